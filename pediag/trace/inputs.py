"""What to feed a model: the user's own example, the given specs, or inputs made up from its signature."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from pediag.errors import TraceError, UsageError
from pediag.targets import InputSpec
from pediag.targets.inputs import POSITION_ARGUMENTS

Role = Literal["content", "positions", "mask"]

_WIDTHS_TRIED = 6
# Coordinates of four axes below it are told apart by one number of 52 bits.
_LARGEST_SIDE = 2.0**13
_STRETCHED = re.compile(r"(\d*)([BNM])([+-]\d+)?")


def positions(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor of ``example_inputs`` as positions (times, coordinates, position ids), and return it."""
    tensor._pediag_role = "positions"  # type: ignore[attr-defined]
    return tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """Batch, tokens and keys of one trace."""

    batch: int
    tokens: int
    keys: int

    def named(self) -> dict[str, int]:
        """The letters of ``--input``."""
        return {"B": self.batch, "N": self.tokens, "M": self.keys}


@dataclass(frozen=True, slots=True)
class Input:
    """One argument: a shape in the letters of :class:`Sizes`, or the user's own tensor.

    A size may be made of a letter: ``"320N+80"``. ``row`` holds its numbers for one text, where these are known.
    """

    dtype: torch.dtype = torch.int64
    dims: tuple[int | str, ...] = ("B", "N")
    role: Role = "content"
    value: Any = None
    literal: bool = False
    row: tuple[Any, ...] = ()

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape at these sizes."""
        if self.value is not None:
            return tuple(self.value.shape)
        named = sizes.named()
        return tuple(_size(dim, named) if isinstance(dim, str) else dim for dim in self.dims)

    def __str__(self) -> str:
        if self.literal:
            return repr(self.value)
        dims = self.value.shape if self.value is not None else self.dims
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(str(dim) for dim in dims)}]"


def _size(dim: str, named: Mapping[str, int]) -> int:
    """``320N+80`` at these sizes."""
    found = _STRETCHED.fullmatch(dim)
    if found is None:
        return named[dim]
    times, letter, more = found.groups()
    return int(times or 1) * named[letter] + int(more or 0)


@dataclass(slots=True)
class Candidate:
    """One way to call the model. ``given`` says that the user chose it.

    ``beside`` holds, by path, the keyword arguments of parts that run after the model by themselves, since its own
    forward leaves them out for these arguments: the tower of images of a model that is fed text alone. With
    ``parts_only`` the model itself does not run.
    """

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    given: bool = False
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts_only: bool = False

    def __str__(self) -> str:
        parts = [_shown(item) for item in self.args]
        parts += [f"{name}={_shown(item)}" for name, item in self.kwargs.items()]
        parts += [f"{path}({_shown(kwargs)})" for path, kwargs in self.beside.items()]
        return ", ".join(parts)

    def inputs(self) -> list[Input]:
        """Every input, those in containers too, in order."""
        return list(_leaves([*self.args, *self.kwargs.values(), *self.beside.values()]))


def _shown(item: Any) -> str:
    if isinstance(item, dict):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in item.items()) + "}"
    return f"[{', '.join(map(_shown, item))}]" if isinstance(item, (list, tuple)) else str(item)


def _leaves(item: Any) -> Iterator[Input]:
    if isinstance(item, Input):
        yield item
    elif isinstance(item, (list, tuple, dict)):
        for part in item.values() if isinstance(item, dict) else item:
            yield from _leaves(part)


Maker = Callable[[Sizes], Candidate]


def candidates(
    model: nn.Module, specs: Sequence[InputSpec], example: Callable[[int], Any] | None
) -> Iterator[Maker]:
    """Ways to call the model, the likeliest first; only the user's own when one is given."""
    if specs:
        yield lambda sizes: _from_specs(specs, sizes)
    elif example is not None:
        yield lambda sizes: _from_example(example, sizes, tuple(inspect.signature(model.forward).parameters))
    elif declares_inputs(model):
        from pediag.trace.declared import of_model

        yield from of_model(model)
    else:
        yield from _guessed(model)


