"""What position ids and padding do to where tokens stand, read off passes with other batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pediag.rules.finding import Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable

if TYPE_CHECKING:
    import torch

    from pediag.encodings import Encoding
    from pediag.trace import Attention, Frame, Node, Site
    from pediag.trace.batches import Batches, Pass

ABSOLUTE = ("learned", "sinusoidal")
"""Schemes in which a token's own position is what enters, not a distance."""

_READS = frozenset(("embedding", "index", "index_select", "gather", "slice"))
_ATTENTIONS_ASKED = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an encoding first enters: its site in the structural pass, and the key of that site in other passes."""

    encoding: Encoding
    site: Site
    place: object

    @property
    def absolute(self) -> bool:
        """Whether a shift of all positions of a text changes what enters."""
        kind = getattr(self.encoding, "kind", "")
        return self.encoding.scheme in ABSOLUTE or (
            kind == "additive" and self.encoding.scheme == "unrecognised"
        )

    @property
    def frame(self) -> Frame | None:
        """The user's line that reads the row of a position, else the one where it enters."""
        return reading(self.site.position[0]) or self.site.frame

    def where(self) -> Where:
        """The place that a finding points at."""
        frame = self.frame
        file, line = (frame.file, frame.line) if frame else (None, None)
        return Where(self.site.module, self.encoding.id, file, line)

    def rows(self, there: Pass, *, prompted: bool = False) -> torch.Tensor | None:
        """Positions (texts or 1, tokens, numbers) where the encoding enters in another pass; None where unknown.

        With ``prompted`` those of a prompt that the model puts in front come first.
        """
        from pediag.trace.batches import matching

        site = matching(there, self.place, self.site)
        return there.rows(site, prompted=prompted) if site is not None and site.position else None


def batches(facets: Facets) -> Batches:
    """The passes of a model that ran. Raises CouldNotCheck where it did not."""
    if facets.batches is None:
        missing = facets.gaps.get("trace") or facets.gaps.get("target") or "the target holds no code to run"
        raise CouldNotCheck(missing)
    return facets.batches


def entries(facets: Facets) -> list[Entry]:
    """Where absolute encodings and rotations first enter, one each. Raises NotApplicable where there is neither."""
    from pediag.encodings import encodes_position

    known = facets.shared.get("entries")
    if known is None:
        plain = batches(facets).plain
        places = {id(site): place for place, site in plain.places.items()}
        known = [
            entry for encoding in encodes_position(facets.encodings) for entry in _first(encoding, places)
        ]
        facets.shared["entries"] = known
    if not known:
        raise NotApplicable(_none(facets))
    if batches(facets).plain.trace.places:
        raise NotApplicable("attention runs over a fixed number of places, which no batch moves")
    return list(known)


def _first(encoding: Encoding, places: dict[int, object]) -> Iterator[Entry]:
    for site in encoding.sites:
        entry = Entry(encoding, site, places.get(id(site)))
        if entry.place is not None and site.position and (entry.absolute or encoding.scheme == "rotary"):
            yield entry
            return


def _none(facets: Facets) -> str:
    from pediag.encodings import encodes_position

    schemes = sorted({encoding.scheme for encoding in encodes_position(facets.encodings)} - {"unrecognised"})
    if schemes:
        return f"{' and '.join(schemes)} compare distances only, which no shift of a whole text changes"
    return "no encoding of a token's own position"


def sites(entries: Iterable[Entry]) -> list[Site]:
    """The sites of entries, as a pass is asked for them."""
    return [entry.site for entry in entries]


def reading(node: Node) -> Frame | None:
    """The user's line of the last lookup or cut that a position value was read by."""
    from pediag.trace.graph import ancestors

    reads = [item for item in ancestors(node) if item.op_name in _READS and item.frame and item.moving]
    return max(reads, key=lambda item: item.index).frame if reads else None


# -- what becomes of position ids ---------------------------------------------------------------------------


def heeded(facets: Facets, entry: Entry) -> bool | None:
    """Whether ids that start again for a second text give it the rows of the first; None where that is unknown."""
    packed = ran(batches(facets).packed(sites(entries(facets))))
    return starts_again(entry.rows(packed), packed.documents) if packed is not None else None


def starts_again(rows: torch.Tensor | None, documents: tuple[int, ...]) -> bool | None:
    """Whether the second of two texts in one row stands where the first does."""
    from pediag.trace.batches import alike

    if rows is None or len(documents) != 2:
        return None
    first, second = documents
    return alike(rows[:, first:], rows[:, :second])


def ignored(facets: Facets, entry: Entry) -> bool | None:
    """Whether ids in reverse order change nothing where an encoding enters; None where that is unknown."""
    from pediag.trace.batches import alike

    turned = batches(facets).turned(sites(entries(facets)))
    if turned is None or turned.trace.failure is not None:
        # A table that ended was asked for the rows of ids, so they are not ignored.
        ended = (
            turned is not None and turned.trace.failure is not None and turned.trace.failure.table is not None
        )
        return False if ended else None
    rows, plain = entry.rows(turned), entry.rows(batches(facets).plain)
    return alike(rows, plain) if rows is not None and plain is not None else None


def ran(made: Pass | None) -> Pass | None:
    """A pass that got as far as was asked. Raises CouldNotCheck where it stopped."""
    if made is not None and made.trace.failure is not None:
        given = " and ".join(made.given) or "another batch"
        raise CouldNotCheck(f"the pass with {given} stopped: {made.trace.failure.message}")
    return made


# -- which way attention looks ------------------------------------------------------------------------------


def read_backwards(facets: Facets, entry: Entry) -> bool:
    """Whether the first attention that asks with what an encoding was joined to sees the past only."""
    from pediag.rules.reach._attention import attention_span
    from pediag.trace.graph import ancestors

    trace, joined = batches(facets).plain.trace, entry.site.result
    exact = trace.lengths.exact
    # Behind a prompt that the model puts in front, the tokens are more than were given.
    own = set(joined.shape) & set(exact) or {size for size in joined.shape if size > max(exact, default=0)}
    for attention in sorted(trace.graph.attentions, key=lambda item: item.scores.index):
        if attention.scores.index < joined.index or not own & set(attention.query.shape):
            continue
        if joined in ancestors(attention.query):
            return attention_span(facets, trace, attention).causal
    return False


def looks_back_only(facets: Facets) -> bool:
    """Whether every attention along the tokens sees the past only."""
    from pediag.rules.reach._attention import attention_span

    trace = batches(facets).plain.trace
    seen: dict[object, Attention] = {}
    for attention in trace.graph.attentions:
        seen.setdefault((attention.causal, attention.mask, attention.fused), attention)
    asked = list(seen.values())[:_ATTENTIONS_ASKED]
    return bool(asked) and all(attention_span(facets, trace, attention).causal for attention in asked)
