"""The pass at the length asked for follows the structural one, whatever sizes coincide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.trace import Provenance, Session, Trace
from tests.trace._sessions import session

HEADS, HEAD, WIDTH = 4, 8, 32


def sites(made: Trace) -> Counter[tuple[str, str, str, int]]:
    return Counter(
        (site.kind, site.op, site.module, site.frame.line if site.frame else 0) for site in made.graph.sites
    )


def provenances(made: Trace) -> set[tuple[str, str, int, Provenance]]:
    """Which provenances each operation of each line has; content needs fewer copies at a batch of one."""
    return {
        (node.module, node.op_name.replace("alias", "slice"), node.frame.line, node.provenance)
        for node in made.graph.nodes
        if node.frame
    }


def turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


class Attention(nn.Module):
    """Rotary attention with a causal mask, a linear bias and a token type."""

    def __init__(self, table: int = 4096) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("type_ids", torch.zeros(1, table, dtype=torch.long))
        self.register_buffer("mask", torch.ones(table, table).tril()[None, None] if table <= 512 else None)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        x = x * self.gain + self.types(self.type_ids[:, :n])
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        a = torch.arange(n)[:, None] / 100 ** (torch.arange(0, HEAD, 2) / HEAD)
        a = torch.cat((a, a), -1)
        q, k = (t * a.cos() + turned(t) * a.sin() for t in (q, k))
        scores = q @ k.transpose(-1, -2)
        scores = (
            scores
            - (torch.arange(n)[:, None] - torch.arange(n)).abs()
            * torch.tensor([0.5, 0.25, 0.1, 0.2])[:, None, None]
        )
        if self.mask is not None:
            scores = scores.masked_fill(self.mask[:, :, :n, :n] == 0, float("-inf"))
        else:
            scores = scores + torch.full((n, n), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, WIDTH)


class Model(nn.Module):
    def __init__(self, table: int = 4096) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, WIDTH)
        self.positions = nn.Parameter(torch.randn(table, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Attention(table) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return x


COINCIDENT = {
    "width": WIDTH,
    "heads": HEADS,
    "head width": HEAD,
    "half a head": HEAD // 2,
    "fused projection": 3 * WIDTH,
    "vocabulary": 100,
    "types": 2,
    "three": 3,
    "batch of the structural pass": 5,
    "table": 512,
    "another prime": 151,
    "ordinary": 77,
}


@pytest.fixture(scope="module", params=[512, 4096], ids=["stored mask", "made mask"])
def observed(request: pytest.FixtureRequest) -> Session:
    torch.manual_seed(0)
    return session(Model(request.param))


@pytest.mark.parametrize("tokens", COINCIDENT.values(), ids=COINCIDENT)
def test_the_same_sites_with_the_same_provenance(observed: Session, tokens: int) -> None:
    structural, target = observed.structural(), observed.at(tokens)
    assert structural.failure is None
    assert target.failure is None
    assert sites(target) == sites(structural)
    assert provenances(target) == provenances(structural)
    assert len(target.graph.attentions) == len(structural.graph.attentions) == 2


@pytest.mark.parametrize("tokens", COINCIDENT.values(), ids=COINCIDENT)
def test_the_numbers_are_those_of_the_length(observed: Session, tokens: int) -> None:
    target = observed.at(tokens)
    first = target.graph.sites[0]
    assert torch.equal(target.value(first.position[-1]), observed.model.positions[:tokens].detach())
    tables = [s.position[0] for s in target.graph.sites if s.op == "mul"]
    a = torch.arange(tokens)[:, None] / 100 ** (torch.arange(0, HEAD, 2) / HEAD)
    a = torch.cat((a, a), -1)
    assert {node.op_name for node in tables} == {"cos", "sin"}
    for node in tables:
        assert torch.equal(target.value(node), getattr(a, node.op_name)())


def test_a_table_used_to_its_end_is_still_positions() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(50, WIDTH)
            self.register_buffer("table", torch.randn(1, 300, WIDTH))
            self.register_buffer("wide", torch.randn(8, 300, WIDTH))
            self.register_buffer("ids", torch.arange(300)[None])
            self.register_buffer("mask", torch.ones(1, 1, 300, 300).tril().log())
            self.rows = nn.Embedding(300, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            n = ids.shape[1]
            x = self.tokens(ids) + self.table[:, :n]
            x = x * self.wide[:1, :n].to(x.dtype)
            x = x + self.rows(self.ids[:, :n])
            x = x + self.rows.weight[:n]
            x = (x[:, None] @ x[:, None].transpose(2, 3) + self.mask[:, :, :n, :n]).softmax(-1) @ x[:, None]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask[:, :, :n, :n])

    made = session(Whole())
    for tokens in (100, 299, 300):
        assert sites(made.at(tokens)) == sites(made.structural()), tokens
    assert len(made.structural().graph.sites) == 6


def test_one_token(observed: Session) -> None:
    target = observed.at(1)
    assert target.failure is None
    assert sites(target) == sites(observed.structural())


def grown(n: int) -> nn.Module:
    class Grows(nn.Module):
        """A table that is made anew when the text is longer than it."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.cached = 0
            self._make(n)

        def _make(self, length: int) -> None:
            a = torch.arange(length)[:, None] / 100 ** (torch.arange(WIDTH) / WIDTH)
            self.register_buffer("table", a.sin(), persistent=False)
            self.cached = length

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.cached:
                self._make(x.shape[1])
            return self.norm(x) + self.table[: x.shape[1]]

    return Grows()


