"""The config declares a rotary base (rope_theta) that no rotation can have.

## What it does

Looks at every rotary base that the config writes, in every section, those of images included: ``rope_theta`` beside or
inside ``rope_parameters`` and ``rope_scaling``, one per layer type or one per layer, ``rotary_emb_base``,
``rope_local_base_freq``, GLM's ``rope_ratio``.

## Why it matters

Readers take the value as it comes. transformers 5.24 builds a model from a base of 0, -10000, NaN or 1 without a word;
the first three rotate queries and keys into NaN, the last gives an order that repeats every 6.28 tokens.

## What is checked

Pair i of r/2 turns by ``w_i = b^(-2i/r)`` radians a token, and w must fall from 1 towards 0. So b is a finite number
above 1. At b = 1 all pairs turn alike; below 1 w rises; at 0 it is infinite, below 0 and at NaN it is no number; at
infinity all but the first pair stand still. A string, boolean or object is no number for any reader, nor is null inside
``rope_parameters``, where transformers fills nothing in. A list is one base a layer where it has an entry for each,
which some models ship, and an error otherwise; in ``layer_rope_theta`` 0 is a layer that is not rotated.

## Known limits

A base that is merely small, or another than the weights were trained with, is valid here: see PE113, PE202 and PE501.
No base at all is PE103's to say. Of two bases that disagree PE109 speaks, and only the one that is read is judged here.

## Fix

Write the base that the model was trained with, as a number. Published ones lie between 100 and 1e9.

## References

- Su et al., RoFormer (2104.09864), equation 15: theta_i = 10000^(-2(i-1)/d).
- transformers 5.24, modeling_rope_utils.py: the base is used as it is written.
- Luce-Org/lucebox pull request 284: a base of 0 makes every query and key NaN.
- mlx-node/mlx-node pull request 117: a negative base in ``layer_rope_theta`` passes for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pediag.rules.declaration._values import (
    Fault,
    findings,
    kind_of_value,
    measured,
    real,
    rotary_width,
    shown,
    spelt,
    whole,
)
from pediag.rules.finding import Edit, Finding
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.targets.config import Config
from pediag.targets.declaration import BASES, SCALINGS, Said, declarations

LEAST_NORMAL = 2.0**-126
"""The smallest normal number of float32: the inverse of a smaller base is infinite, or near it."""

LEAST_BASE = 1.0
"""Frequencies b^(-2i/r) fall with i only for a base above this."""

BY_LAYER = "layer_rope_theta"
"""Key of a list with a base for each layer, in which 0 is a layer without rotation (Muse, Granite)."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys of the number of layers."""


