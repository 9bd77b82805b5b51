"""The last rows of a learned position table look as initialised while the rest is trained.

## What it does

Looks for rows at the end of a learned table that have nothing in common with their neighbours, or are zero, while the
rows before them go on from one to the next as trained ones do. Fires where ``seq_len`` reaches into them.

## Why it matters

A table has more rows than training texts had tokens, or was made longer without training. Rows without gradient stay
where the initialisation put them (Adam) or shrink towards zero (AdamW). Texts that reach them run, and each token
there gets a random vector in place of a position.

## What is checked

Cosines of neighbouring rows. Of independent rows they are N(0, 1/d); of trained tables their median was measured at
0.83 and 0.85. The tail is the longest run at the end with ``|cos| < 4 / sqrt(d)``, eight rows or more; the rest must
have a median above 0.3 and above 4 / sqrt(d). Single cosines up to 6 / sqrt(d) do not end a run. Rows shorter than
1e-6 of the median norm count as having nothing in common. Row 0 and rows kept aside for padding are left out: they are
unlike the others in every trained table.

## Known limits

- A table that was never trained has no trained rest, and is silent; so is one whose rest is narrower than 16 channels,
  where cosines of random rows are as large.
- Rows that were trained seldom are not told from well trained ones.
- Rows in the middle, between trained ones, are not looked for.

## Fix

Cut texts before these rows, or write them by interpolation from the trained ones and fine-tune.

## References

- Wang and Chen 2020 (2010.04903): what learned tables encode, and how far.
- Loshchilov and Hutter 2019 (1711.05101): decay shrinks what has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, rule
from pediag.rules.state import _rows
from pediag.rules.state._rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SIGMAS, FAR = 4.0, 6.0
"""In standard deviations 1 / sqrt(d) of the null law: what random neighbours keep to, what one of many may reach."""

LEAST_TAIL = 8
"""Rows of the shortest tail: the last rows of some trained tables are outliers."""

LEAST_REST = 8
"""Cosines from which the median of the trained part is taken."""

TRAINED = 0.3
"""Median cosine of the rest; 0.83 and 0.85 were measured, 0.004 of random rows."""

PLAIN = 32
"""Cosines of a trained part that leave no doubt that a stored tensor is a table of positions."""

VANISHED = 1e-6
"""Share of the median norm below which a row is as good as zero."""


@rule(
    code="PE211",
    name="untrained-rows",
    severity="warning",
    basis="measured here",
    needs=("trace",),
    instead=("tensors",),
    references=("Wang and Chen 2020, 2010.04903", "Loshchilov and Hutter 2019, 1711.05101"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each table."""
    for table in _rows.tables(facets, ("learned",)):
        if not table.ordered:
            continue
        start = max(table.first, 1)
        cosines = _cosines(table, range(start, table.rows))
        tail = _tail(cosines, table.width)
        if tail is not None:
            row = start + tail + 1
            if table.position(row) < facets.seq_len:
                yield _finding(facets, table, row, cosines, tail)


def _cosines(table: Rows, rows: range) -> Floats:
    """(n - 1,) cosines of neighbouring rows; 0 where one of them vanishes or is not finite."""
    norms, products = [], []
    last = None
    with np.errstate(all="ignore"):
        for _, numbers in table.pieces(rows):
            joined = numbers if last is None else np.concatenate([last, numbers])
            products.append(np.sum(joined[1:] * joined[:-1], axis=1))
            norms.append(np.linalg.norm(numbers, axis=1))
            last = numbers[-1:]
        size = np.concatenate(norms) if norms else np.zeros(0)
        sound = np.isfinite(size) & (size > VANISHED * np.median(size[size > 0])) if size.any() else size > 0
        both = sound[1:] & sound[:-1]
        values = np.concatenate(products) / (size[1:] * size[:-1]) if size.size > 1 else np.zeros(0)
    return np.where(both, values, 0.0)


def _tail(cosines: Floats, width: int) -> int | None:
    """The first cosine of the run at the end that looks random, where the rest is trained; else None."""
    sigma = 1.0 / np.sqrt(width)
    random = np.abs(cosines) < SIGMAS * sigma
    start = len(cosines)
    while start and (random[start - 1] or _single(cosines, random, start - 1, FAR * sigma)):
        start -= 1
    rest = cosines[:start]
    if len(cosines) - start < LEAST_TAIL or len(rest) < LEAST_REST:
        return None
    return start if float(np.median(rest)) > max(TRAINED, SIGMAS * sigma) else None


def _single(cosines: Floats, random: NDArray[np.bool_], index: int, most: float) -> bool:
    """Whether one cosine among random ones is large by chance."""
    around = random[max(0, index - 2) : index]
    return len(around) == 2 and bool(around.all()) and abs(cosines[index]) < most


def _finding(facets: Facets, table: Rows, row: int, cosines: Floats, tail: int) -> Finding:
    n, position = facets.seq_len, table.position(row)
    near, rest = float(np.median(np.abs(cosines[tail:]))), float(np.median(cosines[:tail]))
    reached = min(n, table.rows - table.first) - position
    return Finding(
        message=(
            f"From position {position:,} on (row {row:,} of `{table.name}`) neighbouring rows have nothing in common: "
            f"median cosine {near:.2g} over {table.rows - row:,} rows, {rest:.2g} before{_rows.shared(table)}."
        ),
        effect=(
            f"The last {reached:,} of {n:,} tokens get rows that look as initialised, in place of positions; nothing "
            f"raises.{_rows.doubtful(table) if tail < PLAIN else ''}"
        ),
        where=table.where(),
        evidence=Evidence(position, None, position, "tokens", n),
        fix=Fix(
            f"Cut texts at {position:,} tokens (max_length={position} at the tokenizer), or write rows {row:,} to "
            f"{table.rows - 1:,} of `{table.name}` by interpolation from those before and fine-tune them."
        ),
        severity="note" if table.encoding.doubt and tail < PLAIN else None,
        scheme=table.encoding.scheme,
    )
