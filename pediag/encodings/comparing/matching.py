"""Which encoding of one side stands where which of the other stands: by scheme, part of the model, layer and role.

Names of modules differ between two codes and tell nothing here: parts are matched in the order in which they run,
layers by their numbers. What a side does not tell (a config no roles, a state dict no layers) matches anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pediag.encodings.grouping import layers as named
from pediag.encodings.model import Encoding, Rotary

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
Distance = Callable[[Encoding, Encoding], float]
Slot = tuple[int | None, int | None, str]
"""Part of the model in running order, number of the layer, role; None and "" where they are not told."""


@dataclass(slots=True)
class Pair:
    """An encoding of each side, or of one, and the slots that they share."""

    a: Encoding | None
    b: Encoding | None
    slots: list[Slot] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Such as "layers 0-31, q and k"."""
        numbers = [f"l.{layer}" for _, layer, _ in self.slots if layer is not None]
        roles = sorted({role for *_, role in self.slots if role}, key="qkv".index)
        return ", ".join(part for part in (named(numbers), " and ".join(roles)) if part)

    @property
    def roles(self) -> list[str]:
        """Which of q, k and v, where both sides tell."""
        return sorted({role for *_, role in self.slots if role}, key="qkv".index)


def pairs(
    a: Sequence[Encoding], b: Sequence[Encoding], distance: Distance, *, one_a_place: bool = False
) -> list[Pair]:
    """Every encoding of one scheme of both sides, each with its counterparts; ``distance`` tells near from far.

    Where a side does not tell layers or roles, one encoding may be the counterpart of several, but for schemes of
    which ``one_a_place`` is used.
    """
    slots_a, slots_b = _slots(a), _slots(b)
    spread = False
    for level in range(3):
        told = _told(slots_a, level) and _told(slots_b, level)
        if not told or (level == 0 and _parts(slots_a) != _parts(slots_b)):
            spread = spread or (not told and not one_a_place)
            slots_a, slots_b = _blurred(slots_a, level), _blurred(slots_b, level)
    found: dict[tuple[int, int], Pair] = {}
    for slot in sorted({*slots_a, *slots_b}, key=_order):
        for one, other in _nearest(slots_a.get(slot, []), slots_b.get(slot, []), distance, spread=spread):
            pair = found.setdefault((id(one), id(other)), Pair(one, other))
            pair.slots.append(slot)
    return list(found.values())


def _order(slot: Slot) -> tuple[int, int, str]:
    part, layer, role = slot
    return -1 if part is None else part, -1 if layer is None else layer, role


def _slots(encodings: Sequence[Encoding]) -> dict[Slot, list[Encoding]]:
    parts: dict[str, int] = {}
    found: dict[Slot, list[Encoding]] = {}
    for encoding in encodings:
        for part, layer in dict.fromkeys(_places(encoding)):
            place = parts.setdefault(part, len(parts)) if part is not None else None
            for role in _roles(encoding):
                found.setdefault((place, layer, role), []).append(encoding)
    return found


def _places(encoding: Encoding) -> Iterator[tuple[str | None, int | None]]:
    """Parts and layers that an encoding enters in; nothing is told of one that was not traced."""
    if encoding.origin != "trace":
        yield None, None
        return
    for module in encoding.modules or [""]:
        number = _LAYER.search(module)
        yield (_LAYER.split(module)[0] if number else ""), (int(number.group(1)) if number else None)


def _roles(encoding: Encoding) -> tuple[str, ...]:
    if isinstance(encoding, Rotary) and encoding.applied_to:
        return tuple(encoding.applied_to)
    return ("",)


def _told(slots: dict[Slot, list[Encoding]], level: int) -> bool:
    return all(slot[level] not in (None, "") for slot in slots)


def _parts(slots: dict[Slot, list[Encoding]]) -> int:
    return len({part for part, *_ in slots})


def _blurred(slots: dict[Slot, list[Encoding]], level: int) -> dict[Slot, list[Encoding]]:
    """The same without one of part, layer and role."""
    found: dict[Slot, list[Encoding]] = {}
    for (part, layer, role), encodings in slots.items():
        slot = (None if level == 0 else part, None if level == 1 else layer, "" if level == 2 else role)
        known = found.setdefault(slot, [])
        known += [encoding for encoding in encodings if all(encoding is not other for other in known)]
    return found


def _nearest(
    a: Sequence[Encoding], b: Sequence[Encoding], distance: Distance, *, spread: bool
) -> Iterator[tuple[Encoding | None, Encoding | None]]:
    """Pairs of one slot, nearest first.

    What is left over on one side has nothing beside it, or, with ``spread``, the nearest that has a pair already.
    """
    left, right = list(range(len(a))), list(range(len(b)))
    ranked = sorted((distance(a[i], b[j]), abs(i - j), i, j) for i in left for j in right)
    for _, _, i, j in ranked:
        if i in left and j in right:
            left.remove(i)
            right.remove(j)
            yield a[i], b[j]
    for i in left:
        near = min(b, key=lambda item: distance(a[i], item)) if spread and b else None
        yield a[i], near
    for j in right:
        near = min(a, key=lambda item: distance(item, b[j])) if spread and a else None
        yield near, b[j]
