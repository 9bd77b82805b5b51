"""Models of every make: wrapped, tied, parametrised, in half precision, built without weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from pediag.targets import Target, open_target
from pediag.trace import Provenance, Session
from tests.trace._sessions import equal, joins, session, trace

D = 12


class Model(nn.Module):
    """Tokens, a fixed table, a learned table, attention, tied output."""

    def __init__(self, rows: int = 400) -> None:
        super().__init__()
        self.tokens = nn.Embedding(90, D)
        self.learned = nn.Embedding(rows, D)
        a = torch.arange(rows)[:, None] / 100 ** (torch.arange(0, D, 2) / D)
        self.register_buffer("table", torch.stack((a.sin(), a.cos()), -1).flatten(1), persistent=False)
        self.attention = nn.MultiheadAttention(D, 3, batch_first=True)
        self.norms = nn.ModuleDict({"in": nn.LayerNorm(D), "out": nn.RMSNorm(D)})
        self.head = nn.Linear(D, 90, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.tokens(ids) + self.table[:n]
        x = self.norms["in"](x + self.learned(torch.arange(n, device=ids.device)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norms["out"](x))


def weight_normed(model: Model) -> Model:
    parametrizations.weight_norm(model.attention.out_proj)
    parametrizations.orthogonal(model.head)
    return model


def spectral(model: Model) -> Model:
    model.extra = spectral_norm(nn.Linear(D, D))
    return model


VARIANTS: dict[str, Callable[[Model], nn.Module]] = {
    "as it is": lambda m: m,
    "training": lambda m: m.train(),
    "evaluation": lambda m: m.eval(),
    "bfloat16": lambda m: m.bfloat16(),
    "float16": lambda m: m.half(),
    "float64": lambda m: m.double(),
    "frozen": lambda m: m.requires_grad_(False),
    "parametrised": weight_normed,
    "spectral norm": spectral,
    "data parallel": lambda m: nn.DataParallel(m),
    "compiled": lambda m: torch.compile(m),
    "compiled in place": lambda m: (m.compile(), m)[1],
    "part compiled": lambda m: (m.attention.compile(), m)[1],
    "in a sequence": lambda m: nn.Sequential(m),
    "channels last": lambda m: m.to(memory_format=torch.channels_last),
    "share memory": lambda m: m.share_memory(),
}


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)
def test_each_variant_has_the_same_two_sites_and_its_own_numbers(make: Callable[[Model], nn.Module]) -> None:
    plain = Model()
    made = Session(open_target(make(plain)))
    for found in (made.structural(), made.at(50)):
        assert found.failure is None, found.failure
        first, second = joins(found)
        n = found.sizes.tokens
        assert equal(found.value(first.position[0]), plain.table[:n])
        assert equal(found.value(second.position[0]), plain.learned.weight[:n].detach())


@pytest.mark.parametrize(
    ("wrap", "path"),
    [(torch.compile, "inner._orig_mod"), (nn.DataParallel, "inner.module")],
    ids=["compiled", "data parallel"],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_wrapper_inside_the_model(wrap: Callable[[nn.Module], nn.Module], path: str) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrap(Model())

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)

    assert [site.module for site in joins(trace(Holder()))] == [path, path]


@pytest.mark.parametrize("deep", [False, True], ids=["model", "inner module"])
def test_a_parametrised_table(deep: bool) -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    model: nn.Module = Model()
    nn.utils.parametrize.register_parametrization(model.learned, "weight", Doubled())
    model = nn.Sequential(model) if deep else model
    made = trace(model)
    inner = model[0] if deep else model
    expected = inner.learned.weight[: made.sizes.tokens].detach()
    assert equal(made.value(joins(made)[1].position[0]), expected)


def test_tied_weights_are_one_leaf_with_both_names() -> None:
    made = session(Model())
    assert made.leaves["tokens.weight"] is not None
    names = {name for leaf in made.leaves.values() for name in leaf.names}
    assert {"tokens.weight", "head.weight"} <= names


def test_equal_buffers_of_layers_are_one_leaf() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.register_buffer("frequencies", torch.arange(float(D)))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.arange(x.shape[1])[:, None] * self.frequencies

    made = session(nn.Sequential(Layer(), Layer()))
    leaves = {id(made.leaves[name]) for name in ("0.frequencies", "1.frequencies")}
    assert len(leaves) == 1
    first, second = joins(made.structural())
    assert first.position[0] is second.position[0]


def test_a_model_with_no_parameters() -> None:
    class Bare(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids * 0.5 + torch.arange(ids.shape[1])

    assert len(joins(trace(Bare()))) == 1


# -- built without weights ----------------------------------------------------------------------------------


def built(build: Callable[[], nn.Module]) -> Session:
    return Session(Target(spec="recipe", loader="python", build=build))


def test_a_model_built_without_weights_has_its_computed_tables() -> None:
    made = built(Model)
    found = made.structural()
    assert found.failure is None, found.failure
    first, second = joins(found)
    assert equal(found.value(first.position[0]), Model().table[: found.sizes.tokens])
    assert second.position[0].provenance is Provenance.POSITION


def test_random_weights_are_unknown_not_made_up() -> None:
    from pediag.trace import Unavailable

    found = built(Model).structural()
    with pytest.raises(Unavailable, match=r"learned\.weight"):
        found.value(joins(found)[1].position[0])


def test_building_does_not_change_the_default_dtype_or_the_random_state() -> None:
    state = torch.get_rng_state()
    made = built(lambda: Model(600))
    made.structural()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32


def test_a_large_model_costs_no_memory() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(200_000, 16_384)
            self.layers = nn.ModuleList([nn.Linear(16_384, 16_384) for _ in range(100)])

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + torch.arange(ids.shape[1])[:, None]
            for layer in self.layers:
                x = x + layer(x)
            return x

    made = built(Large)
    assert made.at(100_000).failure is None
    assert len(joins(made.at(100_000))) == 1


def test_tables_filled_in_the_constructor_by_a_loop() -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            table = torch.zeros(300, D)
            place = torch.arange(300.0)
            for column in range(D):
                table[:, column] = (place * (column + 1) / 10).sin()
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.table[: x.shape[1]]

    found = built(Filled).structural()
    assert equal(found.value(joins(found)[0].position[0]), Filled().table[: found.sizes.tokens])


@pytest.mark.parametrize(
    "initialise",
    [
        lambda w: nn.init.zeros_(w),
        lambda w: nn.init.constant_(w, 0.5),
        lambda w: w.data.copy_(torch.arange(300.0)[:, None].expand(-1, D)),
    ],
    ids=["zeros", "constant", "copied"],
)
def test_parameters_set_in_the_constructor_run(initialise: Callable[[Tensor], object]) -> None:
    class Set(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(50, D)
            self.rows = nn.Parameter(torch.empty(300, D))
            with torch.no_grad():
                initialise(self.rows)

        def forward(self, ids: Tensor) -> Tensor:
            return self.tokens(ids) + self.rows[: ids.shape[1]]

    found = built(Set).structural()
    assert found.failure is None


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.LSTM(D, D, batch_first=True), "lstm"),
        (nn.GRU(D, D, batch_first=True), "gru"),
        (nn.RNN(D, D, batch_first=True), "rnn_tanh"),
    ],
    ids=["LSTM", "GRU", "RNN"],
)
def test_layers_that_know_order_by_themselves(layer: nn.Module, name: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(D), layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x))[0]

    assert trace(Recurrent()).ordered[:1] == [name]


def test_convolution_along_the_sequence_knows_order() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(D), nn.Conv1d(D, D, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(x).transpose(1, 2))

    assert trace(Convolved()).ordered == ["convolution"]
