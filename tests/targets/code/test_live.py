"""Live models: wrappers, refusals, their own configuration."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.ao.quantization import QuantWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import pediag
from pediag.errors import LoadError
from pediag.targets import Config, open_target
from tests.targets.code._decoder import CHECKED_AT, Decoder, decoder


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


def told(model: Any, **options: Any) -> dict[str, Any]:
    """The report, notes apart: what must not depend on what is around a model."""
    report = pediag.check(model, seq_len=CHECKED_AT, **options).to_dict()
    return {key: item for key, item in report.items() if key != "notes"}


def notes(model: Any) -> list[str]:
    return open_target(model).notes


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    report = told(decoder())
    assert [encoding["scheme"] for encoding in report["encodings"]] == ["mask", "learned", "rotary"]
    assert report["target"]["spec"] == "Decoder"
    return report


class Engine(nn.Module):
    """Steps and runs backward, as training engines do; its own forward cannot be run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("waits for the other ranks")

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        pass


class PlainEngine:
    """An engine that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def train_batch(self, batch: Any) -> None:
        pass


def _each(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Decoder], Decoder]:
    def each(model: Decoder) -> Decoder:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = wrap(block)
        return model

    return each


def _compiled_in_place(model: Decoder) -> Decoder:
    model.compile()
    for block in model.blocks:
        block.compile()
    return model


WRAPS: dict[str, tuple[Callable[[Decoder], Any], list[str]]] = {
    "averaged": (AveragedModel, ["AveragedModel"]),
    "compiled": (torch.compile, ["OptimizedModule"]),
    "compiled in place": (_compiled_in_place, ["compiled in place"]),
    "stubs": (QuantWrapper, ["QuantWrapper"]),
    "engine": (lambda model: Engine(torch.compile(model)), ["Engine", "OptimizedModule"]),
    "plain engine": (lambda model: PlainEngine(nn.DataParallel(model)), ["PlainEngine", "DataParallel"]),
    "blocks compiled": (_each(torch.compile), ["OptimizedModule was taken off in 2 places"]),
    "blocks checkpointed": (_each(checkpoint_wrapper), ["CheckpointWrapper was taken off in 2 places"]),
    "blocks in both": (
        lambda model: torch.compile(_each(lambda block: torch.compile(checkpoint_wrapper(block)))(model)),
        ["OptimizedModule was taken off in 3 places", "CheckpointWrapper was taken off in 2 places"],
    ),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_wrapped_model_is_told_of_as_the_bare_one(bare: dict[str, Any], name: str) -> None:
    wrap, said = WRAPS[name]
    model = wrap(decoder())
    assert told(model) == bare
    found = notes(model)
    assert len(found) == len(said)
    assert all(note.startswith(start) for note, start in zip(found, said, strict=True))


def test_low_rank_adapters_are_left_in_their_places(bare: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    targets = [name for name, part in decoder().named_modules() if isinstance(part, nn.Linear)]
    model = peft.get_peft_model(decoder(), peft.LoraConfig(target_modules=targets))
    assert told(model) == bare
    assert isinstance(open_target(model).module, Decoder)
    assert any("lora" in name for name, _ in open_target(model).module.named_parameters())


def test_virtual_tokens_that_are_not_seen_are_told() -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 50, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    prompted = peft.get_peft_model(
        model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7)
    )
    assert open_target(prompted).module is model
    assert "the 7 virtual tokens" in notes(prompted)[0]


def test_a_prepared_model_of_accelerate(bare: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(decoder())
    patched = model.forward
    assert told(model) == bare
    assert model.forward is patched or model.forward == patched
    assert "put around forward" in notes(model)[0]


def test_offloaded_weights_are_read_where_they_are_kept(bare: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(decoder(), execution_device="cpu")
    assert model.rows.weight.is_meta
    assert told(model) == bare
    assert model.rows.weight.is_meta


def test_a_model_set_up_by_fabric(bare: dict[str, Any]) -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    model = decoder()
    wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert told(wrapped) == bare


class _Around(nn.Module):
    """Looks like a wrapper, and adds positions around its ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 12))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).float()
        return self.module(ids) + (places[:, None] * 10000.0 ** (-torch.arange(12) / 12)).sin()


class _Trained(_Around):
    """With steps of its own, as a module of Lightning has, or with positions of its own."""

    def training_step(self, batch: Any) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(self) -> None:
        pass


