"""A model comes out of a trace as it went in, also when its forward raises."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pediag.targets import Target
from pediag.targets.code.sharded import Elsewhere
from pediag.trace import Provenance, Session
from pediag.trace.isolation import on_host
from tests.trace._sessions import content, joined, session

D = 12
TABLES: dict[int, Tensor] = {}
SEEN: list[int] = []


@functools.lru_cache
def memoised(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None]


def from_globals(n: int) -> Tensor:
    SEEN.append(n)
    if n not in TABLES:
        TABLES[n] = torch.arange(n, dtype=torch.float32)[:, None]
    return TABLES[n]


class Cache:
    """A plain object that a model keeps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0
        self.recent: deque[Tensor] = deque(maxlen=2)


class Keeps(nn.Module):
    """Keeps everything a model may keep between calls."""

    shared: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.zeros(4, D), persistent=False)
        self.counter = 0
        self.cos: Tensor | None = None
        self.plain = torch.ones(D)
        self.array = np.zeros(3)
        self.past: list[Tensor] = []
        self.nested: dict[str, Any] = {"layers": [{}, {"k": torch.zeros(1)}]}
        self.ordered: OrderedDict[str, int] = OrderedDict(first=1)
        self.lengths: set[int] = set()
        self.cache = Cache()
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        self.counter += 1
        self.calls += 1
        self.plain.mul_(2)
        self.array[0] += 1
        self.cos = torch.arange(n, device=x.device).float().cos()[:, None]
        self.past.append(x)
        self.nested["layers"][0]["k"] = x
        self.nested["layers"].append({"k": x})
        self.ordered["last"] = n
        self.ordered.move_to_end("first")
        self.lengths.add(n)
        self.cache.keys.append(x)
        self.cache.length += n
        self.cache.recent.append(x)
        self.late = x
        Keeps.shared[n] = x
        if self.table.shape[0] < n:
            self.table = torch.zeros(n, D)
            self.register_buffer("grown", torch.zeros(n))
        self.linear.weight.requires_grad_(False)
        self.blocks.append(nn.LayerNorm(D))
        self.train()
        self.handle = self.linear.register_forward_hook(lambda *_: None)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cpu")
        random.random()
        np.random.rand()
        torch.rand(2)
        torch.set_grad_enabled(True)
        if self.fails:
            raise ValueError("as it does")
        y = self.linear(x) + memoised(n) + from_globals(n) + self.cos
        return self.norm(y.float().transpose(1, 2)).transpose(1, 2)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model and its surroundings that a trace could disturb, as comparable values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    module = model
    assert isinstance(module, Keeps)
    return {
        "identity": {name: id(tensor) for name, tensor in tensors.items()},
        "numbers": {name: tensor.tolist() for name, tensor in tensors.items()},
        "versions": {name: tensor._version for name, tensor in tensors.items()},
        "gradients": {name: None if t.grad is None else t.grad.tolist() for name, t in tensors.items()},
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "modes": {name: part.training for name, part in model.named_modules()},
        "attributes": {name: list(part.__dict__) for name, part in model.named_modules()},
        "hooks": {name: list(part._forward_hooks) for name, part in model.named_modules()},
        "state": list(model.state_dict()),
        "plain": (module.counter, module.cos, module.plain.tolist(), module.array.tolist()),
        "past": list(module.past),
        "nested": repr(module.nested),
        "ordered": list(module.ordered.items()),
        "lengths": set(module.lengths),
        "cache": (list(module.cache.keys), module.cache.length, list(module.cache.recent)),
        "class": dict(Keeps.shared),
        "globals": (dict(TABLES), list(SEEN)),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "global hooks": len(torch.nn.modules.module._global_forward_hooks),
        "rng": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
    }


def keeper(fails: bool = False) -> Keeps:
    torch.manual_seed(0)
    model = Keeps(fails)
    model.train()
    model.drop.eval()
    model.blocks[1].eval()
    model.linear.weight.grad = torch.ones(D, D)
    model.linear.register_forward_pre_hook(lambda module, args: None)
    return model


@pytest.fixture(autouse=True)
def _clean() -> Any:
    yield
    torch.set_default_dtype(torch.float32)
    TABLES.clear()
    SEEN.clear()
    Keeps.shared.clear()
    memoised.cache_clear()


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "raises"])
def test_everything_is_as_before(fails: bool) -> None:
    model = keeper(fails)
    TABLES[3] = torch.zeros(3, 1)
    before = snapshot(model)
    made = session(model)
    made.structural()
    made.at(33)
    after = snapshot(model)
    for key, value in before.items():
        assert after[key] == value, key


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "raises"])
def test_no_memo_keeps_an_abstract_tensor(fails: bool) -> None:
    real = memoised(16)
    made = session(keeper(fails))
    length = made.structural().seq_len
    made.at(16)
    assert not isinstance(memoised(length), FakeTensor)
    assert torch.equal(memoised(16), real)
    assert not any(isinstance(table, FakeTensor) for table in TABLES.values())


def test_the_model_runs_and_copies_as_before() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 3, batch_first=True)
            self.table = nn.Embedding(256, D)
            self.memo: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            if n not in self.memo:
                self.memo[n] = torch.arange(n, device=x.device)
            x = x + self.table(self.memo[n])
            return x + self.attention(x, x, x)[0]

    model = Plain()
    x = content((2, 9, D))
    expected = copy.deepcopy(model)(x)
    made = session(model)
    made.structural()
    made.at(9)
    assert torch.equal(model(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    model(x).sum().backward()
    assert model.table.weight.grad is not None
    assert set(model.memo) == {9}


def test_a_trace_leaves_the_inputs_of_the_user_alone() -> None:
    x = content((2, 9, D))
    before = x.clone()

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            x += torch.arange(x.shape[1])[:, None]
            return self.linear(x)

    made = session(Writes(), example=lambda n: x)
    assert made.structural().failure is None
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "enable_grad", "autocast"],
)
def test_it_works_under_the_callers_modes(around: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D))
    with around():
        inside = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        assert session(model).structural().failure is None
        assert inside == (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        )


