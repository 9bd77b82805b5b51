"""The same input gets other positions after a longer one was seen.

## What it does

Runs the model on a short input, then on longer ones, then on the short one again, in one go, and compares what
positions enter with. Fires when the second short pass has other numbers than the first: a table that grew and stays
grown, one that was rebuilt with other frequencies or in another dtype, an offset that an earlier call left behind.
Fires too when a longer input is refused after the short one, though the model as it came takes it: a table that was
made for the first input and never again.

## Why it matters

An answer then depends on who asked before. Nothing fails; the fault appears in a server after hours and goes away
when the model is loaded again.

## What is checked

With P(x) the values with which positions enter for the input x, as the model computes them:

P(short) = P(short) after P(longer), max |difference| <= 1e-6 of the largest value

The longer inputs have the length asked about and twice that length, where the model takes them. The evidence is the
largest change of such a value.

## Known limits

Only the first layers of the longer inputs are run. Models whose inputs are of one size, such as images, are not judged.
What a model keeps outside of its modules and of the Python modules that it is written in is not put back between
checks, and not judged. A model that goes on from call to call with a cache of its own, whether asked to or not, could
not be checked. Dynamic scaling that falls back for short inputs, as in the transformers library, is silent.

## Fix

Keep the original frequencies and rebuild from them when the length falls back; or choose the table once, when the
model is built. Compute what is rebuilt in float32.

## References

- huggingface/transformers#25306, fixed in #27033: a long request changes later short answers (dynamic NTK).
- huggingface/transformers#31228: an input of exactly the greatest length has the table rebuilt, which then stays.
- huggingface/transformers#36009: an offset of the previous call is used again.
- huggingface/transformers#25681: a table rebuilt in the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import line_of
from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Site
    from pediag.trace.failures import Failure
    from pediag.trace.steps import History

SAME = 1e-6
"""Share of the largest value: recomputing in float32 gives equal bits, another table or dtype 1e-3 and more."""


@rule(
    code="PE705",
    name="history-dependent",
    severity="error",
    basis="theorem",
    needs=("trace", "steps"),
    references=(
        "huggingface/transformers#25306",
        "huggingface/transformers#31228",
        "huggingface/transformers#36009",
    ),
)
def check(facets: Facets) -> Iterator[Finding]:
    """Yield a finding per line at which a short input gets other positions after a longer one."""
    from pediag.trace.beside import follows_length
    from pediag.trace.steps import Unrunnable

    assert facets.steps is not None
    if facets.structural is not None and not facets.structural.graph.sites:
        raise NotApplicable("no position enters the model")
    if facets.structural is not None and not (
        facets.structural.fed.given or follows_length(facets.structural.fed)
    ):
        raise NotApplicable("the input is of one size, such as an image: there is no longer one")
    try:
        history = facets.steps.history(_longer(facets))
    except Unrunnable as reason:
        raise CouldNotCheck(str(reason)) from None
    if history.rows.remembers(history.after):
        raise CouldNotCheck(
            "the model goes on from call to call with a cache of its own: check it with that switched off"
        )
    if history.refused is not None and history.refused.failure is not None:
        yield _refused(facets, history, history.refused.tokens, history.refused.failure)
    found: dict[object, tuple[Site, float]] = {}
    for before, after in _pairs(history):
        changed = _changed(history, before, after)
        owner = _owner(facets, after)
        cause = owner.id if owner is not None else (after.module, after.frame)
        first, largest = found.get(cause, (after, 0.0))
        found[cause] = (first if largest or not changed else after), max(largest, changed)
    for site, changed in found.values():
        if changed > 0:
            yield _finding(facets, history, site, changed)


def _longer(facets: Facets) -> tuple[int, ...]:
    """The length asked about, and twice that where no learned table ends before."""
    rows = [item.parameters.get("rows") for item in facets.encodings if item.scheme == "learned"]
    ends = min((count for count in rows if isinstance(count, int)), default=2 * facets.seq_len)
    return (facets.seq_len, 2 * facets.seq_len) if ends >= 2 * facets.seq_len else (facets.seq_len,)


def _owner(facets: Facets, site: Site) -> Encoding | None:
    """The encoding that a join is of."""
    kinds = {"rotary": ("rotary",), "additive": ("learned", "sinusoidal")}.get(site.kind, ())
    near = [item for item in facets.encodings if site.module in item.modules and item.scheme != "mask"]
    return next((item for item in near if item.scheme in kinds), next(iter(near), None))


def _pairs(history: History) -> Iterator[tuple[Site, Site]]:
    """The joins of both short passes at one place: module, operation, line, and which one of several there."""
    before = dict(_placed(history.before.trace.graph.sites))
    for place, site in _placed(history.after.trace.graph.sites):
        if place in before:
            yield before[place], site


def _placed(sites: list[Site]) -> Iterator[tuple[object, Site]]:
    seen: dict[object, int] = {}
    for site in sites:
        place = (site.module, site.op, site.frame)
        seen[place] = seen.get(place, 0) + 1
        yield (place, seen[place]), site


def _changed(history: History, before: Site, after: Site) -> float:
    """The largest change of a value with which positions enter; 0 when all are the same."""
    pairs = zip(before.position, after.position, strict=False)
    return max((_difference(history, one, other) for one, other in pairs if one is not other), default=0.0)


def _difference(history: History, one: Node, other: Node) -> float:
    found = history.values(one, other)
    if found is None:
        return 0.0
    a, b = found
    if a.shape != b.shape:
        return float("inf")
    finite = a.isfinite() & b.isfinite()
    off = (a - b)[finite].abs()
    scale = max(float(a[finite].abs().max()) if finite.any() else 0.0, 1e-30)
    largest = float(off.max()) if off.numel() else 0.0
    return largest if largest > SAME * scale else 0.0


def _refused(facets: Facets, history: History, longer: int, failure: Failure) -> Finding:
    """A longer input that stops after the short one."""
    frame, short = failure.frame, history.before.tokens
    owner = next((e for e in facets.encodings if failure.module in e.modules and e.scheme != "mask"), None)
    at = f" at {line_of(frame)}" if frame is not None else ""
    return Finding(
        message=(
            f"After an input of {short:,} tokens one of {longer:,} tokens is refused, which the model as it came "
            f"takes: {failure.message.rstrip('.')}."
        ),
        effect=(
            f"The first text decides: after one of {short:,} tokens those of up to {facets.seq_len:,} raise{at} until "
            "the model is loaded again."
        ),
        where=Where(
            failure.module,
            owner.id if owner else "",
            frame.file if frame else None,
            frame.line if frame else None,
        ),
        evidence=Evidence(short, longer, None, "tokens", longer),
        fix=Fix(
            f"Make what is kept and read{at} again when a text is longer than it was made for: compare lengths, not "
            "only whether it is there. Or build it once for the longest text."
        ),
        scheme=owner.scheme if owner is not None else "",
    )


def _finding(facets: Facets, history: History, site: Site, changed: float) -> Finding:
    frame = site.frame
    longest = max(history.longer)
    owner = next(
        (e for e in facets.encodings if site.module in e.modules and e.scheme not in ("mask",)), None
    )
    named = f" ({owner.id})" if owner is not None else ""
    unit = {"rotary": "cos or sin", "bias": "logits", "additive": "added"}.get(site.kind, "value")
    return Finding(
        message=(
            f"After an input of {longest:,} tokens, one of {history.before.tokens} tokens has other positions than "
            f"before{named}: what enters changes by up to {changed:.3g}."
        ),
        effect=(
            f"Texts of up to {facets.seq_len:,} tokens are read differently after a request of {longest:,} tokens, "
            "until the model is loaded again."
        ),
        where=Where(
            site.module,
            owner.id if owner else "",
            frame.file if frame else None,
            frame.line if frame else None,
        ),
        evidence=Evidence(changed, 0.0, SAME, unit, history.before.tokens),
        fix=Fix(
            "Keep what the table is made from as it was built, and make the table for a short input from that again; "
            "or build it once, before the first input."
        ),
        scheme=owner.scheme if owner is not None else "",
    )
