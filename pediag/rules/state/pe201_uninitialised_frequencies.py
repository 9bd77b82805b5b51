"""The frequencies of a rotation were never filled in, or hold garbage.

## What it does

Looks at the frequencies of every rotation, at those of products that look like one and are none, and at
tables that enter q and k. Fires on values that are not finite, on frequencies that are all zero (nothing
turns) or all equal (an exponent divided as whole numbers; with a declared base that is PE202's), on a table of
complex zeros (every product is 0), and on values outside (0, 1] or not falling that no formula explains.

## Why it matters

Rotary buffers are usually not saved. A model built on the meta device and then materialised with ``to_empty``
has left-over memory in them unless something computes them again; nothing raises, and a trained model starts
at the loss of a random one.

## What is checked

For w as the model holds it, pair by pair: finite; ``0 < w_i <= 1`` and ``w_{i+1} <= w_i``, unless a
published formula (plain, linear, NTK, YaRN, Llama 3, proportional) or the scaling that the config declares
gives these numbers. Allowed besides: zeros at the tail (proportional rotary), a first value up to 4 (short
factors of LongRoPE below 1), evenly spaced frequencies (rotary for pixels), trained frequencies. Not
allowed: a value that is positive and below 1e-20, which no base gives and left-over memory often is.

Where nothing can be run, stored tensors are judged: a list of which a formula gives more than half, for entries
that are not finite, zero, negative or end the fall; tables of cosines and sines, for values that are none. Stored
tensors that the model does not read are a note, since another runtime may.

## Known limits

Left-over memory that happens to fall within (0, 1] looks like learned frequencies and passes. Finished tables
show frequencies only modulo a turn. Frequencies that are a wrong but sound formula are PE202. A stored list that is
garbage as a whole cannot be told from any other list by its values, and is silent.

## Fix

Compute the buffer again after the model is materialised (in ``_init_weights`` or ``reset_parameters``).

## References

- huggingface/transformers 45902; pytorch/torchtitan 3772, 4783; macwiatrak/Bacformer 33.
- ReaLLMASIC/ReaLLM-Forge 35 (the exponent is zero for every pair).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.rules import _angles
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule
from pediag.rules.state import _axes, _still, _stored
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.recover import identify

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings import Rotary
    from pediag.trace import Frame, Node, Site, Trace

    Floats = NDArray[np.float64]

USUAL_BASE = 10000.0
"""Base of the expected value where neither the config nor the numbers give one (Su et al.)."""

SMALLEST = 1e-20
"""Radians per token; published bases end at 1e9, so no formula gives less."""

SLACK = 1e-4
"""Relative rise from one pair to the next that rounding explains, half precision apart."""

SURE = 4
"""Measured pairs from which on a formula that gives them says something: two or three always have one."""

_ROTARY_KINDS = frozenset(("rotary", "bilinear", "opaque"))


@dataclass(frozen=True, slots=True)
class Bad:
    """The first offending value of frequencies (r/2,) and what is wrong with it."""

    index: int
    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Suspect:
    """Numbers under suspicion, where they apply and which buffer holds them. ``table`` is a finished
    table.
    """

    bad: Bad
    pairs: int
    module: str
    frame: Frame | None
    name: str
    encoding: str = ""
    modules: tuple[str, ...] = ()
    table: bool = False


@rule(
    code="PE201",
    name="uninitialised-frequencies",
    severity="error",
    basis="field report",
    needs=("trace",),
    instead=("tensors",),
    references=("transformers issue 45902", "torchtitan issue 3772"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each buffer of frequencies that holds garbage."""
    found = list(_of_stored(facets))
    yield from found
    trace = facets.structural
    if trace is None:
        if not found and not _stored.rotations(facets.encodings):
            raise NotApplicable("no stored tensor holds rotary frequencies or their cosines and sines")
        return
    looked = _Looked(facets, trace)
    merged: dict[object, Suspect] = {}
    for suspect in looked.suspects():
        place = (suspect.frame.file, suspect.frame.line) if suspect.frame is not None else suspect.name
        key = (place, suspect.bad.why, repr(suspect.bad.value))
        known = merged.setdefault(key, suspect)
        merged[key] = replace(known, modules=tuple(dict.fromkeys([*known.modules, *suspect.modules])))
    for suspect in merged.values():
        yield _finding(facets, suspect)
    if not merged and not found and not looked.judged:
        if looked.unknown:
            raise CouldNotCheck(f"the frequencies have no numbers here: {looked.unknown}")
        raise NotApplicable("the model has no rotary encoding")


def _of_stored(facets: Facets) -> Iterator[Finding]:
    """What is wrong with tensors of a file, where nothing runs or the model that runs does not read them."""
    for encodings, unread in ((facets.encodings, False), (facets.unread, True)):
        for encoding in _stored.rotations(encodings):
            for hole in _stored.holes(facets, encoding):
                yield _stored.finding(facets, encoding, hole, unread=unread)


