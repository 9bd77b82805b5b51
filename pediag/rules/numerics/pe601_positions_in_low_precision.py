"""Positions pass through a half format and can no longer be told apart.

## What it does

Looks for every value of the position program that is a run of positions, one number a token (``0, 1, 2, ...``, also
scaled or shifted), and that bfloat16 or float16 holds: ``arange`` made in the dtype of the model, ``.to(x.dtype)``,
what autocast casts before a matrix product, a stored run of positions that was cast with the module. Counts how
many of the positions up to the length asked about are left. Where positions go through a matrix product, whole
numbers are also multiplied by one on the device that the model lives on: a product that loses them is the same
fault.

## Why it matters

bfloat16 has 8 significant bits and float16 and TF32 have 11: whole numbers are exact up to 256 and 2,048. Beyond,
neighbours become one number, first every two tokens, then four, then eight. All that is computed of them is equal,
in whatever precision, so the model cannot tell these tokens apart.

## What is checked

The number of distinct values of ``round(first + step * m)`` for m = 0 .. L - 1, by the definition of the format. It
must be L. For a product on a device: ``ones(1, 1) @ arange(n)`` must give back every whole number below L, whatever
the switches say.

## Known limits

A program that starts from times that the user gives in a half format is judged as given. Linear biases (ALiBi) by key
position are PE605: BLOOM and Falcon were trained with ties. By distance they are judged where positions are rounded
before one is taken from the other; distances that are cast are exact where they matter. Positions beyond the range of
float16 are PE606, equal rows of a table that was made ahead PE210. Where only finished cosines, sines or rows are
cast, nothing is lost and the rule is silent. With ``--dtype`` a live model is run once more as if it were cast, so
that ``.to(x.dtype)`` follows.

## Fix

Count in int64 or float32, and cast what is finished.

## References

- huggingface/transformers 25681, 29285, 48428; EleutherAI/gpt-neox 1003; huggingface/candle 3520.
- huggingface/diffusers 13920 (all patches at one position); thinking-machines-lab/batch_invariant_ops 23.
- Wang et al. 2411.13476: bfloat16 breaks the relative property of rotary encodings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.numerics import _held, _products
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.theory.rounding import exact_integer_limit

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node


@rule(
    code="PE601",
    name="positions-in-low-precision",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("transformers issues 25681, 29285, 48428", "gpt-neox issue 1003", "diffusers issue 13920"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line at which positions are lost."""
    judged = _judged(facets)
    if not judged:
        raise NotApplicable("no position encoding whose positions are computed in forward")
    seen: set[object] = set()
    for encoding in judged:
        for finding in _of(facets, encoding):
            place = (finding.where.file, finding.where.line, finding.evidence.measured)
            if place not in seen:
                seen.add(place)
                yield finding


def _judged(facets: Facets) -> list[Encoding]:
    from pediag.encodings import Alibi, encodes_position

    kinds = [item for item in encodes_position(facets.encodings) if item.origin == "trace"]
    return [
        item for item in kinds if not (isinstance(item, Alibi) and item.form == "key") and _held.roots(item)
    ]


def _of(facets: Facets, encoding: Encoding) -> Iterator[Finding]:
    found = _held.lost(facets, encoding)
    if found is not None:
        yield _finding(facets, encoding, *found)
        return
    for product in [] if encoding.scheme == "alibi" else _products.losing(facets, encoding):
        yield _by_product(facets, encoding, product)


def _finding(facets: Facets, encoding: Encoding, item: _held.Held, what: _held.Left) -> Finding:
    assert what.pair is not None
    one, other = what.pair
    share = f"{what.distinct:,} of {what.asked:,}"
    after = f" after .to({item.form})" if item.cast else ""
    return Finding(
        message=f"Positions are held in {item.form}{after}: {share} are left at this length.",
        effect=(
            f"The first that are one are {one:,} and {other:,}; from there on neighbours share their code, "
            f"and at {what.asked:,} tokens up to {what.longest:,} in a row do."
        ),
        where=_where(encoding, item.node),
        evidence=Evidence(
            measured=what.distinct,
            expected=what.asked,
            limit=exact_integer_limit(item.form),
            unit="distinct positions",
            seq_len=facets.seq_len,
        ),
        fix=Fix(_advice(item, encoding)),
        scheme=encoding.scheme,
    )


def _where(encoding: Encoding, node: Node) -> Where:
    frame = node.frame
    return Where(
        module=node.module or (encoding.modules[0] if encoding.modules else ""),
        encoding=encoding.id,
        file=frame.file if frame is not None else encoding.source_file,
        line=frame.line if frame is not None else encoding.source_line,
    )


def _advice(item: _held.Held, encoding: Encoding) -> str:
    node = item.node
    name = node.names[0] if node.names else ""
    if item.stored:
        return f"Keep {name or 'the stored positions'} out of the cast, or count anew with torch.arange in int64."
    how = {"arange": "Make the range in int64 or float32", "_to_copy": "Leave the cast of the positions out"}
    start = how.get(node.op_name, "Compute the positions in float32")
    if encoding.scheme == "alibi":
        return f"{start}: subtract whole numbers or float32, and cast the distances or the finished bias."
    return (
        f"{start}, and the frequencies and the product too; multiply one by one, outside of autocast, and cast "
        "cos and sin, or the finished rows."
    )


def _by_product(facets: Facets, encoding: Encoding, product: _products.Losing) -> Finding:
    first = product.first_lost
    return Finding(
        message=(
            f"A {product.node.op_name} multiplies positions on {product.device}, where products lose whole "
            f"numbers: 1 x {first:,} is not {first:,}."
        ),
        effect=(
            f"From position {first:,} on tokens take the place of their neighbours, at {facets.seq_len:,} tokens "
            "in float32 as it seems. Measured on the device with the settings of this process, whatever they say."
        ),
        where=_where(encoding, product.node),
        evidence=Evidence(
            measured=first, expected=None, limit=first - 1, unit="first position lost", seq_len=facets.seq_len
        ),
        fix=Fix(
            "Multiply positions and frequencies one by one, positions[:, None] * inv_freq[None, :], in place of the "
            "matrix product; or torch.set_float32_matmul_precision('highest') and no override of products."
        ),
        scheme=encoding.scheme,
    )