def declares_inputs(model: nn.Module) -> bool:
    """Whether ``model`` says by itself what its main input is, as models of transformers do."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def _from_specs(specs: Sequence[InputSpec], sizes: Sizes) -> Candidate:
    kwargs = {
        spec.name: Input(getattr(torch, spec.dtype), spec.shape(sizes.named()), spec.role) for spec in specs
    }
    return Candidate([], dict(kwargs), True)


def _from_example(example: Callable[[int], Any], sizes: Sizes, names: Sequence[str] = ()) -> Candidate:
    """The user's call; ``names`` are the arguments of forward, in order."""
    try:
        made = example(sizes.tokens)
    except Exception as error:
        raise TraceError(
            f"example_inputs({sizes.tokens}) raised {type(error).__name__}: {error}; it must return the "
            "model's arguments for that many tokens"
        ) from error
    if isinstance(made, Mapping):
        owned = [_own_named(name, item) for name, item in made.items()]
        return Candidate([], dict(zip(made, _among_others(owned), strict=True)), True)
    items = made if isinstance(made, (tuple, list)) else (made,)
    named = itertools.zip_longest(names[: len(items)], items, fillvalue="")
    return Candidate(_among_others([_own_named(name, item) for name, item in named]), {}, True)


def _among_others(items: list[Any]) -> list[Any]:
    """The arguments, with those as positions that are such by what stands beside them.

    Coordinates that are all zero beside others of as many axes; 0, 1, 2, ... in every row beside vectors.
    """
    tensors = [item for item in items if isinstance(item, Input) and not item.literal]
    axes = {item.value.shape[-1] for item in tensors if _is_grid(item.value)}
    vectors = any(
        item.role == "content" and item.dtype.is_floating_point and item.value.dim() > 2 for item in tensors
    )

    def counted(value: torch.Tensor) -> bool:
        origin = (
            value.is_floating_point() and value.dim() >= 2 and value.shape[-1] in axes and not value.any()
        )
        return origin or (vectors and _is_range(value))

    places = {id(item) for item in tensors if counted(item.value)}
    return [replace(item, role="positions") if id(item) in places else item for item in items]


def _own_named(name: str, item: Any) -> Any:
    """The user's own argument for ``name``; whole numbers given for an argument of positions are positions."""
    found = _own(item)
    whole = isinstance(item, torch.Tensor) and item.dtype is not torch.bool and not item.is_floating_point()
    return replace(found, role="positions") if whole and name in POSITION_ARGUMENTS else found


def _own(item: Any) -> Any:
    """The user's own argument; tensors in lists, tuples and dictionaries are inputs each."""
    if type(item) is dict:
        return {name: _own(part) for name, part in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_own(part) for part in item)
    if not isinstance(item, torch.Tensor):
        return Input(value=item, literal=True)
    role: Role = getattr(item, "_pediag_role", None) or _role_by_value(item)
    return Input(item.dtype, role=role, value=item)


def _role_by_value(tensor: torch.Tensor) -> Role:
    """All-true masks are masks; clocks that only run forward and coordinates of a grid are positions; else content."""
    if tensor.dtype is torch.bool:
        return "mask"
    if _is_grid(tensor):
        return "positions"
    if tensor.dim() == 2 and tensor.is_floating_point() and tensor.shape[-1] > 2:
        return "positions" if bool((tensor.diff(dim=-1) > 0).all()) else "content"
    return "mask" if tensor.dim() >= 2 and tensor.numel() > 1 and bool((tensor == 1).all()) else "content"


def _is_range(tensor: torch.Tensor) -> bool:
    """Whether every row holds the whole numbers 0, 1, 2, ..."""
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() not in (1, 2) or tensor.shape[-1] < 3:
        return False
    return bool((tensor.cpu() == torch.arange(tensor.shape[-1])).all())


