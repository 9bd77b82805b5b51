"""What an attribution and a map of attention come to: plain numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

LARGE_DELTA = 0.05
"""Completeness delta, as a share of f(x) - f(baseline), above which nothing is concluded: a convention. Gradients that
integrate to 95 % of the change still order sides and layers rightly; shares are then off by 5 points at most."""

SMALL_DELTA = 0.01
"""Completeness delta at which no more steps are taken."""

UNUSED = 1e-6
"""Share of the change of the output below which positions count as unused: float32 rounds at 6e-8 an operation."""

SINK = 0.3
"""Mean attention on one key above which a head has a sink there: eps of Gu et al. 2024, arXiv 2410.10781."""

SINK_TOKENS = 64
"""Tokens at which Gu et al. measure; among fewer keys an even head passes eps by itself."""


@dataclass(slots=True)
class LayerShare:
    """The positions that enter at one module.

    ``share`` is their part of all attribution, by absolute values; ``total`` the signed sum, and ``by_token`` its parts
    at each token. ``ablation`` is how far
    the attributed number falls when the positions of this module alone are taken away.
    """

    encoding: str
    scheme: str
    module: str
    share: float
    total: float
    ablation: float
    path: str
    by_token: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Ablations:
    """How far the attributed number falls, f(x) - f(changed): a negative number says that it rises.

    ``removed``: all positions at their reference, the tokens kept. ``permuted``: positions shuffled among the tokens,
    the root mean square over some shuffles. ``tokens``: the tokens at their reference, the positions kept.
    """

    removed: float
    permuted: float
    tokens: float

    @property
    def share(self) -> float | None:
        """Share of position when each side alone is taken away; None where neither changes anything."""
        total = abs(self.removed) + abs(self.tokens)
        return abs(self.removed) / total if total else None


@dataclass(slots=True)
class Side:
    """Positions or tokens, moved from their reference to what they are while the other side stays as it is.

    ``by_token`` has one signed number for each of N tokens. ``reference`` is the attributed number at the reference,
    ``delta`` the sum of all attributions less value - reference, and ``relative`` that as a share of value - reference.
    """

    by_token: list[float]
    reference: float
    delta: float
    relative: float
    steps: int

    @property
    def size(self) -> float:
        """The sum of the absolute values."""
        return sum(map(abs, self.by_token))


@dataclass(slots=True)
class TextAttribution:
    """One input, attributed: ``attributed`` says of which number, ``value`` is that number.

    ``position`` is None where no position was seen to enter; ``missed`` names modules in which the real pass was not
    seen to use the positions that it should. ``agreement`` is the rank correlation of attribution and ablation over
    ``agreement_over``, modules or tokens; None where those are too few. ``references`` say what was compared with what.
    """

    tokens: list[str]
    attributed: str
    value: float
    position: Side | None
    token: Side
    layers: list[LayerShare]
    ablations: Ablations
    agreement: float | None = None
    agreement_over: str = ""
    missed: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    @property
    def relative(self) -> float:
        """The larger of the completeness deltas of both sides; positions that change nothing have none."""
        if self.position is None or self.unused:
            return self.token.relative
        return max(self.token.relative, self.position.relative)

    @property
    def complete(self) -> bool:
        """Whether both deltas are small enough to conclude from."""
        return self.relative <= LARGE_DELTA

    @property
    def share(self) -> float | None:
        """Share of position in all attribution; None where a delta is large, or where nothing is attributed."""
        return self.raw_share if self.complete else None

    @property
    def raw_share(self) -> float | None:
        """The same, whatever the deltas: the sizes of the layers against those and that of the tokens."""
        given = sum(layer.share for layer in self.layers)
        return given if self.position is not None and (given or self.token.size) else None

    @property
    def unused(self) -> bool:
        """Whether neither gradients nor ablations find that the output depends on positions."""
        if self.position is None or self.missed:
            return False
        change = max(abs(self.ablations.tokens), UNUSED * abs(self.value), 1e-30)
        moved = (self.ablations.removed, self.ablations.permuted, *self.position.by_token)
        return max(map(abs, moved)) <= UNUSED * change


@dataclass(slots=True)
class HeadMap:
    """What one head looks at, on the mean over its queries.

    ``first`` is the mean weight on the first token, over all queries; ``separators`` that on separator tokens, None
    without any. ``distance`` is the mean distance |i - j| in tokens, ``even`` the same of an even head. ``entropy`` is
    in nats, as a share of that of an even head. ``profile`` is the weight by distance, in the bins of the map;
    ``even_profile`` is what an even head would have there.
    """

    layer: str
    head: int
    first: float
    separators: float | None
    distance: float
    even: float
    entropy: float
    profile: list[float]
    even_profile: list[float]

    @property
    def sink(self) -> bool:
        """Whether the first token gets more than ``SINK`` (Gu et al. 2024)."""
        return self.first > SINK

    @property
    def looks_at_distance(self) -> float:
        """Half the sum of the differences between the profile and an even head's, 0 (not at all) to 1."""
        return sum(abs(a - b) for a, b in zip(self.profile, self.even_profile, strict=True)) / 2


@dataclass(slots=True)
class AttentionMap:
    """The heads of one input of ``tokens`` tokens. ``bins`` are distances in tokens, first and last of each bin.

    ``recomputed`` says that weights were computed again from queries and keys, since a fused kernel keeps none.
    ``hidden`` says why heads are lacking, and what to set.
    """

    tokens: list[str]
    heads: list[HeadMap]
    bins: list[tuple[int, int]]
    separators: list[int]
    recomputed: bool = False
    causal: bool = False
    hidden: str = ""

    @property
    def sink_rate(self) -> float | None:
        """Share of heads with a sink at the first token; None where there are too few tokens or no heads."""
        if len(self.tokens) < SINK_TOKENS or not self.heads:
            return None
        return sum(head.sink for head in self.heads) / len(self.heads)
