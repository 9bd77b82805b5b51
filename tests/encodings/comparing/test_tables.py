"""Sinusoids and learned tables side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.encodings.comparing._models import HEADS, D, Rope, aspect, beside, only, table

ROWS, WIDTH = 200, HEADS * D


def trained(rows: int = ROWS) -> np.ndarray:
    """Rows that follow each other smoothly, no two the same."""
    random = np.random.default_rng(0)
    m = np.arange(rows)[:, None]
    return 0.1 * np.sin(m * random.uniform(0, 0.1, WIDTH) + random.uniform(0, 6, WIDTH))


@pytest.fixture(scope="module")
def before():
    return table(trained())


def test_a_table_is_like_itself_bit_by_bit(before):
    one = only(before, table(trained()), 100)
    assert one.kind == "same"
    assert aspect(one, "values").note == "bitwise equal"


def test_tuning_is_told_in_percent_and_is_no_difference(before):
    noise = 0.01 * np.random.default_rng(1).standard_normal((ROWS, WIDTH))
    one = only(before, table(trained() + noise), 100)
    found = aspect(one, "values")
    a, b = trained().astype(np.float32).astype(float), (trained() + noise).astype(np.float32).astype(float)
    change = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    whole = np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b))
    assert one.kind == "same"
    assert found.measured == pytest.approx(change.max(), rel=1e-6)
    assert found.note == f"changed by {100 * whole:.3g} % overall, {ROWS} of {ROWS} rows"


def test_equal_values_can_be_asked_for(before):
    changed = trained()
    changed[37] *= 1.001
    assert only(before, table(changed), 100).kind == "same"
    one = only(before, table(changed), 100, equal_values=True)
    assert (one.kind, aspect(one, "values").first) == ("differs", 37)


@pytest.mark.parametrize(
    ("made", "first", "said"),
    [
        (np.zeros((ROWS, WIDTH)), 0, "all of B are zero"),
        (trained()[np.random.default_rng(2).permutation(ROWS)], 0, "the same rows in another order"),
        (
            np.concatenate([trained()[:120], 0.07 * np.random.default_rng(3).standard_normal((80, WIDTH))]),
            120,
            "80 have nothing left of the other side's",
        ),
    ],
    ids=["zeroed", "shuffled", "tail"],
)
def test_rows_that_were_replaced_are_a_difference(before, made, first, said):
    found = aspect(only(before, table(made), 100), "values")
    assert found.verdict == "differs"
    assert said in found.note
    assert abs(found.first - first) <= (0 if first else 1)


def test_neighbouring_rows_that_change_places_are_a_difference_too(before):
    """Rows next to each other are alike, and yet no training puts one in the place of the other."""
    swapped = trained()
    swapped[[60, 61]] = swapped[[61, 60]]
    found = aspect(only(before, table(swapped), 100), "values")
    assert (found.verdict, found.first) == ("differs", 60)
    assert "2 of 200 rows: the same rows in another order" in found.note


def test_rows_and_offset_are_structure(before):
    """OPT and BART keep two rows aside."""
    longer = table(np.concatenate([np.zeros((2, WIDTH)), trained()]), first=2)
    one = only(longer, before, 100)
    assert {(item.name, item.a, item.b) for item in one.differing if item.name != "values"} == {
        ("rows", ROWS + 2, ROWS),
        ("first row", 2, 0),
    }


class Waves(nn.Module):
    """A sinusoid (N, D) added to tokens, built anew at each call or stored."""

    def __init__(
        self, base: float = 1e4, amplitude: float = 1.0, *, stored: bool = False, swap: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(97, WIDTH), Rope([], roles="")
        self.base, self.amplitude, self.swap = base, amplitude, swap
        if stored:
            self.register_buffer("pe", self.rows(512))

    def rows(self, n: int) -> Tensor:
        rate = torch.exp(torch.arange(0, WIDTH, 2) * (-np.log(self.base) / WIDTH))
        angle = torch.arange(n)[:, None] * rate
        pair = (angle.cos(), angle.sin()) if self.swap else (angle.sin(), angle.cos())
        return self.amplitude * torch.stack(pair, -1).flatten(1)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        return self.block(self.embed(ids) + (self.pe[:n] if hasattr(self, "pe") else self.rows(n)))


def test_a_sinusoid_built_and_stored_is_one():
    one = only(Waves(), Waves(stored=True).eval(), 400)
    assert one.kind == "same"


def test_another_base_of_a_sinusoid():
    one = only(Waves(5e3), Waves(), 400)
    m, k = np.arange(400)[:, None], np.arange(0, WIDTH, 2)
    angles = [m * base ** (-k / WIDTH) for base in (5e3, 1e4)]
    apart = max(
        np.abs(np.sin(angles[0]) - np.sin(angles[1])).max(),
        np.abs(np.cos(angles[0]) - np.cos(angles[1])).max(),
    )
    found = aspect(one, "rows")
    assert {item.name for item in one.differing} == {"base", "rows"}
    assert found.first == 1
    assert found.measured == pytest.approx(apart, rel=0.02)


def test_amplitude_and_order_of_a_sinusoid():
    assert "amplitude" in {item.name for item in only(Waves(amplitude=0.5), Waves(), 400).differing}
    assert "layout" in {item.name for item in only(Waves(swap=True), Waves(), 400).differing}


def test_another_scheme_stands_alone(before):
    assert {(one.scheme, one.kind) for one in beside(before, Waves(), 100)} == {
        ("learned", "only in a"),
        ("sinusoidal", "only in b"),
    }


def test_functional_form_is_the_same_table():
    """F.embedding and a slice read the same rows."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(97, WIDTH), Rope([], roles="")
            self.wpe = nn.Parameter(torch.tensor(trained()).float())

        def forward(self, ids: Tensor) -> Tensor:
            return self.block(F.embedding(ids, self.embed.weight) + self.wpe[: ids.shape[1]])

    assert only(Sliced(), table(trained()), 100).kind == "same"


def test_each_of_two_tables_is_compared():
    """An encoder and a decoder with tables of one shape, of which the second is changed."""

    class Two(nn.Module):
        def __init__(self, second: np.ndarray) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(97, WIDTH), Rope([], roles="")
            self.one, self.two = (nn.Parameter(torch.tensor(t).float()) for t in (trained(), second))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.block(self.embed(ids) + self.one[: ids.shape[1]])
            return self.block(x + self.two[: ids.shape[1]])

    right = trained()[::-1].copy()
    assert {one.kind for one in beside(Two(right), Two(right), 100)} == {"same"}
    assert "differs" in {one.kind for one in beside(Two(right * 0 + right[:1]), Two(right), 100)}
