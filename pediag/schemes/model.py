"""What a comparison of schemes was asked for, and what it measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Setting:
    """One comparison: the decoder, the lengths (tokens), the training.

    ``seq_len`` is the length at which steps are timed; training happens at ``train_len``, and what was learned is tried
    at 1, 2 and 4 times that. ``steps`` is None where ``minutes`` decides.
    """

    d_model: int = 64
    heads: int = 4
    layers: int = 2
    seq_len: int = 256
    train_len: int = 32
    batch: int = 32
    schemes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    seeds: int = 3
    first_seed: int = 0
    steps: int | None = None
    minutes: float = 5.0
    device: str = "cpu"

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.d_model // self.heads


@dataclass(frozen=True, slots=True)
class Cost:
    """What one scheme costs at ``seq_len``: training steps in seconds, one a round; bytes.

    ``parameters`` and ``tables`` are the bytes that the scheme itself adds, trained or constant. ``peak`` is the most
    bytes of tensors that one step allocated beyond what lay there before it.
    """

    scheme: str
    seconds: tuple[float, ...]
    parameters: int
    tables: int
    peak: int


@dataclass(slots=True)
class Behaviour:
    """Share of right answers of one scheme on one task at one length, one value a seed.

    ``scheme`` may be a scaling that is applied after training, such as "rotary + yarn". ``reason`` says why there is no
    number. ``losses`` are the mean cross entropies in nats.
    """

    scheme: str
    task: str
    length: int
    accuracies: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reason: str = ""


@dataclass(slots=True)
class Comparison:
    """All that was measured; ``complete`` is False when it was stopped before its end.

    ``made`` names versions and the device. ``steps`` is how many training steps each model took.
    """

    setting: Setting
    made: dict[str, str]
    costs: list[Cost] = field(default_factory=list)
    behaviours: list[Behaviour] = field(default_factory=list)
    steps: int = 0
    chance: float = 0.0
    complete: bool = True
    notes: list[str] = field(default_factory=list)


def mean(values: list[float] | tuple[float, ...]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def deviation(values: list[float] | tuple[float, ...]) -> float | None:
    """The sample standard deviation (divisor n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def median(values: list[float] | tuple[float, ...]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
