"""The frequencies of a rotation or sinusoid were rounded to half precision.

## What it does

Looks at the frequencies that positions are multiplied with (a buffer such as ``inv_freq``, or what forward
makes of it) and at every value between the stored buffer and the product. Fires when they hold bfloat16 or
float16 numbers while the formula they come from does not give such numbers, whatever their dtype is now. A
table of cosines made ahead is judged by the frequencies recovered from its rows.

## Why it matters

The angle is position times frequency, so a relative error of 2^-9 becomes radians at a few thousand tokens:
with base 10000 and width 128 it is 1.25 rad at position 1023 and 10 rad at 8191. Nothing fails; long texts
just come out wrong. ``model.to(torch.bfloat16)``, ``.half()``, engines and wrappers that cast buffers do
this. A later ``.float()`` restores the dtype, not the digits. From the other tensors the finding tells which way it
went: the whole model in one half format (a cast, an engine); half buffers under wide weights (FSDP's
``buffer_dtype``); wide buffers with half numbers (cast and cast back, a second load path).

## What is checked

``max_i (L - 1) |w_i - f_i|`` in radians, w the frequencies as used, f the float64 formula: what the config
declares when it explains w within 1 %, else the formula recovered from w. It must exceed what float32
allows, ``16 u32 (1 + ln base)`` relative (measured: pow 1.42 u32, exp up to 28 u32), and the numbers must
be those of a half format or have passed through one.

Where nothing can be run, stored lists and tables are judged in the same way, by their dtype and their numbers.
They are a warning, since a file does not tell whether the code reads them. A list that stands alone is a note: it may
turn something else, or nothing (Meta's files hold one ``rope.freqs`` in bfloat16 that their code computes anew); so are
those that the model which ran does not read.

## Known limits

Cosines and sines that were finished in float32 and then cast lose half a unit in the last place at every
position; that is harmless and silent. Frequencies that no formula explains (learned, or a list that the
config does not give) are judged only when their store has a half dtype, by the bound u m w. Where forward
rounds positions too it is PE601, of the product PE603, powers beyond float16 PE606. What a stored list turns is
not known without code: it may be a diffusion timestep, and the finding says so.

## Fix

Keep the frequencies in float32 (cast parameters only, or recompute the buffer after the cast), or make them
in float32 inside forward.

## References

- huggingface/transformers 25681, 29285; deepspeedai/DeepSpeed 8066; Modalities 462.
- Wang et al. 2411.13476: bfloat16 breaks the relative property of rotary encodings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules import _angles
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.numerics import _buffers, _held, _overflow
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.theory.frequencies import rope_type, scaled
from pediag.theory.recover import identify
from pediag.theory.rounding import frequency_tolerance, phase_error, precision_of, round_to, unit_roundoff

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary, Sinusoidal
    from pediag.trace import Node

    Floats = NDArray[np.float64]

HALF = ("bfloat16", "float16")

USUAL_BASE = 10000.0
"""Base that is tried when none is declared or recovered (Vaswani et al., Su et al.)."""

NOTICED = 0.1
"""Radians at which a phase error is called noticeable in the effect (facts: 0.1 rad moves a cosine by
0.1).
"""

MEASURED_NOISE = 3e-9
"""Radians per token by which frequencies read off float32 cosines over a hundred tokens are wrong."""

NEAR = 0.05
"""Share of a roundoff within which a frequency read off a table counts as a number of that format."""

ENOUGH = 4
"""Pairs that must say so: rounded by chance all of four lie that near with probability 1e-4."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Frequencies (r/2,) in a half ``form``, and the float64 ones of a ``base`` that they stand for.

    ``cast`` says that forward itself rounds them, the stored ones being finer.
    """

    used: Floats
    meant: Floats | None
    base: float | None
    form: str
    name: str
    cast: bool = False
    scaling: str = "default"


@rule(
    code="PE602",
    name="frequencies-rounded",
    severity="error",
    basis="measured here",
    needs=("trace",),
    instead=("tensors",),
    references=("transformers issue 25681", "DeepSpeed issue 8066", "Wang et al. 2411.13476"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each encoding whose frequencies are rounded."""
    from pediag.encodings import Rotary, Sinusoidal

    waves = [
        item
        for item in facets.encodings
        if isinstance(item, (Rotary, Sinusoidal)) and item.origin != "config"
    ]
    unread = [item for item in facets.unread if isinstance(item, (Rotary, Sinusoidal))]
    if not waves and not unread:
        raise NotApplicable("the model has no sinusoid and no rotary encoding")
    seen: set[object] = set()
    for encoding in [*waves, *unread]:
        found = rounded(facets, encoding)
        if found is None or _told_elsewhere(facets, encoding, found):
            continue
        finding = _finding(facets, encoding, found)
        if encoding in unread:
            finding = _unread(finding)
        elif encoding.origin == "tensors":
            finding = _stored(finding, encoding.doubt)
        place = (finding.where.module, finding.where.file, finding.where.line, finding.evidence.measured)
        if place not in seen:
            seen.add(place)
            yield finding


