"""The config writes a rotary base (rope_theta) as a floating-point number.

## What it does

Looks at every rotary base that the config declares, in the spellings of transformers 4 (``rope_theta``,
``rotary_emb_base``, ``rope_local_base_freq``, ``global_rope_theta`` ...) and 5
(``rope_parameters.rope_theta``, also per layer type), in nested text and vision sections and in lists with
one base a layer. A float with a whole value (``500000.0``) is a note; a float with a fraction is a warning.

## Why it matters

A runtime, converter or exporter that reads the base into an integer drops the fraction without a word, and
one that insists on an integer refuses the file. ``500000.0`` survives the first and not the second; a base
with a fraction survives neither.

## What is checked

For a base b that is a float: ``b = floor(b)`` (note) or not (warning). Reading ``floor(b)`` in place of b
turns pair i at position m by ``m |b^-x - floor(b)^-x|`` radians too much, x = 2i/d. Over all x this is at
most ``m (b - floor(b)) / (b e ln b)``, the number given as the effect.

## Known limits

The field disputes this rule. transformers and vLLM both take a float, most published configs write one
(``10000.0``, ``500000.0``), and models ship with a fraction and serve well: starcoder2-3b has
999999.4420358813. So a whole float is only a note, and a fraction only a warning: it says what an integer
reader would do, not that the model is wrong. Whether your reader is one cannot be seen from the config.
A GGUF file stores the type of each number, so the rule does not apply to one. Strings, booleans, NaN,
infinities and bases not above 1 are the business of PE102.

## Fix

Write a whole base as an integer. Leave a base with a fraction as it is when the model was trained with it,
and make sure that every reader keeps the fraction: rounding the base of a trained model is itself a change.

## References

- vLLM issue 18914: the base is read as a float.
- bigcode/starcoder2-3b config.json: ``rope_theta`` 999999.4420358813.
- Su et al., RoFormer (2104.09864), equation 15: the base is any real number.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterator
from typing import Any

from pediag.rules.declaration._values import EXACT
from pediag.rules.finding import Applicability, Edit, Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule

LEAST_BASE = 1.0
"""Bases at or below this are invalid whatever their type (theory: w_i would not fall), so PE102 says it."""

_SPELLING = re.compile(
    r"(?:.*_)?(?:rope|rotary)(?:_.*)?_(?:theta|base|base_freq|freq_base|base_frequency|frequency_base)s?"
)
"""``rope_theta``, ``rotary_emb_base``, ``rope_local_base_freq``, ``global_rope_theta``,
``rope_freq_base``.
"""

_SECTION = re.compile(r"(?:.*_)?(?:rope|rotary)(?:_.*)?")
_IN_SECTION = frozenset(("theta", "base", "base_freq", "freq_base", "base_frequency"))


@rule(
    code="PE101",
    name="float-rope-theta",
    severity="warning",
    basis="convention",
    needs=("config",),
    references=("vLLM issue 18914", "bigcode/starcoder2-3b config.json", "Su et al. 2104.09864, eq. 15"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each declared key whose base is a float."""
    declared = list(_bases(facets.config.values, "", in_rope=False))
    if not declared:
        raise NotApplicable("the config declares no rotary base (rope_theta)")
    if facets.config.typed:
        raise NotApplicable("the file's format fixes the type of each number, so no reader can mistake it")
    for path, values in declared:
        floats = [float(value) for value in values if _is_float(value)]
        if floats:
            worst = max(floats, key=lambda value: value % 1.0 > 0)
            yield _finding(facets, path, worst)


def _bases(value: Any, path: str, *, in_rope: bool) -> Iterator[tuple[str, list[Any]]]:
    """The dotted key of every declared base, with its value or the values of its list."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _bases(item, f"{path}.{index}", in_rope=in_rope)
    elif isinstance(value, dict):
        for key, item in value.items():
            name, below = _snake(str(key)), f"{path}.{key}" if path else str(key)
            if _SPELLING.fullmatch(name) or (in_rope and name in _IN_SECTION):
                yield from _declared(item, below)
            else:
                yield from _bases(item, below, in_rope=in_rope or bool(_SECTION.fullmatch(name)))


def _declared(value: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
    """A base is one number, a list with one a layer, or a mapping with one a layer type."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _declared(item, f"{path}.{key}")
    elif value is not None:
        yield path, value if isinstance(value, list) else [value]


def _snake(key: str) -> str:
    """``ropeTheta`` and ``llama.rope.freq_base`` as snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace(".", "_").replace("-", "_").lower()


def _is_float(value: Any) -> bool:
    if isinstance(value, numbers.Integral) or not isinstance(value, numbers.Real):
        return False
    return math.isfinite(value) and float(value) > LEAST_BASE


def _finding(facets: Facets, path: str, base: float) -> Finding:
    whole = int(base)
    config = facets.config
    return Finding(
        message=_message(path, base),
        effect=_effect(base, whole, facets.seq_len),
        where=Where(module=path, file=config.source, line=config.line_of(path)),
        evidence=Evidence(measured=base, expected=whole, seq_len=facets.seq_len),
        fix=_fix(path, base, whole, _whole_ones(path, config.get(path))),
        severity="note" if base == whole else "warning",
        scheme="rotary",
    )


def _message(path: str, base: float) -> str:
    kind = "a whole number written as a float" if base.is_integer() else "a float that is not a whole number"
    return f"{path} is {base!r}, {kind}."


def _effect(base: float, whole: int, seq_len: int) -> str:
    if base == whole:
        return f"None where a float is read; a reader that insists on an integer refuses {base!r}."
    lost = seq_len * truncation_error(base)
    return (
        f"A reader that takes an integer keeps {whole} and turns the pairs by up to {lost:.2g} rad more at "
        f"{seq_len:,} tokens; one that takes a float loses nothing."
    )


def truncation_error(base: float) -> float:
    """Radians per token, at most over all pairs, by which ``floor(base)`` turns more than ``base``."""
    return (base - math.floor(base)) / (base * math.e * math.log(base))


def _whole_ones(path: str, value: Any) -> tuple[Edit, ...]:
    """What writes a base, or each float of a list of them, as an integer; nothing where floats may not hold one."""
    places = [(path, value)]
    if isinstance(value, list):
        places = [(f"{path}.{index}", item) for index, item in enumerate(value)]
    found = [(place, item) for place, item in places if _is_float(item)]
    return tuple(Edit(place, int(item)) for place, item in found) if all(_exact(x) for _, x in found) else ()


def _exact(base: float) -> bool:
    return base.is_integer() and base <= EXACT


def _fix(path: str, base: float, whole: int, edits: tuple[Edit, ...]) -> Fix:
    key = path.rpartition(".")[2]
    if base == whole:
        kind: Applicability = "safe" if edits else "manual"
        patch = f'"{key}": {whole}' if edits else None
        return Fix(f"Write {path} as the integer {whole}.", kind, patch, edits)
    return Fix(
        f"Keep {base!r} if the model was trained with it and check that every reader takes a float; "
        f"for a model not yet trained write {path} as the integer {round(base)}."
    )