class _Looked:
    """All places of one trace where frequencies may be."""

    def __init__(self, facets: Facets, trace: Trace) -> None:
        self.facets = facets
        self.trace = trace
        self.judged = 0
        self.unknown = ""
        self._known: dict[Node, Bad | None] = {}

    def suspects(self) -> Iterator[Suspect]:
        """Everything that is wrong, in the order it is met."""
        from pediag.encodings import Rotary

        known: set[int] = set()
        for encoding in self.facets.encodings:
            if isinstance(encoding, Rotary):
                known.update(id(site) for site in encoding.sites)
                yield from self._of_rotary(encoding)
        for site in self.trace.graph.sites:
            if site.kind in _ROTARY_KINDS and id(site) not in known:
                yield from self._of_site(site)
        yield from self._still()

    def _of_rotary(self, encoding: Rotary) -> Iterator[Suspect]:
        self.judged += 1
        module, frame = _angles.spot(self.facets, encoding)
        factor = encoding.factor
        numbers = _angles.factor_of(self.trace, factor)
        modules = tuple(encoding.modules)
        if numbers is not None and factor is not None:
            bad = self._fault(factor, single(numbers))
            sound = encoding.frequencies.size >= SURE and _formula(encoding.frequencies, self.facets)
            if bad is not None and not sound:
                pairs = single(numbers).size
                yield Suspect(bad, pairs, module, frame, _name(factor), encoding.id, modules)
            return
        name = _name(encoding.table.leaf) if encoding.table is not None else ""
        bad = self._of_table(encoding.table.leaf) if encoding.table is not None else None
        if bad is None and encoding.even:
            # Angles of rows and columns, or of times, are no multiples of the place in the text.
            bad = fault(encoding.frequencies, self.facets, trained=False)
        if bad is not None:
            yield Suspect(
                bad, encoding.frequencies.size, module, frame, name, encoding.id, modules, table=True
            )

    def _fault(self, factor: Node, numbers: Floats) -> Bad | None:
        """:func:`fault` of a factor, judged once however many sites it turns."""
        if factor not in self._known:
            self._known[factor] = fault(numbers, self.facets, factor.trainable)
        return self._known[factor]

    def _of_site(self, site: Site) -> Iterator[Suspect]:
        """A product that is no rotation: by the frequencies in its program, else by the table it reads."""
        from pediag.encodings import program

        for node in site.position:
            phase = program.phase(node)
            factor = program.frequency_factor(phase) if phase is not None else None
            numbers = _angles.factor_of(self.trace, factor)
            if numbers is not None and factor is not None:
                self.judged += 1
                bad = self._fault(factor, single(numbers))
                product = _angles.product_of(phase, factor) or site.result
                frame = product.frame or site.frame
                if bad is not None:
                    yield self._suspect(bad, single(numbers).size, product, frame, _name(factor), site)
            elif site.kind == "rotary" and phase is None:
                yield from self._of_plain_table(site, node)

    def _of_plain_table(self, site: Site, node: Node) -> Iterator[Suspect]:
        leaf = _table_of(node)
        bad = self._of_table(leaf) if leaf is not None and not leaf.trainable else None
        if bad is not None and leaf is not None:
            yield self._suspect(bad, leaf.shape[-1], site.result, site.frame, _name(leaf), site, table=True)

    def _suspect(
        self,
        bad: Bad,
        pairs: int,
        node: Node,
        frame: Frame | None,
        name: str,
        site: Site,
        *,
        table: bool = False,
    ) -> Suspect:
        owner = next((item for item in self.facets.encodings if site in item.sites), None)
        modules = tuple(owner.modules) if owner is not None else (site.module,)
        return Suspect(
            bad, pairs, node.module or site.module, frame, name, owner.id if owner else "", modules, table
        )

    def _of_table(self, leaf: Node) -> Bad | None:
        """A value in a finished table that is no cosine or sine; None when there is none or it is unknown."""
        import torch

        from pediag.trace import Away, Unavailable

        try:
            value = self.trace.value(leaf)
        except Unavailable as reason:
            self.unknown = str(reason) if isinstance(reason, Away) else f"{reason}; give the weights"
            return None
        if not (value.is_floating_point() or value.is_complex()):
            return None
        wide = torch.complex64 if value.is_complex() else torch.float32
        size = np.abs(value.to(wide).flatten().numpy())
        wrong = ~np.isfinite(size) | (size > _stored.ABSURD)
        if not wrong.any():
            return None
        index = int(wrong.argmax())
        kind = "is not finite" if not np.isfinite(size[index]) else "is no cosine or sine"
        return Bad(index, float(size[index]), kind)

    # -- nothing turns --------------------------------------------------------------------------------------

    def _still(self) -> Iterator[Suspect]:
        """Products with cosines and sines that do not move: every frequency is zero, or none is a number."""
        from pediag.encodings import program

        seen: dict[object, dict[float, Site]] = {}
        for site in self.trace.graph.constant_sites:
            node = site.position[0]
            phase = program.phase(node)
            factor = program.frequency_factor(phase) if phase is not None else None
            numbers = _angles.factor_of(self.trace, factor)
            if numbers is not None and factor is not None and not _turns(numbers):
                bad = fault(single(numbers), self.facets, trained=False)
                product = _angles.product_of(phase, factor) or node
                if bad is not None:
                    frame = product.frame or site.frame
                    yield self._suspect(bad, single(numbers).size, product, frame, _name(factor), site)
            elif phase is None:
                whole = self._whole(node)
                if whole is not None:
                    seen.setdefault((site.module, node.shape), {})[whole] = site
        for found in seen.values():
            if 0.0 not in found:
                one = found.get(1.0)
                if one is not None and _still.turns_nothing(self.trace, one):
                    bad = Bad(0, 1.0, "is 1, as is every complex number of the table: nothing turns")
                    pairs = one.position[0].shape[-1]
                    yield self._suspect(bad, pairs, one.result, one.frame, "", one, table=True)
                continue
            site = found[0.0]
            leaf = _table_of(site.position[0])
            if not (set(found) == {0.0, 1.0} or _still.annuls(site, leaf)):
                continue
            what = "is 0 where sines should be, and every cosine is 1: nothing turns"
            bad = Bad(0, 0.0, what if len(found) > 1 else "is 0, as is all of the table: every product is 0")
            name = _name(leaf) if leaf is not None else ""
            yield self._suspect(
                bad, site.position[0].shape[-1], site.result, site.frame, name, site, table=True
            )

    def _whole(self, node: Node) -> float | None:
        """The one number that a per-token table is filled with; None when it is not."""
        from pediag.trace import Unavailable

        if not any(size in self.trace.lengths.sequence for size in node.shape):
            return None
        try:
            value = self.trace.value(node)
        except Unavailable:
            return None
        first = value.flatten()[0]
        if not (value.is_floating_point() or value.is_complex()) or not bool((value == first).all()):
            return None
        return float(first.real) if float(first.imag if value.is_complex() else 0.0) == 0 else None


