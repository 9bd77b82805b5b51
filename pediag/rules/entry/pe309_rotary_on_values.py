"""The values of an attention are rotated, and nothing turns the result back.

## What it does

Looks at what positions do to the third operand of every attention, fused or written out. It fires where the values
are turned by position. Silent where the output of the attention is turned again before it is projected, as schemes do
that carry the relative position into the values (GTA, VO-RoPE), and on factors that are no rotation.

## Why it matters

Scores see only the difference of two positions because the turn of the query undoes that of the key. Nothing undoes
that of a value: what a word contributes depends on where in the text it stands, by all its channels. The sum over keys
mixes vectors turned by unrelated angles, and fast pairs average out.

## What is checked

R_v(m), the map on the channels of the values, must not change with m by more than 0.05 on unit vectors, up to one
factor per place; or the output must be multiplied with positions again.

## Known limits

An undoing behind the output projection is not seen.

## Fix

Rotate queries and keys only.

## References

- Su et al. 2021 (2104.09864), equation 16: queries and keys; values stay.
- Miyato et al. 2023 (2310.10375), GTA: values turned, outputs turned back.
- rasbt/LLMs-from-scratch issue 411, NVIDIA/Megatron-LM issue 355, nntrainer/nntrainer issue 3982: rotations that reach
  tensors they are not meant for, or miss those they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import complete, line_of
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.geometry._rotation import LIMIT, Kind, is_rotated, kinds, movement, unread
from pediag.rules.rule import Facets, rule

if TYPE_CHECKING:
    from pediag.encodings.maps import Side
    from pediag.trace import Node, Trace

MIXING = frozenset(("mm", "addmm", "linear", "convolution", "embedding", "_grouped_mm"))
"""Operations by which weights mix channels: behind one, the output of the attention is no more itself."""

REACH = 64
"""Operations behind an attention in which its output may be turned back."""


@rule(
    code="PE309",
    name="rotary-on-values",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Su et al. 2021, 2104.09864, equation 16", "Miyato et al. 2023, 2310.10375"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each function that rotates values for good."""
    found = kinds(facets)
    seen: set[object] = set()
    for kind in found:
        side = kind.one.v
        if side is None or not is_rotated(side) or _turned_back(complete(facets), kind):
            continue
        spot = side.site.frame or side.site.module
        if spot not in seen:
            seen.add(spot)
            yield _finding(facets, kind, side)
    if not seen:
        unread(found)


def _turned_back(trace: Trace, kind: Kind) -> bool:
    """Whether positions are multiplied into the output before weights mix its channels."""
    sites = {site.result for site in trace.graph.sites if site.kind in ("rotary", "bilinear", "opaque")}
    start = kind.one.attention.scores
    pending: list[Node] = [start]
    seen: set[Node] = {start}
    users: dict[Node, list[Node]] = {}
    for node in trace.graph.nodes[start.index : start.index + 4 * REACH]:
        for item in node.inputs():
            users.setdefault(item, []).append(node)
    while pending:
        for user in users.get(pending.pop(), []):
            if user in sites:
                return True
            if user not in seen and user.op_name not in MIXING and user.index - start.index < REACH:
                seen.add(user)
                pending.append(user)
    return False


def _finding(facets: Facets, kind: Kind, side: Side) -> Finding:
    assert side.map is not None
    layers = f" of {kind.layers}" if kind.layers else ""
    moved = movement(side.map)
    at = f" at {line_of(side.site.frame)}" if side.site.frame else ""
    return Finding(
        message=f"The values{layers} are rotated by position and not turned back: the same value moves by up to "
        f"{moved:.3g} times its length.",
        effect=f"Over {facets.seq_len:,} tokens the sum over keys mixes vectors turned by unrelated angles, so what a "
        "word contributes depends on where in the text it stands.",
        where=kind.where(side, facets),
        evidence=Evidence(round(moved, 4), 0.0, LIMIT, "of its length", facets.seq_len),
        fix=Fix(f"Rotate queries and keys only; leave the values{at} as they are."),
        scheme="rotary",
    )
