"""The rotation pairs other channels than the reference does, or than models of this type do.

## What it does

Compares which channels turn together, (i, i + r/2) or (2i, 2i + 1), with those of ``--reference TARGET``. Without a
reference it compares with what is published of the model type, where the config was written by transformers and the
weights have the names of its checkpoints.

## Why it matters

Both pairings are rotations: norms are kept, scores depend on the distance alone, shapes agree. Only the weights know
which one they were trained with. With the other one every score is of channels that never met: perplexity goes from 4
to 250, or text turns to gibberish after a few words.

## What is checked

The slice of the program between "q before" and "q at the attention" is replayed on random vectors; the two channels
that turn by one angle are a pair. Channels that are put in another order before the turn are followed back to where
the projection left them, since that is where the weights meet them. A pairing swapped on both q and k leaves
``R(m)' R(n)`` a function of n - m, so that no equation tells right from wrong: a convention or a reference must.

Where both models have their numbers and B's q and k rows are A's in the order of the other pairing (row i at 2i, row
i + r/2 at 2i + 1 within each head), the scores are equal and nothing is said.

With a reference, what else differs is an error of the rule that it belongs to, if that rule has not found it by itself:

| differs | rule |
|---|---|
| base, frequencies | PE202 |
| scaling | PE203 |
| attention factor, scale of the softmax | PE204 |
| a sinusoid | PE205 |
| the row of a learned table that position 0 reads | PE208 |
| values of a learned table | PE211 |
| an encoding that one side lacks | PE308 |
| sense, offset | PE402 |
| slopes, form of ALiBi | PE404 |
| map of buckets | PE406 |
| rotary width, the channels that turn | PE407 |
| rows of a learned table | PE502 |
| anything else, such as a mask | this one |

What rounding explains is no difference: ``pediag diff`` and docs/diff.md say the limits.

## Known limits

- Files and configs do not tell a pairing; the reference has to be one that runs.
- The published pairing is of checkpoints in the layout of transformers. Meta's own Llama and Mistral files are made for
  neighbours and are permuted when they are converted: a model whose weights have other names is not judged by its type.
- A model that permutes weights of these names when it loads them is right and is accused here, unless the reference and
  the model are given with their weights.
- Types that are not in the table are not judged without a reference; a second rotation of one layer (an indexer) with a
  pairing of its own needs a reference, too.
- Of q and k that pair unlike each other the reference tells which is wrong; without one that is PE401's and PE402's.

## Fix

Pair the channels as the weights were trained, or permute the rows of q and k once when loading; k with the number of
its own heads, which under grouped queries are fewer.

## References

- jzhang38/TinyLlama 24; ggml-org/llama.cpp 3018, 13260, 13261; ikawrakow/ik_llama.cpp 2290.
- vllm-project/vllm 42765; vllm-project/vllm-ascend 4641; mattn/tensai 57.
- Not faults: huggingface/transformers 25199; Dao-AILab/flash-attention 288 (weights permuted to match).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pediag.rules import differences
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.geometry import _pairings
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Rotary
    from pediag.encodings.comparing.model import Comparison

EITHER = "half or interleaved"
"""How two channels pair, which is one way only."""


@rule(
    code="PE403",
    name="pairing-unlike-reference",
    severity="error",
    basis="convention",
    needs=("trace",),
    references=("llama.cpp issues 3018, 13260, 13261", "ik_llama.cpp issue 2290", "vllm pull request 42765"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotation whose pairing is another."""
    from pediag.encodings import Rotary

    rotations = [one for one in facets.encodings if isinstance(one, Rotary) and one.pairing]
    if not rotations:
        raise NotApplicable("the model has no rotary encoding")
    pairs = [one for one in differences.compared(facets) if one.scheme == "rotary" and one.a and one.b]
    told = [(one, aspect) for one in pairs for aspect in one.aspects if aspect.name == "pairing"]
    if any(aspect.verdict != "unknown" for _, aspect in told):
        yield from (_unlike(facets, one) for one, aspect in told if aspect.verdict == "differs")
    else:
        yield from _unlike_type(facets, rotations)


def _unlike_type(facets: Facets, rotations: list[Rotary]) -> Iterator[Finding]:
    trace = facets.structural
    known = (
        _pairings.published(facets.config.values, trace)
        if facets.config is not None and trace is not None
        else None
    )
    if known is None:
        if facets.reference is not None:
            raise CouldNotCheck(
                "the reference does not tell its pairing: give --reference TARGET, a model that runs"
            )
        raise NotApplicable(
            "nothing says which pairing the weights were trained with: give --reference TARGET, a model that is right"
        )
    kind, expected = known
    if len({one.pairing for one in rotations}) > 1:
        raise NotApplicable("rotations pair unlike each other: compare with --reference TARGET")
    for one in rotations:
        if one.pairing not in (expected, EITHER):
            where = Where(one.modules[0] if one.modules else "", one.id, one.source_file, one.source_line)
            of = f"where {kind} checkpoints in the layout of transformers are made for"
            yield _finding(facets, one.pairing, expected, (one.width, one.head_width), where, of, _used(one))


def _unlike(facets: Facets, one: Comparison) -> Finding:
    a = one.a
    assert a is not None
    where = Where(a.module, a.id, a.file, a.line)
    aspect = next(aspect for aspect in one.differing if aspect.name == "pairing")
    sizes = a.parameters["rotary_width"], a.parameters["head_width"]
    of = f"where {differences.reference_of(facets)} turns"
    used = one.where or "q and k"
    return _finding(facets, str(aspect.a), str(aspect.b), sizes, where, of, used, aspect.note)


def _used(one: Rotary) -> str:
    return ", ".join(part for part in (one.layers, " and ".join(one.applied_to)) if part)


def _finding(
    facets: Facets,
    measured: str,
    expected: str,
    sizes: tuple[int, int],
    where: Where,
    of: str,
    used: str,
    note: str = "",
) -> Finding:
    width, head = sizes
    told = f"; {note}" if note else ""
    place = f" at {Path(where.file).name}:{where.line}" if where.file and where.line else ""
    return Finding(
        message=(
            f"The rotation {where.encoding} ({used}) turns {_pairs(measured, width)}, {of} "
            f"{_pairs(expected, width)}{told}."
        ),
        effect=(
            f"At {facets.seq_len:,} tokens each of {width} channels is turned with another than in training: scores "
            "are wrong from distance 1 on, while norms, shapes and the dependence on distance look right."
        ),
        where=where,
        evidence=Evidence(measured, expected, None, "", facets.seq_len),
        fix=Fix(
            f"Turn {_pairs(expected, width)}{place}, or permute q and k once on loading: "
            + f"{_permutation(measured, width, head)}."
        ),
        scheme="rotary",
    )


def _pairs(pairing: str, width: int) -> str:
    return f"halves (i, i + {width // 2})" if pairing == "half" else "neighbours (2i, 2i + 1)"


def _permutation(measured: str, width: int, head: int) -> str:
    """How rows made for the other pairing are brought into the order of the one that the code has."""
    split = f"2, {width // 2}" if measured == "interleaved" else f"{width // 2}, 2"
    rows = "" if width == head else f" of the {width} rows of each head that turn"
    return (
        f"w.view(heads, {split}, -1).transpose(1, 2).reshape(w.shape){rows}, heads being those of q or of k"
    )
