"""Faults planted into a running transformers Llama and GPT-2, each beside its healthy twin as the reference.

What only cached steps show (positions that restart) is no difference of the full pass and is left to PE701.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.rules import differences

transformers = pytest.importorskip("transformers")

N, ROWS = 70, 128
Turn = Callable[[Any, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def llama(base: float = 10000.0) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=N,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def gpt2(change: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    config = transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=1, n_head=2, n_positions=ROWS)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
        m = torch.arange(ROWS)[:, None]
        table = 0.02 * torch.sin(0.1 * m * torch.rand(32) + 6 * torch.rand(32))
        model.transformer.wpe.weight.copy_(table if change is None else change(table))
    return model


def half(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def neighbours(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    c, s = (table[..., : x.shape[-1] // 2] for table in (c, s))
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def turning(turn: Turn) -> nn.Module:
    """A Llama whose attentions turn q and k by ``turn(model, q, k, cos, sin)``."""
    model = llama()

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, **_: Any) -> Any:
        split = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            f(hidden_states).view(split).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turn(model, q, k, *(table[:, None] for table in position_embeddings))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None

    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(forward, layer.self_attn)
    return model


def later(model: Any, q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Keys as if they stood three tokens later."""
    step = 3 * model.model.rotary_emb.inv_freq.repeat(2)
    return half(q, c, s), half(k, c * step.cos() - s * step.sin(), s * step.cos() + c * step.sin())


def frequencies(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = llama()
    model.model.rotary_emb.inv_freq.copy_(change(model.model.rotary_emb.inv_freq))
    return model


def standing() -> nn.Module:
    model = llama()
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids, **kw: forward(x, position_ids * 0, **kw)
    return model


@pytest.fixture(scope="module")
def healthy():
    return {"llama": llama(), "gpt2": gpt2()}


SHUFFLED = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
NOISE = 0.02 * torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(2))
FAULTS: list[tuple[str, str, Callable[[], nn.Module], set[str], set[str]]] = [
    ("base", "llama", lambda: frequencies(lambda w: 5e5 ** (-torch.arange(8) / 8)), {"base"}, {"PE202"}),
    ("uninitialised", "llama", lambda: frequencies(lambda w: w * 0), set(), {"PE201"}),
    ("rounded", "llama", lambda: frequencies(lambda w: w.bfloat16().float()), {"frequencies"}, {"PE602"}),
    ("zero", "llama", standing, set(), {"PE305"}),
    (
        "swapped on q",
        "llama",
        lambda: turning(lambda m, q, k, c, s: (neighbours(q, c, s), half(k, c, s))),
        {"pairing"},
        {"PE403"},
    ),
    ("k unturned", "llama", lambda: turning(lambda m, q, k, c, s: (half(q, c, s), k)), set(), {"PE310"}),
    (
        "sense",
        "llama",
        lambda: turning(lambda m, q, k, c, s: (half(q, c, s), half(k, c, -s))),
        {"sense"},
        {"PE402"},
    ),
    ("offset", "llama", lambda: turning(later), {"offset"}, {"PE402"}),
    (
        "swapped on q and k",
        "llama",
        lambda: turning(lambda m, q, k, c, s: (neighbours(q, c, s), neighbours(k, c, s))),
        {"pairing"},
        {"PE403"},
    ),
    ("table zeroed", "gpt2", lambda: gpt2(lambda t: t * 0), {"values"}, {"PE211"}),
    ("tail", "gpt2", lambda: gpt2(lambda t: torch.cat((t[:100], NOISE[100:]))), {"values"}, {"PE211"}),
    ("shuffled", "gpt2", lambda: gpt2(lambda t: t[SHUFFLED]), {"values"}, {"PE211"}),
]


@pytest.mark.parametrize(
    ("twin", "make", "aspects", "codes"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_a_fault_is_seen_beside_its_twin(healthy, twin, make, aspects, codes):
    model, reference = make(), healthy[twin]
    length = N if twin == "llama" else ROWS
    found = pediag.diff(model, reference, seq_len=length)
    assert (found.verdict, found.exit_code()) == ("different", 1)
    differing = {item.name for one in found.comparisons for item in one.differing}
    assert aspects <= differing
    if not aspects:
        assert {one.kind for one in found.comparisons if one.scheme != "mask"} & {"only in b"}
    report = pediag.check(model, reference=reference, seq_len=length, select=codes)
    assert report.exit_code() == 1
    assert codes <= {finding.code for finding in report.findings if finding.severity == "error"}


@pytest.mark.parametrize("twin", ["llama", "gpt2"])
def test_a_healthy_twin_is_the_same(healthy, twin):
    made = {"llama": llama, "gpt2": gpt2}[twin]()
    found = pediag.diff(made, healthy[twin])
    assert (found.verdict, found.exit_code(), found.ok) == ("same", 0, True)
    report = pediag.check(made, reference=healthy[twin], select=[*differences.RULES.values(), "PE403"])
    assert report.summary["errors"] == 0, str(report)


def test_code_that_turns_by_hand_is_the_same(healthy):
    port = turning(lambda m, q, k, c, s: (half(q, c, s), half(k, c, s)))
    assert pediag.diff(port, healthy["llama"]).verdict == "same"


def test_a_swapped_pairing_is_told_by_the_type_without_a_reference():
    swapped = turning(lambda m, q, k, c, s: (neighbours(q, c, s), neighbours(k, c, s)))
    (finding,) = pediag.check(swapped, seq_len=N, select=["PE403"]).findings
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == (
        "error",
        "interleaved",
        "half",
    )
    assert "llama checkpoints" in finding.message
