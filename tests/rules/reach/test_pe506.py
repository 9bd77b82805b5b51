"""PE506: bytes by hand, what is alive at once, masks that a flag replaces, and masks that real passes leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.reach._reach import cases, findings, points_at_the_mark

STEM = "pe506_bias_memory"
BYTES = {"faulty": 12 * 8192**2 * 4, "faulty_mask": 8192**2 * 4, "faulty_two_heads": 2 * 8192**2 * 4}


@pytest.mark.parametrize(("path", "name"), cases(STEM, "FAULTY"))
def test_faulty(path: Path, name: str) -> None:
    finding = points_at_the_mark(path, name, "PE506")
    assert finding.severity == "note"
    assert finding.evidence.measured == BYTES[name]
    advice = {"faulty_mask": "is_causal=True"}.get(name, "score_mod")
    assert advice in finding.fix.summary


@pytest.mark.parametrize(("path", "name"), cases(STEM, "HEALTHY"))
def test_healthy(path: Path, name: str) -> None:
    assert not findings(f"{path}:{name}", "PE506", seq_len=8192)


def test_a_bias_above_8_gib_is_a_warning_and_a_mask_never() -> None:
    (path, *_) = cases(STEM, "FAULTY")[0].values
    for name, severity in (("faulty", "warning"), ("faulty_mask", "note")):
        length = 16384 if name == "faulty" else 65536
        (finding,) = findings(f"{path}:{name}", "PE506", seq_len=length)
        assert finding.evidence.measured == BYTES[name] * (length // 8192) ** 2 >= 2**33
        assert finding.severity == severity


class Layers(nn.Module):
    """Written-out attention with a bias that each layer makes for itself, or keeps in a buffer."""

    def __init__(self, style: str, rows: int = 0) -> None:
        super().__init__()
        self.style, self.embed = style, nn.Embedding(97, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.slope = nn.Parameter(torch.rand(3))
        for k in range(3 if rows else 0):
            # Numbers of their own, so that no two buffers are one.
            seen = torch.ones(rows, rows).tril() * (k + 1)
            self.register_buffer(f"seen{k}", seen, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, i = self.embed(ids), torch.arange(ids.shape[1])
        n = i.numel()
        for k, project in enumerate(self.qkv):
            q, key, v = project(x).chunk(3, -1)
            scores = q @ key.mT
            if self.style == "kept":
                scores = scores.masked_fill(getattr(self, f"seen{k}")[:n, :n] == 0, float("-inf"))
            else:
                scores = scores - self.slope[k] * (i[:, None] - i).abs()
            x = x + scores.softmax(-1) @ v
        return x


def test_each_layer_in_turn_counts_once() -> None:
    (finding,) = findings(Layers("made").eval(), "PE506", seq_len=16384)
    assert finding.evidence.measured == 16384**2 * 4


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")

    def write(architecture: str, **changes: Any) -> str:
        config = getattr(transformers, architecture).config_class(**changes).to_dict()
        config["architectures"] = [architecture]
        (tmp_path / "config.json").write_text(json.dumps(config, default=str))
        return str(tmp_path)

    return write


def test_transformers_hands_no_mask_to_the_kernel_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real pass does, which a trace can not see."""
    transformers = pytest.importorskip("transformers")
    seen: list[tuple[bool, bool]] = []
    kernel = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((kwargs.get("attn_mask") is None, bool(kwargs.get("is_causal"))))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50}
    small |= {"num_hidden_layers": 1, "num_key_value_heads": 2}
    llama = transformers.LlamaModel(transformers.LlamaConfig(**small))
    mistral = transformers.MistralModel(transformers.MistralConfig(**small, sliding_window=4))
    ids = torch.arange(16)[None]
    for model in (llama, mistral):
        model.eval()(ids, attention_mask=torch.ones_like(ids))
    assert seen == [(True, True), (False, False)]


def test_so_the_default_mask_is_silent_and_that_of_a_window_is_not(folder: Any) -> None:
    small = {"num_hidden_layers": 2}
    assert not findings(folder("LlamaForCausalLM", **small), "PE506", seq_len=131072)
    target = folder("MistralForCausalLM", **small, sliding_window=4096)
    (finding,) = findings(target, "PE506", seq_len=131072)
    assert (finding.severity, finding.evidence.measured) == ("note", 131072**2)


def test_t5_makes_its_bias_once_per_stack(folder: Any) -> None:
    found = findings(folder("T5ForConditionalGeneration"), "PE506", seq_len=8192)
    biases = [one for one in found if one.scheme == "t5-buckets"]
    assert [one.evidence.measured for one in biases] == [8 * 8192**2 * 4]
    (zeros,) = [one for one in found if one not in biases]
    assert "zero everywhere" in zeros.fix.summary