@rule(
    code="PE102",
    name="invalid-rope-theta",
    severity="error",
    basis="theorem",
    needs=("config",),
    references=(
        "Su et al. 2104.09864, eq. 15",
        "transformers 5.24 modeling_rope_utils.py",
        "Luce-Org/lucebox pull request 284",
        "mlx-node/mlx-node pull request 117",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each base that is written and cannot be one."""
    said = list(_bases(facets.config))
    if not said:
        raise NotApplicable("the config declares no rotary base (rope_theta)")
    yield from findings(facets, (fault for one in said for fault in _faults(facets, one)))


def _bases(config: Config) -> Iterator[Said]:
    """Every base that is written and read; null counts inside a scaling only, where it is taken as it stands."""
    spoken = declarations(config)
    unread = {other.path for one in spoken for what, other in one.again if what == "base"}
    for path, values in config.sections():
        inside = any(part in SCALINGS for part in path.split("."))
        keys = [*BASES, *(("rope_ratio",) if "original_rope" in values else ())]
        keys += [BY_LAYER] if isinstance(values.get(BY_LAYER), list) else []
        for key in keys:
            dotted = f"{path}.{key}" if path else key
            if key in values and dotted not in unread and (inside or values[key] is not None):
                yield Said(values[key], dotted)


def _faults(facets: Facets, said: Said) -> Iterator[Fault]:
    value = said.value
    if isinstance(value, list):
        layers = _layers(facets.config, said.path)
        still = said.path.endswith(BY_LAYER)
        wrong = [item for item in value if not _sound(item) and not (still and real(item) == 0)]
        if wrong or not layers or len(value) < layers:
            yield _of_list(said, wrong, layers)
    elif not _sound(value):
        number = spelt(value) if _sound(spelt(value)) else None
        yield Fault(
            said.path,
            f"{said.path} is {shown(value)}{_kind(value)}; a rotary base must be a finite number above 1.",
            _effect(facets, said, value),
            f"Write {said.path} as the base that the model was trained with, a number such as 10000."
            if number is None
            else f"Write {said.path} as the number {number}, without quotes.",
            measured=measured(value),
            limit=LEAST_BASE,
            applicability="manual" if number is None else "safe",
            edits=() if number is None else (Edit(said.path, number),),
        )


def _of_list(said: Said, wrong: list[Any], layers: int) -> Fault:
    entries = len(said.value)
    has = f"and the model has {layers} layers" if layers else "and no number of layers is declared"
    what = f"{shown(wrong[0])} among them" if wrong else has
    return Fault(
        said.path,
        f"{said.path} is a list of {entries}, {what}; a base must be one finite number above 1, or one a layer.",
        "A reader of one base raises TypeError when the model is built; a reader of one a layer lacks some.",
        f"Write {said.path} as one finite number above 1, or as one such number for each layer.",
        measured=measured(wrong[0]) if wrong else entries,
        expected=None if wrong else layers or 1,
        limit=LEAST_BASE if wrong else None,
        unit="" if wrong else "bases",
    )


def _layers(config: Config, path: str) -> int:
    """How many layers the model of a key has; 0 where its section does not say."""
    parts = path.split(".")[:-1]
    while parts and parts[-1] in SCALINGS:
        parts.pop()
    counts = (whole(config.get(".".join([*parts, key]))) for key in LAYERS)
    return next((count for count in counts if count and count > 0), 0)


def _sound(value: Any) -> bool:
    base = real(value)
    return base is not None and math.isfinite(base) and base > LEAST_BASE


def _kind(value: Any) -> str:
    """What is wrong with a base, where the value alone does not say it."""
    base = real(value)
    if value is None or base == 0:
        return ""
    if base is None:
        return f", {kind_of_value(value)}"
    return "" if math.isfinite(base) else ", not a finite number"


def _effect(facets: Facets, said: Said, value: Any) -> str:
    base = real(value)
    if base is None:
        if isinstance(value, bool):
            return f"Python counts it as {int(value)}: {_of_number(float(value), _pairs(facets, said))}"
        return "transformers raises TypeError when the model is built; another reader may take a default instead."
    told = _of_number(base, _pairs(facets, said))
    return told[0].upper() + told[1:]


def _of_number(base: float, pairs: int) -> str:
    most = f"{pairs - 1} of {pairs} pairs" if pairs > 1 else "all pairs but the first"
    if base < LEAST_NORMAL or math.isnan(base):
        what = "infinite" if base >= 0 else "no numbers"
        return (
            f"the frequencies of {most} are {what}, so rotated queries and keys are NaN from position 0 on."
        )
    if math.isinf(base):
        return f"{most} do not turn at all; positions that differ by 2 pi (6.28) look the same."
    if base == 1:
        return "all pairs turn by 1 rad a token, so positions that differ by 2 pi (6.28) look the same."
    fastest = base ** -(1 - 1 / pairs) if pairs > 1 else 1 / base
    return f"frequencies rise from 1 to {fastest:.3g} rad a token instead of falling: no pair is slow."


def _pairs(facets: Facets, said: Said) -> int:
    """Pairs that turn by this base, 0 where the config does not tell."""
    for one in declarations(facets.config):
        if one.base is not None and one.base.path == said.path:
            return rotary_width(one) // 2
    return 0
