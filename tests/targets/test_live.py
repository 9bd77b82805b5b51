"""Live models: wrappers, refusals, their own configuration."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pediag.errors import LoadError
from pediag.targets import Config, open_target


@dataclasses.dataclass
class Declared:
    block_size: int = 16
    n_layer: int = 2


class Model(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_model_is_taken_as_it_is() -> None:
    model = Model(Declared())
    target = open_target(model)
    assert target.module is model
    assert target.build is None
    assert target.loader == "live module"
    assert target.config is not None
    assert target.config.get("block_size") == 16


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m))]
)
def test_wrappers_are_taken_off(wrap: Any) -> None:
    model = Model()
    target = open_target(wrap(model))
    assert target.module is model
    assert "was taken off" in target.notes[0]


def test_a_submodule_called_module_is_no_wrapper() -> None:
    holder = nn.Sequential()
    holder.add_module("module", Model())
    assert open_target(holder).module is holder


@pytest.mark.parametrize("config", [{"n_layer": 2}, argparse.Namespace(n_layer=2), Declared()])
def test_own_config_of_a_part(config: Any) -> None:
    target = open_target(nn.Sequential(nn.Linear(2, 2), Model(config)))
    assert target.config is not None
    assert target.config.get("n_layer") == 2


def test_what_is_no_model_configuration_is_left() -> None:
    assert open_target(Model({"learning_rate": 1.0})).config is None
    assert open_target(Model("text")).config is None


def test_a_given_config_wins() -> None:
    given = Config({"block_size": 1})
    assert open_target(Model(Declared()), config=given).config is given


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_cannot_be_traced_are_refused() -> None:
    with pytest.raises(LoadError, match="give the Python module"):
        open_target(torch.jit.script(nn.Linear(2, 2)))
    with torch.device("meta"):
        empty = Model()
    with pytest.raises(LoadError, match="has no numbers"):
        open_target(empty)
    with FakeTensorMode():
        fake = Model()
    with pytest.raises(LoadError, match="has no numbers"):
        open_target(fake)
    with pytest.raises(LoadError, match="lazy parameters"):
        open_target(nn.LazyLinear(3))


def test_a_model_partly_without_numbers_is_noted() -> None:
    model = Model()
    model.register_buffer("table", torch.empty(3, device="meta"))
    assert open_target(model).notes == ["1 of 3 parameters and buffers have no numbers (meta device)"]


def test_other_objects_are_refused() -> None:
    with pytest.raises(LoadError, match="give an instance"):
        open_target(Model)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="object of type int"):
        open_target(3)  # type: ignore[arg-type]
