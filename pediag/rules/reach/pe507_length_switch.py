"""Rotary frequencies change with the length seen: keys cached before the switch disagree with queries after it.

## What it does

Finds rotary encodings whose frequencies depend on the length of the input: dynamic NTK, which raises the base as the
text grows, and LongRoPE, which changes from one list of factors to another above the original length. It says from
which length on, and by how much: the largest change of a frequency, and the phase error at this length. Where the
model runs, the frequencies of a short pass and of the one at this length are compared as the model computes them; of
finished tables the rows that both passes read.

## Why it matters

Keys are usually cached after rotation. A key that was rotated before the switch and a query rotated after it no longer
differ by their distance, so a generation that crosses the switch is not what a full pass would give. Chunked prefill
mixes the tables in the same way. Where the longer table is kept, a long text changes the answers to later short ones.

## What is checked

``max_i |w_i(L) - w_i(L0)|`` in radians per token, with L0 the length of the switch and L the length asked about, and
the phase ``(L - 1)`` times that. It fires from L = L0 on, since at L0 itself the next token switches. Declared types
are built by their formulas; an undeclared change is measured, and lies somewhere between the two lengths that ran.

## Known limits

How much a change costs is not known: users of dynamic NTK saw little, users of LongRoPE with one cache saw garbage. So
this is a note. Engines that build one table for their configured maximum (vLLM) do not switch; their short texts then
differ from training instead. Whether a cache is kept across the switch is not seen here.

## Fix

Choose the table once for a whole sequence, from the longest it may become, before the first token; or cache keys before
rotation; or drop the cache at the switch, as transformers does for LongRoPE.

## References

- emozilla 2023, Dynamically Scaled RoPE; Peng et al., YaRN (2309.00071), section 3.3: cache keys before rotation.
- Ding et al., LongRoPE (2402.13753).
- huggingface/transformers issues 25104 and 25306; microsoft/onnxruntime-genai issue 1161; vllm-project/vllm pull 27431.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.reach._lengths import is_length, kind_of
from pediag.rules.reach._places import layers_text, where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import scaled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary
    from pediag.targets.declaration import RopeDeclaration
    from pediag.trace import Trace

    Floats = NDArray[np.float64]

CHANGED = 1e-3
"""Relative change of a frequency from which two passes differ; reading one off twice agrees to about 1e-5."""

NAMES = {"dynamic": "dynamic NTK", "longrope": "LongRoPE"}


@dataclass(frozen=True, slots=True)
class Switch:
    """Frequencies (r/2,) before and after; ``at`` is the length in tokens from which on the later ones hold."""

    kind: str
    at: int
    before: Floats
    after: Floats
    where: Where
    layers: str = ""
    between: int | None = None

    @property
    def change(self) -> float:
        """The largest change of a frequency, radians per token."""
        return float(np.abs(self.after - self.before).max())

    @property
    def pair(self) -> int:
        """The pair that changes most."""
        return int(np.abs(self.after - self.before).argmax())


@rule(
    code="PE507",
    name="length-switch",
    severity="note",
    basis="field report",
    needs=("trace",),
    instead=("config",),
    references=(
        "Peng et al. 2309.00071, section 3.3",
        "Ding et al. 2402.13753",
        "huggingface/transformers issue 25104",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotary encoding that has switched, or switches with the next token."""
    from pediag.encodings import Rotary

    rotations = [item for item in facets.encodings if isinstance(item, Rotary) and item.even]
    declared = _declared(facets)
    if not rotations and not declared:
        raise NotApplicable("the model has no rotary encoding")
    measured = [item for item in (_measured(facets, one) for one in rotations) if item is not None]
    for switch in measured:
        yield _finding(facets, _named(switch, declared))
    if not measured:
        # A switch that the running model does not make at this length is only that of its next token.
        ran = facets.target is not None and facets.target.failure is None and bool(rotations)
        for switch in declared:
            if facets.seq_len == switch.at or (facets.seq_len > switch.at and not ran):
                yield _finding(facets, switch)


def _multiplied(facets: Facets, encoding: Rotary, trace: Trace) -> tuple[Floats, Floats] | None:
    """The frequencies (r/2,) that positions are multiplied with in the short pass and in the long one."""
    from pediag.rules._angles import factor_of, pairs_of, source

    short, found = factor_of(trace, encoding.factor), source(facets, encoding)
    if short is None or found is None or found.trace is not facets.target:
        return None
    pairs = pairs_of(short, encoding.frequencies)
    return None if pairs is None else (np.abs(short[pairs]), np.abs(found.frequencies))