def _told_elsewhere(facets: Facets, encoding: Rotary | Sinusoidal, found: Rounded) -> bool:
    """Whether positions are rounded with the frequencies (PE601), or the frequencies come of an overflow (PE606)."""
    if encoding.origin != "trace" or encoding in facets.unread:
        return False
    if _overflow.beyond(facets, encoding) is not None:
        return True
    lost = _held.lost(facets, encoding)
    return lost is not None and found.cast and lost[0].form == found.form


def _stored(finding: Finding, doubt: str) -> Finding:
    """Of a file alone: a warning, and a note where it may be something else."""
    told = f" Uncertain: {doubt}." if doubt else ""
    effect = f"Where the code reads it: {finding.effect}{told}"
    return replace(finding, severity="note" if doubt else "warning", effect=effect)


def _unread(finding: Finding) -> Finding:
    """Of a tensor that the model that ran does not read: a note, since another runtime may."""
    where = replace(finding.where, encoding="")
    effect = (
        f"The model that ran does not read it. In a runtime that takes it from the file: {finding.effect}"
    )
    return replace(finding, where=where, effect=effect, severity="note")


def rounded(facets: Facets, encoding: Rotary | Sinusoidal) -> Rounded | None:
    """How the frequencies of an encoding are rounded; None when they are not."""
    if encoding.origin == "tensors":
        return _of_stored(facets, encoding)
    source = _angles.source(facets, encoding)
    if source is not None:
        return _of_program(facets, encoding, source)
    return _of_table(facets, encoding)


def _of_program(facets: Facets, encoding: Rotary | Sinusoidal, source: _angles.Source) -> Rounded | None:
    """Frequencies that the program shows: half by dtype somewhere on their way, or by their numbers."""
    used = source.frequencies
    if not np.isfinite(used).all():
        return None
    passed = _passed(source)
    held = precision_of(used)
    form = passed[0] if passed else (held if held in HALF else None)
    if form is None or _even_series(used):
        return None
    name = passed[1] if passed else _name(encoding)
    meant, base, scaling = formula(facets, encoding, used, form)
    if meant is None:
        simple = precision_of_bits(used) <= 4
        trained = encoding.factor is not None and encoding.factor.trainable
        return None if simple or trained or not passed else Rounded(used, None, None, form, name)
    if _within_float32(used, meant, base):
        return None
    return Rounded(used, meant, base, form, name, bool(passed and passed[2]), scaling)


def _of_stored(facets: Facets, encoding: Rotary | Sinusoidal) -> Rounded | None:
    """A stored list by its dtype or its numbers; a finished table by the frequencies that were read off it."""
    used = encoding.frequencies
    if not getattr(encoding, "even", True):
        return None
    if encoding.factor is None or encoding.parameters.get("damaged"):
        return _of_table(facets, encoding)
    dtype = str(encoding.factor.dtype).removeprefix("torch.")
    form = dtype if dtype in HALF else precision_of(used)
    if form not in HALF or _even_series(used):
        return None
    meant, base, scaling = formula(facets, encoding, used, form)
    if meant is None:
        return Rounded(used, None, None, form, _name(encoding)) if dtype in HALF else None
    if _within_float32(used, meant, base):
        return None
    return Rounded(used, meant, base, form, _name(encoding), scaling=scaling)


def precision_of_bits(values: Floats) -> int:
    """Significant bits that the values need; few of them make a number that any format holds."""
    for bits in range(1, 12):
        mantissa, _ = np.frexp(values)
        if np.array_equal(np.round(np.ldexp(mantissa, bits)), np.ldexp(mantissa, bits)):
            return bits
    return 53