def bucketed() -> nn.Module:
    class Short(nn.Module):
        """Takes another way for long texts."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], dtype=x.dtype)
            if x.shape[1] > 500:
                places = places * (500 / x.shape[1])
            return self.norm(x) + places[:, None]

    return Short()


@pytest.mark.parametrize("make", [lambda: grown(64), lambda: grown(256), lambda: grown(10_000), bucketed])
@pytest.mark.parametrize("tokens", [16, 300, 1000])
def test_code_that_depends_on_the_length(make: Callable[[], nn.Module], tokens: int) -> None:
    model = make()
    made = session(model)
    assert made.structural().failure is None
    target = made.at(tokens)
    assert target.failure is None
    (site,) = target.graph.sites
    x = torch.zeros(1, tokens, WIDTH)
    expected = model(x) - model.norm(x)
    torch.testing.assert_close(
        target.value(site.position[-1]).expand(1, tokens, WIDTH), expected.detach(), rtol=0, atol=0
    )


@pytest.mark.parametrize("rows", [8, 14, 16, 40, 64, 128, 151, 160])
@pytest.mark.parametrize("by", ["lookup", "slice"])
def test_a_table_shorter_than_the_usual_structural_length(rows: int, by: str) -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(300, WIDTH)
            self.positions = nn.Embedding(rows, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            n = ids.shape[1]
            row = self.positions(torch.arange(n)) if by == "lookup" else self.positions.weight[:n]
            return self.tokens(ids) + row

    made = session(Short())
    structural = made.structural()
    assert structural.failure is None
    assert structural.seq_len <= rows
    assert [site.position[0].provenance.name for site in structural.graph.sites] == ["POSITION"]
    assert made.at(rows).failure is None
    assert len(made.at(rows).graph.sites) == 1
    too_long = made.at(rows + 1).failure
    assert too_long is not None
    assert (too_long.table is not None) == (by == "lookup")
    assert (too_long.site is not None) == (by == "slice")


@pytest.mark.parametrize("rows", [16, 64, 130])
def test_a_buffer_that_ends_before_the_table_does(rows: int) -> None:
    """RoBERTa gathers token types, all zero, with its position ids, along an axis that is not the first."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(300, WIDTH)
            self.positions = nn.Embedding(rows, WIDTH)
            self.kinds = nn.Embedding(2, WIDTH)
            self.register_buffer("types", torch.zeros(1, rows, dtype=torch.long))

        def forward(self, ids: Tensor) -> Tensor:
            place = torch.arange(2, ids.shape[1] + 2)[None]
            return self.tokens(ids) + self.kinds(self.types.gather(1, place)) + self.positions(place)

    made = session(Typed())
    structural = made.structural()
    assert structural.failure is None
    assert structural.seq_len <= rows - 2
    assert made.at(rows - 2).failure is None
    assert made.at(rows - 1).failure is not None


@pytest.mark.parametrize("width", [151, 157, 302, 150, 152, 5, 61, 139])
def test_structural_sizes_avoid_those_of_the_model(width: int) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.gain = nn.Parameter(torch.randn(width))
            self.other = nn.Parameter(torch.randn(width, width))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.linear(x) + self.gain) @ (self.other * self.gain)

    made = session(Sized()).structural()
    assert made.failure is None
    assert width not in (made.sizes.tokens, made.sizes.batch, made.sizes.keys)
    assert made.graph.sites == []


def test_a_key_value_cache_does_not_grow_between_passes() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.past: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            start = sum(item.shape[1] for item in self.past)
            self.past.append(x)
            return self.norm(x) + torch.arange(start, start + x.shape[1])[:, None]

    made = session(Cached())
    made.structural()
    for tokens in (10, 20):
        target = made.at(tokens)
        assert torch.equal(target.value(target.graph.sites[0].position[0])[:, 0], torch.arange(tokens))
