"""Numbers of one machine in a small file, and what became of them on another.

A file holds digests and some position values, what made them, and nothing of weights, paths, hosts or users. It is read
with mistrust: whatever is not as written here is refused in one line.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pediag.drifting.model import Compared, EncodingDrift, LaneDrift, Made, Samples, Unit
from pediag.errors import LoadError, UsageError

KIND = "pediag-drift-fingerprint"
VERSION = 1
LARGEST = 4_000_000
"""Bytes of a file that is read at most; those that are written stay below a twentieth of it."""

MOST = 4096
"""Entries of a list that is read at most."""

LONGEST = 400
"""Letters of a text that is read at most."""

UNITS: dict[str, Unit] = {"rad": "rad", "logits": "logits", "share": "share"}
HOST = ("as written", "as stored")
"""Lanes of the host, with which a device is compared where the other machine has none of its kind."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a file says: ``made`` by what, at ``seq_len`` tokens, with the numbers of each encoding and lane."""

    made: Made
    seq_len: int
    encodings: tuple[EncodingDrift, ...]


# -- writing ------------------------------------------------------------------------------------------------


def as_json(made: Made, seq_len: int, encodings: Sequence[EncodingDrift]) -> dict[str, Any]:
    """A fingerprint as JSON values."""
    return {
        "kind": KIND,
        "version": VERSION,
        "made": asdict(made),
        "seq_len": seq_len,
        "encodings": [_encoding(one) for one in encodings if one.measured],
    }


def dump(value: Mapping[str, Any]) -> str:
    """The text of a file, on one line, without NaN or infinity."""
    return json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":")) + "\n"


def _encoding(one: EncodingDrift) -> dict[str, Any]:
    lanes = {lane.lane: _lane(lane) for lane in one.measured}
    return {"id": one.id, "scheme": one.scheme, "unit": one.unit, "axis": one.axis, "lanes": lanes}