def _turns(numbers: Floats) -> bool:
    """Whether some frequency is a number other than zero."""
    return bool((np.isfinite(numbers) & (numbers != 0)).any())


def single(numbers: Floats) -> Floats:
    """Frequencies once per pair: the first half or every second where the factor holds each of them twice."""
    half = numbers.size // 2
    if not numbers.any():
        return numbers
    several = np.unique(numbers).size > 1
    if several and numbers.size >= 4 and numbers.size % 2 == 0:
        if np.array_equal(numbers[:half], numbers[half:], equal_nan=True):
            return numbers[:half]
        if np.array_equal(numbers[::2], numbers[1::2], equal_nan=True):
            return numbers[::2]
    return numbers


def fault(w: Floats, facets: Facets, trained: bool) -> Bad | None:
    """The first value of frequencies (r/2,), radians per token, that no sound ones have; None when all are
    sound.
    """
    if not w.size:
        return None
    if not np.isfinite(w).all():
        index = int((~np.isfinite(w)).argmax())
        return Bad(index, float(w[index]), "is not finite")
    if not w.any():
        return Bad(0, 0.0, "is zero, as are all of them: nothing turns")
    w = -w if (w <= 0).all() else w
    equal = not trained and w.size >= SURE and (w == w[0]).all() and w[0] >= SMALLEST
    if equal and _angles.declared(facets, 2 * w.size) is None:
        return Bad(1, float(w[1]), "is the one before, and so are all of them: every pair turns alike")
    if trained or _evenly_spaced(w) or _axes.any_layout(w, lambda item: _formula(item, facets)):
        return None
    return _unsound(w[: int(np.flatnonzero(w)[-1]) + 1])


def _unsound(w: Floats) -> Bad | None:
    """The first of finite frequencies (P,) that is out of range or rises."""
    outside = (w <= 0) | (w > max(_angles.LARGEST, w[0]))
    outside[0] |= w[0] > _angles.LARGEST
    rises = np.diff(w, prepend=w[0]) > SLACK * np.roll(w, 1)
    wrong = outside | (w < SMALLEST) | rises
    if not wrong.any():
        return None
    index = int(wrong.argmax())
    small = "is smaller than any base gives" if w[index] < SMALLEST else "is larger than the one before"
    return Bad(index, float(w[index]), "is outside (0, 1]" if outside[index] else small)


