"""Ranks of one training run hold different positions, or count the same ones twice.

## What it does

With ``pediag.check(model, ranks=True)`` on every rank, or ``pediag.watch(..., ranks=True)``, it compares what the ranks
of torch.distributed hold of positions: the dtype, shape and bits of every tensor that positions are computed from,
and the schemes that were recognised. Where a :class:`pediag.Ranks` says that the ranks hold parts of one sequence, it
also looks for positions that two of them count.

## Why it matters

Gradients are averaged over ranks as if all computed the same function. A rank whose tables differ (other seed, other
config, a buffer that one engine has cast, a file that was read in part) teaches the shared weights another order;
nothing raises, and the loss looks only a little worse. A rank that starts its part of a sequence at 0 has every
distance to the other parts wrong.

## What is checked

- Tensors of the same name on two ranks and more: SHA-256 of their bits, dtype and shape. Above 64 MiB rows that lie
  evenly over the tensor.
- The title of the scheme at the same module on two ranks and more.
- Position ids, where one sequence is split: each rank's row as runs of even steps. No two ranks may hold the same id.
  Contiguous, zigzag and striped parts are all right, in any order of ranks, and so are gaps.

## Known limits

- Every rank has to take part, at the same steps. One that does not answer within the time limit ends the comparison
  with a line that says so.
- What is split over ranks (DTensor, FSDP, ZeRO) is a different part on each by design, and is not compared; nor is
  what only one rank holds (stages of a pipeline).
- DistributedDataParallel copies the buffers of rank 0 at each forward and parameters when it is made: it mends what
  is registered, and no plain attribute.
- Rows of position ids that do not rise all along (several texts packed, padding) are not judged. Texts that end exactly
  where the parts do look like a lost offset.
- That ranks hold one sequence is never guessed: data parallel ranks all start at 0, and are right.

## Fix

Build on every rank from the same seed and config and load the same file, or broadcast from rank 0 after that; for
parts of a sequence add the offset of the part.

## References

- PyTorch documentation, DistributedDataParallel: ``broadcast_buffers``, and what is copied when it is made.
- Brandon et al. 2023 (2311.09431): striped parts of a sequence; Liu et al. 2023 (2310.01889): contiguous ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.learning._tables import quoted, where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node
    from pediag.trace.ranks import Digest, RankState, Run

COUNTED_TWICE = "positions counted twice"
"""Unit of the finding on parts of a sequence."""


@rule(
    code="PE804",
    name="ranks-disagree",
    severity="error",
    basis="theorem",
    needs=("ranks",),
    references=("PyTorch documentation, DistributedDataParallel", "Brandon et al. 2023", "Liu et al. 2023"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each way in which ranks fall apart, and one for positions that two ranks count."""
    states = facets.ranks
    assert states is not None
    if len(states) < 2:
        raise NotApplicable("there is one rank only")
    failed = [state for state in states if state.error]
    if failed:
        raise CouldNotCheck(f"rank {failed[0].rank} failed before the comparison: {failed[0].error}")
    if not _shared(states):
        raise NotApplicable(
            "no two ranks hold a tensor or an encoding of the same name: nothing can be compared"
        )
    apart = _apart(states)
    yield from _tensors(facets, states, apart)
    yield from _schemes(facets, states, {name for names in apart.values() for name in names})
    if any(state.sequence for state in states):
        yield from _counted_twice(facets, states)


# -- tensors ------------------------------------------------------------------------------------------------


def _shared(states: list[RankState]) -> bool:
    """Whether there is anything that two ranks hold, or positions of one sequence that they count."""
    held = [name for state in states for name in (*state.tensors, *state.schemes)]
    return len(held) > len(set(held)) or any(state.sequence for state in states)


Apart = dict[tuple[str, tuple[tuple[int, ...], ...]], list[str]]
"""Names of tensors by what differs, and by which ranks hold the same."""


def _apart(states: list[RankState]) -> Apart:
    apart: Apart = {}
    for name in dict.fromkeys(name for state in states for name in state.tensors):
        held = {state.rank: state.tensors[name] for state in states if name in state.tensors}
        sides = _sides(held)
        if len(sides) > 1:
            what = held[sides[0][0]].differs_in(held[sides[1][0]])
            apart.setdefault((what, sides), []).append(name)
    return apart


def _tensors(facets: Facets, states: list[RankState], apart: Apart) -> Iterator[Finding]:
    from pediag.encodings.leaves import position_leaves

    owners = {name: pair for pair in position_leaves(facets.encodings) for name in pair[1].names}
    for (what, sides), names in apart.items():
        yield _differ(facets, states, what, sides, names, owners)