def _is_grid(tensor: torch.Tensor) -> bool:
    """Whether each text holds coordinates (N, 2 to 4), real-valued whole numbers, row after row of a grid."""
    if not (
        tensor.is_floating_point()
        and tensor.dim() >= 2
        and tensor.shape[-2] > 2
        and 2 <= tensor.shape[-1] <= 4
    ):
        return False
    whole = bool(((tensor >= 0) & (tensor == tensor.round()) & (tensor < _LARGEST_SIDE)).all())
    if not whole or tensor.max() < 2:
        return False
    scale = _LARGEST_SIDE ** torch.arange(tensor.shape[-1] - 1, -1, -1, dtype=torch.float64)
    return bool(((tensor.to("cpu", torch.float64) * scale).sum(-1).diff(dim=-1) > 0).all())


def _guessed(model: nn.Module) -> Iterator[Maker]:
    """Inputs from the forward signature and the widths of the first modules."""
    names = _required(model)
    for primary in _primary(model):
        for filler in (None, "mask"):
            yield _call_with(names, primary, filler)
            if not any("mask" in name for name in names):
                break
        if primary.dims[0] == "B" and any(name in POSITION_ARGUMENTS for name in names):
            yield _call_with(names, primary, "mask", one_row=True)
            yield _call_with(names, replace(primary, dims=primary.dims[1:]), "mask")


def _required(model: nn.Module) -> dict[str, bool]:
    """Arguments that forward needs, with whether they go by keyword; its first one when it needs none.

    Those of ``forward(*args, **kwargs)`` are the ones of the first part with weights, which it hands them to.
    """
    by_name = inspect.Parameter.KEYWORD_ONLY
    ways = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, by_name)
    accepted = inspect.signature(model.forward).parameters.values()
    taken = [item for item in accepted if item.kind in ways]
    if not taken and accepted:
        inner = next((part for part in model.children() if any(True for _ in part.parameters())), None)
        keywords_only = all(item.kind is item.VAR_KEYWORD for item in accepted)
        named = _required(inner) if inner is not None else {}
        return {name: by_keyword or keywords_only for name, by_keyword in named.items()}
    required = [item for item in taken if item.default is item.empty] or taken[:1]
    return {item.name: item.kind is by_name for item in required}


def _call_with(names: Mapping[str, bool], primary: Input, filler: str | None, one_row: bool = False) -> Maker:
    """A call with ``primary`` as content; ``one_row`` gives one row of positions for all texts."""

    def make(sizes: Sizes) -> Candidate:
        made = Candidate()
        content: list[str] = []
        for name, by_keyword in names.items():
            item = _argument(name, primary, filler, later=bool(content))
            if one_row and item.role == "positions":
                item = Input(item.dtype, item.dims[-1:], item.role)
            if item.role == "content" and not item.literal:
                content.append(name)
            if by_keyword:
                made.kwargs[name] = item
            else:
                made.args.append(item)
        return made

    return make


def _argument(name: str, primary: Input, filler: str | None, *, later: bool) -> Input:
    """What to give for an argument; ``later`` says that content was given before."""
    if name in POSITION_ARGUMENTS:
        return Input(torch.int64, ("N",) if primary.dims[0] != "B" else ("B", "N"), "positions")
    if "mask" in name:
        return Input(torch.bool, ("B", "N"), "mask") if filler else Input(literal=True)
    if name in ("start_pos", "offset", "past_length", "cache_position"):
        return Input(value=0, literal=True)
    return _renamed(primary) if later and _is_target(name) else primary


def _is_target(name: str) -> bool:
    """Whether a second sequence is the decoder's, which may be of another length than the encoder's."""
    return name.startswith(("tgt", "target", "dec", "decoder", "y"))


def _renamed(primary: Input) -> Input:
    return Input(primary.dtype, tuple("M" if dim == "N" else dim for dim in primary.dims), primary.role)


