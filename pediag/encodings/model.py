"""A recognised scheme: the numbers recovered from it, the sites that use it, the tensors that feed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pediag.trace import Node, Site

Floats = NDArray[np.float64]
Origin = Literal["trace", "tensors", "config"]


@dataclass(slots=True, kw_only=True)
class Encoding:
    """One scheme as it is used by equal layers.

    ``modules`` are the paths of the modules where it enters, ``sites`` the joins themselves. ``node`` is the
    position-side value that enters at the first. ``leaves`` names the parameters and buffers it reads.

    ``origin`` says what it was read off: the running model, tensors stored in a file, or the declaration alone; only
    the first has sites. Where ``doubt`` is not empty it says why a tensor may be something else.
    """

    scheme: ClassVar[str] = "unrecognised"

    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    layers: str = ""
    source_file: str | None = None
    source_line: int | None = None
    title: str = ""
    sites: list[Site] = field(default_factory=list)
    node: Node | None = None
    leaves: list[str] = field(default_factory=list)
    origin: Origin = "trace"
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a config says of the attentions that a rotation serves.

    ``window`` is the span in tokens that each token sees, None when it sees all; ``causal`` that only the past is
    seen; either is said only where the declaration leaves no other reading.
    """

    window: int | None = None
    causal: bool = False


@dataclass(slots=True, kw_only=True)
class Rotary(Encoding):
    """Rotation of q and k. Frequencies in radians per token, shape (r/2,), as the model computes them.

    ``phase`` is the recorded value whose cosine and sine are taken, when the program shows it; ``factor`` the
    recorded frequencies that the positions are multiplied with. Where ``even`` is False the angles are no multiples
    of the place in the sequence, and the frequencies mere averages. ``pairing`` is empty and ``head_width`` 0 where
    nothing that was read tells them. ``channels`` are those of a whole head that turn, where they were seen. ``seen``
    is what the config says of its attentions, for one that was not traced.
    """

    scheme: ClassVar[str] = "rotary"

    frequencies: Floats
    width: int
    head_width: int
    pairing: str
    attention_factor: float = 1.0
    even: bool = True
    applied_to: tuple[str, ...] = ()
    causal: bool | None = None
    offset: float = 0.0
    phase: Node | None = None
    factor: Node | None = None
    table: Table | None = None
    precision: float = 0.0
    seen: Seen | None = None
    channels: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Table:
    """A stored table that positions index: its leaf, its rows, and the first row that position 0 reads."""

    leaf: Node
    rows: int
    first: int = 0
    by: str = "slice"


@dataclass(slots=True, kw_only=True)
class Sinusoidal(Encoding):
    """Sines and cosines of the position, added to content. Frequencies in radians per token."""

    scheme: ClassVar[str] = "sinusoidal"

    frequencies: Floats
    width: int
    layout: str
    amplitude: float = 1.0
    table: Table | None = None
    phase: Node | None = None
    factor: Node | None = None


@dataclass(slots=True, kw_only=True)
class Learned(Encoding):
    """A trained table, one row a position, added to content. ``table`` is None where a config only declares it."""

    scheme: ClassVar[str] = "learned"

    table: Table | None
    width: int


@dataclass(slots=True, kw_only=True)
class Alibi(Encoding):
    """A bias that falls linearly with distance. ``slopes`` has one entry a head, in logits per token.

    ``form`` is "distance" (-s|i-j|), "key" (s*j up to a row constant), "past" (zero for future keys) or "sides"
    (slopes of their own for future keys, in the parameter ``ahead``).
    """

    scheme: ClassVar[str] = "alibi"

    slopes: Floats
    form: str


@dataclass(slots=True, kw_only=True)
class Bucketed(Encoding):
    """A learned bias looked up by a bucket of the distance; ``buckets`` maps key minus query to bucket.

    ``table`` is None where a config only declares it.
    """

    scheme: ClassVar[str] = "t5-buckets"

    buckets: dict[int, int]
    table: Table | None


@dataclass(slots=True, kw_only=True)
class Clipped(Encoding):
    """A learned row looked up by the clipped distance (Shaw et al. 2018); ``clip`` in tokens."""

    scheme: ClassVar[str] = "clipped"

    clip: int
    table: Table
    sides: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class RelativeTable(Encoding):
    """A learned value looked up by query and key position, by a map that is none of the published ones."""

    scheme: ClassVar[str] = "relative-table"

    buckets: dict[int, int]
    table: Table


@dataclass(slots=True, kw_only=True)
class ContentRelative(Encoding):
    """A row for each distance, multiplied with the query or the key and added to their score.

    Transformer-XL, XLNet and conformers take rows of sinusoids, Music Transformer and DeBERTa trained ones. ``side``
    says which of the two is multiplied; ``buckets`` maps key minus query to the row, and is empty where the distance
    alone does not tell the row. ``rows`` are the rows by query and key, (N, M), -1 where hidden; ``strayed`` marks the
    entries that were computed for a neighbour of their query (or key).
    """

    scheme: ClassVar[str] = "content-relative"

    buckets: dict[int, int]
    rows: NDArray[np.int64]
    strayed: NDArray[np.bool_]
    side: str


@dataclass(slots=True, kw_only=True)
class Decay(Encoding):
    """A factor that falls exponentially with distance, in attention without softmax: exp(-rate (m - n)).

    ``rates`` has one entry a head, per token. ``form`` is "distance" (on the product of query and key, as in RetNet) or
    "token" (one factor for each token on queries and keys, as blocks of lightning attention hand on their sums).
    """

    scheme: ClassVar[str] = "decay"

    rates: Floats
    form: str


@dataclass(slots=True, kw_only=True)
class Mask(Encoding):
    """Which keys a query may see. Not an encoding, though a causal one tells order."""

    scheme: ClassVar[str] = "mask"

    causal: bool
    window: int | None = None


@dataclass(slots=True, kw_only=True)
class Temperature(Encoding):
    """One factor for each token, (N,) at the structural length, by which its queries (or keys) are multiplied.

    (N, H) where each head of the queries has its own; empty, (0, 0), where these are trained and not at hand. Not an
    encoding: it sharpens attention for far tokens and does not tell one key from another.
    """

    scheme: ClassVar[str] = "temperature"

    factors: Floats


@dataclass(slots=True, kw_only=True)
class PositionIds(Encoding):
    """A stored buffer of position ids 0 .. n-1. Not an encoding, but its length is a limit."""

    scheme: ClassVar[str] = "position-ids"

    table: Table


@dataclass(slots=True, kw_only=True)
class Fourier(Encoding):
    """Sines and cosines of coordinates that a stored matrix mixes, random or trained (Tancik et al. 2020)."""

    scheme: ClassVar[str] = "fourier"

    coordinates: int
    width: int


@dataclass(slots=True, kw_only=True)
class Points(Encoding):
    """Where each place is, in ``numbers`` numbers, added to as many that content predicts: anchors of boxes, the points
    that deformable attention looks around.
    """

    scheme: ClassVar[str] = "points"

    numbers: int


@dataclass(slots=True, kw_only=True)
class Unrecognised(Encoding):
    """A position signal that is none of the known schemes, with the kind of its site."""

    scheme: ClassVar[str] = "unrecognised"

    kind: str = ""


def encodes_position(encodings: Sequence[Encoding]) -> list[Encoding]:
    """Those that are position encodings; masks, temperatures and buffers of ids are none."""
    return [encoding for encoding in encodings if not isinstance(encoding, (Mask, PositionIds, Temperature))]
