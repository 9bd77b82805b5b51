"""PE111: odd widths, widths beyond a head, divisions that do not come out, and the shapes that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rules.declaration._written import HERE, found, in_file, keys, only, outcome

GPTJ = {"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64}


@pytest.mark.parametrize(
    ("more", "place", "measured"),
    [
        ({"head_dim": 15}, "head_dim", 15),
        ({"kv_channels": 15}, "kv_channels", 15),
        ({"hidden_size": 60}, "num_attention_heads", 15),
        ({"qk_rope_head_dim": 15, "qk_nope_head_dim": 16}, "qk_rope_head_dim", 15),
        ({"rotary_dim": 7}, "rotary_dim", 7),
        (
            {"head_dim": 15, "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
            "head_dim",
            15,
        ),
    ],
)
def test_odd_widths(more: dict[str, Any], place: str, measured: int) -> None:
    finding = only("PE111", {**HERE, "model_type": "qwen2", **more})
    assert (finding.severity, finding.where.module) == ("error", place)
    assert (finding.evidence.measured, finding.evidence.expected) == (measured, measured + 1)
    assert finding.evidence.unit == "channels"


@pytest.mark.parametrize("head", [1, 2, 3, 4])
def test_tiny_heads_are_let_be(head: int) -> None:
    assert not found("PE111", {**HERE, "head_dim": head})


@pytest.mark.parametrize(
    ("head", "share", "width", "severity"),
    [
        (112, 0.3, 33, "warning"),
        (80, 0.4125, 33, "warning"),
        (10, 0.05, 0, "error"),
        (80, 0.4, 32, None),
        (192, 0.334, 64, None),
        (15, 0.8, 12, None),
        (128, 0.75, 96, None),
    ],
)
def test_shares(head: int, share: float, width: int, severity: str | None) -> None:
    assert int(head * share) == width
    findings = found("PE111", {**HERE, "head_dim": head, "partial_rotary_factor": share})
    assert [(f.severity, f.evidence.measured) for f in findings] == ([(severity, width)] if severity else [])


def test_a_share_out_of_range_is_left_to_the_rule_on_values() -> None:
    for share in (1.5, 0, "0.5"):
        assert not found("PE111", {**HERE, "partial_rotary_factor": share})


@pytest.mark.parametrize("value", [0, -16, 16.5, "16", True, float("nan")])
@pytest.mark.parametrize("key", ["head_dim", "qk_rope_head_dim", "rotary_dim"])
def test_no_width_at_all(key: str, value: Any) -> None:
    if value == 0 and key != "head_dim":
        assert not found("PE111", {**HERE, key: value})
    else:
        assert keys("PE111", {**HERE, key: value}) == [key]


def test_latent_attention_without_rotation() -> None:
    assert not found("PE111", {**HERE, "qk_rope_head_dim": 0, "qk_nope_head_dim": 256, "head_dim": 0})


@pytest.mark.parametrize(("width", "faulty"), [(16, False), (8, False), (18, True), (32, True)])
def test_wider_than_a_head(width: int, faulty: bool) -> None:
    findings = found("PE111", {**GPTJ, "rotary_dim": width})
    assert [(f.evidence.measured, f.evidence.limit) for f in findings] == [(width, 16)] * faulty


@pytest.mark.parametrize(
    ("model_type", "severity"),
    [("llama", "error"), ("gpt_neox", "error"), ("", "error"), ("mistral", "warning")],
)
def test_heads_that_do_not_divide(model_type: str, severity: str) -> None:
    finding = only("PE111", {**HERE, "model_type": model_type, "hidden_size": 66})
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == (severity, 2, 0)
    assert "4 heads of 16 cover 64 of 66 channels" in finding.effect


def test_a_division_that_leaves_an_odd_head() -> None:
    """2048 / 28 is 73: the default of Qwen3-Omni's text class, whose published models write head_dim 128."""
    finding = only("PE111", {**HERE, "model_type": "mistral", "hidden_size": 2048, "num_attention_heads": 28})
    assert finding.severity == "error"
    assert "73" in finding.effect
    assert not found("PE111", {**HERE, "hidden_size": 2048, "num_attention_heads": 28, "head_dim": 128})


def test_more_heads_than_channels() -> None:
    assert only("PE111", {**HERE, "num_attention_heads": 128}).severity == "error"


