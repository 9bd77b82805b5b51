"""A position bias or table is built on the host and copied to the device in every forward pass.

## What it does

Follows every position value that forward makes without a device (``torch.arange(n)``, numpy, a list, a
tensor kept as a plain attribute) to the ``.to(...)``, ``.cuda()`` or ``.type_as(...)`` that moves it to
where the tokens are. It fires at that line, gives the bytes that cross, and names the line where the value
was born. A value that the module keeps after the move, in an attribute or a cache, is silent: it crosses
once.

A mask alone is a note.

## Why it matters

On an accelerator each forward pass computes the value on the host, and copies it from pageable memory. Such
a copy makes the host wait for the device, so the queue of kernels runs dry; a bias grows with the square of
the length. On a machine without an accelerator nothing crosses and nothing is lost.

## What is checked

bytes = (number of elements at this length) x (bytes of an element as it is moved), for one text, times the
number of moves in a forward pass. Host-born is a property of the program, so the rule needs no accelerator.

## Known limits

It is often said that an ALiBi bias built on the CPU costs 40 % of the throughput. No source for that number
could be found, and the rule does not claim it: the cost depends on length, heads, batch and what else runs.
Measure it before you work on it. CUDA's guide says that host-to-device copies of up to 64 KiB do not make
the host wait, so short vectors cost little. Host-born index tensors that indexing moves implicitly are not
seen.

## Fix

Build the value where it is used (``torch.arange(n, device=x.device)``), or register it once as a non-
persistent buffer and slice it.

## References

- PyTorch documentation, Performance Tuning Guide: avoid unnecessary CPU-GPU synchronization; create tensors
  directly on the target device.
- CUDA C++ Programming Guide, asynchronous concurrent execution: copies of 64 KB or less from host to
  device.
- Press et al. 2022 (2108.12409): the bias is fixed and can be computed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pediag.rules.entry._common import fed_by, layers_of, line_of, place, reached, shape_at, spot, structural
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import Facets, NotApplicable, rule

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.trace import Node, Trace, Transfer

HIDDEN = -9e3
"""A score with this much added (in logits) is hidden; 1e4 is the usual infinity of half precision."""

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@rule(
    code="PE303",
    name="bias-built-on-host",
    severity="warning",
    basis="field report",
    needs=("trace",),
    references=("PyTorch Performance Tuning Guide", "CUDA C++ Programming Guide, asynchronous execution"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line that moves host-born positions."""
    trace = structural(facets)
    if not any(node.provenance.name == "POSITION" for node in trace.graph.nodes):
        raise NotApplicable("forward makes no value of positions")
    groups: dict[object, list[Transfer]] = {}
    for transfer in trace.graph.transfers:
        node = transfer.node
        if node.provenance.name == "POSITION" and node.shape and not transfer.kept:
            groups.setdefault(spot(transfer.frame), []).append(transfer)
    for group in groups.values():
        yield _finding(facets, trace, group)


def _finding(facets: Facets, trace: Trace, group: list[Transfer]) -> Finding:
    first = group[0]
    each = [_bytes(facets, trace, transfer) for transfer in group]
    users = fed_by(facets.encodings, reached(trace, first.node))
    encoding = next((item for item in users if item.scheme != "mask"), None)
    masks = encoding is None and (bool(users) or _is_mask(trace, first.node))
    what = "A mask" if masks else "A value made of positions"
    named = encoding or next(iter(users), None)
    return Finding(
        message=_message(group, named, what, sum(each), facets.seq_len),
        effect=_effect(group, sum(each), facets.seq_len),
        where=place(first.module, first.frame, encoding.id if encoding else ""),
        evidence=Evidence(sum(each), 0, None, "bytes", facets.seq_len),
        fix=_fix(first),
        severity="note" if masks else None,
        scheme=encoding.scheme if encoding else "",
    )


def _bytes(facets: Facets, trace: Trace, transfer: Transfer) -> int:
    """Bytes of one move for one text of ``seq_len`` tokens: as recorded at that length, else scaled."""
    own = [item for item in trace.graph.transfers if spot(item.frame) == spot(transfer.frame)]
    there = facets.target.graph.transfers if facets.target is not None else []
    twins = [item for item in there if spot(item.frame) == spot(transfer.frame)]
    shape = shape_at(transfer.node.shape, trace.sizes, facets.seq_len)
    if len(twins) == len(own):
        shape = twins[own.index(transfer)].node.shape
    return math.prod(shape) * transfer.node.dtype.itemsize


def _is_mask(trace: Trace, node: Node) -> bool:
    """Whether a value over queries and keys only shows or hides: true or false, zero or minus infinity."""
    import torch

    from pediag.trace import Unavailable

    if len(node.moving) < 2:
        return False
    try:
        value = trace.value(node)
    except Unavailable:
        return False
    hides = value.is_floating_point() and bool(((value == 0) | (value <= HIDDEN)).all())
    return hides or value.dtype is torch.bool


def _message(
    group: list[Transfer], encoding: Encoding | None, otherwise: str, total: int, seq_len: int
) -> str:
    first = group[0]
    what = f"The numbers of {encoding.id} ({encoding.scheme})" if encoding else otherwise
    born = f" born on the host at {line_of(first.born)}" if first.born else " born on the host"
    times = f" in {len(group)} copies" if len(group) > 1 else ""
    modules = list(dict.fromkeys(item.module for item in group))
    shared = f" ({layers_of(modules)})" if len(modules) > 1 else ""
    verb = "are" if encoding else "is"
    return (
        f"{what}{born} {verb} moved to the tokens' device in every forward pass: {size(total)}{times} at "
        f"{seq_len:,} tokens{shared}."
    )


def _effect(group: list[Transfer], total: int, seq_len: int) -> str:
    axes = max(len(item.node.moving) for item in group)
    growth = "grow with the square of the length" if axes >= 2 else "grow with the length"
    copies = (
        f"a copy of {total:,} bytes" if len(group) == 1 else f"{len(group)} copies, {total:,} bytes in all,"
    )
    return (
        f"On an accelerator each step waits for {copies} from pageable memory; the bytes "
        f"{growth}. On the host alone nothing is lost."
    )


def size(count: int) -> str:
    """Bytes in the largest binary unit that gives at least one."""
    for name, unit in UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,} bytes"


def _fix(transfer: Transfer) -> Fix:
    stored = transfer.node
    while stored.op != "leaf" and (below := [item for item in stored.inputs() if item.host and item.shape]):
        stored = below[0]
    if stored.op == "leaf" and stored.names and stored.names[0]:
        name = stored.names[0].rpartition(".")[2]
        call = f'self.register_buffer("{name}", ..., persistent=False)'
        return Fix(f"Register it with {call}; it then moves with the module.")
    at = f" at {line_of(transfer.born)}" if transfer.born else ""
    return Fix(f"Make the value{at} with device= the tokens' device, or keep it as a non-persistent buffer.")