def _formula(w: Floats, facets: Facets) -> bool:
    """Whether a published formula or the declared scaling gives these numbers."""
    if not np.isfinite(w).all() or not w.any():
        return False
    found = identify(np.abs(w))
    sane = found.known and w[0] > SMALLEST and found.base is not None and float(w.max()) <= _angles.LARGEST
    return sane or _angles.declared(facets, 2 * w.size, w) is not None


def _evenly_spaced(w: Floats) -> bool:
    """Pixel frequencies are a line (Lang et al.; rotary for images), which left-over memory is not."""
    steps = np.diff(w)
    return w.size >= 3 and bool((w > 0).all() and np.allclose(steps, steps[0], rtol=1e-3) and steps[0] != 0)


def _table_of(node: Node) -> Node | None:
    """The stored tensor that a value is a view, slice or row of."""
    from pediag.encodings import program

    current: Node | None = node
    while current is not None:
        if program.is_stored(current):
            return current
        name, args, _ = program.call(current)
        first = args[0] if args and isinstance(args[0], type(node)) else None
        current = first if name in program.LOOKUPS | program.SLICES else program.carrier(current, below=True)
    return None


def _name(node: Node) -> str:
    names = _angles.names_of(node)
    return names[0] if names else ""


# -- the finding --------------------------------------------------------------------------------------------


def _finding(facets: Facets, suspect: Suspect) -> Finding:
    expected = _expected(facets, suspect)
    bad = suspect.bad
    shared = _layers(suspect.modules)
    kind = "a table" if suspect.table else "frequencies"
    return Finding(
        message=f"{_what(suspect)} = {bad.value:.6g} {bad.why}{_in(shared)}.",
        effect=_effect(bad, facets.seq_len),
        where=Where(
            module=suspect.module or (suspect.modules[0] if suspect.modules else ""),
            encoding=suspect.encoding,
            file=suspect.frame.file if suspect.frame is not None else None,
            line=suspect.frame.line if suspect.frame is not None else None,
        ),
        evidence=Evidence(
            measured=_number(bad.value),
            expected=expected,
            limit=1.0,
            unit="rad/token" if not suspect.table or expected is not None else "",
            seq_len=facets.seq_len,
        ),
        fix=Fix(_advice(facets, suspect, kind)),
        scheme="rotary",
    )


def _what(suspect: Suspect) -> str:
    index, name = suspect.bad.index, suspect.name
    if name and not suspect.table:
        return f"{name}[{index}]"
    return f"Value {index} of {name or 'the frequencies'}"


def _effect(bad: Bad, seq_len: int) -> str:
    if not np.isfinite(bad.value):
        return "Every score that it touches is not a number, and no output is one."
    if "alike" in bad.why:
        return (
            f"All channels repeat after {2 * np.pi / abs(bad.value):,.0f} tokens: of {seq_len:,} tokens those so far "
            "apart look alike to every pair, and nothing raises."
        )
    still = "nothing turns" in bad.why
    what = "The rotation is the identity." if still else "The angles follow left-over memory."
    what = "Queries and keys are multiplied by 0." if "product is 0" in bad.why else what
    return (
        f"{what} The {seq_len:,} tokens have no order by this encoding; nothing raises, and a trained model "
        "answers like a random one."
    )


def _number(value: float) -> Any:
    return float(value) if np.isfinite(value) else str(value)


def _expected(facets: Facets, suspect: Suspect) -> float | None:
    """The value that the nearest formula has there: declared base and scaling, else base 10000."""
    index, pairs = suspect.bad.index, suspect.pairs
    if suspect.table and index >= pairs:
        return None
    entry = _angles.declared(facets, 2 * pairs)
    w = entry.frequencies if entry is not None else inverse_frequencies(USUAL_BASE, 2 * pairs)
    return float(w[index]) if index < w.size else None


def _advice(facets: Facets, suspect: Suspect, kind: str) -> str:
    name = suspect.name or f"the {kind}"
    width = 2 * suspect.pairs
    entry = _angles.declared(facets, width) if not suspect.table else None
    base = f"{entry.base:.10g}" if entry is not None else "base"
    if suspect.table:
        return f"Compute {name} again after the model is materialised, from frequencies that fall from 1."
    if "alike" in suspect.bad.why:
        return f"Divide by a float: 1.0 / {base} ** (torch.arange(0, {width}, 2, dtype=torch.float32) / {width})."
    return (
        f"Compute {name} again after the model is materialised (_init_weights or reset_parameters): "
        f"1.0 / {base} ** (torch.arange(0, {width}, 2, dtype=torch.float32) / {width})."
    )


def _layers(modules: tuple[str, ...]) -> str:
    from pediag.encodings.grouping import layers

    return layers(modules)


def _in(shared: str) -> str:
    return f" in {shared}" if shared.startswith("layers") else ""
