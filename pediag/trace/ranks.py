"""What each rank of a distributed run holds of positions, and the exchange of it.

All ranks take part in an exchange, in the same order among their collectives. It goes through a gloo group of its own
with a time limit, so a rank that has failed stops nobody for longer than that.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pediag.errors import PediagError, UsageError

LIMIT_S = 60.0
"""Seconds that a rank waits for the others."""

WHOLE = 1 << 26
"""Bytes of a tensor up to which all of them are digested; of a longer one rows that lie evenly over it."""

MOST_RUNS = 64
"""Runs of even steps in a row of position ids; a row with more is packed or padded."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A tensor in short: equal exactly when dtype, shape and bits are. ``size`` is its Euclidean norm."""

    dtype: str
    shape: tuple[int, ...]
    bits: str
    size: float

    def differs_in(self, other: Digest) -> str:
        """The first of dtype, shape and values that is another; empty where none is."""
        if self.dtype != other.dtype:
            return "dtype"
        return "shape" if self.shape != other.shape else "values" if self.bits != other.bits else ""


@dataclass(frozen=True, slots=True)
class Run:
    """Position ids ``first``, ``first + step``, ... up to ``last``, both with; ``count`` of them."""

    first: int
    last: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank holds: digests of the tensors that positions are computed from, and the position ids it was given.

    ``schemes`` are the titles of encodings by scheme and module. ``rows`` has the runs of each row of ids, None where
    a row is irregular; it is None where no ids were given or the ranks hold no parts of one sequence. ``left_out``
    names tensors that are split over ranks, ``sequence`` the ranks that hold parts of its sequences. ``error`` says why
    there is nothing else. ``step`` is that of a running training.
    """

    rank: int
    tensors: dict[str, Digest] = field(default_factory=dict)
    schemes: dict[str, str] = field(default_factory=dict)
    rows: tuple[tuple[Run, ...] | None, ...] | None = None
    left_out: tuple[str, ...] = ()
    sequence: tuple[int, ...] = ()
    error: str = ""
    step: int = 0


class Gathers(Protocol):
    """Gives what every rank holds for what this one holds."""

    position_ids: Any
    sequence: tuple[int, ...]

    def gather(self, mine: RankState) -> list[RankState]:
        """The states of all ranks, in their order."""


def digest(tensor: torch.Tensor) -> Digest:
    """The digest of a tensor on any device, of any dtype."""
    plain = tensor.detach()
    rows = plain.shape[0] if plain.dim() else 1
    if plain.numel() * plain.element_size() > WHOLE and rows > 1:
        kept = max(1, WHOLE // max(1, plain.element_size() * plain.numel() // rows))
        plain = plain[:: math.ceil(rows / kept)]
    plain = plain.cpu().contiguous().reshape(-1)
    bits = hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest() if plain.numel() else ""
    wide = torch.complex128 if plain.is_complex() else torch.float64
    size = float(torch.linalg.vector_norm(plain.to(wide))) if plain.numel() else 0.0
    return Digest(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bits, size)


def split(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one rank's part of a larger one."""
    placements = getattr(tensor, "placements", None)
    if placements is not None:
        return any(not placement.is_replicate() for placement in placements)
    return hasattr(tensor, "ds_id") or hasattr(tensor, "_handle")