def _passed(source: _angles.Source) -> tuple[str, str, bool] | None:
    """(format, name, whether forward made it) of the half value that a factor's numbers went through, or
    None.
    """
    from pediag.trace.graph import ancestors

    for node in sorted(ancestors(source.node), key=lambda item: -item.index):
        form = str(node.dtype).removeprefix("torch.")
        numbers = _angles.factor_of(source.trace, node) if form in HALF and node.numel > 1 else None
        if numbers is not None and _fractional(numbers):
            stored = any(
                str(part.dtype).removeprefix("torch.") == form for part in ancestors(node) if part.names
            )
            return form, _name_of(node) or _name_of(source.node), not stored
    return None


def _fractional(numbers: Floats) -> bool:
    """Whether numbers are frequencies rather than exponents 0, 2, 4 ... that a half format holds."""
    return bool(np.isfinite(numbers).all() and np.any(numbers != np.rint(numbers)) and np.all(numbers >= 0))


def _name_of(node: Node) -> str:
    names = _angles.names_of(node)
    return names[0] if names else ""


def _name(encoding: Rotary | Sinusoidal) -> str:
    if encoding.factor is not None:
        return _name_of(encoding.factor)
    table = encoding.table
    return _name_of(table.leaf) if table is not None else ""


def formula(
    facets: Facets, encoding: Rotary | Sinusoidal, used: Floats, form: str
) -> tuple[Floats | None, float | None, str]:
    """Float64 frequencies (r/2,) meant by rounded ones, base and scaling; None when nothing explains them.

    Of the declared formula, the recovered one and the usual ones, the first that rounds to most of ``used``.
    """
    share = max(0.01, 4 * unit_roundoff(form))
    best: tuple[int, Floats | None, float | None, str] = (-1, None, None, "default")
    for meant, base, scaling in _candidates(facets, encoding, used, form, share):
        if meant.shape == used.shape and np.allclose(meant, used, rtol=share, atol=0.0):
            hits = int(np.count_nonzero(round_to(meant.astype(np.float32), form) == used.astype(np.float32)))
            if hits > best[0]:
                best = (hits, meant, base, scaling)
    return best[1:]


def _candidates(
    facets: Facets, encoding: Rotary | Sinusoidal, used: Floats, form: str, share: float
) -> Iterator[tuple[Floats, float, str]]:
    entry = _angles.declared(facets, encoding.width, used, within=share)
    if entry is not None:
        yield entry.frequencies, entry.base, str(rope_type(entry.scaling))
    for numbers in (used, np.asarray(round_to(used, form), dtype=np.float64)):
        found = identify(numbers)
        if found.known and found.base is not None:
            rebuilt = scaled(found.base, found.width, found.scaling)
            yield rebuilt[: used.size], found.base, str(found.scaling["rope_type"])
    base = encoding.parameters.get("base")
    index, steps = np.arange(used.size), {used.size}
    if encoding.scheme == "sinusoidal":
        # tensor2tensor and fairseq divide by one pair less, so that the slowest is exactly 1/base.
        steps.add(max(used.size - 1, 1))
    for one in dict.fromkeys((base, USUAL_BASE)):
        if isinstance(one, (int, float)) and one > 1:
            for count in steps:
                yield np.asarray(float(one) ** (-index / count)), float(one), "default"


def _even_series(used: Floats) -> bool:
    """Whether the numbers are one geometric series as closely as float32 can tell: then nothing was lost."""
    if used.size < ENOUGH or not bool((used > 0).all()):
        return False
    index, logs = np.arange(used.size), np.log(used)
    slope, level = np.polyfit(index, logs, 1)
    return bool(np.abs(logs - slope * index - level).max() <= frequency_tolerance(USUAL_BASE))


def _within_float32(used: Floats, meant: Floats, base: float | None) -> bool:
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.where(used == meant, 0.0, np.abs(used - meant) / np.abs(meant))
    return bool(apart.max() <= frequency_tolerance(max(base or USUAL_BASE, 2.0)))


def _of_table(facets: Facets, encoding: Rotary | Sinusoidal) -> Rounded | None:
    """Frequencies read off a finished table: half when nearly every one is a number of that format."""
    w = np.abs(encoding.frequencies)
    if not np.isfinite(w).all():
        return None
    for form in HALF:
        near = np.asarray(round_to(w, form), dtype=np.float64)
        if not _lies_on(w, near, unit_roundoff(form)):
            continue
        meant, base, scaling = formula(facets, encoding, near, form)
        if meant is None or _within_float32(near, meant, base) or _lies_on(w, meant, unit_roundoff(form)):
            continue
        return Rounded(near, meant, base, form, _name(encoding), scaling=scaling)
    return None


