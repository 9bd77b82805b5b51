"""A position table is a plain attribute: it is not moved with the model and not saved.

## What it does

Finds tensors that feed a position encoding and that their module holds neither as buffer nor as parameter: a plain
attribute, or a tensor in a list or dict. Fires when nothing in forward moves them to where the tokens are, and when
each forward takes all of them there again, whatever number of rows it reads.

## Why it matters

``model.to("cuda")``, ``.half()`` and wrappers for several devices move parameters and buffers only. The table stays
behind, and the first forward on an accelerator raises that tensors are on two devices; ``state_dict`` does not hold it.
On a CPU nothing shows.

## What is checked

Of every position value that enters content, the tensors that it is computed from: each must be registered, given, or
made in the pass itself. Bytes are (number of elements) x (bytes of one).

## Known limits

- Rows in use that forward moves in each call are PE303, which counts what crosses; a table that is kept after the move
  is fine.
- Silent where forward, or a method that it calls, assigns the attribute again (a cache that is made on demand), and
  where the module has its own ``_apply`` or ``to``. Whether such a cache looks at the device is not seen.
- Masks are not looked at, nor single numbers. A model that is built from a config without weights is not judged.

## Fix

``self.register_buffer(name, tensor, persistent=False)``: moved with the model, and not in the checkpoint.

## References

- PyTorch documentation, ``torch.nn.Module.register_buffer``; facebookresearch/fairseq 4420; lyuwenyu/RT-DETR 677.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import layers_of, place, spot, structural
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Trace

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@rule(
    code="PE206",
    name="table-not-registered",
    severity="warning",
    basis="field report",
    needs=("trace",),
    references=("PyTorch documentation, Module.register_buffer", "fairseq issue 4420"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each attribute, that of equal layers once."""
    from pediag.encodings import encodes_position

    trace = structural(facets)
    used = [item for item in encodes_position(facets.encodings) if item.origin == "trace"]
    if not used:
        raise NotApplicable("the model has no position encoding")
    moved = _moved(trace)
    groups: dict[object, list[tuple[Node, Encoding]]] = {}
    for encoding in used:
        for node in _feeding(encoding):
            name = trace.unregistered.get(node)
            if name is not None and node.numel > 1 and node not in moved:
                key = (re.sub(r"\d+", "#", name), spot(node.frame))
                if all(known is not node for known, _ in groups.get(key, [])):
                    groups.setdefault(key, []).append((node, encoding))
    for group in groups.values():
        yield _finding(facets, trace, group)


def _feeding(encoding: Encoding) -> list[Node]:
    """All that the position side of an encoding's sites is computed from, in the order it was recorded."""
    from pediag.trace.graph import ancestors

    found: set[Node] = set()
    for site in encoding.sites:
        for node in site.position:
            found |= ancestors(node)
    return sorted(found, key=lambda node: node.index)


def _moved(trace: Trace) -> set[Node]:
    """What a move inside forward keeps on the tokens' device, or takes there by the rows in use, which PE303 counts."""
    from pediag.trace.graph import ancestors

    found: set[Node] = set()
    for transfer in trace.graph.transfers:
        if transfer.kept or transfer.node.provenance.name == "POSITION":
            found |= ancestors(transfer.node)
    return found


def _fetched(trace: Trace, node: Node) -> bool:
    """Whether forward takes a whole attribute to the tokens' device each time."""
    from pediag.trace.graph import ancestors

    return any(node in ancestors(transfer.node) for transfer in trace.graph.transfers)


def _finding(facets: Facets, trace: Trace, group: list[tuple[Node, Encoding]]) -> Finding:
    node, encoding = group[0]
    names = [trace.unregistered[item] for item, _ in group]
    module, _, attribute = names[0].rpartition(".")
    size = sum(item.numel * item.dtype.itemsize for item, _ in group)
    shape = " x ".join(f"{length:,}" for length in node.shape)
    shared = f" ({layers_of(name.rpartition('.')[0] for name in names)})" if len(names) > 1 else ""
    dtype = str(node.dtype).removeprefix("torch.")
    two = "raises that tensors are on two devices"
    what = "copies all of them there again, and waits" if _fetched(trace, node) else two
    return Finding(
        message=(
            f"`{names[0]}`{shared} ({shape}, {dtype}), which {encoding.id} reads, is a plain attribute: neither "
            "buffer nor parameter."
        ),
        effect=(
            f".to(device) and .half() leave its {_bytes(size)} where and as they are: on an accelerator a forward of "
            f"{facets.seq_len:,} tokens, or of any number, {what}. state_dict() does not hold it. On a CPU nothing "
            "shows."
        ),
        where=place(module, node.frame, encoding.id),
        evidence=Evidence(size, 0, None, "bytes", facets.seq_len),
        fix=Fix(_advice(attribute)),
        scheme=encoding.scheme,
    )


def _advice(attribute: str) -> str:
    name, inside, _ = attribute.partition("[")
    call = f'self.register_buffer("{name}", ..., persistent=False)'
    return f"Register what `{name}` holds, one buffer a tensor." if inside else f"Assign it by {call}."


def _bytes(count: int) -> str:
    for name, unit in UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,} bytes"
