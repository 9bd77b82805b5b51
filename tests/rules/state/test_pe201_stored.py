"""PE201 on files: damaged lists and tables are named with the entry; garbage as a whole is silent."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._rotary import Turned, by_product
from tests.rules._stored import judged

W = 1.0 / 10000.0 ** (torch.arange(0, 64, 2).double() / 64).float()


def changed(index: int | tuple[int, int], value: float, source: Tensor = W) -> Tensor:
    tensor = source.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("index", "value", "why"),
    [
        (5, math.nan, "is not finite"),
        (9, 0.0, "is zero"),
        (31, -1.0, "is negative"),
        (7, 0.9, "does not fall"),
        (0, -65309.75, "is negative"),
    ],
)
def test_damaged_frequencies(tmp_path: Path, index: int, value: float, why: str) -> None:
    report = judged(tmp_path, {f"layers.{i}.rot.w": changed(index, value) for i in range(3)}, "PE201")
    (finding,) = report.findings
    assert finding.severity == "error"
    assert (
        "`layers.0.rot.w`" in finding.message and why in finding.message and "layers 0-2" in finding.message
    )
    measured = finding.evidence.measured
    assert measured == ("nan" if math.isnan(value) else pytest.approx(value, rel=1e-6))
    assert finding.evidence.expected == pytest.approx(10000.0 ** (-index / 32))
    assert "1.0 / 10000 ** (torch.arange(0, 64, 2" in finding.fix.summary
    assert finding.where.encoding == "rope-1"


@pytest.mark.parametrize("make", [torch.cos, torch.sin])
@pytest.mark.parametrize("value", [math.nan, 1e11])
def test_tables_with_holes(tmp_path: Path, make: object, value: float) -> None:
    angle = torch.outer(torch.arange(1024.0), W)
    state = {"a.cos": angle.cos(), "a.sin": angle.sin()}
    name = "a.cos" if make is torch.cos else "a.sin"
    state[name] = changed((700, 3), value, state[name])
    (finding,) = judged(tmp_path, state, "PE201").findings
    assert name in finding.message and f"{700 * 32 + 3:,}" in finding.message
    assert finding.evidence.measured == ("nan" if math.isnan(value) else pytest.approx(1e11))


@pytest.mark.parametrize(
    "state",
    [
        {"w": W},
        {"w": W.bfloat16()},
        {"w": torch.cat((W[:24], torch.zeros(8)))},
        {"c": torch.outer(torch.arange(64.0), W).cos(), "s": torch.outer(torch.arange(64.0), W).sin()},
    ],
)
def test_sound_ones_pass(tmp_path: Path, state: dict[str, Tensor]) -> None:
    report = judged(tmp_path, state, "PE201")
    assert [outcome.status for outcome in report.outcomes] == ["pass"]


def test_garbage_as_a_whole_is_silent(tmp_path: Path) -> None:
    """Left-over memory cannot be told from any other list, so nothing was checked."""
    garbage = torch.randn(32, generator=torch.Generator().manual_seed(0)) * 1e5
    report = judged(tmp_path, {"inv_freq": garbage, "nan": torch.full((32,), math.nan)}, "PE201")
    assert [outcome.status for outcome in report.outcomes] == ["could-not-check"]


def test_what_a_model_does_not_read_is_a_note() -> None:
    from pediag.encodings.from_tensors import read
    from pediag.rules.registry import find
    from pediag.rules.rule import Facets
    from pediag.targets import LazyTensor

    damaged = changed(5, math.nan)
    lazy = {"w": LazyTensor("w", (32,), "float32", lambda: damaged)}
    facets = Facets(seq_len=512, tensors=lazy, unread=read(lazy))
    (finding,) = find("PE201").check(facets)
    assert finding.severity == "note" and "does not read it" in finding.effect


def test_a_live_model_is_judged_as_before() -> None:
    model: nn.Module = Turned(by_product, w=W[:16]).eval()
    assert [outcome.status for outcome in pediag.check(model, select=["PE201"]).outcomes] == ["pass"]
