"""The 13 planted runtime faults and two healthy twins: a tiny transformers Llama and GPT-2 with random weights.

Each fault is put into the running model, not into a file: a buffer overwritten, a forward replaced. The table below
says which codes must be found; run with ``-s`` to have it printed, fault by fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pediag

transformers = pytest.importorskip("transformers")

N = 80
ROWS = 256


def llama() -> nn.Module:
    """Two layers, grouped keys, weights at a raised scale."""
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=N,
        rope_parameters={"rope_type": "default", "rope_theta": 10000},
        attn_implementation="eager",
    )
    return _raised(transformers.LlamaForCausalLM, config)


def gpt2() -> nn.Module:
    """Two layers and a table of 256 rows, smooth as a trained one."""
    config = transformers.GPT2Config(
        vocab_size=211, n_embd=64, n_layer=2, n_head=4, n_positions=ROWS, attn_implementation="eager"
    )
    model = _raised(transformers.GPT2LMHeadModel, config)
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(_smooth())
    return model


def _raised(make: Any, config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 2 and "embed" not in name and "wpe" not in name and "wte" not in name:
                    weight.mul_(4)
    return model.eval()


def _smooth() -> Tensor:
    """Rows of a slow random curve: neighbours alike, no two the same."""
    m = torch.arange(ROWS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    rates = torch.rand(64, generator=generator, dtype=torch.float64) * 0.15
    phase = torch.rand(64, generator=generator, dtype=torch.float64) * 6.28
    noise = torch.randn(ROWS, 64, generator=generator, dtype=torch.float64)
    return (0.02 * (m[:, None] * rates + phase).sin() + 0.003 * noise).float()


# -- faults of the rotation ---------------------------------------------------------------------------------


def _half_turn(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _half_turn(x) * sin


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours (2i, 2i+1) turn together."""
    half = x.shape[-1] // 2
    c, s = cos[..., :half], sin[..., :half]
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def _rotating(
    model: nn.Module, turn: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> nn.Module:
    """The model with its attention layers turning q and k by ``turn(q, k, cos, sin)``."""
    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(_attention, layer.self_attn, turn)
    return model


def _attention(
    self: Any,
    turn: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    **_: Any,
) -> Any:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    cos, sin = (table.unsqueeze(1) for table in position_embeddings)
    q, k = turn(q, k, cos, sin)
    cache = _.get("past_key_values")
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    groups = self.num_key_value_groups
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * self.scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
    return self.o_proj(out), None


def base_unlike_config() -> nn.Module:
    model = llama()
    d = model.model.rotary_emb.inv_freq
    d.copy_(1.0 / 500000.0 ** (torch.arange(0, 16, 2) / 16))
    return model


def uninitialised() -> nn.Module:
    model = llama()
    model.model.rotary_emb.inv_freq.zero_()
    return model


def rounded_to_bf16() -> nn.Module:
    model = llama()
    model.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq.bfloat16().float())
    return model


def positions_all_zero() -> nn.Module:
    model = llama()
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids, **kwargs: forward(x, position_ids * 0, **kwargs)
    return model


def swapped_on_q() -> nn.Module:
    return _rotating(llama(), lambda q, k, c, s: (_rotate_pairs(q, c, s), _rotate_half(k, c, s)))


def k_not_rotated() -> nn.Module:
    return _rotating(llama(), lambda q, k, c, s: (_rotate_half(q, c, s), k))


def sense_flipped() -> nn.Module:
    return _rotating(llama(), lambda q, k, c, s: (_rotate_half(q, c, s), _rotate_half(k, c, -s)))


def restarting_steps() -> nn.Module:
    """Every call starts at position 0, cached or not."""
    model = llama()
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids, **kwargs: forward(
        x, position_ids - position_ids[:, :1], **kwargs
    )
    return model


def k_offset() -> nn.Module:
    """Keys turn as if they stood three tokens later."""
    model = llama()
    inv = model.model.rotary_emb.inv_freq

    def turn(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        step = torch.cat((inv, inv)) * 3
        return _rotate_half(q, c, s), _rotate_half(
            k, c * step.cos() - s * step.sin(), s * step.cos() + c * step.sin()
        )

    return _rotating(model, turn)


def swapped_on_both() -> nn.Module:
    return _rotating(llama(), lambda q, k, c, s: (_rotate_pairs(q, c, s), _rotate_pairs(k, c, s)))


# -- faults of the table ------------------------------------------------------------------------------------


def table_zeroed() -> nn.Module:
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    return model


def tail_untrained() -> nn.Module:
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight[ROWS // 2 :] = 0.02 * torch.randn(
            ROWS // 2, 64, generator=torch.Generator().manual_seed(5)
        )
    return model


def rows_shuffled() -> nn.Module:
    model = gpt2()
    with torch.no_grad():
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(6))
        model.transformer.wpe.weight.copy_(model.transformer.wpe.weight[order].clone())
    return model


