"""Names position signals by what trained layers make them of: mapped sinusoids, rows of object queries, levels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from pediag.encodings.additive import attach, encodings_of
from pediag.encodings.fourier import fourier
from pediag.encodings.model import Encoding, Learned, Sinusoidal, Unrecognised
from pediag.encodings.points import points
from pediag.encodings.program import SLICES, call, carrier, is_stored
from pediag.trace.graph import Node, Provenance, Site, ancestors
from pediag.trace.operators import describe
from pediag.trace.session import Trace

_MATRIX = frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "_scaled_dot_product", "attention"))
_SUMS = frozenset(("add", "sub"))
_JOINS = _SUMS | {"cat"}
# Operations that layers consist of; a sine of what is known would be another signal.
_LAYERS = frozenset(
    "mul div sum mean native_layer_norm _fused_rms_norm _softmax softmax relu gelu silu sigmoid tanh mish leaky_relu "
    "hardtanh getitem split split_with_sizes repeat clone contiguous _to_copy _unsafe_view lift_fresh view".split()
)
_MOVED = frozenset(("mul", "div", "clone", "_unsafe_view", "constant_pad_nd", "gather"))
# Where sines may enter through layers; what turns or chooses content by them is something else.
_PLACED = ({"additive"}, {"bilinear"})
_FAR = 40


def explained(trace: Trace, found: list[Encoding]) -> list[Encoding]:
    """``found`` with each unrecognised signal replaced by the encodings that it is made of, where all are known."""
    reader = _Reader(trace)
    return [item for encoding in found for item in reader.instead(encoding)]


class _Reader:
    """Reads what signals are made of; values that several signals share are read once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[Node, list[Encoding]] = {}
        self._users: dict[Node, list[Node]] = defaultdict(list)
        self._several = {node.args[0] for node in trace.graph.nodes if node.op_name == "getitem"}
        for node in trace.graph.nodes:
            if node.provenance is Provenance.CONTENT:
                for operand in set(node.inputs()):
                    self._users[operand].append(node)

    def instead(self, encoding: Encoding) -> list[Encoding]:
        """The encodings that stand for ``encoding``: itself, unless it is a signal of known ones."""
        if not isinstance(encoding, Unrecognised) or not encoding.sites or encoding.node is None:
            return [encoding]
        if (places := points(self._trace, encoding)) is not None:
            return [places]
        made = self._made_of(encoding.node, encoding.sites)
        for item in made:
            for site in encoding.sites:
                attach(item, site)
        return made or [encoding]

    def _made_of(self, node: Node, sites: list[Site]) -> list[Encoding]:
        kinds = {site.kind for site in sites}
        if kinds == {"additive"} and (features := fourier(node)) is not None:
            return [features]
        if kinds == {"additive"} and (levels := self._levels(node)):
            return levels
        if kinds == {"rotary"} and (scaled := self._scaled(node, sites)):
            return scaled
        if kinds == {"bilinear"} and not all(self._alone(site) for site in sites):
            return []
        made = self._layered(node)
        if not made and kinds == {"bilinear"} and self._are_rows(node):
            made = self.known(node)
        fixed = [item for item in made if not isinstance(item, Learned)]
        return [] if fixed and kinds not in _PLACED else _unlike(map(_through, made))

    # -- through layers ------------------------------------------------------------------------------------

    def known(self, node: Node) -> list[Encoding]:
        """The encodings that a value is by itself; none where some of it is unrecognised."""
        if node not in self._known:
            made = encodings_of(self._trace, node) if node not in self._several else []
            known = all(isinstance(item, (Learned, Sinusoidal)) for item in made)
            self._known[node] = made if known else []
        return self._known[node]

    def _layered(self, node: Node) -> list[Encoding]:
        """What trained layers make ``node`` of; none where they are none, or some of it is not known."""
        found: list[Encoding] = []
        names: set[str] = set()
        mapped, seen, pending = False, {node}, [(node, False)]
        while pending:
            current, asked = pending.pop()
            if asked and (below := _carried(current)) is not None:
                pending.append((below, True))
                continue
            made = self.known(current) if asked or is_stored(current) else []
            if made:
                found += made
                continue
            name, _, _ = call(current)
            names.add("view" if _is_view(current) else name)
            operands = list(current.inputs())
            moving = [item for item in operands if item.provenance is Provenance.POSITION]
            if not moving:
                return []
            product = name in _MATRIX
            mapped |= product and any(_is_trained(item) for item in operands)
            pending += [(item, product or _ends(item)) for item in moving if item not in seen]
            seen.update(moving)
        if any(item.parameters.get("axis") == "batch" for item in found):
            return []
        trained = all(isinstance(item, Learned) for item in found)
        return found if mapped and (trained or names <= _LAYERS | _MATRIX | _JOINS) else []

    # -- rows that meet content in a product ---------------------------------------------------------------

    def _are_rows(self, node: Node) -> bool:
        """Whether a value is rows of features, no weight that mixes tokens."""
        return bool(node.shape) and node.shape[-1] not in self._trace.lengths.sequence

    def _alone(self, site: Site) -> bool:
        """Whether a product is added to no other one: rows by distance are, queries and values are not."""
        pending, seen = [site.result], {site.result}
        while pending and len(seen) < _FAR:
            for user in self._users[pending.pop()]:
                name, args, _ = call(user)
                if name in _SUMS and any(_is_product(item) for item in args[:2] if item not in seen):
                    return False
                if user not in seen and name not in _MATRIX:
                    seen.add(user)
                    pending.append(user)
        return True

    # -- a sinusoid that content scales --------------------------------------------------------------------

    def _scaled(self, node: Node, sites: list[Site]) -> list[Encoding]:
        """The sinusoid that content is multiplied with before it is added to other content, or laid beside it."""
        if not all(site.op == "mul" and self._only_joins(site.result) for site in sites):
            return []
        made = self.known(node)
        return made if all(isinstance(item, Sinusoidal) for item in made) else []

    def _only_joins(self, node: Node) -> bool:
        users = self._users[node]
        return bool(users) and all(
            call(user)[0] in _JOINS or (_is_view(user) and self._only_joins(user)) for user in users
        )

    # -- levels --------------------------------------------------------------------------------------------

    def _levels(self, node: Node) -> list[Encoding]:
        """What a signal is on the largest of several maps that lie one after the other along the tokens."""
        pieces, axis = _pieces(node)
        if len(pieces) < 2 or len({_program(piece) for piece in pieces}) > 1:
            return []
        largest = max(pieces, key=lambda piece: piece.shape[axis])
        lengths = self._trace.lengths
        sequence = lengths.sequence | {largest.shape[axis]}
        made = encodings_of(replace(self._trace, lengths=replace(lengths, sequence=sequence)), largest)
        return made if all(isinstance(item, (Learned, Sinusoidal)) for item in made) else []