def _measured(facets: Facets, encoding: Rotary) -> Switch | None:
    """The change between the short pass and the one at the length asked about; None without one."""
    from pediag.rules.reach._finished import steps

    trace = facets.structural
    if (
        encoding.origin != "trace"
        or facets.target is None
        or facets.target.failure is not None
        or trace is None
    ):
        return None
    both = _multiplied(facets, encoding, trace) or steps(facets, encoding)
    if both is None or not _changed(*both):
        return None
    # The length asked about may be below that of the short pass.
    (at, before), (between, after) = sorted(
        zip((trace.seq_len, facets.seq_len), both, strict=True), key=lambda pair: pair[0]
    )
    return Switch("", at, before, after, where(encoding), layers_text(encoding), between)


def _changed(before: Floats, after: Floats) -> bool:
    return bool(np.any(np.abs(after - before) > CHANGED * np.abs(before)))


def _named(switch: Switch, declared: list[Switch]) -> Switch:
    """A measured switch with the kind and length of the declaration that has its frequencies, if one has."""
    for said in declared:
        if said.after.shape == switch.after.shape and np.allclose(
            said.after, switch.after, rtol=1e-2, atol=0
        ):
            return Switch(said.kind, said.at, switch.before, switch.after, switch.where, switch.layers)
    return switch


def _declared(facets: Facets) -> list[Switch]:
    """The switches that the config declares, built by their formulas at this length or the next token's."""
    if facets.config is None:
        return []
    from pediag.targets.declaration import declarations

    made = (_built(facets, one) for one in declarations(facets.config))
    return [switch for switch in made if switch is not None]


def _built(facets: Facets, declared: RopeDeclaration) -> Switch | None:
    from pediag.encodings.from_config import head_and_width, scaling_of

    scaling = scaling_of(declared)
    kind = kind_of(scaling)
    keys = ("max_position_embeddings", "original_max_position_embeddings")
    at = scaling.get(keys[0] if kind == "dynamic" else keys[1])
    width = head_and_width(declared)[1]
    if kind not in NAMES or declared.base is None or not is_length(at) or not width:
        return None
    try:
        before, after = (
            scaled(declared.base.value, width, scaling, length)
            for length in (at, max(facets.seq_len, int(at or 0) + 1))
        )
    except (TheoryError, TypeError, ValueError, OverflowError):
        return None
    if not _changed(before, after):
        return None
    path = declared.type.path if declared.type is not None else declared.base.path
    config = facets.config
    layers = f" ({declared.layer_type})" if declared.layer_type else ""
    return Switch(
        kind, int(at or 0), before, after, Where("", "", config.source, config.line_of(path)), layers
    )


def _finding(facets: Facets, switch: Switch) -> Finding:
    n = facets.seq_len
    phase = switch.change * (n - 1)
    return Finding(
        message=(
            f"{_what(switch)}: pair {switch.pair} turns by {switch.after[switch.pair]:.4g} instead of "
            f"{switch.before[switch.pair]:.4g} rad per token, {phase:.3g} rad at {n:,} tokens."
        ),
        effect=_effect(switch, n),
        where=switch.where,
        evidence=Evidence(phase, 0.0, switch.at, "rad", n),
        fix=Fix(
            "Choose the table once per sequence, from the longest it may become, or cache keys before rotation; "
            "never carry rotated keys across the switch."
        ),
        scheme="rotary",
    )


def _what(switch: Switch) -> str:
    name = NAMES.get(switch.kind, "the frequencies")
    if switch.between is not None:
        return f"Rotary frequencies{switch.layers} change somewhere between {switch.at:,} and {switch.between:,} tokens"
    grows = "grows with every token above" if switch.kind == "dynamic" else "takes its long factors above"
    return f"{name[0].upper()}{name[1:]}{switch.layers} {grows} {switch.at:,} tokens"


def _effect(switch: Switch, n: int) -> str:
    last = switch.at - 1
    when = "The next token switches: keys" if n <= switch.at and switch.between is None else "Keys"
    return (
        f"{when} cached up to token {last:,} keep the old frequencies, {switch.change * last:.3g} rad away from what "
        "queries after the switch expect; a generation or chunked prefill across it differs from a full pass."
    )