# -- the table ----------------------------------------------------------------------------------------------

FAULTS: dict[Callable[[], nn.Module], tuple[set[str], float]] = {
    base_unlike_config: ({"PE202"}, 0.1),
    uninitialised: ({"PE201"}, 0.1),
    rounded_to_bf16: ({"PE602"}, 1e-3),
    positions_all_zero: ({"PE305"}, 0.1),
    swapped_on_q: ({"PE402"}, 0.1),
    k_not_rotated: ({"PE310"}, 0.1),
    sense_flipped: ({"PE402"}, 0.1),
    restarting_steps: ({"PE701"}, 0.0),
    k_offset: ({"PE402"}, 0.1),
    swapped_on_both: ({"PE403"}, 0.1),
    table_zeroed: ({"PE311"}, 1e-3),
    tail_untrained: ({"PE211"}, 1e-3),
    rows_shuffled: (set(), 1e-3),
}
"""Per fault the codes that must be found, errors and warnings; and by how much logits of the full pass change at least.

An empty set: rows in another order are a sound table of another training run, which only a reference tells.
"""

WARNED = {"PE211"}
NOTED = {"PE311"}


@functools.cache
def _found(fault: Callable[[], nn.Module]) -> dict[str, str]:
    """Code and severity of what is found on a model."""
    model = fault()
    report = pediag.check(model, seq_len=ROWS if hasattr(model, "transformer") else N)
    broken = [outcome.reason for outcome in report.outcomes if "internal error" in outcome.reason]
    assert not broken
    found = {finding.code: finding.severity for finding in report.findings}
    print(f"{fault.__name__:20s} {', '.join(f'{code} {severity}' for code, severity in found.items())}")
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found_with_its_code(fault: Callable[[], nn.Module]) -> None:
    expected, _ = FAULTS[fault]
    found = _found(fault)
    errors = {code for code, severity in found.items() if severity == "error"}
    assert expected <= set(found)
    assert errors == expected - WARNED - NOTED
    assert {code for code, severity in found.items() if severity == "warning"} <= WARNED & expected


@pytest.mark.parametrize("twin", [llama, gpt2], ids=lambda twin: twin.__name__)
def test_healthy_twin_is_silent(twin: Callable[[], nn.Module]) -> None:
    assert not _found(twin)


def test_rows_in_another_order_are_told_by_a_reference() -> None:
    report = pediag.check(rows_shuffled(), seq_len=ROWS, reference=gpt2())
    (finding,) = [finding for finding in report.findings if finding.severity == "error"]
    assert finding.scheme == "learned"
    assert not pediag.check(gpt2(), seq_len=ROWS, reference=gpt2()).findings


def _logits(model: nn.Module) -> Tensor:
    tokens = ROWS if hasattr(model, "transformer") else N
    ids = torch.randint(1, 200, (1, tokens), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_changes_logits_of_the_full_pass(fault: Callable[[], nn.Module]) -> None:
    """Each plant is a fault: the model with the same weights and without it gives other logits, or other steps."""
    _, least = FAULTS[fault]
    healthy = gpt2 if fault in (table_zeroed, tail_untrained, rows_shuffled) else llama
    change = float((_logits(fault()) - _logits(healthy())).abs().max())
    assert change > least if least else change == 0


def test_restarting_steps_change_the_steps() -> None:
    ids = torch.randint(1, 200, (1, 40), generator=torch.Generator().manual_seed(9))
    model = restarting_steps()
    with torch.no_grad():
        full = model(ids, use_cache=False).logits[0, -1]
        before = model(ids[:, :-1], use_cache=True)
        step = model(ids[:, -1:], past_key_values=before.past_key_values, use_cache=True).logits[0, -1]
    assert float((full - step).abs().max()) > 0.1


def test_own_attention_is_that_of_the_library() -> None:
    """The stand-in that turns q and k by itself gives the library's logits when it turns them rightly."""
    own = _rotating(llama(), lambda q, k, c, s: (_rotate_half(q, c, s), _rotate_half(k, c, s)))
    torch.testing.assert_close(_logits(own), _logits(llama()), atol=1e-4, rtol=0)