RIGHT: list[dict[str, Any]] = [
    {"hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128},
    {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128},
    {"hidden_size": 66, "model_type": "qwen3"},
    {"hidden_size": 66, "model_type": "gemma3_text"},
    {"hidden_size": 66, "attention_head_size": 16},
    {"hidden_size": 66, "attention_hidden_size": 64},
    {"hidden_size": 66, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32},
    {"hidden_size": 66, "head_dim": 16},
    {"hidden_size": [64, 128], "num_attention_heads": [4, 8]},
    {"num_attention_heads": None},
    {"head_dim": [16, 32]},
]


@pytest.mark.parametrize("more", RIGHT)
def test_right_shapes(more: dict[str, Any]) -> None:
    assert not found("PE111", {**HERE, **more})


@pytest.mark.parametrize(
    ("axes", "head", "measured"),
    [
        ([16, 56, 56], 128, None),
        ([24, 20, 20], 64, None),
        ([22, 21, 21], 64, 21),
        ([16, 56, 64], 128, 136),
        ([16, 16], 128, None),
        ([16, 56, 56], None, None),
        ([16, -2], 128, -2),
        (["a"], 128, None),
    ],
)
@pytest.mark.parametrize("key", ["axes_dims_rope", "axes_dim", "rope_axes_dim"])
def test_axes(axes: list[Any], head: int | None, measured: int | None, key: str) -> None:
    config = {"transformer": {key: axes, "attention_head_dim": head}}
    findings = found("PE111", config)
    assert [f.evidence.measured for f in findings] == ([] if measured is None else [measured])
    assert all(f.where.module == f"transformer.{key}" for f in findings)


def test_nothing_to_judge() -> None:
    assert outcome("PE111", {"model_type": "gpt2", "n_embd": 66, "n_head": 4}).status == "not-applicable"


def llama(**more: Any) -> dict[str, Any]:
    return {
        **{k: v for k, v in HERE.items() if k != "model_type"},
        "intermediate_size": 32,
        "vocab_size": 32,
        **more,
    }


def test_transformers_stops_on_them() -> None:
    """What is found in the config is what stops the model, at the config or in the first forward."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    ids = torch.arange(9)[None]

    def runs(name: str, values: dict[str, Any]) -> Any:
        config = getattr(transformers, f"{name}Config")(**values)
        return getattr(transformers, f"{name}Model")(config)(ids)

    for name, kind, values in (
        ("Llama", "llama", llama(head_dim=15)),
        ("Llama", "llama", llama(hidden_size=66)),
        ("Qwen2", "qwen2", llama(hidden_size=60, num_key_value_heads=4)),
        ("StableLm", "stablelm", llama(partial_rotary_factor=0.7, num_key_value_heads=4)),
        ("GPTJ", "gptj", {**GPTJ, "rotary_dim": 15}),
        ("GPTJ", "gptj", {**GPTJ, "rotary_dim": 32}),
    ):
        assert found("PE111", {**values, "model_type": kind}), values
        with pytest.raises(Exception, match=r"(even|multiple|size of tensor)"):
            runs(name, {key: value for key, value in values.items() if key != "model_type"})
    runs("GPTJ", {key: value for key, value in {**GPTJ, "rotary_dim": 16}.items() if key != "model_type"})


def test_line(tmp_path: Path) -> None:
    _, line = in_file("PE111", {**HERE, "head_dim": 15}, tmp_path)
    assert line == '"head_dim": 15'


# -- reports ------------------------------------------------------------------------------------------------


def test_a_head_of_65_channels() -> None:
    """huggingface/transformers#48101: 520 channels in 8 heads pass every validation and stop in the first forward."""
    shape = {"hidden_size": 520, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
    for kind in ("llama", "qwen2", "mixtral"):
        finding = only("PE111", {"model_type": kind, **shape, "rope_theta": 10000.0})
        assert (finding.severity, finding.evidence.measured) == ("error", 65)
        assert not found("PE111", {"model_type": kind, **shape, "hidden_size": 512, "rope_theta": 10000.0})


def test_heads_that_do_not_divide_a_gpt_neox() -> None:
    """huggingface/transformers#23081: 1024 channels and 12 heads of 85, of which 3 x 85 x 12 is no 3,072."""
    neox = {"model_type": "gpt_neox", "hidden_size": 1024, "rotary_pct": 0.25, "rotary_emb_base": 10000}
    finding = only("PE111", {**neox, "num_attention_heads": 12})
    assert (finding.severity, finding.evidence.measured) == ("error", 1024 % 12)
    assert not found("PE111", {**neox, "num_attention_heads": 16})


def test_three_of_four_channels() -> None:
    """huggingface/transformers#35233: int(4 * 0.75) channels of a tiny head turn, whose table has 4."""
    neox = {"model_type": "gpt_neox", "hidden_size": 32, "num_attention_heads": 8, "rotary_emb_base": 10000}
    finding = only("PE111", {**neox, "rotary_pct": 0.75})
    assert (finding.where.module, finding.evidence.measured) == ("rotary_pct", 3)
    assert not found("PE111", {**neox, "rotary_pct": 0.5})


def test_a_hidden_size_between_the_heads() -> None:
    """delphi-suite/delphi#144: "hidden_size must be divisible by num_heads (got 54 and 4)"."""
    tiny = {"model_type": "llama", "num_attention_heads": 4, "rope_theta": 10000.0}
    assert only("PE111", {**tiny, "hidden_size": 54}).evidence.measured == 54 % 4
    assert not found("PE111", {**tiny, "hidden_size": 56})


def test_one_head_split_by_two_formulas() -> None:
    """B106, huggingface/diffusers#12538: 64 channels as [24, 20, 20] in the tables and [22, 21, 21] in the split."""
    assert sum([24, 20, 20]) == sum([22, 21, 21]) == 64
    split = {"axes_dims_rope": [22, 21, 21], "attention_head_dim": 64}
    assert only("PE111", {"transformer": split}).evidence.measured == 21
    assert not found("PE111", {"transformer": {**split, "axes_dims_rope": [24, 20, 20]}})


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "mistral", "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128},
        {"model_type": "llama", "hidden_size": 1792, "num_attention_heads": 24, "head_dim": 128},
        {"model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128},
        {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 32},
    ],
    ids=[
        "huggingface/candle#2358",
        "huggingface/transformers#46211",
        "SafeAILab/EAGLE#223",
        "transformers#36090",
    ],
)
def test_a_head_that_is_not_the_quotient(shape: dict[str, Any]) -> None:
    """B103: the declared head is right and the reader divides. B104: whether it is stale the stored weights tell."""
    assert not found("PE111", {**shape, "rope_theta": 1000000.0})
    if shape["hidden_size"] % shape["num_attention_heads"]:
        left = {key: value for key, value in shape.items() if key != "head_dim"}
        assert only("PE111", {**left, "rope_theta": 1000000.0}).severity == "error"
