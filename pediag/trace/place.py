"""Where a pass is, which sizes are lengths, and the ways in which it can stop."""

from __future__ import annotations

from dataclasses import dataclass, field

from pediag.trace.graph import Node


class DependsOnContent(Exception):
    """The model's own code asked for the number of an abstract value."""


class Unsupported(Exception):
    """The model uses an operation that has no abstract form."""


class Overrun(IndexError):
    """A table was asked for a row that it does not have; ``largest`` is the row farthest out."""

    def __init__(self, table: Node, largest: int) -> None:
        super().__init__(f"index {largest} is out of range for a table of {table.shape[0]} rows")
        self.table = table
        self.largest = largest


_LEAST_ALLOWED, _TIMES_ALLOWED = 20_000, 4


class Enough(BaseException):
    """All that a pass was run for was met; no fault, and nothing for the model's own code to catch."""


class Laborious(BaseException):
    """A pass runs far more operations than the structural one did: the model's code loops over its tokens."""


@dataclass(slots=True)
class Effort:
    """Operations of a pass: how many ran, and how many may; None for any number."""

    spent: int = 0
    allowed: int | None = None

    def several(self) -> Effort:
        """What a pass of another length may run: several times as much, since more is a loop over tokens in Python."""
        return Effort(allowed=max(_LEAST_ALLOWED, _TIMES_ALLOWED * self.spent))

    def spend(self) -> None:
        """Count one. Raises Laborious when it is one too many."""
        self.spent += 1
        if self.allowed is not None and self.spent > self.allowed:
            raise Laborious(
                f"the code runs operation after operation for each token: after {self.spent:,} of them, several times "
                "what a short input takes, the pass was given up"
            )


@dataclass(slots=True)
class Lengths:
    """The sizes that tell axes apart: sequence lengths in tokens, and the batch.

    ``exact`` are the lengths of the inputs; ``sequence`` also what is usually made of them (one more, twice). ``grids``
    are the rows and columns of maps whose places are one axis of attention.
    """

    sequence: set[int]
    batch: int
    exact: tuple[int, ...] = ()
    grids: frozenset[tuple[int, int]] = frozenset()

    @property
    def moving(self) -> set[int]:
        """Sizes whose axes may carry positions, rightly (sequence) or wrongly (batch)."""
        return self.sequence | {self.batch}

    def counts_tokens(self, size: int, keys: int = 0) -> bool:
        """Whether an axis of this size runs over tokens, perhaps folded with heads that share their keys.

        ``keys`` is the size of the axis of keys beside it: a prefix makes it longer than the input.
        """
        folded = (*self.exact, keys) if keys in self.sequence else self.exact
        return size in self.sequence or any(size % length == 0 for length in folded)


@dataclass(slots=True)
class Place:
    """Where the pass is now: module path, and whether it constructs the model or runs it.

    ``host`` says that a factory without a device is running, ``making`` that any factory is: numbers that come in
    outside one (``torch.from_numpy``) are on the host.
    """

    path: list[str] = field(default_factory=lambda: [""])
    raised: tuple[BaseException, str] | None = None
    constructing: bool = False
    host: bool = False
    making: bool = False

    @property
    def module(self) -> str:
        """Path of the innermost module that is running."""
        return self.path[-1]


def explain(error: BaseException) -> str:
    """The first line of an exception, with its type."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
