"""What is picked by content is as long as all of it; numbers in names are numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.trace._sessions import WIDTH, joins, trace


class Experts(nn.Module):
    """A mixture that loops over its experts by name, and writes back what each makes of the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(WIDTH, WIDTH) for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = self.gate(flat) > 0
        out = torch.zeros_like(flat)
        for hit in torch.arange(3)[:, None]:
            (rows,) = torch.where(chosen[:, hit[0]])
            out.index_add_(0, rows, self.experts[f"expert_{hit[0]}"](flat[rows]))
        return out.view(x.shape) + torch.arange(x.shape[1])[:, None]


def test_experts_that_are_looped_over_by_name_run() -> None:
    made = trace(Experts())
    assert {node.module for node in made.graph.nodes if node.op_name == "addmm"} >= {
        "experts.expert_0",
        "experts.expert_2",
    }
    assert joins(made)[-1].kind == "additive"


@pytest.mark.parametrize("picked", ["x[x[..., 0] > 0]", "x.masked_select(x > 0)", "(x > 0).nonzero()"])
def test_what_content_picks_is_as_long_as_all_of_it(picked: str) -> None:
    shapes: list[tuple[int, ...]] = []

    class Picks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shapes.append((tuple(x.shape), tuple(eval(picked, {"x": x}).shape)))  # type: ignore[arg-type]
            return x + torch.arange(x.shape[1])[:, None]

    trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), Picks()))
    (batch, tokens, width), shape = shapes[-1]  # type: ignore[misc]
    count = batch * tokens * width  # type: ignore[operator]
    assert shape == {"x[": (batch * tokens, width), "x.": (count,), "(x": (count, 3)}[picked[:2]]  # type: ignore[operator]


def test_a_value_equals_itself() -> None:
    class Checks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not bool((x == x).all()):
                raise ValueError("not a number")
            return x + torch.arange(x.shape[1])[:, None]

    assert joins(trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), Checks())))
