"""Training learns, the same way each time; costs count the bytes that are there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pediag.schemes import costs, training
from pediag.schemes.encodings import SCHEMES
from pediag.schemes.model import Behaviour, Setting, deviation, mean, median
from pediag.schemes.tasks import TASKS

SMALL = Setting(
    d_model=16, heads=2, layers=1, seq_len=16, train_len=16, batch=16, schemes=("none", "learned", "t5")
)


def test_statistics_are_numpys() -> None:
    values = [0.25, 0.5, 0.125, 0.875]
    assert mean(values) == pytest.approx(np.mean(values))
    assert deviation(values) == pytest.approx(np.std(values, ddof=1))
    assert deviation([1.0]) is None
    assert median(values) == pytest.approx(np.median(values))
    assert median(values[:3]) == pytest.approx(np.median(values[:3]))


def test_the_loss_falls_and_a_seed_gives_the_same_again() -> None:
    found: dict[tuple[str, str, int], Behaviour] = {}
    again: dict[tuple[str, str, int], Behaviour] = {}
    setting = replace(SMALL, d_model=32)
    before = torch.random.get_rng_state()
    for where in (found, again):
        training.behaviours(setting, SCHEMES["none"], TASKS["first"], 3, 120, where)
    assert torch.equal(before, torch.random.get_rng_state())
    assert found[("none", "first", 16)].losses[0] < np.log(16) - 0.1  # ln 16 is what guessing costs
    assert found == again
    assert {length for _, _, length in found} == {16, 32, 64}


def test_a_table_has_no_rows_beyond_its_training() -> None:
    found: dict[tuple[str, str, int], Behaviour] = {}
    training.behaviours(SMALL, SCHEMES["learned"], TASKS["lag"], 0, 2, found)
    assert [found[("learned", "lag", length)].reason for length in (16, 32, 64)] == ["", "no rows", "no rows"]
    assert not found[("learned", "lag", 32)].accuracies


def test_scalings_are_tried_beyond_the_trained_length_only() -> None:
    found: dict[tuple[str, str, int], Behaviour] = {}
    training.behaviours(replace(SMALL, d_model=32), SCHEMES["rotary"], TASKS["lag"], 0, 2, found)
    at = {length: sorted(name for name, _, other in found if other == length) for length in (16, 32, 64)}
    assert at[16] == ["rotary"]
    assert at[32] == at[64] == ["rotary", "rotary + linear", "rotary + ntk", "rotary + yarn"]


def test_bytes_of_tables_and_steps() -> None:
    none, learned, t5 = costs.costs(SMALL, lambda text: None, rounds=1)
    assert (none.parameters, none.tables) == (0, 0)
    assert learned.parameters == 16 * 16 * 4
    assert t5.parameters == 32 * 2 * 4
    assert len(none.seconds) == 1
    assert 0 < none.peak <= learned.peak


def test_peak_counts_what_lives_at_once() -> None:
    size = 100 * 100 * 4

    def two_of_three() -> None:
        first = torch.zeros(100, 100)
        second = first + 1
        del first
        second.mul_(2)
        second * 2

    assert costs._peak(two_of_three, "cpu") == 2 * size

    kept = torch.zeros(100, 100, requires_grad=True)

    def backward() -> None:
        kept.exp().sin().sum().backward()
        kept.grad = None

    assert (
        3 * size <= costs._peak(backward, "cpu") <= 3 * size + 64
    )  # exp and sin are kept, a gradient beside them