def _pieces(node: Node) -> tuple[list[Node], int]:
    """The pieces that a value is joined from along an axis other than the last, and that axis."""
    current: Node | None = node
    while current is not None:
        name, args, _ = call(current)
        if name == "cat":
            axis = (args[1] if len(args) > 1 else 0) % len(current.shape)
            return (list(args[0]), axis) if axis < len(current.shape) - 1 else ([], 0)
        current = carrier(current)
    return [], 0


def _program(node: Node) -> frozenset[str]:
    return frozenset("view" if _is_view(part) else part.op_name for part in ancestors(node))


def _is_view(node: Node) -> bool:
    return not isinstance(node.op, str) and bool(describe(node.op).view)


def _carried(node: Node) -> Node | None:
    """The moving value that another is a view or a copy of."""
    found = carrier(node)
    if found is not None and call(node)[0] == "getitem":
        found = call(found)[1][0] if call(found)[0] in SLICES else None
    return found if found is not None and found.provenance is Provenance.POSITION else None


def _ends(node: Node) -> bool:
    """Whether nothing that moves goes into a value."""
    return not any(item.provenance is Provenance.POSITION for item in node.inputs())


def _is_trained(node: Node) -> bool:
    weight = node.provenance is Provenance.WEIGHT and node.dtype.is_floating_point
    return weight and any(part.trainable for part in ancestors(node))


def _is_product(item: object) -> bool:
    """Whether a value is a product of matrices, up to views and constant factors."""
    current = item if isinstance(item, Node) else None
    for _ in range(_FAR):
        if current is None:
            return False
        name, args, _ = call(current)
        if name in _MATRIX:
            return True
        plain = _is_view(current) or name in _MOVED
        current = args[0] if plain and isinstance(args[0], Node) else None
    return False


def _through(encoding: Encoding) -> Encoding:
    """An encoding as layers hand it on."""
    made = replace(encoding, sites=[], modules=[], source_file=None, source_line=None)
    made.parameters = {**encoding.parameters, "through": "trained layers"}
    made.title = f"{encoding.title}, through trained layers"
    return made


def _unlike(encodings: Iterable[Encoding]) -> list[Encoding]:
    """Encodings with titles of their own, once each."""
    return list({item.title: item for item in encodings}.values())


__all__ = ["explained"]
