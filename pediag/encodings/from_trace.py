"""From the sites of a trace to the encodings that they are."""

from __future__ import annotations

import torch

from pediag.encodings import additive, axial, bias, content, decay, layered, misplaced, rotary, temperature
from pediag.encodings.grouping import merge
from pediag.encodings.model import Encoding, Unrecognised
from pediag.encodings.regions import PLACING
from pediag.trace import Site, Trace

_UNREMARKABLE = frozenset(("lookup",))
_KIND_NAMES = {"rotary": "elementwise product"}


def read(trace: Trace) -> list[Encoding]:
    """Every encoding of a structural trace, masks included, equal layers joined, in order."""
    claimed: set[int] = set()
    found: list[Encoding] = []
    found += rotary.find(trace, claimed)
    found += content.find(trace, claimed)
    found += axial.find(trace)
    found += decay.find(trace, claimed)
    found += bias.find(trace, claimed)
    found += temperature.find(trace, claimed)
    found += additive.find(trace, claimed)
    found += misplaced.find(trace, claimed)
    found += [
        _unrecognised(site) for site in trace.graph.sites if id(site) not in claimed and _remarkable(site)
    ]
    return merge(layered.explained(trace, found))


def _remarkable(site: Site) -> bool:
    """Picking and placing tokens by position, hiding what positions choose and masks of content are no signals."""
    if site.kind in _UNREMARKABLE or _places(site):
        return False
    return site.result.dtype != torch.bool and not additive.chooses(site)


def _places(site: Site) -> bool:
    """Whether positions only say which slots content is written into, as in a cache of its own."""
    return site.op in PLACING and not any(
        node.dtype.is_floating_point or node.dtype.is_complex for node in site.position
    )


def _unrecognised(site: Site) -> Unrecognised:
    return Unrecognised(
        kind=site.kind,
        parameters={"kind": site.kind, "operation": site.op},
        title=f"unrecognised position signal ({_KIND_NAMES.get(site.kind, site.kind)}, {site.op})",
        sites=[site],
        node=site.position[0],
        source_file=site.frame.file if site.frame else None,
        source_line=site.frame.line if site.frame else None,
    )
