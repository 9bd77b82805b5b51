"""Sessions on small models, and the numbers that torch itself computes for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pediag.targets import InputSpec, Target
from pediag.trace import Node, Provenance, Session, Site, Trace

WIDTH = 12


def session(model: nn.Module, *specs: InputSpec, example: Callable[[int], Any] | None = None) -> Session:
    """A session on a live model."""
    target = Target(spec="model", loader="live module", module=model, example_inputs=example)
    return Session(target, list(specs))


def trace(model: nn.Module, *specs: InputSpec, example: Callable[[int], Any] | None = None) -> Trace:
    """The structural trace of a live model, which must have run."""
    made = session(model, *specs, example=example).structural()
    assert made.failure is None, made.failure
    return made


class Adds(nn.Module):
    """Adds what ``program(x)`` returns to content x of shape (B, N, D)."""

    def __init__(self, program: Callable[[torch.Tensor], torch.Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.program = program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.program(x)


def joins(made: Trace, op: str = "add") -> list[Site]:
    """The sites whose operation is ``op``."""
    return [site for site in made.graph.sites if site.op == op]


def joined(made: Trace) -> Node:
    """The position operand of the last addition."""
    return joins(made)[-1].position[-1]


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.nan_to_num(nan=12345.0), right.nan_to_num(nan=12345.0))
    )


def provenance_of(made: Trace, op: str) -> list[Provenance]:
    """Provenance of every node that ``op`` made."""
    return [node.provenance for node in made.graph.nodes if node.op_name == op]


def content(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random content; no program may depend on its numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(dtype)