class Turns(nn.Module):
    """A complex rotation and an attention, of operations that are made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (part.reshape(b, n, 2, d // 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        angles = torch.outer(torch.arange(n, device=x.device).type_as(x), torch.ones(3, device=x.device))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.reshape(b, n, 2, 3, 2)) * turn)
            .flatten(3)
            .type_as(x)
            for part in (q, k)
        )
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1)).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", scores, v).flatten(2)


class TurnsInInference(Turns):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_a_forward_in_inference_mode_records_what_it_records_without() -> None:
    plain, inside = (
        session(kind(), example=lambda n: torch.rand(2, n, D)).structural()
        for kind in (Turns, TurnsInInference)
    )
    recorded, wanted = (
        [(node.op_name.removeprefix("_unsafe_"), node.shape) for node in made.graph.nodes]
        for made in (inside, plain)
    )
    assert {"mul", "bmm"} <= {op for op, _ in wanted}
    assert recorded == wanted


def test_it_works_under_a_default_dtype_of_float64() -> None:
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(D, D))
    assert session(model).structural().failure is None
    assert torch.get_default_dtype() is torch.float64


def test_it_works_from_another_thread() -> None:
    results: list[Any] = []
    model = nn.Sequential(nn.Linear(D, D))
    thread = threading.Thread(target=lambda: results.append(session(model).structural().failure))
    thread.start()
    thread.join()
    assert results == [None]


def test_two_sessions_on_one_model_do_not_meet() -> None:
    model = nn.Sequential(nn.Embedding(50, D), nn.Linear(D, D))
    first, second = session(model), session(model)
    lengths = [made.structural().seq_len for made in (first, second)]
    assert first.at(20).failure is None
    assert second.at(21).failure is None
    assert lengths[0] == lengths[1]


def test_keyboard_interrupt_restores_too() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            raise KeyboardInterrupt

    model = Interrupted().train()
    with pytest.raises(KeyboardInterrupt):
        session(model).structural()
    assert model.calls == 0
    assert model.training
    assert torch.ones(2).add(1).tolist() == [2, 2]


class _SetsDefaults(nn.Module):
    """A forward that changes what is global in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return self.words(ids) + torch.arange(ids.shape[1])[:, None]


def test_defaults_that_forward_sets_are_put_back() -> None:
    before = torch.get_default_dtype(), torch.get_default_device()
    session(_SetsDefaults()).structural()
    assert (torch.get_default_dtype(), torch.get_default_device()) == before


class _Turned(nn.Module):
    """Makes its frequencies by a matrix product that its code keeps out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            places = torch.arange(x.shape[1], device=x.device).float()[:, None]
            angle = places @ (10000.0 ** (-torch.arange(D) / D))[None]
        return self.norm(x) + angle


def test_what_a_model_keeps_out_of_autocast_is_replayed_without_it() -> None:
    model = _Turned()
    with torch.autocast("cpu", torch.bfloat16), on_host():
        made = session(model).structural()
        angle = made.value(joined(made))
    places = torch.arange(made.seq_len).double()[:, None]
    expected = places * 10000.0 ** (-torch.arange(D).double() / D)
    assert torch.allclose(angle.double(), expected, rtol=1e-6)


def test_the_models_own_code_runs_as_it_was_called() -> None:
    seen: list[Any] = []

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return self.linear(x)

    with torch.autocast("cpu", torch.float16):
        with on_host():
            assert not torch.is_autocast_enabled("cpu")
            assert session(Notes()).structural().failure is None
        assert torch.is_autocast_enabled("cpu")
    assert set(seen) == {(True, torch.float16)}


def test_inputs_are_on_the_device_of_the_model() -> None:
    model = nn.Sequential(nn.Embedding(50, D), nn.Linear(D, D))
    for part in model:
        for name, parameter in list(part._parameters.items()):
            made = nn.Parameter(torch.empty(parameter.shape, device="meta"))
            made._pediag_elsewhere = Elsewhere(torch.device("cuda:0"), read=parameter.detach)
            part._parameters[name] = made
    trace = session(model).structural()
    assert trace.failure is None
    assert {node.device for node in trace.graph.nodes if node.given} == {"cuda"}


class Converted(nn.Module):
    """Converts a part in its constructor and another within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D).to(torch.float64)
        self.second = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.double())
        self.second.to(torch.float64)
        return self.second(x) + torch.arange(x.shape[1])[:, None]


def test_parts_may_be_converted_in_the_constructor_and_within_forward() -> None:
    made = Session(Target(spec="recipe", loader="python", build=Converted))
    found = made.structural()
    assert found.failure is None, found.failure
    assert joined(found).provenance is Provenance.POSITION
    products = [node for node in found.graph.nodes if node.op_name in ("mm", "addmm")]
    assert [node.dtype for node in products] == [torch.float64] * 2
    assert torch.utils.swap_tensors.__name__ == "swap_tensors"


def test_a_live_part_that_forward_converts_comes_out_as_it_went_in() -> None:
    model = Converted()
    before = model.second.weight
    assert session(model).structural().failure is None
    assert model.second.weight is before
    assert before.dtype is torch.float32
