"""What the rules on single declared values share: numbers as they are written, places, faults as findings."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pediag.rules.finding import REMOVED, Applicability, Edit, Evidence, Finding, Fix, Number, Severity, Where
from pediag.rules.rule import Facets
from pediag.targets.declaration import RopeDeclaration, Said, with_widths
from pediag.targets.rope_keys import (
    FILLED,
    TYPES,
    meant,
    nearest_key,
    needed,
    own_head_width,
    own_share,
    read_by,
)

EXACT = 2**53
"""Up to here a float holds every whole number, so that writing one as an integer changes no reader's value."""

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")

SHOWN = 40
"""Letters of a value that a message repeats."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong value: where it is said, what is wrong with it, what follows, and what to write."""

    path: str
    message: str
    effect: str
    fix: str
    measured: Number = None
    expected: Number = None
    limit: Number = None
    unit: str = ""
    severity: Severity | None = None
    at: str = ""
    patch: str | None = None
    applicability: Applicability = "manual"
    edits: tuple[Edit, ...] = ()


def findings(facets: Facets, faults: Iterable[Fault]) -> Iterator[Finding]:
    """Each distinct fault as a finding at the line of its key (``at`` where the key itself is not written)."""
    seen = set()
    for fault in faults:
        if (fault.path, fault.message) in seen:
            continue
        seen.add((fault.path, fault.message))
        config = facets.config
        line = config.line_of(fault.path) or config.line_of(fault.at)
        yield Finding(
            message=fault.message,
            effect=fault.effect,
            where=Where(module=fault.path, file=config.source, line=line),
            evidence=Evidence(fault.measured, fault.expected, fault.limit, fault.unit, facets.seq_len),
            fix=Fix(fault.fix, fault.applicability, fault.patch, fault.edits),
            severity=fault.severity,
            scheme="rotary",
        )


def real(value: Any) -> float | None:
    """A number as a float, infinite where it is beyond all floats; None for what is no number, booleans included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number: Any = value
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def whole(value: Any) -> int | None:
    """A whole number, be it written 4096 or 4096.0; None for anything else."""
    number = real(value)
    if number is None or not math.isfinite(number) or number != math.floor(number):
        return None
    return int(value)


def spelt(value: Any) -> int | float | None:
    """The finite number that a string is, letter for letter in JSON's spelling; None for all else."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return None
    number = float(value)
    if not math.isfinite(number):
        return None
    exact = number.is_integer() and abs(number) <= EXACT
    return int(number) if exact else None if number.is_integer() else number


def renaming(said: Said, key: str) -> tuple[Edit, ...]:
    """The edits that give a value another key in the same object."""
    holder, dot, _ = said.path.rpartition(".")
    return Edit(said.path, REMOVED), Edit(f"{holder}{dot}{key}", said.value)


def kind_of_value(value: Any) -> str:
    """What a value is, in the words of JSON: "a string", "a boolean", "NaN" ..."""
    number = real(value)
    if number is not None:
        return "NaN" if math.isnan(number) else "infinite" if math.isinf(number) else "a number"
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def shown(value: Any) -> str:
    """A value as JSON writes it, cut to some forty letters."""
    try:
        text = (
            json.dumps(value) if isinstance(value, (str, int, float, list, dict, type(None))) else repr(value)
        )
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def measured(value: Any) -> Number:
    """A value as evidence: a finite number as it is, anything else as it is shown."""
    number = real(value)
    finite = number is not None and math.isfinite(number)
    return value if finite and isinstance(value, (int, float)) else shown(value)


def type_of(declared: RopeDeclaration) -> str:
    """The known type that a declaration means, "default" where it says none; empty for one that nobody knows."""
    said = declared.type
    if said is None:
        return "default"
    if not isinstance(said.value, str) or said.value not in TYPES:
        return ""
    return meant(said.value, declared.model_type)


def scaling_path(declared: RopeDeclaration) -> str:
    """The dotted path of the object that holds the scaling, empty where nothing is written in one."""
    inside = [*([declared.type] if declared.type else []), *declared.scaling.values()]
    return inside[0].path.rpartition(".")[0] if inside else ""


def given(declared: RopeDeclaration, key: str) -> Said | None:
    """A key of the scaling itself; null counts as not said."""
    said = declared.scaling.get(key)
    return said if said is not None and said.value is not None else None


def misspelt(declared: RopeDeclaration, kind: str) -> dict[str, Said]:
    """Key that the type needs and lacks -> the unread key that most likely means it.

    A length that is filled in from elsewhere is not lacking.
    """
    unread = [key for key in declared.scaling if given(declared, key) and not read_by(key, kind)]
    lacking = [
        key
        for key in needed(kind)
        if declared.get(key) is None or (key not in FILLED and not given(declared, key))
    ]
    lacking = [key for key in lacking if key not in FILLED or declared.get("max_position_embeddings") is None]
    found = {key: near for near in unread if (key := nearest_key(near, lacking))}
    return {key: declared.scaling[near] for key, near in found.items()}


def spoken(facets: Facets) -> list[RopeDeclaration]:
    """Every rotary declaration of the config, those of a width alone included."""
    return with_widths(facets.config)


def own_code(facets: Facets) -> bool:
    """Whether the config names code of its own, which may read more than the public readers do."""
    return bool(facets.config.get("auto_map"))


def head_width(declared: RopeDeclaration) -> int:
    """Channels of a head, as written, as the class has it, or by division; 0 where nothing sound tells."""
    said = declared.get("head_dim")
    if said is not None:
        return max(whole(said.value) or 0, 0)
    if width := own_head_width(declared.model_type):
        return width
    hidden, heads = (length(declared, key) for key in ("hidden_size", "num_attention_heads"))
    return hidden // heads if hidden and heads else 0


def rotary_width(declared: RopeDeclaration) -> int:
    """Channels of a head that turn; 0 where nothing sound tells."""
    for key in ("qk_rope_head_dim", "rotary_dim"):
        if width := length(declared, key):
            return width
    head, said = head_width(declared), declared.get("partial_rotary_factor")
    fraction = real(said.value) if said is not None else own_share(declared.model_type)
    return int(head * fraction) if fraction is not None and 0 < fraction <= 1 else 0


def length(declared: RopeDeclaration, key: str) -> int:
    """A whole number above 0 that the declaration says, else 0."""
    said = declared.get(key)
    return max((whole(said.value) or 0) if said is not None else 0, 0)
