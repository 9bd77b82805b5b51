"""How an encoding is measured: by its program where that is known, else by what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag.drifting.biases import Bias
from pediag.drifting.reference import held_as, meant
from pediag.drifting.subjects import Angles, Subject
from pediag.drifting.tables import Frequencies, Held, Rows, waves
from pediag.encodings.model import Alibi, Encoding, Learned, Rotary, Sinusoidal

if TYPE_CHECKING:
    from pediag.encodings.replaying import Program
    from pediag.rules.rule import Facets
    from pediag.trace import Node, Site, Trace

DECLARED = "only a config declares it: give its folder, the model's code, or a file with its tables"


def subject(facets: Facets, encoding: Encoding) -> Subject | str:
    """What to measure, or why nothing can be."""
    from pediag.trace import Unavailable

    if encoding.origin == "config":
        return DECLARED
    try:
        if isinstance(encoding, (Rotary, Sinusoidal)):
            return _waves(facets, encoding)
        if isinstance(encoding, Alibi):
            return _bias(facets, encoding)
        return _rows(facets, encoding)
    except Unavailable as reason:
        return str(reason)


def _waves(facets: Facets, encoding: Rotary | Sinusoidal) -> Subject | str:
    from pediag.encodings.replaying import program_of

    trace = facets.structural
    if encoding.origin == "trace" and trace is not None and encoding.phase is not None:
        program = program_of(trace, encoding.phase)
        if program is not None:
            return Angles(facets, encoding, _longer(facets, encoding, program))
    if encoding.origin == "tensors" and encoding.factor is not None:
        return _frequencies(facets, encoding)
    found = waves(facets, encoding, list(_held(facets, encoding)))
    if found is None and encoding.origin == "trace":
        found = waves(facets, encoding, list(_entered(facets, encoding)))
    return found or "neither the program of its angles nor a table of cosines and sines is at hand"


def _longer(facets: Facets, encoding: Rotary | Sinusoidal, program: Program) -> Program:
    """The program in the pass at the length asked about, where no counter of positions feeds it and it is short."""
    from pediag.encodings.program import phase
    from pediag.encodings.replaying import program_of

    trace = facets.target
    ran = trace is not None and trace.failure is None
    if not program.built or not ran or trace is None or program.phase.shape[program.axis] >= facets.seq_len:
        return program
    angles = (phase(node) for site in _joins(trace, encoding) for node in site.position)
    found = (program_of(trace, angle) for angle in angles if angle is not None)
    return next((one for one in found if one is not None), program)


def _frequencies(facets: Facets, encoding: Rotary | Sinusoidal) -> Subject | str:
    held = next(_stored(facets, encoding), None)
    if held is None:
        return "its numbers are not at hand"
    used = held.rows(None, np.arange(len(held.value))).reshape(-1)
    exact = meant(facets, encoding, used, held_as(held.node.dtype))
    if exact is None:
        return f"no formula gives the frequencies in {held.name}, so there is nothing to compare with"
    return Frequencies(facets, encoding, held, exact)


def _bias(facets: Facets, encoding: Alibi) -> Subject | str:
    trace = facets.structural
    if encoding.origin != "trace" or trace is None or encoding.node is None:
        return "slopes alone are no bias: give the model's code"
    made = Bias(facets, encoding, trace, encoding.node)
    if made.counters and not _moves(made):
        made = Bias(facets, encoding, trace, encoding.node, counted=False)
    longer = _at_length(facets, encoding, encoding.node) if not made.counters else None
    if longer is None or facets.target is None:
        return made
    return Bias(facets, encoding, facets.target, longer, counted=False)


def _moves(made: Bias) -> bool:
    """Whether its program runs with other positions; one that indexes by them may not."""
    from pediag.trace import Lane, Unavailable

    try:
        made.numbers(Lane(), np.array([0, made.length - 1]))
    except Unavailable:
        return False
    return True


def _at_length(facets: Facets, encoding: Encoding, like: Node) -> Node | None:
    """The value of a bias in the pass at the length asked about, for one that no counter of positions feeds."""
    trace = facets.target
    if trace is None or trace.failure is not None:
        return None
    nodes = (node for site in _joins(trace, encoding) for node in site.position)
    fits = (node for node in nodes if node.dtype is like.dtype and node.shape[-1:] == (facets.seq_len,))
    return next((node for node in fits if node.numel <= trace.value.budget), None)


def _joins(trace: Trace, encoding: Encoding) -> Iterator[Site]:
    """The joins of a trace that are those of an encoding in the first module that uses it."""
    if encoding.sites:
        first = encoding.sites[0]
        yield from (
            site for site in trace.graph.sites if (site.module, site.kind) == (first.module, first.kind)
        )


def _rows(facets: Facets, encoding: Encoding) -> Subject | str:
    table = getattr(encoding, "table", None)
    if table is None:
        return f"the scheme {encoding.scheme} has no angle, no slope and no table to measure"
    held = list(_held(facets, encoding))
    if not held or held[0].value.ndim < 2 or not held[0].value.is_floating_point():
        return "its table has no numbers here: give the weights"
    if isinstance(encoding, Learned):
        return Rows(facets, held[0])
    return Rows(facets, Held(held[0].name, held[0].node, held[0].value))


# -- tables -------------------------------------------------------------------------------------------------


def _held(facets: Facets, encoding: Any) -> Iterator[Held]:
    """The tables that hold an encoding, each once."""
    if encoding.origin == "tensors":
        yield from _stored(facets, encoding)
        return
    from pediag.encodings import program
    from pediag.trace import Unavailable

    trace = facets.structural
    assert trace is not None
    sites = [site for site in encoding.sites if site.module == encoding.sites[0].module]
    nodes = dict.fromkeys(node for site in sites for node in site.position)
    seen = set()
    for node in list(nodes)[:8]:
        looked = program.lookup(node, trace.lengths)
        if looked is None or looked.table in seen:
            continue
        seen.add(looked.table)
        try:
            value = trace.value(looked.table)
        except Unavailable:
            continue
        yield Held(
            _name(looked.table), looked.table, value.movedim(_axis(value, looked.rows), 0), looked.first
        )
    table = encoding.table
    if not seen and table is not None:
        value = trace.value(table.leaf)
        yield Held(_name(table.leaf), table.leaf, value.movedim(_axis(value, table.rows), 0), table.first)


def _entered(facets: Facets, encoding: Encoding) -> Iterator[Held]:
    """What meets content itself, token by token, in the longest pass that ran."""
    from pediag.encodings.replaying import first_text
    from pediag.trace import Unavailable

    ran = [one for one in (facets.target, facets.structural) if one is not None and one.failure is None]
    for trace in ran[:1]:
        nodes = dict.fromkeys(node for site in _joins(trace, encoding) for node in site.position)
        for node in list(nodes)[:8]:
            try:
                value = first_text(trace.value(node), trace)
            except Unavailable:
                continue
            if value.is_floating_point() or value.is_complex():
                yield Held("", node, value)


def _axis(value: Any, rows: int) -> int:
    return next((axis for axis, size in enumerate(value.shape) if size == rows), 0)


def _name(node: Any) -> str:
    return node.names[0] if node.names else ""


def _stored(facets: Facets, encoding: Any) -> Iterator[Held]:
    """Tables of a file, by the names of its tensors."""
    from pediag.encodings.from_tensors.reading import leaf, stored

    for name in encoding.leaves:
        tensor = (facets.tensors or {}).get(name)
        if tensor is None:
            continue
        item = stored(0, tensor)
        value = item.open()
        if value is not None and value.ndim:
            first = encoding.table.first if getattr(encoding, "table", None) is not None else 0
            node = leaf(item)
            node.stored = True
            yield Held(name, node, value, first)
