"""What is worth keeping of an operation on content: joins with positions, attention, order by other means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pediag.trace.frames import user_frame
from pediag.trace.graph import Attention, Graph, Node, Provenance, Site
from pediag.trace.grids import SUMS, grid_axis
from pediag.trace.operators import ORDERED, Operator
from pediag.trace.place import Lengths, Place

CONTENT, POSITION, WEIGHT = Provenance.CONTENT, Provenance.POSITION, Provenance.WEIGHT
_PRODUCTS = frozenset(("bmm", "mm", "addmm", "baddbmm", "matmul"))


class Noticer:
    """Adds sites and attentions to a graph.

    ``scores`` and ``joins`` tell which products and joins of the structural pass they were; a pass at another
    length is given them as ``known_scores`` and ``known_joins``. ``by_shape`` lets shapes tell
    of products as well. ``met`` is told of every site.
    """

    def __init__(self, graph: Graph, lengths: Lengths, place: Place) -> None:
        self.graph = graph
        self.lengths = lengths
        self.place = place
        self.ordered: list[str] = []
        self.scores: set[Any] = set()
        self.joins: dict[Any, set[int]] = {}
        self.known_scores: set[Any] | None = None
        self.known_joins: dict[Any, set[int]] | None = None
        self.by_shape = False
        self.met: Callable[[Site], None] | None = None
        self._seen: Counter[Any] = Counter()

    def notice(
        self, func: Any, operator: Operator, node: Node, operands: list[Node], bound: Any, named: Any
    ) -> None:
        """Keep what an operation on content joins or multiplies."""
        if node.provenance is not CONTENT or self.place.constructing:
            return
        content = tuple(item for item in operands if item.provenance is CONTENT)
        position = self._position_operands(operator, operands) if content else ()
        if operator.name in ORDERED:
            self.ordered.append(operator.name)
        if operator.name in _PRODUCTS and len(content) >= 2:
            self._notice_product(operator, node, content, position)
        if operator.name.startswith("_scaled_dot_product"):
            self._notice_fused(func, node, bound, named)
            return
        if content and position:
            frame = node.frame = user_frame()
            self._add(Site("", operator.name, node, content, position, self.place.module, frame))
        elif content and operator.name in ("add", "mul", "sub"):
            self._notice_constant(operator, node, content, operands)

    def _position_operands(self, operator: Operator, operands: list[Node]) -> tuple[Node, ...]:
        """The operands that are positions, now or at the same place of the structural pass."""
        fixed = [item for item in operands if item.provenance is not CONTENT and item.shape]
        if not fixed:
            return ()
        place = (self.place.module, operator.name, "join", user_frame())
        self._seen[place] += 1
        identity = (*place, self._seen[place])
        which = {index for index, item in enumerate(fixed) if item.provenance is POSITION}
        if operator.name in SUMS and self.lengths.grids:
            which |= self._of_grids(fixed)
        if self.known_joins is not None and not which:
            # A view of a table that is used up to its end does not move with the length.
            which = {index for index in self.known_joins.get(identity, ()) if index < len(fixed)}
            for index in which:
                if fixed[index].op != "leaf":
                    fixed[index].provenance = POSITION
        if which:
            self.joins[identity] = which
        return tuple(fixed[index] for index in sorted(which))

    def _of_grids(self, fixed: list[Node]) -> set[int]:
        """Which of several values are tables by the rows and columns of a map; they are positions from now on."""
        found = set()
        for index, item in enumerate(fixed):
            axis = grid_axis(item.shape, self.lengths.grids)
            if axis >= 0 and item.op != "leaf":
                item.provenance, item.moving = POSITION, (axis, axis + 1)
                found.add(index)
        return found

    def _notice_product(
        self, operator: Operator, node: Node, content: tuple[Node, ...], position: tuple[Node, ...]
    ) -> None:
        frame, lengths = user_frame(), self.lengths.moving
        place = (self.place.module, operator.name, frame)
        self._seen[place] += 1
        identity = (*place, self._seen[place])
        scores = len(node.shape) >= 2 and node.shape[-1] in lengths
        scores &= node.shape[-2] == self.lengths.batch or self.lengths.counts_tokens(*node.shape[-2:])
        # At the length asked for a width may equal the length; the structural pass has told which products are scores.
        if self.known_scores is not None:
            scores = identity in self.known_scores or (self.by_shape and scores)
        if scores:
            self.scores.add(identity)
            query, key = content[-2], content[-1]
            mask = position[0] if position else None
            self.graph.attentions.append(
                Attention(query, key, None, mask, False, node, self.place.module, frame)
            )

    def _notice_fused(self, func: Any, node: Node, bound: Any, named: Any) -> None:
        """A fused attention that the function mode did not see, because library code called it."""
        names = [argument.name for argument in func._schema.arguments]
        call = {**dict(zip(names, bound, strict=False)), **named}
        mask = call.get("attn_mask", call.get("attn_bias"))
        query, key, value = call["query"], call["key"], call["value"]
        module, frame, causal = self.place.module, user_frame(), bool(call.get("is_causal"))
        self.graph.attentions.append(
            Attention(query, key, value, mask, causal, node, module, frame, call.get("scale"), True)
        )
        if mask is not None and mask.provenance is POSITION:
            self._add(Site("bias", "attention", node, (query, key), (mask,), module, frame))

    def _add(self, site: Site) -> None:
        self.graph.sites.append(site)
        if self.met is not None:
            self.met(site)

    def _notice_constant(
        self, operator: Operator, node: Node, content: tuple[Node, ...], operands: list[Node]
    ) -> None:
        """A table joined with content that moves along no length: perhaps positions laid along a wrong axis."""
        for item in operands:
            if item.provenance <= WEIGHT and sum(size > 1 for size in item.shape) >= 2 and not item.trainable:
                site = Site("", operator.name, node, content, (item,), self.place.module, user_frame())
                self.graph.constant_sites.append(site)
                return
