"""A linear bias by key position is held in half precision, and near keys share one number.

## What it does

Looks at linear biases (ALiBi) of the form ``slope * key``, which are equal to ``-slope * distance`` up to a
constant per query that softmax does not see. Where bfloat16 or float16 holds such a bias, it is computed at the
last positions of the length asked about: which of the 64 nearest keys tie with their neighbour, in the worst head,
and how far the bias is off.

## Why it matters

By distance the bias is small where attention is; by key position it is largest there, so the format rounds it most.
In bfloat16 at 2,048 tokens about nine of ten of the nearest neighbours tie in the worst head and logits are off by
2.5 to 8. BLOOM and Falcon compute it so and were trained with it: this is a note, and matters where a model is
trained anew, made longer, or moved between runtimes of which one computes it in float32.

## What is checked

``round(s j) != round(s (j + 1))`` for the 64 keys before the last query. Numbers of a format with p significant
bits are ``2^(floor(log2(s N)) - p + 1)`` apart near ``s N``; once the slope s is less, neighbours tie with a share
of about ``1 - s / spacing``.

## Known limits

Biases by distance are exact where it matters, and silent; PE601 speaks where positions were rounded before one was
taken from the other. Keys are taken before the last query of a causal attention.

## Fix

Use the form by distance, or keep slopes, positions and their product in float32.

## References

- Press et al. 2108.12409; BigScience, BLOOM's build_alibi_tensor.
- Dao-AILab/flash-attention 846; HabanaAI/vllm-fork 503; NVIDIA/TensorRT-Model-Connect 667.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.encodings import replaying
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.numerics import _held
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Alibi
    from pediag.trace import Node, Trace

NEAREST = 64
"""Keys before the last query that are looked at (facts: the nearest 64 are where a bias by distance is exact)."""


@dataclass(frozen=True, slots=True)
class Ties:
    """Share of the nearest keys that tie in the worst ``head`` of a bias, and by how many logits it is off."""

    node: Node
    form: str
    share: float
    head: int
    error: float


@rule(
    code="PE605",
    name="bias-ties",
    severity="note",
    basis="measured here",
    needs=("trace",),
    references=("Press et al. 2108.12409", "flash-attention issue 846", "TensorRT-Model-Connect issue 667"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each bias by key position whose nearest keys tie."""
    from pediag.encodings import Alibi

    judged = [item for item in facets.encodings if isinstance(item, Alibi) and item.origin == "trace"]
    if not any(item.form == "key" for item in judged):
        raise NotApplicable("the model has no linear bias by key position")
    for encoding in judged:
        ties = _ties(facets, encoding) if encoding.form == "key" else None
        if ties is not None:
            yield _finding(facets, encoding, ties)


def _ties(facets: Facets, encoding: Alibi) -> Ties | None:
    trace = facets.structural
    assert trace is not None
    found = None
    for node in replaying.parts(encoding.node) if encoding.node is not None else ():
        if _by_head_and_key(trace, node, encoding.slopes.size):
            found = found or _in(facets, trace, node)
    return found


def _by_head_and_key(trace: Trace, node: Node, heads: int) -> bool:
    """Whether a half value has one number for each head and key (and text)."""
    if str(node.dtype).removeprefix("torch.") not in _held.HALF:
        return False
    axes = [size for size in node.shape if size in trace.lengths.sequence]
    return len(axes) == 1 and node.numel // axes[0] in (heads, heads * trace.sizes.batch)


def _in(facets: Facets, trace: Trace, node: Node) -> Ties | None:
    """The ties of a bias at the last positions, by replay; None where there are none or it cannot run."""
    from pediag.trace import Lane, Unavailable
    from pediag.trace.lanes import Float64

    program = replaying.program_of(trace, node)
    if program is None or program.built or facets.seq_len <= NEAREST:
        return None
    where = np.arange(facets.seq_len - NEAREST, facets.seq_len)
    try:
        got, exact = (
            replaying.angles(program, lane, where).reshape(NEAREST, -1) for lane in (Lane(), Float64())
        )
    except Unavailable:
        return None
    if not np.isfinite(got).all():
        return None  # PE606
    tied = ((np.diff(got, axis=0) == 0) & (np.diff(exact, axis=0) != 0)).mean(axis=0)
    off = got - exact
    error = float((off - off[-1:]).__abs__().max())
    head = int(tied.argmax())
    form = str(node.dtype).removeprefix("torch.")
    return Ties(node, form, float(tied[head]), head, error) if tied[head] > 0 else None


def _finding(facets: Facets, encoding: Alibi, ties: Ties) -> Finding:
    frame = ties.node.frame
    return Finding(
        message=(
            f"The bias slope * key is held in {ties.form}: {100 * ties.share:.0f} % of the nearest {NEAREST} keys tie "
            f"with their neighbour in head {ties.head}."
        ),
        effect=(
            f"At {facets.seq_len:,} tokens the bias of near keys is off by up to {ties.error:.2g} against one another. "
            "BLOOM and Falcon were trained so; a runtime that computes it in float32 gives other logits."
        ),
        where=Where(
            module=ties.node.module or (encoding.modules[0] if encoding.modules else ""),
            encoding=encoding.id,
            file=frame.file if frame is not None else encoding.source_file,
            line=frame.line if frame is not None else encoding.source_line,
        ),
        evidence=Evidence(
            measured=round(ties.share, 4),
            expected=0.0,
            limit=0.0,
            unit="share of neighbours",
            seq_len=facets.seq_len,
        ),
        fix=Fix(
            "Take -slope * (query - key), which is small where attention is, or keep slopes, positions and their "
            "product in float32."
        ),
        scheme=encoding.scheme,
    )