def _lane(lane: LaneDrift) -> dict[str, Any]:
    if lane.same_as:
        return {"same_as": lane.same_as}
    held = lane.samples
    return {
        "at": list(held.at),
        "digests": list(held.digests),
        "positions": list(held.positions),
        "values": [[_number(item) for item in row] for row in held.values],
        "limits": [_number(item) for item in held.limits],
        "whole": held.whole,
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def refuse(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise UsageError when ``path`` can not become a fingerprint: what is there would be lost.

    With ``force`` another fingerprint is written over, and nothing else.
    """
    where = Path(path)
    if not where.absolute().parent.is_dir():
        raise UsageError(
            f"--save {where}: the folder {where.absolute().parent} does not exist; create it first"
        )
    if not os.path.lexists(where):
        return
    try:
        read(where)
    except LoadError:
        raise UsageError(f"--save {where}: is there and is no fingerprint; name another file") from None
    if not force:
        raise UsageError(f"--save {where}: is there already; give --force to write over it, or another name")


def write(path: str | os.PathLike[str], value: Mapping[str, Any], *, force: bool = False) -> None:
    """Write a fingerprint to ``path``, complete or not at all. Raises UsageError when it can not be written."""
    refuse(path, force=force)
    where = Path(path).resolve()
    partial = where.with_name(f".{where.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(dump(value), encoding="utf-8")
        partial.replace(where)
    except OSError as error:
        raise UsageError(f"--save {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


# -- reading ------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Fingerprint:
    """The fingerprint in a file. Raises LoadError with one line for anything else."""
    where = os.fspath(path)
    try:
        return _fingerprint(_parsed(Path(path)))
    except _Wrong as wrong:
        raise LoadError(f"{where}: is no fingerprint that `pediag drift --save` wrote: {wrong}") from None


class _Wrong(Exception):
    """What is not as it is written."""


def _parsed(path: Path) -> Any:
    try:
        if not path.is_file():
            raise _Wrong("no such file" if not path.exists() else "not a plain file")
        if path.stat().st_size > LARGEST:
            raise _Wrong(f"it has more than {LARGEST:,} bytes")
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, parse_constant=_refuse)
    except OSError as error:
        raise _Wrong(error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        raise _Wrong("it is not JSON") from None


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _fingerprint(value: Any) -> Fingerprint:
    top = _object(value, "it")
    if top.get("kind") != KIND:
        raise _Wrong(f"its kind is not {KIND}")
    if top.get("version") != VERSION:
        raise _Wrong(f"its version is {str(top.get('version'))[:20]!r}, and this pediag reads {VERSION}")
    encodings = tuple(_read_encoding(item) for item in _list(top.get("encodings"), "encodings"))
    return Fingerprint(
        _made(_object(top.get("made"), "made")), _whole(top.get("seq_len"), "seq_len"), encodings
    )


def _made(value: Mapping[str, Any]) -> Made:
    said = {item.name: _text(value.get(item.name), item.name) for item in fields(Made) if item.name != "tf32"}
    return Made(tf32=_flag(value.get("tf32")), **said)


def _read_encoding(value: Any) -> EncodingDrift:
    one = _object(value, "an encoding")
    unit = UNITS.get(_text(one.get("unit"), "unit"))
    if unit is None:
        raise _Wrong(f"a unit is none of {', '.join(UNITS)}")
    name = _text(one.get("id"), "id")
    lanes = _object(one.get("lanes"), f"the lanes of {name}")
    if len(lanes) > MOST:
        raise _Wrong(f"{name} has more than {MOST:,} lanes")
    made = EncodingDrift(
        name, _text(one.get("scheme"), "scheme"), "", unit=unit, axis=_text(one.get("axis"), "axis")
    )
    made.lanes = [_read_lane(_text(key, "a lane"), item) for key, item in lanes.items()]
    known = {lane.lane for lane in made.lanes if not lane.same_as}
    if stray := next((lane for lane in made.lanes if lane.same_as and lane.same_as not in known), None):
        raise _Wrong(f"{name}: a lane is said to be the same as {stray.same_as!r}, which is not there")
    return made


def _read_lane(name: str, value: Any) -> LaneDrift:
    one = _object(value, f"lane {name}")
    if "same_as" in one:
        return LaneDrift(name, same_as=_text(one["same_as"], "same_as"))
    at = tuple(_whole(item, "at") for item in _list(one.get("at"), "at"))
    digests = tuple(_text(item, "digests") for item in _list(one.get("digests"), "digests"))
    where = tuple(_whole(item, "positions") for item in _list(one.get("positions"), "positions"))
    rows = [_list(row, "values") for row in _list(one.get("values"), "values")]
    values = tuple(tuple(_real(item) for item in row) for row in rows)
    limits = tuple(_real(item) for item in _list(one.get("limits"), "limits"))
    whole = _text(one.get("whole"), "whole")
    if len(at) != len(digests) or len({len(where), len(values), len(limits)}) != 1:
        raise _Wrong(f"lists of lane {name} differ in length")
    if len({len(row) for row in values}) > 1:
        raise _Wrong(f"rows of lane {name} differ in length")
    return LaneDrift(name, samples=Samples(at, digests, where, values, limits, whole))


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{what} is no object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST:
        raise _Wrong(f"{what} is no list of at most {MOST:,}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST or not (value.isprintable() or not value):
        raise _Wrong(f"{what} is no text of at most {LONGEST} letters")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("tf32 is neither true nor false")
    return value


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= 2**31:
        raise _Wrong(f"{what} is no whole number from 0 to {2**31}")
    return value


def _real(value: Any) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if type(value) not in (int, float) or abs(value) > 1e300:
        raise _Wrong("a number is none")
    return float(value)


# -- comparing ----------------------------------------------------------------------------------------------


def compare(here: Sequence[EncodingDrift], there: Fingerprint) -> list[Compared]:
    """Every lane of every encoding here against that of the file; what one side alone has is not compared."""
    return list(_compared(here, there))


def _compared(here: Sequence[EncodingDrift], there: Fingerprint) -> Iterator[Compared]:
    others = {one.id: one for one in there.encodings}
    for one in here:
        other = others.pop(one.id, None)
        if not one.measured:
            yield _not(one, "", f"not measured here: {one.reason or 'no lane has numbers'}")
        elif other is None:
            yield _not(one, "", "the file has no encoding of that name")
        elif (one.scheme, one.unit, one.axis) != (other.scheme, other.unit, other.axis):
            yield _not(one, "", f"the file has a {other.scheme} encoding of that name, in {other.unit}")
        else:
            yield from _lanes(one, other)
    for other in others.values():
        yield _not(other, "", "only the file has it")


def _not(one: EncodingDrift, lane: str, note: str) -> Compared:
    return Compared(one.id, lane, lane, "not compared", one.unit, note=note)


def _lanes(one: EncodingDrift, other: EncodingDrift) -> Iterator[Compared]:
    """Lanes of one name; a device that one side alone has against the other's host."""
    mine, theirs = ({lane.lane: lane for lane in side.measured} for side in (one, other))
    for name, lane in mine.items():
        if name in theirs:
            yield _pair(one, lane, _resolved(theirs, name), name)
        elif _is_device(name) and (host := next((h for h in HOST if h in theirs), None)):
            yield _pair(one, lane, _resolved(theirs, host), host)
        else:
            yield _not(one, name, "only this side has the lane")
    for name in theirs:
        if name in mine:
            continue
        host = next((h for h in HOST if h in mine), None)
        if _is_device(name) and host:
            yield _pair(one, mine[host], _resolved(theirs, name), name)
        else:
            yield _not(one, name, "only the file has the lane")


def _is_device(name: str) -> bool:
    return name.startswith(("cuda", "mps", "xpu"))


def _resolved(lanes: Mapping[str, LaneDrift], name: str) -> LaneDrift:
    found = lanes[name]
    return lanes[found.same_as] if found.same_as else found


def _pair(one: EncodingDrift, lane: LaneDrift, other: LaneDrift, name: str) -> Compared:
    own = _resolved({item.lane: item for item in one.measured}, lane.lane).samples
    first = _first_apart(own, other.samples)
    shared = set(own.at) & set(other.samples.at)
    if not shared:
        return Compared(one.id, lane.lane, name, "not compared", one.unit, note="no position in common")
    if (
        first is None
        and own.whole != other.samples.whole
        and len(own.at) == len(shared) == len(other.samples.at)
    ):
        note = "other numbers between the positions that the file tells apart"
        return Compared(one.id, lane.lane, name, "differs", one.unit, note=note)
    if first is None:
        return Compared(one.id, lane.lane, name, "same bits", one.unit, 0.0)
    if not own.values or not other.samples.values:
        note = "trained numbers: a file has digests of them only, so by how much is not known"
        return Compared(one.id, lane.lane, name, "differs", one.unit, first=first, beyond=first, note=note)
    return _measured(one, lane.lane, name, first, own, other.samples)


def _first_apart(own: Samples, other: Samples) -> int | None:
    known = dict(zip(other.at, other.digests, strict=True))
    apart = [m for m, digest in zip(own.at, own.digests, strict=True) if known.get(m, digest) != digest]
    return min(apart, default=None)


def _measured(one: EncodingDrift, lane: str, name: str, first: int, own: Samples, other: Samples) -> Compared:
    """By how much sampled numbers differ; the limit is that of this side."""
    theirs = dict(zip(other.positions, other.values, strict=True))
    rows = [k for k, m in enumerate(own.positions) if len(theirs.get(m, ())) == len(own.values[k])]
    if not rows:
        note = "other bits, and no sampled number in common to measure by"
        return Compared(one.id, lane, name, "differs", one.unit, first=first, beyond=first, note=note)
    a = np.array([own.values[k] for k in rows])
    b = np.array([theirs[own.positions[k]] for k in rows])
    off = _off(a, b, one.unit)
    at = int(off.argmax())
    limits = np.array([own.limits[k] for k in rows])
    beyond = [own.positions[rows[k]] for k in np.flatnonzero(off > limits)]
    verdict = "differs" if beyond else "same within rounding"
    return Compared(
        one.id,
        lane,
        name,
        verdict,  # type: ignore[arg-type]
        one.unit,
        float(off[at]),
        own.positions[rows[at]],
        min([first, *beyond]),
        min(beyond, default=None),
    )


def _off(a: Any, b: Any, unit: Unit) -> Any:
    """The largest difference (M,) of numbers (M, K); angles without whole turns."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    if unit == "rad":
        apart = np.abs((apart + np.pi) % (2 * np.pi) - np.pi)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf)).max(axis=1, initial=0.0)
