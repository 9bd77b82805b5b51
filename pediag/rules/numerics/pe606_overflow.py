"""A value on the way to the positions is beyond the range of float16 at this length.

## What it does

Replays the position program of every encoding as written, and as the model would run after ``--dtype float16``,
beside float64, up to the length asked about. Fires at the first value that is infinite (or no number) while float64
holds a plain number: positions and distances above 65,504, ``base ** x`` with a base above that, a slope times a
distance. What is added to the scores of an attention is summed in its own format: two masks of the lowest number
make minus infinity.

## Why it matters

float16 ends at 65,504. An infinite angle has no cosine, so from that position on rows are NaN, and one NaN in a
softmax spoils its row. An infinite ``base ** x`` makes the frequency zero: all but the first pair stop turning, and
nothing fails. A row of scores that is minus infinity throughout has no softmax.

## What is checked

``isfinite(value) or not isfinite(value64)`` for the values of the program in float16 at sampled positions below L;
the first position is found by halving. Of added masks: no row of their sum is minus infinity at every key where
each of them is finite.

## Known limits

Only what is reached at this length and in these formats is reported. Tables that hold infinities already are PE209.
A model that is built from a config runs in the dtype that it declares, so ``--dtype`` does not cast it again.

## Fix

Compute positions, powers and biases in float32; mask once, with the lowest number of the format that is added.

## References

- IEEE 754 binary16: the largest number is 65504.
- vllm-project/vllm 1004 (base 1e6 in float16).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.numerics import _overflow
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.theory.rounding import largest_value

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Site

SMALL = 1 << 24
"""Elements of a bias that is summed with others at the structural length."""


@rule(
    code="PE606",
    name="overflow",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("IEEE 754 binary16", "vLLM pull request 1004"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line at which a value leaves the range of its format."""
    judged = [item for item in facets.encodings if item.origin == "trace"]
    if not judged:
        raise NotApplicable("no position program that runs")
    seen: set[object] = set()
    for encoding in judged:
        found = _overflow.beyond(facets, encoding)
        if found is not None and found.node.frame not in seen:
            seen.add(found.node.frame)
            yield _finding(facets, encoding, found)
    yield from _added_twice(facets)


def _finding(facets: Facets, encoding: Encoding, found: _overflow.Beyond) -> Finding:
    largest = largest_value(found.form)
    when = f" after .to({found.form})" if found.cast else ""
    start = "" if found.first is None else f" from position {found.first:,} on"
    what = (
        "should be" if found.value > largest else "is infinite, of operands beyond the format, and should be"
    )
    return Finding(
        message=(
            f"A value of the position program ({found.node.op_name}) leaves {found.form}{when}{start}: it {what} up "
            f"to {found.value:.6g}, and the format ends at {largest:,.0f}."
        ),
        effect=_effect(facets, found),
        where=_where(encoding, found.node),
        evidence=Evidence(
            measured=found.value, expected=None, limit=largest, unit="largest value", seq_len=facets.seq_len
        ),
        fix=Fix(
            f"Compute {_named(found)} in float32 and cast what is finished: cosines and sines, or the bias relative to "
            "its query."
        ),
        scheme=encoding.scheme,
    )


def _named(found: _overflow.Beyond) -> str:
    if found.first is None:
        return "the powers of the base"
    return "positions and what is computed of them"


def _effect(facets: Facets, found: _overflow.Beyond) -> str:
    if found.first is None:
        return (
            "It is infinite, at every length: frequencies made of it are zero or no numbers, and their pairs stop "
            "turning."
        )
    count = facets.seq_len - found.first
    return f"At {facets.seq_len:,} tokens the last {count:,} are infinite there; cosines and softmaxes of them are NaN."


def _where(encoding: Encoding, node: Node) -> Where:
    frame = node.frame
    return Where(
        module=node.module or (encoding.modules[0] if encoding.modules else ""),
        encoding=encoding.id,
        file=frame.file if frame is not None else encoding.source_file,
        line=frame.line if frame is not None else encoding.source_line,
    )


# -- masks added twice --------------------------------------------------------------------------------------


def _added_twice(facets: Facets) -> Iterator[Finding]:
    """Attentions whose added masks sum to a row without any finite score."""
    trace = facets.structural
    assert trace is not None
    added: dict[str, list[Site]] = defaultdict(list)
    for site in trace.graph.sites:
        if site.kind == "bias" and site.position:
            added[site.module].append(site)
    seen: set[object] = set()
    for sites in added.values():
        rows = _rows_lost(facets, sites)
        if rows and sites[-1].frame not in seen:
            seen.add(sites[-1].frame)
            yield _twice(facets, sites[-1], rows)


def _rows_lost(facets: Facets, sites: list[Site]) -> int:
    """How many queries have a sum of minus infinity at all keys, though every part of it was finite at some."""
    import torch

    total: Any = None
    for site in sites:
        for part in site.position[:1]:
            value = _bias(facets, part)
            if value is None:
                continue
            if bool(torch.isneginf(value).all(dim=-1).any()) and not _made_of_finite(facets, part):
                return 0
            try:
                total = value if total is None else total + value
            except RuntimeError:
                return 0
    if total is None or total.dim() < 2 or total.shape[-1] < 2:
        return 0
    flat = total.reshape(-1, *total.shape[-2:])[0]
    return int(torch.isneginf(flat).all(dim=-1).sum())


def _bias(facets: Facets, node: Node) -> Any:
    from pediag.trace import Unavailable

    trace = facets.structural
    assert trace is not None
    if node.numel > SMALL or not node.dtype.is_floating_point or len(node.shape) < 2:
        return None
    try:
        return trace.value(node)
    except Unavailable:
        return None


def _made_of_finite(facets: Facets, node: Node) -> bool:
    """Whether a bias is finite in float64, so that its infinities come from its format."""
    from pediag.trace import Evaluator, Unavailable
    from pediag.trace.lanes import Float64

    try:
        return bool(np.isfinite(Evaluator(Float64())(node).double().numpy()).all())
    except Unavailable:
        return False


def _twice(facets: Facets, site: Site, rows: int) -> Finding:
    form = str(site.position[0].dtype).removeprefix("torch.")
    frame = site.frame
    return Finding(
        message=f"What is added to the scores sums to minus infinity at every key of {rows:,} queries, in {form}.",
        effect="The softmax of such a row is NaN, and so is all that is computed of it.",
        where=Where(
            module=site.module,
            file=frame.file if frame is not None else None,
            line=frame.line if frame is not None else None,
        ),
        evidence=Evidence(measured=rows, expected=0, unit="rows", seq_len=facets.seq_len),
        fix=Fix(
            f"Join the masks as booleans and fill once, or clamp the sum to torch.finfo(torch.{form}).min."
        ),
        scheme="mask",
    )
