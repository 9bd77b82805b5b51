"""What optimisers hold of a model, by the names of its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pediag.errors import UsageError
from pediag.targets.code import optimizers


def net() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.LayerNorm(5))
    model[1].weight = model[0].weight
    return model


def test_groups_by_every_name_of_a_shared_parameter():
    model = net()
    other = nn.Parameter(torch.ones(2))
    groups = [{"params": [model[0].weight], "weight_decay": 0.5}, {"params": [*model[2].parameters(), other]}]
    held = optimizers.optimised(torch.optim.SGD(groups, lr=0.1), model)
    assert {name: group.index for name, group in held.groups.items()} == {
        "0.weight": 0, "1.weight": 0, "2.weight": 1, "2.bias": 1,
    }  # fmt: skip
    assert held.groups["0.weight"].weight_decay == 0.5 and held.groups["2.bias"].lr == 0.1
    assert held.foreign == 1


@pytest.mark.parametrize(
    ("make", "shrinks"),
    [
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.Adam(p, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.Adam(p), False),
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
    ],
)
def test_whether_a_step_shrinks_what_gets_no_gradient(make, shrinks):
    """Against one that is really taken: lr 0.1, decay 0.5, a gradient of zero."""
    parameter = nn.Parameter(torch.tensor([8.0, 2.0]))
    optimizer = make([parameter])
    for group in optimizer.param_groups:
        group.update(lr=0.1, weight_decay=0.5)
    held = optimizers.optimised(optimizer, nn.ParameterList([parameter]))
    parameter.grad = torch.zeros(2)
    optimizer.step()
    proportional = torch.allclose(parameter.detach(), 0.95 * torch.tensor([8.0, 2.0]))
    assert held.groups["0"].shrinks is shrinks is proportional


def test_names_are_those_without_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = net()
    model[2] = checkpoint_wrapper(model[2])
    assert [name for name, _ in optimizers.parameters(nn.DataParallel(model))] == [
        "0.weight",
        "1.weight",
        "2.weight",
        "2.bias",
    ]
    held, attribute = optimizers.named(model, "2.bias")
    assert attribute == "bias" and held.bias is model[2]._checkpoint_wrapped_module.bias
    assert optimizers.module_at(model, "") is model and optimizers.module_at(model, "0") is model[0]


def test_what_is_no_optimiser_and_no_model():
    with pytest.raises(UsageError, match=r"got a dict"):
        optimizers.listed({})
    with pytest.raises(UsageError, match="live"):
        optimizers.innermost("model.pt")
