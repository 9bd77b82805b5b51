"""Trained tables whose rows are blended before they are added: resized to the grid of an image, or one an axis."""

from __future__ import annotations

from pediag.encodings.model import Learned
from pediag.encodings.program import SUMS
from pediag.theory.sinusoid import LEAST_ROWS
from pediag.trace.graph import Node, ancestors
from pediag.trace.grids import Grid, grid_axis

# After one of these, a signal is no longer linear in the table that it is made of.
_NOT_LINEAR = frozenset(
    (
        *("sin", "cos", "tanh", "sigmoid", "exp", "log", "pow", "rsqrt", "sqrt", "erf"),
        *("gelu", "silu", "relu", "softmax", "_softmax", "native_layer_norm", "_fused_rms_norm", "div"),
    )
)
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "matmul", "einsum", "convolution", "mul"))


def blended_tables(node: Node, width: int) -> list[Node]:
    """The trained tables of rows ``width`` wide that a position signal is a blend of; none where it is anything else.

    A blend is linear in its tables: rows that are chosen, weighed by numbers that are no parameters, and summed.
    """
    made_of = ancestors(node)
    tables = [item for item in made_of if _is_trained(item)]
    trained = set(tables)
    for item in sorted(made_of, key=lambda each: each.index):
        operands = [operand for operand in item.inputs() if operand in trained]
        if operands and (item.op_name in _NOT_LINEAR or (item.op_name in _PRODUCTS and len(operands) > 1)):
            return []
        if operands and _adds_another(item, trained):
            return []
        if operands:
            trained.add(item)
    # Rows, or a map for each channel as convolutions lay them out.
    if not all(width in table.shape for table in tables):
        return []
    return sorted(tables, key=lambda each: each.index)


def _adds_another(node: Node, trained: set[Node]) -> bool:
    """Whether a sum has a summand that is a signal of its own: many numbers, and no trained ones in them."""
    return node.op_name in SUMS and any(item.numel > 1 and item not in trained for item in node.inputs())


def _is_trained(node: Node) -> bool:
    return node.stored and node.trainable and node.dtype.is_floating_point


def blend(node: Node, grids: frozenset[Grid] = frozenset()) -> Learned | None:
    """The learned encoding that a position signal is as a blend of trained rows; None where it is none.

    ``grids`` are the rows and columns of maps, whose features may lie before them or behind.
    """
    side = grid_axis(node.shape, grids)
    features = node.shape[:side] + node.shape[side + 2 :] if side >= 0 else node.shape[-1:]
    width = max(features, default=1)
    tables = blended_tables(node, width) if width > 1 else []
    rows = max((table.numel // width for table in tables), default=0)
    if rows < LEAST_ROWS:
        return None
    whole = side >= 0 and all(table.numel == node.numel for table in tables)
    encoding = Learned(table=None, width=width)
    how = "one a place of a map" if whole else "that are blended"
    encoding.title = f"learned, {rows:,} rows {how}, width {width}"
    by = "rows and columns" if whole else "blend"
    encoding.parameters = {"rows": rows, "width": width, "by": by, "trainable": True}
    return encoding
