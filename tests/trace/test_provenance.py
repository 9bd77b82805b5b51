"""Where each value is said to come from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pediag.trace import Provenance, Trace
from tests.trace._sessions import WIDTH, Adds, equal, joined, joins, provenance_of, trace

D = WIDTH
CONTENT, POSITION, MASK = Provenance.CONTENT, Provenance.POSITION, Provenance.MASK
WEIGHT, CONSTANT = Provenance.WEIGHT, Provenance.CONSTANT


class Model(nn.Module):
    """An embedding of tokens, then ``then(self, ids, x)``, then a projection."""

    def __init__(self, then: Callable[[Model, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(60, D, padding_idx=1)
        self.positions = nn.Embedding(300, D)
        self.types = nn.Embedding(2, D)
        self.bias = nn.Parameter(torch.randn(D))
        self.gate = nn.Linear(D, 1)
        self.out = nn.Linear(D, D)
        self.register_buffer("ids", torch.arange(300)[None])
        self.register_buffer("type_ids", torch.zeros(1, 300, dtype=torch.long))
        self.register_buffer("ones", torch.ones(300, D))
        self.register_buffer("table", torch.arange(300.0)[:, None].mul(torch.ones(D)).sin())
        self.then = then

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.then(self, ids, self.tokens(ids)))


def run(then: Callable[[Model, Tensor, Tensor], Tensor]) -> tuple[Trace, Model]:
    torch.manual_seed(0)
    model = Model(then)
    return trace(model), model


def test_tokens_are_content() -> None:
    made, _ = run(lambda self, ids, x: x)
    assert set(provenance_of(made, "embedding")) == {CONTENT}
    assert made.graph.sites == []


def test_ranges_are_positions() -> None:
    made, _ = run(lambda self, ids, x: x + self.positions(torch.arange(ids.shape[1])))
    assert provenance_of(made, "arange") == [POSITION]
    assert joined(made).provenance is POSITION


@pytest.mark.parametrize(
    "rows",
    [
        lambda self, ids: self.positions.weight[: ids.shape[1]],
        lambda self, ids: self.positions(self.ids[:, : ids.shape[1]]),
        lambda self, ids: self.positions(self.ids.expand(ids.shape[0], -1)[:, 2 : ids.shape[1] + 2]),
        lambda self, ids: self.table[: ids.shape[1]],
        lambda self, ids: self.positions.weight.narrow(0, 0, ids.shape[1])[None],
        lambda self, ids: nn.functional.embedding(self.ids[0, : ids.shape[1]], self.positions.weight),
        lambda self, ids: self.positions(torch.ones_like(ids).cumsum(1) - 1),
    ],
    ids=["slice", "id buffer", "offset", "fixed table", "narrow", "functional", "ones summed"],
)
def test_rows_of_a_table_are_positions(rows: Callable[[Model, Tensor], Tensor]) -> None:
    made, model = run(lambda self, ids, x: x + rows(self, ids))
    node = joined(made)
    assert node.provenance is POSITION
    ids = torch.zeros(made.sizes.batch, made.sizes.tokens, dtype=torch.long)
    assert equal(made.value(node), rows(model, ids).detach())


@pytest.mark.parametrize(
    ("compare", "assumed"),
    [
        (lambda ids: ids.ne(1), True),
        (lambda ids: ids != 1, True),
        (lambda ids: ids.eq(1), False),
        (lambda ids: ids == 0, False),
        (lambda ids: ids > 0, True),
        (lambda ids: ids > 1, True),
        (lambda ids: ids < 1, False),
        (lambda ids: torch.isin(ids, torch.tensor([0, 1])), False),
        (lambda ids: ~(ids == 1), True),
    ],
)
def test_a_comparison_with_a_constant_is_a_mask(compare: Callable[[Tensor], Tensor], assumed: bool) -> None:
    def then(self: Model, ids: Tensor, x: Tensor) -> Tensor:
        return x.masked_fill(~compare(ids)[..., None], 0)

    made, _ = run(then)
    masks = [node for node in made.graph.nodes if node.provenance is MASK and node.op == "assume"]
    assert masks
    last = next(n for n in reversed(made.graph.nodes) if n.op_name == "bitwise_not")
    assert bool(made.value(last).any()) is not assumed
    assert bool(made.value(last).all()) is not assumed


def test_a_cumulative_sum_of_a_mask_is_positions_as_for_ordinary_tokens() -> None:
    def ids_of(ids: Tensor) -> Tensor:
        mask = ids.ne(1).int()
        return (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1

    made, model = run(lambda self, ids, x: x + self.positions(ids_of(ids)))
    node = joined(made)
    assert node.provenance is POSITION
    ordinary = torch.full((made.sizes.batch, made.sizes.tokens), 7)
    assert equal(made.value(node), model.positions(ids_of(ordinary)).detach())


@pytest.mark.parametrize(
    "constant",
    [
        lambda self, ids: self.types(self.type_ids[:, : ids.shape[1]]),
        lambda self, ids: self.types(torch.zeros_like(ids)),
        lambda self, ids: self.ones[: ids.shape[1]],
        lambda self, ids: torch.ones(ids.shape[1], D),
        lambda self, ids: self.bias,
        lambda self, ids: torch.arange(D),
        lambda self, ids: self.bias.expand(ids.shape[1], D),
        lambda self, ids: self.positions.weight[3],
        lambda self, ids: self.positions(torch.tensor([5])),
        lambda self, ids: (torch.arange(ids.shape[1]) * 0)[:, None],
    ],
    ids=[
        "types",
        "zeros",
        "ones",
        "made-ones",
        "bias",
        "features",
        "expanded",
        "row",
        "one-row",
        "cancelled",
    ],
)
def test_what_does_not_move_with_the_token_is_no_position(
    constant: Callable[[Model, Tensor], Tensor],
) -> None:
    made, _ = run(lambda self, ids, x: x + constant(self, ids))
    assert joins(made) == []


def test_positions_made_of_content_stay_content() -> None:
    def then(self: Model, ids: Tensor, x: Tensor) -> Tensor:
        contextual = torch.sigmoid(self.gate(x)).squeeze(-1).cumsum(-1)
        return x + contextual[..., None].sin()

    made, _ = run(then)
    assert made.graph.sites == []
    assert set(provenance_of(made, "cumsum")) == {CONTENT}


def test_positions_shifted_by_content_are_content_from_there_on() -> None:
    def then(self: Model, ids: Tensor, x: Tensor) -> Tensor:
        return x + (torch.arange(ids.shape[1])[None] + ids[:, :1])[..., None]

    made, _ = run(then)
    assert [(s.content[0].dtype, s.position[0].op_name) for s in joins(made)] == [(torch.int64, "unsqueeze")]


def test_a_parameter_as_long_as_the_sequence_is_no_position_by_that_alone() -> None:
    def then(self: Model, ids: Tensor, x: Tensor) -> Tensor:
        return x + self.bias + (x @ self.out.weight) * self.bias

    made, _ = run(then)
    assert made.graph.sites == []


def test_content_written_into_a_table_makes_it_content() -> None:
    def then(self: Model, ids: Tensor, x: Tensor) -> Tensor:
        table = torch.zeros_like(x)
        table[:, :, :3] = torch.arange(ids.shape[1])[:, None]
        table[:, :, 3:] = x[..., 3:]
        return table

    made, _ = run(then)
    assert made.graph.nodes[-1].provenance is CONTENT


@pytest.mark.parametrize(
    "write",
    [
        lambda x, pe: x.add_(pe),
        lambda x, pe: x[:, :, 2:].add_(pe[:, 2:]),
        lambda x, pe: x[:, 1:].mul_(pe[1:]),
        lambda x, pe: x.transpose(0, 1).add_(pe[:, None]),
    ],
)
def test_positions_added_in_place_to_content_are_sites(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            pe = torch.arange(x.shape[1], dtype=torch.float32)[:, None].expand(-1, D) + torch.arange(D)
            write(x, pe)
            return x * 2

    made = trace(InPlace())
    (site,) = made.graph.sites
    pe = torch.arange(made.sizes.tokens, dtype=torch.float32)[:, None] + torch.arange(D)
    expected = {2: pe[:, 2:], 1: pe[1:]}
    value = made.value(site.position[0]).squeeze()
    assert any(torch.equal(value, item) for item in (pe, *expected.values()))
    assert made.graph.nodes[-1].op_name == "mul"
    assert site.result in set(made.graph.nodes)


def test_weights_are_weights() -> None:
    made, _ = run(lambda self, ids, x: x @ self.out.weight)
    leaves = {node.provenance for node in made.graph.nodes if node.op == "leaf" and node.names == ["input"]}
    assert leaves == {CONTENT}
    products = [node for node in made.graph.nodes if node.op_name == "t"]
    assert {node.provenance for node in products} == {WEIGHT}


def test_sites_name_operands_and_result() -> None:
    made = trace(Adds(lambda x: torch.arange(x.shape[1], dtype=x.dtype)[:, None]))
    (site,) = joins(made)
    assert site.kind == "additive"
    assert [node.provenance for node in (site.result, *site.content, *site.position)] == [
        CONTENT,
        CONTENT,
        POSITION,
    ]
    assert site.result.shape == site.content[0].shape == (made.sizes.batch, made.sizes.tokens, D)


@pytest.mark.parametrize(
    ("join", "kind"),
    [
        (lambda x, p: x + p[:, None], "additive"),
        (lambda x, p: torch.cat([x, p[None, :, None].expand(x.shape[0], -1, 1)], -1)[..., 1:], "additive"),
        (lambda x, p: x * p[:, None].cos(), "rotary"),
        (lambda x, p: x @ x.transpose(1, 2) + (p[None] - p[:, None]), "bias"),
        (lambda x, p: (x @ x.transpose(1, 2)).masked_fill(p[None] > p[:, None], -1e9), "bias"),
        (
            lambda x, p: torch.einsum("bnd,mnd->bnm", x, (p[:, None] - p[None])[..., None].expand(-1, -1, D)),
            "bilinear",
        ),
        (lambda x, p: x[:, p.long().flip(0)], "lookup"),
        (lambda x, p: torch.atan2(x, p[:, None]), "opaque"),
    ],
    ids=["sum", "cat", "product", "bias", "mask", "bilinear", "lookup", "opaque"],
)
def test_the_kind_of_a_join(join: Callable[[Tensor, Tensor], Tensor], kind: str) -> None:
    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return join(self.norm(x), torch.arange(x.shape[1], dtype=x.dtype))

    made = trace(Joins())
    assert [site.kind for site in made.graph.sites] == [kind]
