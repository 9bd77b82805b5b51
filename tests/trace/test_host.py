"""Values made on the host, whatever the device of the model, and their way to the model's device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.trace._sessions import WIDTH, Adds, joined, joins, session, trace

D = WIDTH


def as_column(value: Tensor) -> Tensor:
    return value.to(torch.float32)[:, None]


BORN = {
    "arange": lambda n, x: torch.arange(n),
    "arange of floats": lambda n, x: torch.arange(0.0, n),
    "linspace": lambda n, x: torch.linspace(0, 1, n),
    "tensor of a list": lambda n, x: torch.tensor(list(range(n))),
    "numpy": lambda n, x: torch.from_numpy(np.arange(n)),
    "as_tensor": lambda n, x: torch.as_tensor(np.arange(n)),
    "asarray": lambda n, x: torch.asarray(np.arange(n)),
    "legacy": lambda n, x: torch.LongTensor(list(range(n))),
    "legacy float": lambda n, x: torch.Tensor(list(range(n))),
    "logspace": lambda n, x: torch.logspace(0, 1, n),
    "ones summed": lambda n, x: torch.ones(n).cumsum(0),
    "full summed": lambda n, x: torch.full((n,), 2).cumsum(0),
    "written": lambda n, x: torch.zeros(n).copy_(torch.arange(n)),
    "arithmetic": lambda n, x: (torch.arange(n) * 2 + 1).float().sin(),
    "stacked": lambda n, x: torch.stack([torch.tensor(float(i)) for i in range(n)]),
    "cpu device named": lambda n, x: torch.arange(n, device="cpu"),
}
ARRIVES = {
    "arange on the device": lambda n, x: torch.arange(n, device=x.device),
    "tensor on the device": lambda n, x: torch.tensor(list(range(n)), device=x.device),
    "as_tensor on the device": lambda n, x: torch.as_tensor(list(range(n)), device=x.device),
    "new_tensor": lambda n, x: x.new_tensor(list(range(n))),
    "ones_like": lambda n, x: torch.ones_like(x[0, :, 0]).cumsum(0),
    "new_ones": lambda n, x: x.new_ones(n).cumsum(0),
    "device context": lambda n, x: _in_context(n, x),
    "range of an input's mask": lambda n, x: (x[0, :, 0] == 0).logical_not().cumsum(0),
}
MOVES = {
    "to device": lambda p, x: p.to(x.device),
    "to device by keyword": lambda p, x: p.to(device=x.device),
    "to device and dtype": lambda p, x: p.to(x.device, torch.float32),
    "to other": lambda p, x: p.to(x),
    "type_as": lambda p, x: p.type_as(x),
    "as_tensor": lambda p, x: torch.as_tensor(p, device=x.device),
    "non blocking": lambda p, x: p.to(x.device, non_blocking=True),
}
STAYS = {
    "nothing": lambda p, x: p,
    "to dtype": lambda p, x: p.to(torch.float32),
    "to x's dtype": lambda p, x: p.to(x.dtype),
    "float": lambda p, x: p.float(),
    "type": lambda p, x: p.type(torch.float32),
    "to the host": lambda p, x: p.to("cpu"),
    "cpu": lambda p, x: p.cpu(),
}


def _in_context(n: int, x: Tensor) -> Tensor:
    with torch.device(x.device):
        return torch.arange(n)


Born = Callable[[int, Tensor], Tensor]
Move = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("born", BORN.values(), ids=BORN)
def test_born_on_the_host_and_moved(born: Born) -> None:
    made = trace(Adds(lambda x: as_column(born(x.shape[1], x).to(x.device))))
    (transfer,) = made.graph.transfers
    assert transfer.node.host
    assert transfer.module == ""
    assert transfer.frame is not None
    assert transfer.frame.file == __file__
    assert transfer.born is not None
    assert transfer.born.file == __file__
    assert not joined(made).host


@pytest.mark.parametrize("born", BORN.values(), ids=BORN)
def test_born_on_the_host_and_never_moved(born: Born) -> None:
    made = trace(Adds(lambda x: as_column(born(x.shape[1], x))))
    assert made.graph.transfers == []
    assert joined(made).host


@pytest.mark.parametrize("born", ARRIVES.values(), ids=ARRIVES)
def test_born_where_the_model_is(born: Born) -> None:
    made = trace(Adds(lambda x: as_column(born(x.shape[1], x).to(x.device))))
    assert made.graph.transfers == []
    assert not joined(made).host


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_what_moves(move: Move) -> None:
    made = trace(Adds(lambda x: as_column(move(torch.arange(x.shape[1]), x))))
    assert len(made.graph.transfers) == 1
    assert not joined(made).host


@pytest.mark.parametrize("move", STAYS.values(), ids=STAYS)
def test_what_does_not_move(move: Move) -> None:
    made = trace(Adds(lambda x: as_column(move(torch.arange(x.shape[1]), x))))
    assert made.graph.transfers == []


def test_the_moved_value_is_the_same_number() -> None:
    made = trace(Adds(lambda x: as_column(torch.arange(x.shape[1]).to(x.device) * 2)))
    assert torch.equal(made.value(joined(made)), 2.0 * torch.arange(made.sizes.tokens)[:, None])


class Holds(nn.Module):
    def __init__(self, held: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        held(self, torch.arange(400.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.table[: x.shape[1], None].to(x.device)


@pytest.mark.parametrize(
    ("held", "moves"),
    [
        (lambda module, t: setattr(module, "table", t), 1),
        (lambda module, t: module.register_buffer("table", t), 0),
        (lambda module, t: module.register_buffer("table", t, persistent=False), 0),
        (lambda module, t: module.register_parameter("table", nn.Parameter(t)), 0),
    ],
    ids=["attribute", "buffer", "passing buffer", "parameter"],
)
def test_a_plain_attribute_stays_behind_when_the_model_moves(
    held: Callable[[nn.Module, Tensor], None], moves: int
) -> None:
    made = trace(Holds(held))
    assert len(made.graph.transfers) == moves
    assert len(joins(made)) == 1


def test_a_transfer_is_seen_at_the_length_asked_for_too() -> None:
    made = session(Adds(lambda x: as_column(torch.arange(x.shape[1]).to(x.device))))
    assert len(made.at(64).graph.transfers) == 1


def test_lines_of_birth_and_of_the_move() -> None:
    def program(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        scaled = place * 2
        return as_column(scaled.to(x.device))

    (transfer,) = trace(Adds(program)).graph.transfers
    start = program.__code__.co_firstlineno
    assert transfer.born is not None
    assert transfer.frame is not None
    assert (transfer.born.line - start, transfer.frame.line - start) == (1, 3)


def test_a_scalar_is_no_transfer_worth_a_word() -> None:
    made = trace(Adds(lambda x: as_column(torch.arange(x.shape[1], device=x.device) * torch.tensor(2.0))))
    assert made.graph.transfers == []
    assert not joined(made).host


def test_an_input_of_the_user_is_where_the_model_is() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            return self.norm(x) + position_ids.to(x.device)[..., None]

    made = trace(Given())
    assert made.graph.transfers == []
    assert len(joins(made)) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the move then is a real one")
@pytest.mark.parametrize("move", [lambda p: p.cuda(), lambda p: p.to("cuda"), lambda p: p.to("cuda:0")])
def test_a_move_to_an_absent_accelerator_is_a_move(move: Callable[[Tensor], Tensor]) -> None:
    made = trace(Adds(lambda x: as_column(move(torch.arange(x.shape[1])))))
    assert len(made.graph.transfers) == 1
