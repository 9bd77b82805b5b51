"""What enters attention scores, recovered and compared with formulas written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.encodings import (
    Alibi,
    Bucketed,
    Clipped,
    Encoding,
    Mask,
    RelativeTable,
    Unrecognised,
    bias,
    encodes_position,
)
from pediag.targets import Target, open_target
from pediag.trace import Session

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Scores(nn.Module):
    """Attention of 4 heads whose scores pass through ``join(module, scores)``."""

    def __init__(self, join: Callable[[nn.Module, Tensor], Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.embed, self.qkv, self.join = nn.Embedding(101, 32), nn.Linear(32, 96), join
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = self.join(self, q @ k.mT / math.sqrt(8))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def found(model: nn.Module) -> list[Encoding]:
    trace = Session(Target(spec="model", loader="live", module=model.eval())).structural()
    assert trace.failure is None
    return bias.find(trace, set())


def from_fixture(name: str) -> list[Encoding]:
    return bias.find(Session(open_target(str(FIXTURES / name))).structural(), set())


def offsets(scores: Tensor) -> Tensor:
    """Key minus query, (N, M)."""
    n, m = scores.shape[-2:]
    return torch.arange(m)[None, :] - torch.arange(n)[:, None]


def slopes(heads: int = 4) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


# -- linear biases ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "form", "kind"),
    [
        ("documents/alibi.py", [2.0**-h for h in range(1, 9)], "key", "published"),
        ("healthy/alibi_absolute_key.py", [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3], "key", "published"),
        ("healthy/alibi_symmetric_encoder.py", [2**-2, 2**-4, 2**-6, 2**-8], "distance", "published"),
        ("mistakes/alibi_without_mask.py", [2.0**-h for h in range(1, 9)], "past", "published"),
        (
            "mistakes/slopes_single_series_12_heads.py",
            [2 ** (-8 * h / 12) for h in range(1, 13)],
            "distance",
            "geometric",
        ),
    ],
)
def test_slopes_of_the_fixtures(name: str, expected: list[float], form: str, kind: str) -> None:
    (encoding,) = encodes_position(from_fixture(f"{name}:model"))
    assert isinstance(encoding, Alibi)
    np.testing.assert_allclose(encoding.slopes, expected, rtol=1e-5)
    assert encoding.form == encoding.parameters["form"] == form
    assert encoding.parameters["slopes"] == kind
    assert len(encoding.sites) == 2


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -1e4, -1e9])
def test_a_sum_of_slopes_and_mask_is_both(hidden: float) -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        away = offsets(scores)
        linear = slopes()[:, None, None] * away
        return scores + torch.where(away > 0, torch.tensor(hidden), linear)

    linear, mask = found(Scores(join))
    assert isinstance(linear, Alibi)
    assert isinstance(mask, Mask)
    np.testing.assert_allclose(linear.slopes, slopes().numpy(), rtol=1e-5)
    assert linear.form == "distance"
    assert mask.causal
    assert mask.window is None


def test_a_silent_head_and_a_reversed_one() -> None:
    given = torch.tensor([0.5, 0.0, -0.25, 0.125])
    (encoding,) = found(Scores(lambda m, s: s - given[:, None, None] * offsets(s).abs()))
    assert isinstance(encoding, Alibi)
    np.testing.assert_allclose(encoding.slopes, given.numpy(), atol=1e-7)
    assert encoding.parameters["slopes"] == "unpublished"


def test_learned_slopes_and_the_scale_of_the_scores() -> None:
    rate = nn.Parameter(slopes() / math.sqrt(8))
    (encoding,) = found(Scores(lambda m, s: s + m.rate[:, None, None] * offsets(s), rate=rate))
    assert isinstance(encoding, Alibi)
    assert encoding.parameters["slopes"] == "published"
    assert encoding.parameters["factor"] == pytest.approx(1 / math.sqrt(8), rel=1e-5)
    assert encoding.leaves == ["rate"]


def test_bfloat16_slopes() -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        return scores - (slopes()[:, None, None] * offsets(scores).abs()).bfloat16().float()

    (encoding,) = found(Scores(join))
    assert isinstance(encoding, Alibi)
    np.testing.assert_allclose(encoding.slopes, slopes().numpy(), rtol=2e-3)


def test_a_bent_bias_is_unrecognised() -> None:
    (encoding,) = found(Scores(lambda m, s: s - offsets(s).abs().float().sqrt()))
    assert isinstance(encoding, Unrecognised)
    assert encoding.kind == "bias"


def test_a_row_constant_is_no_encoding() -> None:
    assert found(Scores(lambda m, s: s + torch.arange(s.shape[-1]).float()[:, None])) == []


# -- masks ------------------------------------------------------


def masks(name: str) -> list[Mask]:
    return [encoding for encoding in from_fixture(name) if isinstance(encoding, Mask)]


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("documents/ntk_aware.py:model", None),
        ("documents/llama_gqa.py:model", None),
        ("healthy/complex_rotary.py:model", None),
        ("healthy/no_position_causal.py:model", None),
        ("healthy/sliding_window_rotary.py:model", 128),
    ],
)
def test_masks_of_the_fixtures(name: str, window: int | None) -> None:
    (mask,) = masks(name)
    assert mask.causal
    assert mask.window == mask.parameters["window"] == window
    assert len(mask.modules) == 2


def test_fused_attention_with_is_causal_is_one_mask() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    (mask,) = found(nn.Sequential(nn.Embedding(101, 32), *(Layer() for _ in range(3))))
    assert isinstance(mask, Mask)
    assert mask.modules == ["1", "2", "3"]


def test_a_band_on_both_sides() -> None:
    (mask,) = found(Scores(lambda m, s: s.masked_fill(offsets(s).abs() > 9, -math.inf)))
    assert isinstance(mask, Mask)
    assert (mask.causal, mask.window) == (False, 10)


@pytest.mark.parametrize("shown", [True, False])
def test_the_sense_of_a_choice(shown: bool) -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        past, low = offsets(scores) <= 0, torch.tensor(-1e9)
        return torch.where(past, scores, low) if shown else torch.where(~past, low, scores)

    (mask,) = found(Scores(join))
    assert isinstance(mask, Mask)
    assert mask.causal


def test_a_fill_that_hides_nothing_is_told() -> None:
    (mask,) = found(Scores(lambda m, s: s.masked_fill(offsets(s) > 0, -5.0)))
    assert mask.parameters["fill"] == -5.0


# -- tables ------------------------------------------------------


def t5_bucket(offset: int, both: bool) -> int:
    """The published code in plain Python, 32 buckets to 128 tokens."""
    buckets, start = (16, 16 * (offset > 0)) if both else (32, 0)
    distance = abs(offset) if both else max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    far = exact + int(math.log(distance / exact) / math.log(128 / exact) * (buckets - exact))
    return start + min(far, buckets - 1)


@pytest.mark.parametrize(
    ("name", "both"), [("documents/t5_bias.py:model", True), ("healthy/t5_decoder.py:model", False)]
)
def test_t5_buckets_of_the_fixtures(name: str, both: bool) -> None:
    (encoding,) = encodes_position(from_fixture(name))
    assert isinstance(encoding, Bucketed)
    assert encoding.parameters["published"] is True
    assert encoding.parameters["num_buckets"] == encoding.table.rows == 32
    assert encoding.parameters["max_distance"] == 128
    assert encoding.parameters["bidirectional"] is both
    assert encoding.buckets == {offset: t5_bucket(offset, both) for offset in range(-150, 151)}


def test_a_map_unlike_t5s_is_kept() -> None:
    for encoding in from_fixture("mistakes/t5_bucket_shared.py:model"):
        assert isinstance(encoding, Bucketed)
        assert encoding.parameters["published"] is False
        assert encoding.buckets[-1] == encoding.buckets[17]


def test_shaw_on_keys_and_values() -> None:
    encodings = from_fixture("documents/shaw_relative.py:model")
    assert [encoding.modules for encoding in encodings] == [["mixers.0"], ["mixers.1"]]
    for encoding in encodings:
        assert isinstance(encoding, Clipped)
        assert (encoding.clip, encoding.table.rows, encoding.sides) == (16, 33, ("keys", "values"))


@pytest.mark.parametrize("sign", [1, -1])
def test_clipped_scalars_of_either_sign(sign: int) -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        return scores + model.table[(sign * offsets(scores)).clamp(-6, 6) + 6].permute(2, 0, 1)

    (encoding,) = found(Scores(join, table=nn.Parameter(torch.randn(13, 4))))
    assert isinstance(encoding, Clipped)
    assert (encoding.clip, encoding.table.rows, encoding.sides) == (6, 13, ("scores",))
    assert encoding.parameters.get("reversed", False) is (sign < 0)


@pytest.mark.parametrize(("behind", "ahead"), [(12, 4), (3, 20), (9, 0)])
def test_a_clip_with_another_limit_on_each_side_is_a_relative_table(behind: int, ahead: int) -> None:
    """Each distance within the limits has a row of its own, so that these are no buckets."""

    def join(model: nn.Module, scores: Tensor) -> Tensor:
        return scores + model.table[offsets(scores).clamp(-behind, ahead) + behind].permute(2, 0, 1)

    rows = behind + ahead + 1
    (encoding,) = found(Scores(join, table=nn.Parameter(torch.randn(rows, 4))))
    assert isinstance(encoding, RelativeTable)
    assert encoding.buckets == {o: min(max(o, -behind), ahead) + behind for o in encoding.buckets}
    assert (encoding.table.rows, encoding.parameters["by"]) == (rows, "distance")


def test_a_clip_of_the_distance_alone_is_a_relative_table() -> None:
    """Both sides share rows; each distance up to the limit has one of its own, so that these are no buckets."""

    def join(model: nn.Module, scores: Tensor) -> Tensor:
        return scores + model.table[offsets(scores).abs().clamp(max=9)].permute(2, 0, 1)

    (encoding,) = found(Scores(join, table=nn.Parameter(torch.randn(10, 4))))
    assert isinstance(encoding, RelativeTable)
    assert encoding.buckets[-3] == encoding.buckets[3] == 3


def test_a_row_for_every_distance_is_a_relative_table() -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        return scores + model.table[:, offsets(scores) + 255]

    (encoding,) = found(Scores(join, table=nn.Parameter(torch.randn(4, 511))))
    assert isinstance(encoding, RelativeTable)
    assert encoding.table.rows == 511
    assert encoding.buckets[-150] == 105


def test_a_grid_of_rows_and_columns_is_a_relative_table() -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        m = torch.arange(scores.shape[-1])
        row, column = m // 12, m % 12
        index = (row[:, None] - row + 40) * 23 + column[:, None] - column + 11
        return scores + model.table[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1)

    (encoding,) = found(Scores(join, table=nn.Parameter(torch.randn(81 * 23, 4))))
    assert isinstance(encoding, RelativeTable)
    assert encoding.buckets == {}
    assert encoding.parameters["by"] == "query and key"


def test_positions_projected_onto_each_other_are_unrecognised() -> None:
    def join(model: nn.Module, scores: Tensor) -> Tensor:
        rows = model.table[: scores.shape[-1]]
        return scores + rows @ rows.T

    encodings = found(Scores(join, table=nn.Parameter(torch.randn(400, 16))))
    assert [type(encoding) for encoding in encodings] == [Unrecognised]


# -- transformers ------------------------------------------------------


def pretrained(config: object, kind: str) -> list[Encoding]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return found(getattr(transformers, kind)(config))


def test_bloom_folds_the_batch_into_the_heads() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(n_layer=2, hidden_size=48, n_head=6, vocab_size=97)
    (encoding,) = encodes_position(pretrained(config, "BloomForCausalLM"))
    assert isinstance(encoding, Alibi)
    np.testing.assert_allclose(encoding.slopes, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3], rtol=1e-6)
    assert encoding.form == "key"


def test_t5_has_one_map_a_side() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(num_layers=2, d_model=48, d_kv=12, num_heads=4, d_ff=96, vocab_size=97)
    encoder, decoder = encodes_position(pretrained(config, "T5ForConditionalGeneration"))
    assert isinstance(encoder, Bucketed)
    assert isinstance(decoder, Bucketed)
    assert encoder.parameters["bidirectional"] is True
    assert decoder.parameters["bidirectional"] is False
    assert encoder.buckets[-40] == t5_bucket(-40, True)
    assert decoder.buckets[-40] == t5_bucket(-40, False)
