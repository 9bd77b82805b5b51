"""What the recorder must know of an operator, read from its schema and tags."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# The result depends on the shape of the operand, not on its numbers.
SHAPE_ONLY = frozenset(
    ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
)
UNINITIALISED = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
)
# What they write into is lost as a whole.
OVERWRITING = frozenset(("copy", "fill", "zero"))
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
# The shape of the result depends on the numbers of the operand.
DATA_DEPENDENT = frozenset(
    (
        "nonzero",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "masked_select",
        "repeat_interleave",
        "bincount",
    )
)
# Operations that know order by themselves: a model that uses them along the sequence is not blind to it.
ORDERED = frozenset(
    ("convolution", "lstm", "gru", "rnn_tanh", "rnn_relu", "cumsum", "cumprod", "logcumsumexp", "_fft_r2c")
)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@dataclass(frozen=True, slots=True)
class Operator:
    """Facts of one overload: does it view, which arguments does it write (``outs`` by name), is it random.

    One that is ``composite`` is made of others; in inference mode it reaches the dispatcher whole.
    """

    name: str
    view: bool
    writes: tuple[int, ...]
    outs: tuple[str, ...]
    random: bool
    composite: bool


@cache
def describe(func: Any) -> Operator:
    """The facts of one ATen overload."""
    from pediag.trace.graph import op_name

    schema = func._schema
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    written = tuple(
        i for i, argument in enumerate(positional) if argument.alias_info and argument.alias_info.is_write
    )
    outs = tuple(a.name for a in schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write)
    aliased = any(
        result.alias_info is not None and not result.alias_info.is_write for result in schema.returns
    )
    return Operator(
        name=op_name(func),
        view=aliased and not written and not outs,
        writes=written,
        outs=outs,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        composite=func.namespace != "prim" and func.has_kernel_for_dispatch_key(_COMPOSITE),
    )


def refilled(
    name: str, like: torch.Tensor, bound: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The factory call that makes the same tensor as a ``*_like`` or ``new_*`` call."""
    shape, options = tuple(like.shape), {"dtype": like.dtype}
    if "zeros" in name:
        return torch.ops.aten.zeros.default, (shape,), options
    if "ones" in name:
        return torch.ops.aten.ones.default, (shape,), options
    if "full" in name:
        return torch.ops.aten.full.default, (shape, bound[-1]), options
    return torch.ops.aten.empty.memory_format, (shape,), options
