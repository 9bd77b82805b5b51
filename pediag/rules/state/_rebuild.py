"""Rotary frequencies as they were built beside the float64 ones that the config declares, and which serves which."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.encodings.from_config import head_and_width, scaling_of
from pediag.rules import _angles
from pediag.rules.finding import Severity, Where
from pediag.rules.numerics import pe602_frequencies_rounded as pe602
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable
from pediag.rules.state import pe201_uninitialised_frequencies as pe201
from pediag.targets.class_defaults import assumed
from pediag.targets.completed import completed
from pediag.targets.config import Config
from pediag.targets.declaration import SCALINGS, TEXT, RopeDeclaration, Said, declarations
from pediag.targets.rope_keys import OWN_BASE
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import rope_type, scaled
from pediag.theory.rounding import frequency_tolerance, unit_roundoff

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary

    Floats = NDArray[np.float64]

TABLE_ROUNDINGS = 4.0
"""Roundings of a cosine and a sine at both ends of the rows from which a frequency is read."""

WHOLE_TURNS = 1e-3
"""Radians per token by which frequencies read off angles may leave the stored ones, whole turns aside."""

NOTICED = 0.1
"""Radians at which a phase error is called noticeable: a cosine moves by as much (theorem: |d cos| <= |d phase|)."""

BY_LENGTH = frozenset(("dynamic", "longrope"))
"""Scalings whose frequencies depend on the length that is served."""


@dataclass(frozen=True, slots=True)
class Meant:
    """One reading of a declaration that a formula takes: base, type and keys of its scaling.

    ``base_at`` is the dotted key of the base, empty where only the class of the model says it. ``width`` is 0 where
    the config does not say how many channels turn.
    """

    declared: RopeDeclaration | None
    base: float
    base_at: str
    kind: str
    scaling: dict[str, Any]
    head: int = 0
    width: int = 0

    @property
    def scaling_at(self) -> str:
        """The dotted key that says the type of the scaling, else that of the base."""
        said = self.declared.type if self.declared is not None else None
        return said.path if said is not None else self.base_at

    def frequencies(self, width: int, length: float | None, **changed: Any) -> Floats | None:
        """Float64 frequencies of the pairs that turn, at a served length in tokens; None when no formula takes it."""
        return rebuilt(self.base, self._span(width), {**self.scaling, **changed}, length)

    def _span(self, width: int) -> int:
        return self.head if self.kind == "proportional" and self.head else width

    def fits(self, width: int) -> bool:
        """Whether the declared width is that of an encoding, or is not declared."""
        return self.kind == "proportional" or self.width in (0, width)


@dataclass(frozen=True, slots=True)
class Built:
    """The frequencies (r/2,) of an encoding as they are used, and how exactly they are known.

    ``lengths`` are those (tokens) of which the numbers may be; ``noise`` in radians per token is what reading them
    off a finished table leaves open; ``form`` is the format that their store rounds them to, if they are not exact.
    """

    encoding: Rotary
    w: Floats
    lengths: tuple[int, ...]
    noise: float = 0.0
    form: str = "float32"

    def allowed(self, reference: Floats, base: float) -> Floats:
        """Radians per token by which each may be off a reference (r/2,)."""
        return np.asarray(frequency_tolerance(max(base, 2.0), self.form) * np.abs(reference) + self.noise)

    def is_(self, reference: Floats | None, base: float) -> bool:
        """Whether the numbers are the given ones, as closely as they are known."""
        if reference is None or reference.shape != self.w.shape:
            return False
        return bool((np.abs(self.w - reference) <= self.allowed(reference, base)).all())


@dataclass(frozen=True, slots=True)
class Served:
    """An encoding with the declaration it was built from, and whether its frequencies are those declared."""

    built: Built
    meant: Meant
    same: bool

    def due(self) -> Floats:
        """The declared frequencies (r/2,) that are nearest to the built ones."""
        found = list(references(self.meant, self.built))
        return min(found, key=lambda reference: apart(self.built.w, reference))


def rebuilt(base: float, width: int, scaling: dict[str, Any], length: float | None) -> Floats | None:
    """The frequencies of the pairs that turn; None when the formula takes no such values."""
    try:
        w = scaled(base, width, scaling, length)
    except (TheoryError, TypeError, ValueError, OverflowError):
        return None
    return w[w > 0]


def apart(w: Floats, reference: Floats) -> float:
    """Mean distance of two lists of frequencies, in e-folds; infinite where they cannot be compared."""
    if w.shape != reference.shape or not (np.isfinite(w).all() and (w > 0).all()):
        return math.inf
    return float(np.abs(np.log(w / reference)).mean())


# -- what is declared ---------------------------------------------------------------------------------------


def meant(facets: Facets) -> list[Meant]:
    """Every reading of every declaration that a formula takes; last those that may be agreed with only.

    These have no ``declared``: bases that the class assumes, and what sections about other models declare.
    """
    if facets.config is None:
        return []
    spoken = declarations(facets.config)
    if not spoken:
        return _by_code(facets.config)
    found = [one for declared in spoken for one in _readings(declared)]
    types = {declared.layer_type for declared in spoken}
    for declared in spoken[:1]:
        own = assumed(declared.model_type)
        for layer_type, base in own.bases.items() if own is not None else ():
            if layer_type not in types:
                head, width = head_and_width(declared)
                found.append(Meant(None, float(base), "", "default", {"rope_type": "default"}, head, width))
    for part in _others(facets):
        for other in declarations(part):
            found += [replace(one, declared=None) for one in _readings(other)]
    return found


def _by_code(config: Config) -> list[Meant]:
    """The base that is written in the code of a class and that no key changes, where transformers wrote the config."""
    if "transformers_version" not in config.values:
        return []
    fixed = [one for one in completed(config) if one.kind in OWN_BASE]
    return [
        replace(meant, base_at=f"the code of {one.kind} in transformers")
        for one in fixed
        for meant in _readings(one.declared)
    ]


def _others(facets: Facets) -> Iterator[Config]:
    """The sections of a config that describe models which are not of text, each by itself."""
    for path, values in facets.config.sections():
        parts = path.split(".") if path else []
        if not all(part in TEXT for part in parts) and not any(part in SCALINGS for part in parts):
            yield Config(values)


def _readings(declared: RopeDeclaration) -> Iterator[Meant]:
    """A declaration with each base and each type that is said for it: which one counts is for other rules."""
    bases = [(said.value, said.path) for said in _said(declared, "base")]
    if not bases:
        own = assumed(declared.model_type)
        bases = [(own.bases[kind], "") for kind in (declared.layer_type, "") if own and kind in own.bases]
    keys = scaling_of(declared)
    types = [said.value for said in _said(declared, "type")] or [keys.get("rope_type", "default")]
    head, width = head_and_width(declared)
    for value, path in bases:
        for name in dict.fromkeys(item for item in types if isinstance(item, str)):
            scaling = {**keys, "rope_type": name}
            kind = _kind(scaling)
            if kind is not None and _is_base(value):
                yield Meant(declared, float(value), path, kind, scaling, head, width)


def _said(declared: RopeDeclaration, what: str) -> list[Said]:
    first = declared.base if what == "base" else declared.type
    return [*([first] if first is not None else []), *(said for name, said in declared.again if name == what)]


def _kind(scaling: dict[str, Any]) -> str | None:
    try:
        return rope_type(scaling)
    except (TheoryError, TypeError):
        return None


def _is_base(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < value < math.inf


def composite(facets: Facets) -> bool:
    """Whether the config describes other models beside that of text, whose rotations it may not declare."""
    shape = ("hidden_size", "num_attention_heads", "embed_dim", "num_heads", "depth", "d_model")
    return facets.config is not None and any(
        path and not all(part in TEXT for part in path.split(".")) and any(key in values for key in shape)
        for path, values in facets.config.sections()
    )


# -- what was built -----------------------------------------------------------------------------------------


def rotations(facets: Facets) -> list[Built]:
    """The rotations of the target with their frequencies, those left out that other rules or training explain.

    Raises NotApplicable when the config declares none, or nothing was built.
    """
    from pediag.encodings import Rotary

    if not meant(facets):
        raise NotApplicable("the config declares no rotary base or scaling that can be rebuilt")
    found = [
        item
        for item in facets.encodings
        if isinstance(item, Rotary) and item.origin != "config" and item.even
    ]
    if not found:
        if facets.structural is None and facets.tensors is None:
            raise CouldNotCheck("no rotation was built: give the model's code or a file with its frequencies")
        raise NotApplicable("no rotary frequencies were built or stored")
    return [built for item in found if (built := _built(facets, item)) is not None]


def _built(facets: Facets, encoding: Rotary) -> Built | None:
    factor = encoding.factor
    if factor is not None and factor.trainable:
        return None
    source = _source(facets, encoding)
    w = np.abs(source.frequencies if source is not None else encoding.frequencies)
    lengths = (source.trace.seq_len,) if source is not None else _lengths(facets, encoding)
    exact = source is not None or (encoding.origin == "tensors" and factor is not None)
    noise = 0.0 if exact else _noise(facets, encoding)
    if not np.isfinite(w).all() or _garbage(facets, w):
        return None
    rounded = pe602.rounded(facets, encoding)
    if rounded is None:
        return Built(encoding, w, lengths, noise)
    if rounded.meant is None:
        return Built(encoding, w, lengths, noise, rounded.form)
    return Built(encoding, np.abs(rounded.meant), lengths, noise)


def _source(facets: Facets, encoding: Rotary) -> _angles.Source | None:
    """The frequencies as the program shows them, also where the angles tell them but for whole turns."""
    if facets.structural is None or encoding.factor is None:
        return None
    found = _angles.source(facets, encoding)
    numbers = _angles.factor_of(facets.structural, encoding.factor) if found is None else None
    if numbers is None:
        return found
    w = pe201.single(numbers)
    if w.shape != encoding.frequencies.shape or not np.isfinite(w).all():
        return None
    left = np.abs(w) - np.abs(encoding.frequencies), np.abs(w) + np.abs(encoding.frequencies)
    turned = np.minimum(*(np.abs(np.angle(np.exp(1j * part))) for part in left))
    return _angles.Source(facets.structural, encoding.factor, w) if turned.max() <= WHOLE_TURNS else None


def _garbage(facets: Facets, w: Floats) -> bool:
    return pe201.fault(w, facets, trained=False) is not None


def _noise(facets: Facets, encoding: Rotary) -> float:
    """Radians per token that a frequency which was read off cosines and sines is uncertain by."""
    rows = facets.structural.seq_len if facets.structural is not None else 2
    unit = encoding.precision or unit_roundoff("float32")
    if encoding.table is not None and encoding.origin == "tensors":
        rows = min(encoding.table.rows, 128)
    return TABLE_ROUNDINGS * unit / max(rows - 1, 1)


def _lengths(facets: Facets, encoding: Rotary) -> tuple[int, ...]:
    """The lengths that a table, whose rows were all made at once, may have been made for."""
    table = encoding.table
    rows = [table.rows - table.first] if table is not None else []
    return tuple(dict.fromkeys([facets.seq_len, *rows]))


# -- which serves which -------------------------------------------------------------------------------------


def served(facets: Facets) -> list[Served]:
    """Each rotation with its declaration: the one it agrees with, else the nearest that it can be compared with.

    Where a config describes several models, a rotation that agrees with none may be another model's, and a stored
    list may turn something else: either is left out where its declaration is served by another.
    """
    spoken, built = meant(facets), rotations(facets)
    same: list[Served] = []
    other: list[Built] = []
    for item in built:
        agreeing = next((one for one in spoken if _agrees(one, item)), None)
        if agreeing is not None:
            same.append(Served(item, agreeing, True))
        else:
            other.append(item)
    taken = {id(one.meant.declared) for one in same}
    found = []
    for item in other:
        near = _nearest(spoken, item, taken)
        if near is not None and not (
            id(near.declared) in taken and (composite(facets) or item.encoding.doubt)
        ):
            found.append(Served(item, near, False))
    return [*same, *found]


def _nearest(spoken: list[Meant], item: Built, taken: set[int]) -> Meant | None:
    """The reading nearest in frequencies, of those that nothing serves yet where there are any."""
    fitting = [one for one in spoken if one.declared is not None and one.fits(item.encoding.width)]
    if item.encoding.doubt:
        fitting = [one for one in fitting if one.width]
    free = [one for one in fitting if id(one.declared) not in taken] or fitting
    distances = [
        (min((apart(item.w, ref) for ref in references(one, item)), default=math.inf), one) for one in free
    ]
    sound = [pair for pair in distances if pair[0] < math.inf]
    return min(sound, key=lambda pair: pair[0])[1] if sound else None


def _agrees(one: Meant, item: Built) -> bool:
    return any(item.is_(reference, one.base) for reference in references(one, item))


def references(one: Meant, item: Built) -> Iterator[Floats]:
    """The declared frequencies (r/2,) at each length that the numbers may be of."""
    lengths: tuple[int | None, ...] = item.lengths if one.kind in BY_LENGTH else (None,)
    for length in lengths:
        reference = one.frequencies(item.encoding.width, length)
        if reference is not None and reference.shape == item.w.shape:
            yield reference


# -- numbers of a difference --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Off:
    """How far frequencies are from those declared: the worst pair's relative error, and radians at the last token."""

    relative: float
    pair: int
    phase: float
    limit: float
    first: int | None

    def told(self, last: int) -> str:
        """Such as "relative error 0.88 at pair 31, 12.5 rad at position 8,191"."""
        share = f"relative error {self.relative:.3g} at pair {self.pair}"
        return f"{share}, {self.phase:.3g} rad at position {last:,}"


