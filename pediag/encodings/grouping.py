"""Equal encodings of equal layers, described once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from pediag.encodings.model import Encoding, Rotary, Sinusoidal

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_PREFIXES = {
    "rotary": "rope",
    "sinusoidal": "sinusoid",
    "t5-buckets": "t5",
    "relative-table": "relative",
    "content-relative": "term",
    "unrecognised": "signal",
}


def merge(encodings: Iterable[Encoding]) -> list[Encoding]:
    """Join encodings of one scheme with the same parameters, name the rest, and say which layers use each."""
    merged: dict[object, Encoding] = {}
    for encoding in encodings:
        known = merged.setdefault(_identity(encoding), encoding)
        if known is not encoding:
            known.sites += [site for site in encoding.sites if site not in known.sites]
            known.leaves += [leaf for leaf in encoding.leaves if leaf not in known.leaves]
            if isinstance(known, Rotary) and isinstance(encoding, Rotary):
                known.applied_to = tuple(sorted({*known.applied_to, *encoding.applied_to}, key="qkv".index))
    ordered = sorted(merged.values(), key=_first_site)
    number(ordered)
    for encoding in ordered:
        encoding.modules = list(dict.fromkeys([*encoding.modules, *(site.module for site in encoding.sites)]))
        encoding.layers = layers(encoding.modules)
        if isinstance(encoding, (Rotary, Sinusoidal)) and encoding.table is not None:
            encoding.parameters["rows"] = encoding.table.rows
        if isinstance(encoding, Rotary) and encoding.origin == "trace":
            encoding.parameters["applied_to"] = list(encoding.applied_to)
            encoding.title = rotary_title(encoding)
    return ordered


def number(encodings: Iterable[Encoding]) -> None:
    """Give each encoding its name within the report, such as ``rope-1``."""
    counts: dict[str, int] = {}
    for encoding in encodings:
        prefix = _PREFIXES.get(encoding.scheme, encoding.scheme)
        counts[prefix] = counts.get(prefix, 0) + 1
        encoding.id = f"{prefix}-{counts[prefix]}"


def rotary_title(encoding: Rotary) -> str:
    """Such as "rotary, base 500000, llama3 scaling, width 128 of 128, half pairing, on q and k"."""
    parameters = encoding.parameters
    base, kind = parameters["base"], parameters["scaling"]["rope_type"]
    parts = ["rotary", f"base {base:.10g}" if base else "no base fits"]
    if kind != "default":
        parts.append(f"{kind} scaling")
    parts.append(f"width {encoding.width}" + (f" of {encoding.head_width}" if encoding.head_width else ""))
    if encoding.pairing:
        parts.append(f"{encoding.pairing} pairing")
    if encoding.applied_to:
        parts.append(f"on {' and '.join(encoding.applied_to)}")
    return ", ".join(parts)


def _first_site(encoding: Encoding) -> int:
    return min((site.result.index for site in encoding.sites), default=0)


def _identity(encoding: Encoding) -> object:
    """Scheme, parameters and the part of the model (encoder, decoder) before the layer number."""
    modules = [site.module for site in encoding.sites] or encoding.modules or [""]
    part = _LAYER.split(modules[0])[0] if _LAYER.search(modules[0]) else ""
    rows = getattr(encoding, "buckets", None)
    return (
        encoding.scheme,
        getattr(encoding, "kind", ""),
        json.dumps(encoding.parameters, sort_keys=True, default=str),
        part,
        tuple(sorted(rows.items())) if rows else (),
    )


def layers(modules: Iterable[str]) -> str:
    """The layers that module paths belong to: "layers 0-79", "layers 0-2, 4-6", or nothing."""
    numbers = sorted({int(found.group(1)) for module in modules if (found := _LAYER.search(module))})
    if not numbers:
        return ""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"