def _sides(held: dict[int, Digest]) -> tuple[tuple[int, ...], ...]:
    """Ranks that hold the same, together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, digest in held.items():
        groups.setdefault((digest.dtype, digest.shape, digest.bits), []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


def _differ(
    facets: Facets,
    states: list[RankState],
    what: str,
    sides: tuple[tuple[int, ...], ...],
    names: list[str],
    owners: dict[str, tuple[Encoding, Node]],
) -> Finding:
    known = next((owners[name] for name in names if name in owners), None)
    encoding, leaf = known if known is not None else (None, None)
    by_rank = {state.rank: state for state in states}
    told = "; ".join(
        f"{_ranks(side)}: {_shown(what, by_rank[side[0]].tensors[names[0]])}" for side in sides[:4]
    )
    verb = "differ" if len(names) > 1 else "differs"
    return Finding(
        message=f"{quoted(names)} {verb} between ranks in {what}: {told}.",
        effect=f"At {facets.seq_len:,} tokens the {len(sides)} groups of ranks compute different positions, and their "
        "gradients are averaged as if they did not: the shared weights learn a mixture.",
        where=where(encoding, leaf) if encoding is not None and leaf is not None else Where(names[0]),
        evidence=Evidence(len(sides), 1, None, "versions among the ranks", facets.seq_len),
        fix=Fix(_mend(what, names[0], sides)),
        scheme=encoding.scheme if encoding is not None else "",
    )


def _shown(what: str, digest: Digest) -> str:
    if what == "dtype":
        return digest.dtype
    return str(list(digest.shape)) if what == "shape" else f"norm {digest.size:.9g}, sha256 {digest.bits[:8]}"


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}{more}"


def _mend(what: str, name: str, sides: tuple[tuple[int, ...], ...]) -> str:
    odd = _ranks(min(sides[::-1], key=len))
    if what == "dtype":
        return f"Find what casts the model on {odd} (an engine, `.half()`) and keep `{name}` out of it."
    if what == "shape":
        return f"Build {odd} from the same config as the others."
    return (
        f"Build {odd} from the same seed, config and file as the others, or after building call "
        f"torch.distributed.broadcast on `{name}` with src=0 on every rank."
    )


def _schemes(facets: Facets, states: list[RankState], named: set[str]) -> Iterator[Finding]:
    """What was recognised at one place differs, though no stored tensor tells: numbers that forward computes."""
    from pediag.encodings.leaves import leaves_of

    for place in dict.fromkeys(place for state in states for place in state.schemes):
        titles: dict[str, list[int]] = {}
        for state in states:
            if place in state.schemes:
                titles.setdefault(state.schemes[place], []).append(state.rank)
        if len(titles) < 2:
            continue
        scheme, _, module = place.partition(" in ")
        told = "; ".join(f"{_ranks(tuple(ranks))}: {title}" for title, ranks in titles.items())
        path = module if module != "the model" else ""
        own = next((one for one in facets.encodings if one.scheme == scheme and path in one.modules), None)
        if own is not None and any(name in named for leaf in leaves_of(own) for name in leaf.names):
            continue
        yield Finding(
            message=f"Ranks compute different positions in {module}: {told}.",
            effect=f"At {facets.seq_len:,} tokens their gradients are averaged as if the positions were the same.",
            where=Where(
                path,
                own.id if own else "",
                own.source_file if own else None,
                own.source_line if own else None,
            ),
            evidence=Evidence(len(titles), 1, None, "versions among the ranks", facets.seq_len),
            fix=Fix("Build every rank from the same config."),
            scheme=scheme,
        )


# -- parts of a sequence ------------------------------------------------------------------------------------


def _counted_twice(facets: Facets, states: list[RankState]) -> Iterator[Finding]:
    given = [state for state in states if state.rows is not None]
    if len(given) < 2:
        raise CouldNotCheck(
            "the ranks hold parts of one sequence, but no position ids are known: pediag.Ranks(position_ids=ids)"
        )
    common = shared_ids(states)
    if common is None:
        return
    one, other, first, count = common
    starts = {
        state.rank: min(run.first for row in state.rows or () for run in row or ()) for state in (one, other)
    }
    yield Finding(
        message=f"Ranks {one.rank} and {other.rank} hold parts of one sequence and both count the positions from "
        f"{first:,} on ({count:,} of them): their ids start at {starts[one.rank]:,} and {starts[other.rank]:,}.",
        effect=f"Tokens of the two parts have the same positions: those of rank {other.rank} meet the keys "
        "of the other part at distances that are off by a whole part, and which of two came first is lost.",
        where=Where(),
        evidence=Evidence(count, 0, None, COUNTED_TWICE, facets.seq_len),
        fix=Fix(
            f"Add the offset of its part to the position ids of rank {other.rank}: the number of tokens before "
            "it in the whole sequence."
        ),
    )


def shared_ids(states: list[RankState]) -> tuple[RankState, RankState, int, int] | None:
    """Two ranks of which every row counts the same positions twice: they, the first one and how many; None without."""
    held = [(state, _ids(state)) for state in states if state.rows is not None]
    for index, (one, mine) in enumerate(held):
        for other, theirs in held[index + 1 :]:
            if other.rank not in one.sequence or mine is None or theirs is None:
                continue
            if common := mine & theirs:
                return one, other, min(common), len(common)
    return None


def _ids(state: RankState) -> set[int] | None:
    """The positions of a rank; None where a row is packed or padded."""
    found: set[int] = set()
    for row in state.rows or ():
        if row is None:
            return None
        for run in row:
            found |= _of_run(run)
    return found


def _of_run(run: Run) -> set[int]:
    return set(range(run.first, run.last + 1, run.step))
