"""The module path and the source line of every site."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pediag.trace import Trace
from tests.trace._sessions import WIDTH, Adds, joins, trace

D = WIDTH
HERE = __file__


def line_of(marker: str) -> int:
    """The line of this file that ends with ``# marker``."""
    with open(HERE) as source:
        (found,) = [i for i, line in enumerate(source, 1) if line.rstrip().endswith(f"# {marker}")]
    return found


def ranged(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], dtype=x.dtype)[:, None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + ranged(x)


def paths(made: Trace) -> list[str]:
    return [site.module for site in made.graph.sites]


class Nested(nn.Module):
    def __init__(self, blocks: nn.Module | list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.blocks = nn.ModuleList(blocks) if isinstance(blocks, list) else blocks

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.inner.blocks
        for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
            x = block(x)
        return x


def test_paths_of_nested_modules() -> None:
    made = trace(Nested([Block(), nn.Sequential(nn.Identity(), Block())]))
    assert paths(made) == ["inner.blocks.0", "inner.blocks.1.1"]


def test_paths_in_a_module_dict() -> None:
    made = trace(Nested(nn.ModuleDict({"first": Block(), "second": Block()})))
    assert paths(made) == ["inner.blocks.first", "inner.blocks.second"]


def test_a_site_of_the_model_itself_has_an_empty_path() -> None:
    assert paths(trace(Adds(ranged))) == [""]


def test_a_module_shared_by_layers_goes_by_the_layer_that_runs_it() -> None:
    shared = Block()
    made = trace(Nested([nn.Sequential(shared), nn.Sequential(shared)]))
    assert paths(made) == ["inner.blocks.0.0", "inner.blocks.1.0"]


def test_a_module_used_twice_by_one_parent_keeps_its_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    assert paths(trace(Twice())) == ["block", "block"]


def test_hooks_of_the_user_run_and_are_placed() -> None:
    block = Block()
    block.norm.register_forward_hook(lambda module, args, out: out * ranged(out).cos())
    block.register_forward_pre_hook(lambda module, args: (args[0] + ranged(args[0]),))
    made = trace(Nested([block]))
    assert len(made.graph.sites) == 3
    assert all(path.startswith("inner.blocks.0") for path in paths(made))


def test_a_path_survives_a_caught_exception() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.raises = Raises()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.raises(x)
            except ValueError:
                x = self.norm(x) + ranged(x)
            return self.block(x)

    assert paths(trace(Catches())) == ["", "block"]


# -- lines --------------------------------------------------------------------------------------------------


def helper(x: Tensor, p: Tensor) -> Tensor:
    return x + p  # in a helper


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@decorated
@torch.no_grad()
def under_decorators(x: Tensor, p: Tensor) -> Tensor:
    return x + p  # under decorators


by_lambda = lambda x, p: x + p  # noqa: E731 # by lambda


@functools.lru_cache
def memoised_table(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32)[:, None]


class Operators(nn.Module):
    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        return torch.add(  # over several lines
            x,
            p,
        )


operators = Operators()


def by_property(x: Tensor, p: Tensor) -> Tensor:
    class Holder:
        @property
        def sum(self) -> Tensor:
            return x + p  # in a property

    return Holder().sum


def by_comprehension(x: Tensor, p: Tensor) -> Tensor:
    return torch.stack([row + p for row in x])  # in a comprehension


def by_checkpoint(x: Tensor, p: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(helper, x, p, use_reentrant=False)


def by_partial(x: Tensor, p: Tensor) -> Tensor:
    return functools.partial(helper, p=p)(x)


def by_generator(x: Tensor, p: Tensor) -> Tensor:
    return next(row + p for row in [x])  # in a generator


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        return x + p  # in an autograd function

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize(
    ("join", "marker"),
    [
        (helper, "in a helper"),
        (under_decorators, "under decorators"),
        (by_lambda, "by lambda"),
        (operators, "over several lines"),
        (by_property, "in a property"),
        (by_comprehension, "in a comprehension"),
        (by_checkpoint, "in a helper"),
        (by_partial, "in a helper"),
        (by_generator, "in a generator"),
        (lambda x, p: Function.apply(x, p), "in an autograd function"),
        (torch.compile(helper), "in a helper"),
    ],
    ids=[
        "helper",
        "decorators",
        "lambda",
        "operators",
        "property",
        "comprehension",
        "checkpoint",
        "partial",
        "generator",
        "autograd",
        "compiled",
    ],
)
def test_the_line_of_a_site_is_the_users(join: Callable[..., Tensor], marker: str) -> None:
    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return join(self.norm(x), memoised_table(x.shape[1]))

    made = trace(Joins())
    assert made.graph.sites
    for site in made.graph.sites:
        assert site.frame is not None
        assert (site.frame.file, site.frame.line) == (HERE, line_of(marker))


def test_every_site_has_a_line_of_this_file() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 3, batch_first=True)
            self.norm = nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            p = ranged(x)
            x = self.norm(x + p) * p.cos()
            mask = torch.full((n, n), float("-inf")).triu(1) + (p - p.T)
            x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            x = x + self.attention(x, x, x, attn_mask=mask)[0]
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            x[:, :, 0] += p[:, 0]
            return x.index_select(1, torch.arange(n - 1, -1, -1))

    made = trace(Many())
    lines = inspect.getsourcelines(Many.forward)
    assert {site.kind for site in made.graph.sites} >= {"additive", "rotary", "bias", "lookup"}
    for site in made.graph.sites:
        assert site.frame is not None
        assert site.frame.file == HERE
        assert lines[1] <= site.frame.line < lines[1] + len(lines[0])
        assert "Many.forward" in site.frame.function or site.frame.function == "forward"


def test_a_site_inside_torchs_attention_is_placed_in_its_module() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(D, 3, 2 * D, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            bias = -(torch.arange(n)[:, None] - torch.arange(n)[None]).abs().float()
            return self.encoder(x, mask=bias)

    made = trace(Encoder())
    sites = [site for site in made.graph.sites if site.kind == "bias"]
    assert {site.module for site in sites} == {
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
    }
    assert {site.frame.file for site in sites if site.frame} == {HERE}


def test_einops_is_seen_through() -> None:
    einops = pytest.importorskip("einops")

    def program(x: Tensor) -> Tensor:
        return einops.rearrange(torch.arange(x.shape[1], dtype=x.dtype), "n -> n 1")

    (site,) = joins(trace(Adds(program)))
    assert site.frame is not None
    assert site.frame.file.endswith("_sessions.py")
    assert site.position[0].frame is not None
    assert site.position[0].frame.file == HERE


def test_positions_have_the_line_that_made_them() -> None:
    def program(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])  # made here
        return place.to(x.dtype)[:, None]  # moved here

    made = trace(Adds(program))
    (made_at,) = [node for node in made.graph.nodes if node.op_name == "arange"]
    assert made_at.frame is not None
    assert made_at.frame.line == line_of("made here")
    (site,) = joins(made)
    assert site.position[0].frame is not None
    assert site.position[0].frame.line == line_of("moved here")
