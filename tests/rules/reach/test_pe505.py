"""PE505: shifts by the published rule of half-pixel centres, other ways to blend rows, grids, and tables left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from pediag.encodings.program import Term
from pediag.rules.reach import pe505_table_resampled
from tests.rules.reach._members import Attention
from tests.rules.reach._reach import FIXTURES, cases, findings, points_at_the_mark

STEM = "pe505_table_resampled"
# Token 255 reads 255.5 / 2 - 0.5; token 511 of 1024 rows 511.5 * 2 - 0.5; ends aligned: 255 * 255 / 511.
SHIFTS = {
    "faulty": 127.75,
    "faulty_sinusoid": 511.5,
    "faulty_lerp": 255 - 255 * 255 / 511,
    "faulty_weights": 255 - 255 * 255 / 511,
}


@pytest.mark.parametrize(("path", "name"), cases(STEM, "FAULTY"))
def test_faulty(path: Path, name: str) -> None:
    finding = points_at_the_mark(path, name, "PE505")
    if name in SHIFTS:
        assert finding.severity == "warning"
        assert finding.evidence.measured == pytest.approx(SHIFTS[name], abs=2e-3)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("faulty_torn", ("error", 48, 1, "channels")),  # 14 x 14 entries hold four rows of 48 channels
        ("faulty_shifted", ("error", 0, 196, "row")),
        ("noted_grid", ("note", 145, 197, "rows")),
    ],
)
def test_maps_that_were_cut_wrong(name: str, numbers: tuple[str, int, int, str]) -> None:
    (finding,) = findings(f"{FIXTURES / 'rules' / STEM}.py:{name}", "PE505", seq_len=512)
    found = finding.evidence
    assert (finding.severity, found.measured, found.expected, found.unit) == numbers


@pytest.mark.parametrize(("path", "name"), cases(STEM, "HEALTHY"))
def test_healthy(path: Path, name: str) -> None:
    assert not findings(f"{path}:{name}", "PE505", seq_len=512)


@pytest.mark.parametrize("length", [100, 256])
def test_the_mistake_is_none_up_to_its_rows(length: int) -> None:
    target = f"{FIXTURES / 'mistakes' / 'resampled_table.py'}:model"
    assert not findings(target, "PE505", seq_len=length)
    assert findings(target, "PE505", seq_len=257)


class Cached(nn.Module):
    """Cosines and sines in a cache that is stretched: another kind of table, and another style."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(97, 48), nn.Linear(48, 144)
        angle = torch.arange(rows)[:, None] * 1e4 ** (-torch.arange(0, 24, 2) / 24)
        self.cache = nn.Buffer(torch.stack((angle.cos(), angle.sin())))

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 24)).permute(2, 0, 3, 1, 4)
        cache = self.cache[:, :n]
        if n > self.cache.shape[1]:
            cache = F.interpolate(self.cache.mT, n, mode="linear", align_corners=True).mT
        cos, sin = cache[0], cache[1]
        q, k = (
            torch.cat((a * cos - b * sin, a * sin + b * cos), -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_cache_of_cosines() -> None:
    (finding,) = findings(Cached(256).eval(), "PE505", seq_len=512)
    assert finding.evidence.measured == pytest.approx(255 - 255 * 255 / 511, abs=2e-3)
    assert not findings(Cached(512).eval(), "PE505", seq_len=512)


@pytest.mark.parametrize(("side", "found"), [(224, []), (384, ["note"])])
def test_a_vision_model_at_another_resolution(side: int, found: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=48, intermediate_size=64, num_attention_heads=4
    )

    class Resampling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = transformers.ViTModel(config)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.vit(pixel_values, interpolate_pos_encoding=True).last_hidden_state

    inputs = [f"pixel_values=float32[B,3,{side},{side}]"]
    told = findings(Resampling().eval(), "PE505", seq_len=512, inputs=inputs)
    assert [finding.severity for finding in told] == found
    # 24 x 24 patches and the class token.
    assert all("577 places" in finding.message for finding in told)


@pytest.mark.parametrize(
    ("architecture", "absurd"),
    [
        ("RoFormerModel", {"max_position_embeddings": 1 << 30}),
        ("T5EncoderModel", {"relative_attention_num_buckets": 1 << 30}),
    ],
)
def test_tables_of_absurdly_many_rows_are_not_counted(
    architecture: str, absurd: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row numbers of 2^30 rows are 8.6 GB; no value of positions above the budget is ever made."""
    from pediag.encodings import program
    from pediag.trace import Unavailable

    rows: list[int] = []
    counted = program.ramp

    def noted(shape: tuple[int, ...], axis: int) -> torch.Tensor:
        rows.append(shape[axis])
        return counted(shape, axis)

    monkeypatch.setattr(program, "ramp", noted)
    transformers = pytest.importorskip("transformers")
    shape = {"num_hidden_layers": 1, "num_layers": 1, "vocab_size": 97, "d_model": 64, "hidden_size": 64}
    shape |= {"num_attention_heads": 2, "num_heads": 2, "d_kv": 32, "d_ff": 64, "intermediate_size": 64}
    values = getattr(transformers, architecture).config_class(**shape, **absurd).to_dict()
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "architectures": [architecture]}, default=str)
    )
    (outcome,) = pediag.check(tmp_path, select=["PE505"], seq_len=64).outcomes
    assert max(rows) == 1 << 30
    with pytest.raises(Unavailable, match="above the budget"):
        counted((1 << 30, 64), 0)
    assert "memory" not in outcome.reason
    assert not outcome.findings


class RelativeProjections(nn.Module):
    """Sines of the distance, projected by each layer's own weight, as in Transformer-XL and XLNet."""

    def __init__(self, layers: int, stretched: bool = False) -> None:
        super().__init__()
        self.stretched = stretched
        self.embed = nn.Embedding(97, 32)
        self.rows = nn.ParameterList(torch.randn(64, 32) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        self.place = nn.ParameterList(torch.randn(32, 32) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), ids.shape[1]
        angle = torch.arange(n)[:, None] * 1e4 ** (-torch.arange(0, 32, 2) / 32)
        waves = torch.cat((angle.sin(), angle.cos()), -1)
        for rows, project, place in zip(self.rows, self.qkv, self.place, strict=True):
            q, k, v = project(x).chunk(3, -1)
            k = k + waves @ place
            if self.stretched:
                k = k + F.interpolate(rows.T[None], n, mode="linear", align_corners=True)[0].T
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x


@pytest.mark.parametrize(("stretched", "programs"), [(False, 1), (True, 2)])
def test_equal_layers_are_computed_once(
    stretched: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work does not grow with the layers: one computation of each program, in which a weight may be any."""
    computed = []
    rows = pe505_table_resampled._rows
    monkeypatch.setattr(
        pe505_table_resampled, "_rows", lambda *given: computed.append(given[2]) or rows(*given)
    )
    found = findings(RelativeProjections(6, stretched).eval(), "PE505", seq_len=128)
    assert len(computed) == programs
    assert len(found) == (6 if stretched else 0)


def test_weights_that_mix_positions_are_left_after_zeros_and_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token gives them weights of its own, so no row number has to be looked for."""
    given: list[float] = []
    rows, value = pe505_table_resampled._rows, Term.value

    def counting(term: Term, evaluator: Any, values: Any = None) -> Tensor:
        given.extend(float(one.sum()) / one.numel() for one in (values or {}).values())
        return value(term, evaluator, values)

    def watched(*parts: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(Term, "value", counting)
            return rows(*parts)

    monkeypatch.setattr(pe505_table_resampled, "_rows", watched)
    assert not findings(RelativeProjections(1).eval(), "PE505", seq_len=128)
    assert given == [0.0, 1.0]


# -- public reports -----------------------------------------------------------------------------------------


class Grid(Attention):
    """Learned rows of a square grid, resampled to the one at hand as DINO does in every forward pass."""

    def __init__(self, side: int, height: int, width: int, how: str) -> None:
        super().__init__()
        self.side, self.at, self.how = side, (height, width), how
        self.place = nn.Parameter(torch.randn(1, side * side, 64))

    def forward(self, patches: Tensor) -> Tensor:
        rows = self.place.reshape(1, self.side, self.side, 64).permute(0, 3, 1, 2)
        rows = F.interpolate(rows, size=self.at, mode=self.how, align_corners=False)
        x = patches + rows.permute(0, 2, 3, 1).reshape(1, -1, 64)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


GRIDS = {
    "B179 facebookresearch/dino#8: a square grid of 14 x 14 at 10 x 20": (
        (14, 10, 20, "bicubic"),
        (14, 14, 14),
    ),
    "YuanGongND/ast#27: a grid of pictures stretched over frequency and time": (
        (8, 12, 33, "bilinear"),
        (8, 8, 8),
    ),
    "one row of cells less, where row numbers run on nearly straight": ((7, 6, 7, "bilinear"), (7, 7, 7)),
}


@pytest.mark.parametrize("report", GRIDS)
def test_reported_grids(report: str) -> None:
    """B179 facebookresearch/dino#8, YuanGongND/ast#27: by design, so a note; at their own size nothing moves."""
    faulty, own = GRIDS[report]
    places = faulty[1] * faulty[2]
    shape = f"patches=float32[B,{places},64]"
    (finding,) = findings(Grid(*faulty).eval(), "PE505", seq_len=places, inputs=[shape])
    assert finding.severity == "note"
    assert f"{places:,} places" in finding.message
    still = f"patches=float32[B,{own[0] ** 2},64]"
    assert not findings(Grid(*own, faulty[3]).eval(), "PE505", seq_len=own[0] ** 2, inputs=[still])


class Sines(Attention):
    """A fixed sinusoidal table of the trained places; at more places it is interpolated, or computed anew."""

    def __init__(self, rows: int, interpolated: bool) -> None:
        super().__init__()
        self.interpolated = interpolated
        self.table = nn.Buffer(self.computed(rows))

    def computed(self, n: int) -> Tensor:
        angle = torch.arange(n)[:, None] * 1e4 ** (-torch.arange(0, 64, 2) / 64)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)

    def added(self, n: int) -> Tensor:
        if n <= len(self.table):
            return self.table[:n]
        if self.interpolated:
            return F.interpolate(self.table.T[None], size=n, mode="linear", align_corners=False)[0].T
        return self.computed(n)


def test_b038_mae_pytorch_26_a_fixed_table_is_interpolated() -> None:
    """B038 pengzhiliang/MAE-pytorch#26 (and #39): the table of sines is one-dimensional and gets more places.

    From 196 to 576 rows token 195 reads 195.5 * 196 / 576 - 0.5.
    """
    (finding,) = findings(Sines(196, interpolated=True).eval(), "PE505", seq_len=576)
    assert finding.severity == "warning"
    assert finding.evidence.measured == pytest.approx(195 - (195.5 * 196 / 576 - 0.5), abs=2e-3)
    assert not findings(Sines(196, interpolated=False).eval(), "PE505", seq_len=576)


class Stretched(Attention):
    """CLIP's 77 learned rows stretched to the text at hand, whole or but for the first ones."""

    def __init__(self, kept: int, rows: int = 77) -> None:
        super().__init__()
        self.kept, self.place = kept, nn.Parameter(torch.randn(rows, 64))

    def added(self, n: int) -> Tensor:
        if n <= len(self.place):
            return self.place[:n]
        near, rest = self.place[: self.kept], self.place[self.kept :]
        more = F.interpolate(rest.T[None], size=n - self.kept, mode="linear", align_corners=True)[0].T
        return torch.cat((near, more))


@pytest.mark.parametrize("kept", [0, 20])
def test_long_clip_38_rows_beyond_77_are_interpolated(kept: int) -> None:
    """beichenzbc/Long-CLIP#38: 77 rows become 248 by a ratio, the first 20 being kept or not."""
    (finding,) = findings(Stretched(kept).eval(), "PE505", seq_len=248)
    last = kept + (76 - kept) * (76 - kept) / (247 - kept)
    assert finding.evidence.measured == pytest.approx(76 - last, abs=2e-3)
    assert not findings(Stretched(kept, rows=248).eval(), "PE505", seq_len=248)