def _lies_on(w: Floats, near: Floats, roundoff: float) -> bool:
    """Whether every frequency that was measured well enough lies on ``near``, and enough of them do."""
    telling = roundoff * w * NEAR > MEASURED_NOISE
    off = np.abs(w - near) > NEAR * roundoff * w + MEASURED_NOISE
    return int(telling.sum()) >= ENOUGH and not bool(off[telling].any())


def _finding(facets: Facets, encoding: Rotary | Sinusoidal, found: Rounded) -> Finding:
    last = max(facets.seq_len - 1, 1)
    error = _error(found, last)
    module, frame = _angles.spot(facets, encoding)
    name = f"{found.name} " if found.name else ""
    name = f"behind {name}" if name and encoding.factor is None else name
    bound = "" if found.meant is not None else "up to "
    are = f"are cast to {found.form} before the product" if found.cast else f"hold {found.form} numbers"
    return Finding(
        message=(
            f"The frequencies {name}{are}: the angle at position {last:,} is off by {bound}{error:.3g} rad."
        ),
        effect=_effect(found, last, error) + _how(facets, encoding, found),
        where=Where(
            module=module or (encoding.modules[0] if encoding.modules else ""),
            encoding=encoding.id,
            file=frame.file if frame is not None else encoding.source_file,
            line=frame.line if frame is not None else encoding.source_line,
        ),
        evidence=Evidence(
            measured=error,
            expected=0.0,
            limit=_limit(found, last),
            unit="rad",
            seq_len=facets.seq_len,
        ),
        fix=Fix(_advice(encoding, found)),
        scheme=encoding.scheme,
    )


def _error(found: Rounded, position: int) -> float:
    """Radians at ``position``: against the formula, or the bound u m w where there is none."""
    if found.meant is not None:
        return phase_error(found.used, found.meant, position)
    return float(unit_roundoff(found.form) * position * np.abs(found.used).max())


def _limit(found: Rounded, position: int) -> float:
    """Radians that float32 frequencies may be off by."""
    w = found.meant if found.meant is not None else found.used
    allowed = frequency_tolerance(max(found.base or USUAL_BASE, 2.0)) * position * float(np.abs(w).max())
    return float(f"{allowed:.3g}")


def _effect(found: Rounded, last: int, error: float) -> str:
    first = math.ceil(NOTICED / (_error(found, 1) or 1e-30))
    text = f"At {last + 1:,} tokens far tokens are turned by {error:.3g} rad too much or too little"
    if first <= last:
        text += f"; the error passes {NOTICED} rad at position {first:,}"
    return text + ". Nothing fails. A later .float() does not restore the digits."


def _how(facets: Facets, encoding: Rotary | Sinusoidal, found: Rounded) -> str:
    """How it came, where the tensors of the model tell it."""
    told = (
        "" if found.cast or encoding.origin != "trace" else _buffers.how(facets, encoding.factor, found.form)
    )
    return f" {told}" if told else ""


def _advice(encoding: Rotary | Sinusoidal, found: Rounded) -> str:
    name = found.name or "the frequencies"
    rebuilt = f": {written(found)}" if found.base is not None else ""
    if encoding.origin == "tensors" and encoding.factor is not None:
        return f"Write {name} to the file in float32, or leave it out where the model computes it{rebuilt}."
    if encoding.factor is None:
        return f"Build {name} again from float32 frequencies{rebuilt}; cast only the finished table."
    if found.cast:
        return f"Keep {name} in float32 up to the angle: cast cos and sin, not the frequencies{rebuilt}."
    return f"Keep {name} in float32 through every cast, or recompute it after the cast{rebuilt}."


def written(found: Rounded) -> str:
    """The frequencies as one line of PyTorch, in float32."""
    base = f"{found.base:.17g}"
    width = 2 * found.used.size
    then = f", then the {found.scaling} scaling" if found.scaling != "default" else ""
    return f"1.0 / {base} ** (torch.arange(0, {width}, 2, dtype=torch.float32) / {width}){then}"
