"""What two probes show of a map on channels: whether pairs of them turn, by which angles, and how they pair."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from pediag.encodings.model import Floats

# Two channels turn together when their quotient before and after agrees between vectors to this, in float64.
_CONSISTENT = 1e-6
# An angle grows evenly when it leaves a line by less than this many radians: twice what bfloat16 cosines do.
_EVEN_HALF = 2e-2
# Coordinates that channels are shared out to in equal parts: rows and columns, and frames.
_AXES = (2, 3)
# Angles below this many radians are float64 noise of a factor that turns nothing.
_STILL = 1e-9


@dataclass(slots=True)
class Turn:
    """What two probes show: frequencies (r/2,) in radians per token, and how the channels pair.

    ``pairing`` is empty where the channels of several coordinates pair among themselves, each by halves.
    ``angles`` (N, r/2) grow along the sequence; ``sense`` is 1 where channel a turns towards its partner b, else -1.
    ``channels`` are those that turn of all that were probed, ``of`` in number.
    """

    frequencies: Floats
    pairing: str
    width: int
    amplitude: float
    offset: float
    even: bool
    angles: Floats
    sense: float = 1.0
    channels: tuple[int, ...] = ()
    of: int = 0


def turn(vectors: np.ndarray, rows: np.ndarray) -> Turn | None:
    """Read a rotation off vectors (k, d) and their images (k, N, d); None when pairs do not turn together."""
    if np.iscomplexobj(rows) and not np.iscomplexobj(vectors):
        rows = np.stack((rows.real, rows.imag), axis=-1).reshape(*rows.shape[:-1], -1)
    if np.iscomplexobj(vectors) or np.iscomplexobj(rows):
        if rows.shape[-1] != vectors.shape[-1]:
            return None
        return _read(rows / vectors[:, None, :], "interleaved", 2 * vectors.shape[-1])
    if rows.shape[-1] != vectors.shape[-1] or not np.isfinite(rows).all():
        return None
    moving = np.flatnonzero(np.ptp(rows, axis=1).max(axis=0) > 0)
    if moving.size < 2 or moving.size % 2:
        return None
    half = moving.size // 2
    pairings = {"half": (moving[:half], moving[half:]), "interleaved": (moving[::2], moving[1::2])}
    # The pairs may leave in another order than they came (DeepSeek): equal orders of q and k cancel in q.k.
    for (name, came), (_, went) in sorted(
        itertools.product(pairings.items(), pairings.items()), key=lambda pair: pair[0][0] != pair[1][0]
    ):
        before = vectors[:, came[0]] + 1j * vectors[:, came[1]]
        after = rows[..., went[0]] + 1j * rows[..., went[1]]
        read = _read(after / before[:, None, :], name, moving.size)
        if read is not None:
            return replace(read, channels=tuple(moving.tolist()), of=vectors.shape[-1])
    return _by_axes(vectors, rows, moving)


def _by_axes(vectors: np.ndarray, rows: np.ndarray, moving: np.ndarray) -> Turn | None:
    """The same where each axis of a page or a clip has channels of its own, paired by halves among themselves."""
    for axes in _AXES:
        if moving.size % (2 * axes):
            continue
        first, second = moving.reshape(axes, 2, -1).swapaxes(0, 1).reshape(2, -1)
        before = vectors[:, first] + 1j * vectors[:, second]
        after = rows[..., first] + 1j * rows[..., second]
        read = _read(after / before[:, None, :], "", moving.size)
        if read is not None:
            return replace(read, channels=tuple(moving.tolist()), of=vectors.shape[-1])
    return None


def _read(quotient: np.ndarray, pairing: str, width: int) -> Turn | None:
    """Angles from quotients (k, N, r/2): equal for all vectors, of one magnitude per pair, growing evenly."""
    if not np.isfinite(quotient).all():
        return None
    reference = quotient[0]
    if len(quotient) > 1 and np.abs(quotient[1:] - reference).max() > _CONSISTENT * max(
        1.0, np.abs(reference).max()
    ):
        return None
    if pairing == "half" and width == 2:
        pairing = "half or interleaved"
    magnitude = np.abs(reference)
    angles = np.unwrap(np.angle(reference), axis=0)
    if (
        magnitude.min() <= 0
        or np.ptp(magnitude, axis=0).max() > _EVEN_HALF * magnitude.max()
        or np.abs(angles).max() < _STILL
    ):
        return None
    positions = np.arange(len(angles), dtype=np.float64)
    slope = (angles[-1] - angles[0]) / positions[-1]
    line = angles[0] + positions[:, None] * slope
    leaves = float(np.abs(angles - line).max())
    fastest = slope[np.argmax(np.abs(slope))]
    offset = float(angles[0][np.argmax(np.abs(slope))] / fastest) if fastest else 0.0
    sense = 1.0 if fastest >= 0 else -1.0
    return Turn(
        frequencies=np.asarray(sense * slope, dtype=np.float64),
        pairing=pairing,
        width=width,
        amplitude=float(magnitude.mean()),
        offset=offset,
        even=leaves <= _EVEN_HALF,
        angles=np.asarray(sense * angles, dtype=np.float64),
        sense=sense,
    )
