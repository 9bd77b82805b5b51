"""What a finding calls the places of a model that reads images alone: patches, as it has no tokens."""

from __future__ import annotations

import re
from dataclasses import replace

from pediag.rules.finding import Finding
from pediag.rules.rule import Facets

# Axes of a batch of images; of sequences it has three at most.
_AXES = 4
_TOKEN = re.compile(r"\b(?P<first>[Tt])oken(?P<many>s?)\b")


def worded(finding: Finding, facets: Facets) -> Finding:
    """``finding`` with patches for tokens in its effect, where the model reads images alone."""
    key = "of images alone"
    if key not in facets.shared:
        facets.shared[key] = _of_images(facets)
    return replace(finding, effect=_TOKEN.sub(_patch, finding.effect)) if facets.shared[key] else finding


def _patch(token: re.Match[str]) -> str:
    first = "P" if token["first"] == "T" else "p"
    return f"{first}atch{'es' if token['many'] else ''}"


def _of_images(facets: Facets) -> bool:
    """Whether all that the model is fed are images, and the length is the number of its patches."""
    fed = getattr(facets.structural, "fed", None)
    if fed is None or facets.structural is None:
        return False
    from pediag.trace.beside import fixed_places

    content = [item for item in fed.inputs() if not item.literal and item.role == "content"]
    images = [item for item in content if len(item.shape(facets.structural.sizes)) >= _AXES]
    return len(images) == len(content) > 0 and fixed_places(facets.structural) == facets.seq_len