def state(
    rank: int, tensors: Mapping[str, torch.Tensor], ids: Any = None, sequence: Sequence[int] = ()
) -> RankState:
    """What rank number ``rank`` sends; ``ids`` are position ids, (N,) or (B, N), of a part of a sequence."""
    whole = {name: _local(tensor) for name, tensor in tensors.items() if not split(tensor)}
    digests = {name: digest(tensor) for name, tensor in whole.items() if not tensor.is_meta}
    left_out = tuple(name for name in tensors if name not in digests)
    rows = runs_of(ids) if ids is not None and sequence else None
    return RankState(rank, digests, {}, rows, left_out, tuple(sequence))


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def runs_of(ids: torch.Tensor | Sequence[Any]) -> tuple[tuple[Run, ...] | None, ...]:
    """The runs of each row of position ids, (N,) or (B, N); ids of several axes (3, B, N) count by their first.

    Raises UsageError for what are no whole numbers.
    """
    found = torch.as_tensor(ids).detach()
    if found.is_floating_point() or found.is_complex() or found.dim() == 0:
        raise UsageError(
            f"position_ids must be whole numbers, (N,) or (B, N); got {found.dtype} {list(found.shape)}"
        )
    while found.dim() > 2:
        found = found[0]
    rows = torch.unique(found.cpu().reshape(-1, found.shape[-1]), dim=0)
    return tuple(_runs(row.tolist()) for row in rows[:MOST_RUNS])


def _runs(row: list[int]) -> tuple[Run, ...] | None:
    """The runs of one row; None where ids do not rise all along."""
    if any(b <= a for a, b in itertools.pairwise(row)):
        return None
    runs: list[Run] = []
    start = 0
    while start < len(row):
        end = start
        step = row[start + 1] - row[start] if start + 1 < len(row) else 1
        while end + 1 < len(row) and row[end + 1] - row[end] == step:
            end += 1
        runs.append(Run(row[start], row[end], step, end - start + 1))
        if len(runs) > MOST_RUNS:
            return None
        start = end + 1
    return tuple(runs)


def require_ranks() -> None:
    """Raise UsageError where there are no ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("ranks: torch.distributed is not initialised; call init_process_group() before")


def refuse_ranks(ranks: object) -> None:
    """Raise UsageError for what neither says whether ranks are compared nor is an exchange among them."""
    if not (ranks is None or isinstance(ranks, bool) or hasattr(ranks, "gather")):
        raise UsageError(f"ranks must be True, False or a pediag.Ranks; got {ranks!r}")


class Ranks:
    """The exchange among all ranks of the default process group.

    ``position_ids``, (N,) or (B, N), are those that this rank feeds; ``one_sequence`` says that the ranks hold parts of
    the same sequences (sequence or context parallelism), so that no two may hold the same position: True for all
    ranks, or the numbers of those that share one with this rank. ``limit_s`` is how long, in seconds, a rank waits for
    the others.

    Every rank has to make it, for it makes a group. Raises UsageError where torch.distributed is not initialised,
    PediagError where a rank does not take part in time.
    """

    def __init__(
        self,
        position_ids: Any = None,
        *,
        one_sequence: bool | Sequence[int] = False,
        limit_s: float = LIMIT_S,
    ) -> None:
        require_ranks()
        if not limit_s > 0:
            raise UsageError(f"limit_s must be more than 0 seconds; got {limit_s!r}")
        self.position_ids = position_ids
        self.limit_s = limit_s
        self.rank: int = dist.get_rank()
        self.world: int = dist.get_world_size()
        every = range(self.world) if one_sequence is True else one_sequence or ()
        self.sequence = tuple(sorted(every))
        try:
            self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise self._unanswered(error) from error

    def gather(self, mine: RankState) -> list[RankState]:
        """The states of all ranks. Raises PediagError where a rank does not answer in time."""
        states: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(states, mine, group=self._group)
        except RuntimeError as error:
            raise self._unanswered(error) from error
        return list(states)

    def _unanswered(self, error: BaseException) -> PediagError:
        return PediagError(
            f"ranks: not every rank answered within {self.limit_s:g} s ({_first_line(error)}); all ranks have to take "
            "part, at the same steps"
        )

    def close(self) -> None:
        """Give the group back."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _first_line(error: BaseException) -> str:
    """The first line of an error, without the place in its own source that gloo puts before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", lines[0])[:200]


def tell(ranks: Gathers, error: BaseException) -> None:
    """Tell the other ranks that this one failed before its exchange, so that they do not wait."""
    told = f"{type(error).__name__}: {_first_line(error)}"
    with suppress(PediagError):
        ranks.gather(RankState(getattr(ranks, "rank", 0), error=told))
