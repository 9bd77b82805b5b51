"""Recognises terms of content and distance in scores: Transformer-XL, XLNet, conformers, DeBERTa, skewed products."""

from __future__ import annotations

from pediag.encodings.additive import attach
from pediag.encodings.model import ContentRelative, Encoding
from pediag.encodings.program import call, leaf_names, phase
from pediag.encodings.relative import by_offset, reads
from pediag.encodings.scores import Columns, Reader, all_scores, candidates
from pediag.trace.graph import Node, Provenance, Site
from pediag.trace.session import Trace


def find(trace: Trace, claimed: set[int]) -> list[Encoding]:
    """One encoding per product of content with rows of which each query and key is given one, added to the scores.

    Adds the ids of the sites it explains to ``claimed``. A bias made by looking rows up first is none of these.
    """
    if not any(site.kind in ("bilinear", "lookup") and id(site) not in claimed for site in trace.graph.sites):
        return []
    reader = Reader(trace)
    found: list[Encoding] = []
    for scores in all_scores(trace):
        for term, sites in candidates(scores):
            free = [site for site in sites if id(site) not in claimed]
            if any(
                site.kind == "bilinear" and any(reads(trace, node)) for site in free for node in site.position
            ):
                continue
            columns = reader.columns(scores, term) if free else None
            if columns is not None and _along_rows(term, columns):
                found.append(_term(term, columns, free))
                claimed.update(id(site) for site in free)
    return found


def _along_rows(term: Node, columns: Columns) -> bool:
    """Whether more than one row is read: one and the same for all is no position."""
    shown = columns.rows[columns.rows >= 0]
    return bool(shown.size and shown.min() < shown.max())


def _term(term: Node, columns: Columns, sites: list[Site]) -> ContentRelative:
    table = _table(term)
    fixed = table is not None and phase(table) is not None
    offsets = by_offset(columns.rows)
    kind = "sinusoidal" if fixed else "trained"
    encoding = ContentRelative(
        buckets=offsets, rows=columns.rows, strayed=columns.strayed, side=columns.side, node=table
    )
    by = "distance" if offsets else "query and key"
    encoding.parameters = {"rows": columns.count, "side": columns.side, "by": by, "kind": kind}
    if offsets and len(set(offsets.values())) < len(offsets):
        encoding.parameters["shared"] = True
    encoding.title = f"{columns.side} times {kind} rows by {by}, {columns.count:,} rows"
    encoding.leaves = leaf_names(table) if table is not None else []
    for site in sites:
        attach(encoding, site)
    return encoding


def _table(term: Node) -> Node | None:
    """The operand of a product that is no content."""
    operands = [item for item in call(term)[1] if isinstance(item, Node)]
    return next((item for item in operands if item.provenance is not Provenance.CONTENT), None)


__all__ = ["find"]