def off(facets: Facets, item: Served) -> Off:
    """The distance of the built frequencies from those that are due."""
    due, w, last = item.due(), item.built.w, max(facets.seq_len - 1, 1)
    relative = np.abs(w - due) / due
    worst, speed = int(relative.argmax()), float(np.abs(w - due).max())
    limit = float(item.built.allowed(due, item.meant.base).max()) * last
    first = math.ceil(NOTICED / speed) if speed > 0 else None
    return Off(float(relative[worst]), worst, speed * last, float(f"{limit:.3g}"), first)


# -- what is said of it -------------------------------------------------------------------------------------


def name(item: Served) -> str:
    """Which buffer holds the frequencies, with a blank before it; empty where none does."""
    encoding = item.built.encoding
    names = _angles.names_of(encoding.factor) or encoding.leaves
    return f" in {names[0]}" if names else ""


def layers(item: Served) -> str:
    """Such as " (layers 0-31)"."""
    return f" ({item.built.encoding.layers})" if item.built.encoding.layers.startswith("layers") else ""


def where(facets: Facets, item: Served) -> Where:
    """Module and line where the angles are made; of a stored list the module that its name speaks of."""
    encoding = item.built.encoding
    if encoding.origin == "tensors":
        module = encoding.leaves[0].rpartition(".")[0] if encoding.leaves else ""
        return Where(module, encoding.id, encoding.source_file, encoding.source_line)
    module, frame = _angles.spot(facets, encoding)
    return Where(
        module or (encoding.modules[0] if encoding.modules else ""),
        encoding.id,
        frame.file if frame is not None else encoding.source_file,
        frame.line if frame is not None else encoding.source_line,
    )


