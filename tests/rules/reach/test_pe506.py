"""PE506: bytes by hand, what is alive at once, masks that a flag replaces, and masks that real passes leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.rules.reach._members import Attention
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


# -- public reports -----------------------------------------------------------------------------------------


class Reported(Attention):
    """A bias or mask over queries and keys in the way of the report, or without it."""

    def __init__(self, style: str, heads: int = 2) -> None:
        super().__init__(heads, 16)
        self.style = style
        self.slope = nn.Buffer(2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def bias(self, n: int) -> Tensor | None:
        i = torch.arange(n)
        seen = i[None] <= i[:, None]
        if self.style == "flag":
            return None
        if self.style == "dense":
            return seen
        if self.style == "half":
            # Slope times distance for every head, in bfloat16, as a mask of the kernel.
            return (
                (self.slope[:, None, None] * (i[None] - i[:, None])).masked_fill(~seen, -torch.inf).bfloat16()
            )
        future = torch.zeros(n, n).masked_fill(~seen, -torch.inf)
        return (future[None] + self.slope[:, None, None] * i[None, None]).contiguous()


class RowOfKeys(Attention):
    """ALiBi as one row of keys a head: the softmax does not see what a whole row has in common."""

    def __init__(self, heads: int) -> None:
        super().__init__(heads, 16)
        self.slope = nn.Buffer(2.0 ** (-8 * torch.arange(1, heads + 1) / heads))

    def bias(self, n: int) -> Tensor:
        return self.slope[:, None, None] * torch.arange(n)[None, None]


REPORTS: dict[str, tuple[Any, Any, int, int, str]] = {
    "Blaizzy/mlx-embeddings#68: a dense causal mask where the kernel has a flag": (
        lambda: Reported("dense"),
        lambda: Reported("flag"),
        32768,
        32768**2,
        "note",
    ),
    "facebookresearch/metaseq#333: ALiBi expanded to heads x N x N": (
        lambda: Reported("expanded", heads=32),
        lambda: RowOfKeys(heads=32),
        8192,
        32 * 8192**2 * 4,
        "warning",
    ),
    "pytorch/pytorch#107959: an ALiBi mask of 32 heads in bfloat16 at 8,192": (
        lambda: Reported("half", heads=32),
        lambda: RowOfKeys(heads=32),
        8192,
        32 * 8192**2 * 2,
        "note",
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports(report: str) -> None:
    """Blaizzy/mlx-embeddings#68, facebookresearch/metaseq#333, pytorch/pytorch#107959, by their own bytes."""
    faulty, right, length, size, severity = REPORTS[report]
    (finding,) = findings(faulty().eval(), "PE506", seq_len=length)
    assert (finding.severity, finding.evidence.measured) == (severity, size)
    assert not findings(right().eval(), "PE506", seq_len=length)


class KeptMasks(nn.Module):
    """A mask of the longest context in every layer's buffers, or none."""

    def __init__(self, context: int, layers: int, kept: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        if kept:
            for project in self.qkv:
                seen = torch.ones((context, context), dtype=torch.bool, device="meta").tril()
                project.register_buffer("causal_mask", seen, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        for project in self.qkv:
            q, k, v = project(x).chunk(3, -1)
            seen = getattr(project, "causal_mask", None)
            mask = torch.ones(n, n, dtype=torch.bool).tril() if seen is None else seen[:n, :n]
            x = x + (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return x


def test_transformer_lens_479_a_mask_of_the_context_in_every_layer() -> None:
    """TransformerLensOrg/TransformerLens#479 (and huggingface/transformers#46485): n_ctx x n_ctx bytes a layer.

    The masks hold no memory here, as the report's 80 layers of 32,768 would take 86 GB.
    """
    (finding,) = findings(KeptMasks(32768, 8, kept=True).eval(), "PE506", seq_len=512)
    assert (finding.severity, finding.evidence.measured) == ("note", 8 * 32768**2)
    assert not findings(KeptMasks(32768, 8, kept=False).eval(), "PE506", seq_len=512)
