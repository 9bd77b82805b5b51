"""PE207: parameters that hold what a formula gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pediag
from tests.rules._fixtures import load, marked_lines
from tests.rules.state._files import changed, findings

FIXTURE = load("pe207_constant_is_trainable")


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    (finding,) = findings(make(), "PE207", FIXTURE.SEQ_LEN)
    assert finding.severity == "warning"
    assert finding.where.line in marked_lines(FIXTURE, "PE207")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]
        assert finding.evidence.unit == FIXTURE.EXPECTED["unit"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), "PE207", FIXTURE.SEQ_LEN)


def test_an_added_sinusoid_is_a_note() -> None:
    (finding,) = findings(FIXTURE.noted_sinusoid(), "PE207", 256)
    assert (finding.severity, finding.evidence.measured) == ("note", 1024 * 48)


def test_equal_layers_and_both_tables_are_one_finding() -> None:
    model = nn.Sequential(nn.Embedding(128, 48), FIXTURE.Tables(True), FIXTURE.Tables(True)).eval()
    (finding,) = findings(model, "PE207", 256)
    assert "`1.near` and `1.far` (layers 1-2)" in finding.message
    assert finding.evidence.measured == 4 * 1024 * 8


class Complex(FIXTURE.Rotary):
    """One complex table, channels paired side by side."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(512.0), 10000.0 ** (-torch.arange(0, 16, 2) / 16))
        self.turn = nn.Parameter(torch.polar(torch.ones_like(angle) + off * torch.randn(512, 8), angle))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        q, k = (torch.view_as_complex(t.unflatten(-1, (8, 2))) * self.turn[: x.shape[1]] for t in (q, k))
        q, k = (torch.view_as_real(t).flatten(-2) for t in (q, k))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)


def test_a_complex_table() -> None:
    (finding,) = findings(nn.Sequential(nn.Embedding(128, 48), Complex()).eval(), "PE207", 256)
    assert "`1.turn` holds cosines and sines" in finding.message


def test_a_table_that_training_has_moved_is_silent() -> None:
    torch.manual_seed(0)
    assert not findings(nn.Sequential(nn.Embedding(128, 48), Complex(0.05)).eval(), "PE207", 256)


def test_a_frozen_model_is_silent() -> None:
    assert not findings(FIXTURE.faulty().requires_grad_(False), "PE207", 256)


def test_a_file_tells_nothing_of_gradients(tmp_path: Path) -> None:
    report = pediag.check(changed(tmp_path, lambda state: None), select=["PE207"])
    assert [outcome.status for outcome in report.outcomes] == ["could-not-check"]