def _primary(model: nn.Module) -> Iterator[Input]:
    first = next((module for module in model.modules() if list(module.parameters(recurse=False))), None)
    has_table = any(isinstance(module, nn.Embedding) for module in model.modules())
    floats = [Input(_dtype(model), dims) for dims in _float_shapes(model)]
    ids = [Input()] if has_table else []
    # A model whose first weights are a table takes ids; one that starts with a projection takes vectors.
    yield from (
        itertools.chain(ids, floats)
        if isinstance(first, nn.Embedding)
        else itertools.chain(ids if len(floats) == 0 else [], floats, ids, [] if has_table else [Input()])
    )


def _dtype(model: nn.Module) -> torch.dtype:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


def _float_shapes(model: nn.Module) -> list[tuple[int | str, ...]]:
    widths: list[int] = []
    images: list[tuple[int | str, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            widths.append(module.in_features)
        elif isinstance(module, nn.MultiheadAttention):
            widths.append(module.embed_dim)
        elif isinstance(module, nn.LayerNorm):
            widths.append(int(module.normalized_shape[-1]))
        elif isinstance(module, nn.Embedding):
            widths.append(module.embedding_dim)
        elif isinstance(module, nn.Conv2d) and not images:
            sides = (*_patched(module, model), 224, 32)
            images += [("B", module.in_channels, side, side) for side in dict.fromkeys(sides)]
    widths += [int(t.shape[-1]) for t in itertools.chain(model.buffers(), model.parameters()) if t.dim() >= 2]
    unique = list(dict.fromkeys(width for width in widths if width > 1))[:_WIDTHS_TRIED]
    sequences: list[tuple[int | str, ...]] = [("B", "N", width) for width in unique]
    first = next((m for m in model.modules() if list(m.parameters(recurse=False))), None)
    return images + sequences if isinstance(first, nn.Conv2d) else sequences + images


def image_sides(model: nn.Module) -> Iterator[int]:
    """Pixels along a side of the square images that fit the tables of patches of ``model``."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            yield from _patched(module, model)


def _patched(patches: nn.Conv2d, model: nn.Module) -> Iterator[int]:
    """Pixels along a side of the square image that fills a table of one row a patch, and up to two more."""
    if patches.kernel_size != patches.stride:
        return
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.dim() >= 2 and tensor.shape[-1] == patches.out_channels:
            for extra in (0, 1, 2):
                side = math.isqrt(max(int(tensor.shape[-2]) - extra, 0))
                if side > 1 and side * side == tensor.shape[-2] - extra:
                    yield side * int(patches.stride[0])


def made_up(item: Input, shape: tuple[int, ...], sizes: Sizes) -> torch.Tensor:
    """A mask in which nothing is hidden, or positions that count along the tokens and are alike along other axes.

    Without an axis of tokens they count along the longest.
    """
    if item.row:
        return torch.tensor(item.row, dtype=item.dtype).expand(shape)
    if item.role == "mask" or not shape:
        return torch.full(shape, int(item.role == "mask"), dtype=item.dtype)
    axes = [axis for axis, size in enumerate(shape) if size in (sizes.tokens, sizes.keys)]
    axis = axes[-1] if axes else max(range(len(shape)), key=lambda axis: (shape[axis], axis))
    view = [-1 if other == axis else 1 for other in range(len(shape))]
    return torch.arange(shape[axis]).to(item.dtype).view(view).expand(shape)


def check_names(model: nn.Module, specs: Sequence[InputSpec]) -> None:
    """Raise UsageError when a given input is no argument of the model's forward."""
    accepted = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for spec in specs:
        if spec.name not in accepted:
            raise UsageError(
                f"--input {spec.name}: forward() takes no such argument; it takes {', '.join(accepted)}"
            )


def transposed(candidate: Candidate) -> Candidate:
    """The same call with batch and sequence swapped, for models that put the sequence first."""

    def swap(item: Any) -> Any:
        if (
            isinstance(item, Input)
            and not item.literal
            and item.value is None
            and item.dims[:2] == ("B", "N")
        ):
            return Input(item.dtype, ("N", "B", *item.dims[2:]), item.role)
        return item

    return Candidate(
        [swap(item) for item in candidate.args],
        {name: swap(item) for name, item in candidate.kwargs.items()},
        candidate.given,
    )
