"""A change to a JSON file, as a fix of a rule says it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


class Removed(Enum):
    """The value of an edit that takes its key away."""

    REMOVED = "removed"


REMOVED: Final = Removed.REMOVED


@dataclass(frozen=True, slots=True)
class Edit:
    """Give the key at a dotted path this value, or take the key away where the value is REMOVED.

    A key that is not there yet is added at the end of its object.
    """

    path: str
    value: Any