class _WithTable(Engine):
    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 12))
        self.words, self.rows = nn.Embedding(50, 12), nn.Embedding(200, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.module(self.words(ids) + self.rows(torch.arange(ids.shape[1])))


class _WithModel(nn.Module):
    """As a module of Lightning: the model is one of its parts, and forward is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Embedding(50, 12)
        self.rows = nn.Embedding(200, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids) + self.rows(torch.arange(ids.shape[1]))


@pytest.mark.parametrize("cls", [_Around, _Trained, _WithTable, _WithModel])
def test_what_looks_like_a_wrapper_keeps_its_positions(cls: type[nn.Module]) -> None:
    model = cls()
    assert open_target(model).module is model
    assert open_target(model).notes == []
    assert pediag.inspect(model, seq_len=32).has_encoding


def test_a_patched_forward_of_the_users_own_is_kept() -> None:
    model = decoder()
    model._original_forward = model.forward  # type: ignore[assignment]
    model.forward = lambda ids: model.words(ids)  # type: ignore[method-assign]
    model.blocks[0] = torch.compile(model.blocks[0])
    assert [e["scheme"] for e in told(model)["encodings"]] == []


def test_partitions_of_deepspeed_have_shapes_only() -> None:
    model = decoder()
    for index, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = index, parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    report = told(Engine(model))
    assert [encoding["scheme"] for encoding in report["encodings"]] == ["mask", "learned", "rotary"]
    unknown = {
        rule["code"]: rule["reason"] for rule in report["rules"] if rule["status"] == "could-not-check"
    }
    assert "words.weight is partitioned over ranks by DeepSpeed" in unknown["PE301"]
    assert all("is partitioned over ranks by DeepSpeed" in reason for reason in unknown.values())
    assert all(parameter.numel() == 0 for parameter in model.parameters())


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("cpu"),
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.bfloat16),
    ],
    ids=["no_grad", "inference", "autocast", "cpu", "meta", "bfloat16"],
)
def test_the_callers_modes_change_nothing(bare: dict[str, Any], around: Callable[[], Any]) -> None:
    model = decoder()
    with around():
        assert told(model) == bare


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_several_threads_check_one_model(bare: dict[str, Any]) -> None:
    model = decoder().train()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: told(model), range(3)))
    assert found == [bare] * 3
    assert model.training
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("wrap", [lambda model: model, _each(checkpoint_wrapper), nn.DataParallel])
def test_between_backward_and_step_nothing_is_touched(wrap: Any) -> None:
    model = wrap(decoder().train())
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(ids).square().mean().backward()
        held = [
            (id(p), id(p.grad), p.grad.clone(), p._version) for p in model.parameters() if p.grad is not None
        ]
        states, drawn = [id(p) for p in optimiser.state], torch.get_rng_state()
        pediag.check(model, seq_len=CHECKED_AT)
        after = [(id(p), id(p.grad), p.grad, p._version) for p in model.parameters() if p.grad is not None]
        assert [one[:2] + one[3:] for one in held] == [one[:2] + one[3:] for one in after]
        assert all(torch.equal(one[2], other[2]) for one, other in zip(held, after, strict=True))
        assert [id(p) for p in optimiser.state] == states
        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(part.training for part in model.modules())
        optimiser.step()
        optimiser.zero_grad()


def test_layers_without_numbers_stand_where_the_others_are(bare: dict[str, Any]) -> None:
    model = decoder()
    model.blocks[0].up.to("meta")
    assert told(model) == bare
    model.rows.to("meta")
    report = told(model)
    unknown = {
        rule["code"]: rule["reason"] for rule in report["rules"] if rule["status"] == "could-not-check"
    }
    assert "PE301" in unknown
    assert all("rows.weight has no numbers (meta device): load" in reason for reason in unknown.values())


def test_a_submodule_called_module_is_no_wrapper() -> None:
    holder = nn.Sequential()
    holder.add_module("module", Model())
    assert open_target(holder).module is holder


class Plain:
    """Values of the class and of the object."""

    dropout = 0.1
    n_layer = 3

    def __init__(self) -> None:
        self.n_layer = 2

    def heads(self) -> int:
        return 4


class Named(NamedTuple):
    n_layer: int = 2


SPACE = types.SimpleNamespace(n_layer=2)


@pytest.mark.parametrize(
    "config", [{"n_layer": 2}, argparse.Namespace(n_layer=2), SPACE, Declared(), Plain(), Named()]
)
def test_own_config_of_a_part(config: Any) -> None:
    target = open_target(nn.Sequential(nn.Linear(2, 2), Model(config)))
    assert target.config is not None
    assert target.config.get("n_layer") == 2


def test_values_that_a_class_gives_its_configs() -> None:
    config = Config.from_object(Plain())
    assert config.values == {"dropout": 0.1, "n_layer": 2}


def test_what_is_no_model_configuration_is_left() -> None:
    assert open_target(Model(types.SimpleNamespace(learning_rate=1.0))).config is None
    assert open_target(Model(len)).config is None
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