def severity(item: Served) -> Severity | None:
    """A warning where it is not certain that a stored list turns q and k; else the rule's own."""
    return "warning" if item.built.encoding.doubt else None


def effect(facets: Facets, item: Served, off: Off) -> str:
    """What the difference does at the length asked about."""
    text = (
        f"At {facets.seq_len:,} tokens the farthest are turned by {off.phase:.3g} rad too much or too little"
    )
    if off.first is not None and off.first < facets.seq_len:
        text += f"; the error passes {NOTICED} rad at position {off.first:,}"
    text += (
        ". Nothing raises: weights trained with the declared rotation read positions wrongly from there on."
    )
    doubt = item.built.encoding.doubt
    return f"{text} Not certain: {doubt}." if doubt else text


def place(facets: Facets, path: str) -> str:
    """``rope_scaling.rope_type (config.json:12)``; the file only where it is known."""
    config = facets.config
    line = config.line_of(path) if config is not None and path else None
    source = str(config.source).replace("\\", "/").rpartition("/")[2] if line else ""
    return f"{path} ({source}:{line})" if line else path


def advice(facets: Facets, item: Served, path: str) -> str:
    """How to build the declared frequencies, with the key that declares them."""
    one, width = item.meant, 2 * item.built.w.size
    formula = f"1.0 / {one.base:.10g} ** (torch.arange(0, {width}, 2, dtype=torch.float32) / {width})"
    then = "" if one.kind == "default" else f", then the {one.kind} scaling that is declared"
    stored = item.built.encoding.origin == "tensors"
    verb = "Write the file again with the frequencies of" if stored else "Build the frequencies from"
    return (
        f"{verb} {place(facets, path)}: {formula}{then}. If the weights were trained with the built ones, "
        "change the declaration."
    )
