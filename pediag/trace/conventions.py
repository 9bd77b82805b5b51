"""How a model is given what it remembers of earlier tokens: told from its signature, to be confirmed by a trace."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from pediag.errors import UsageError
from pediag.targets.caches import CacheSpec
from pediag.targets.inputs import POSITION_ARGUMENTS
from pediag.trace.inputs import Input

# Calling conventions of libraries in wide use; that an argument is named so proves nothing by itself.
_CACHE = re.compile(r"past|cache|incremental_state|inference_params|(^|_)kvs?($|_)|^mems$")
_FLAG = re.compile(r"^(use|return|with|output|enable|do|is)_|_(mode|flag)$|^(incremental|decode|caching)$")
_OFFSET = re.compile(
    r"pos(ition|itions|_ids|ns)?($|_)|offset|^start|past_(len|length)|cache(d)?_(len|length|position)|(^|_)seen($|_)"
)
_RANGE = re.compile(r"ids$|positions$|input_pos$|cache_position$")
_NOT_CACHE = re.compile(
    r"(len|length|lengths|position|positions|pos|offset|size|implementation|params_class)$"
)


@dataclass(frozen=True, slots=True)
class Convention:
    """One way to run cached steps. ``said`` is how it is told to the user.

    ``given`` are arguments with fixed values, ``counts`` get the number of tokens seen, ``ranges`` the positions of
    the new tokens. ``cache`` is the argument that gets the memory, ``start`` makes what the first pass is given for
    it (nothing when None), ``path`` says where forward returns it (looked for when None, never when empty).
    ``positions`` says that the caller tells the model where it is, though it may be called without.
    """

    said: str
    given: Mapping[str, Any] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    cache: str = ""
    start: Callable[[], Any] | None = None
    path: tuple[int | str, ...] | None = None
    positions: bool = False

    def arguments(self, seen: int, tokens: int) -> dict[str, Any]:
        """What a pass of ``tokens`` after ``seen`` others is given besides its tokens and its memory."""
        found: dict[str, Any] = {name: Input(value=item, literal=True) for name, item in self.given.items()}
        found.update({name: Input(value=seen, literal=True) for name in self.counts})
        for name in self.ranges:
            shape = (1, tokens) if name.endswith(("ids", "positions")) else (tokens,)
            places = torch.arange(seen, seen + tokens).view(shape)
            found[name] = Input(torch.int64, shape, "positions", places)
        return found


class NoCache(Exception):
    """The model takes no memory of earlier tokens; the message says what was looked for."""


def check_cache(model: nn.Module, specs: Sequence[CacheSpec]) -> None:
    """Raise UsageError when what is named as part of a cache is no argument of the model's forward."""
    accepted = inspect.signature(model.forward).parameters
    if any(item.kind is item.VAR_KEYWORD for item in accepted.values()):
        return
    for spec in specs:
        if spec.name not in accepted:
            raise UsageError(
                f"--cache {spec.name}: forward() takes no such argument; it takes {', '.join(accepted)}"
            )


def conventions(model: nn.Module, specs: Sequence[CacheSpec] = ()) -> list[Convention]:
    """Ways in which ``model`` may take its cache, the likeliest first; only the user's own when ``specs`` are given.

    Raises NoCache when its forward has no argument that could be one.
    """
    if specs:
        return [_named(specs)]
    accepted = _accepted(model)
    caches = [name for name in accepted if _is_cache(name, accepted[name])]
    flags = [name for name, item in accepted.items() if _is_flag(name, item)]
    offsets = [name for name in accepted if _OFFSET.search(name) and name not in caches and name not in flags]
    must = [name for name in offsets if accepted[name].default is not None]
    if not caches and not flags and not must and not _holds_memory(model):
        raise NoCache("forward takes no cache")
    return list(_ways(model, accepted, caches, flags, offsets, must))


def _ways(
    model: nn.Module,
    accepted: Mapping[str, inspect.Parameter],
    caches: list[str],
    flags: list[str],
    offsets: list[str],
    must: list[str],
) -> Iterator[Convention]:
    given = dict.fromkeys(flags, True)
    for names in dict.fromkeys((tuple(must), tuple(offsets))):
        told = names != tuple(must)
        for cache, start in _starts(model, accepted, caches):
            for counts, ranges in _split(names, accepted):
                yield Convention(
                    _said(cache, flags, names), given, counts, ranges, cache, start, positions=told
                )


def _split(
    names: Sequence[str], accepted: Mapping[str, inspect.Parameter]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Offsets as numbers and as tensors of positions; the likelier reading first, then the other."""
    tensors = tuple(name for name in names if _is_range(name, accepted[name]))
    yield tuple(name for name in names if name not in tensors), tensors
    unsure = [name for name in names if accepted[name].annotation is inspect.Parameter.empty]
    if len(names) == 1 and unsure:
        yield (names[0],) if tensors else (), () if tensors else (names[0],)


def _is_range(name: str, item: inspect.Parameter) -> bool:
    if type(item.default) is int:
        return False
    said = str(item.annotation)
    if "Tensor" in said:
        return True
    return bool(_RANGE.search(name)) and "int" not in said


def _starts(
    model: nn.Module, accepted: Mapping[str, inspect.Parameter], caches: list[str]
) -> Iterator[tuple[str, Callable[[], Any] | None]]:
    """(argument, what the first pass is given for it)."""
    if not caches:
        yield "", None
    for name in caches:
        kind = _annotated(model, name)
        needed = accepted[name].default is inspect.Parameter.empty
        if kind is dict or name == "incremental_state":
            yield name, dict
        elif kind is list:
            yield name, None if not needed else list
        if not needed:
            yield name, None
        if isinstance(kind, type) and kind not in (dict, list, tuple) and not issubclass(kind, torch.Tensor):
            yield name, kind
        yield name, dict
        yield name, list
        yield name, partial(_for_each, _layers(model), None)
        yield name, partial(_for_each, _layers(model), dict)


def _for_each(layers: int, make: Callable[[], Any] | None) -> list[Any]:
    return [make() if make is not None else None for _ in range(layers)]


def _annotated(model: nn.Module, name: str) -> Any:
    """The class that a parameter of forward is annotated with, also as ``X | None``."""
    try:
        hint = typing.get_type_hints(type(model).forward).get(name)
    except Exception:
        return None
    options = [item for item in typing.get_args(hint) if item is not type(None)] or [hint]
    options = [
        item for item in options if not issubclass(type(None), item if isinstance(item, type) else object)
    ]
    chosen = next(iter(options), None) if typing.get_origin(hint) not in (list, dict, tuple) else hint
    origin = typing.get_origin(chosen)
    return origin if isinstance(origin, type) else chosen


def _layers(model: nn.Module) -> int:
    return max((len(part) for part in model.modules() if isinstance(part, nn.ModuleList)), default=1)


def _accepted(model: nn.Module) -> dict[str, inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: item for name, item in inspect.signature(model.forward).parameters.items() if item.kind in kinds
    }


def _is_cache(name: str, item: inspect.Parameter) -> bool:
    return bool(_CACHE.search(name)) and not _NOT_CACHE.search(name) and not _is_flag(name, item)


def _is_flag(name: str, item: inspect.Parameter) -> bool:
    remembers = bool(_CACHE.search(name)) or name in ("incremental", "decode")
    return remembers and (
        type(item.default) is bool or bool(_FLAG.search(name)) or item.annotation in (bool, "bool")
    )


def _holds_memory(model: nn.Module, tables: Collection[str] = ()) -> bool:
    """Whether some part of the model keeps an attribute or buffer named as a cache, filled or not, that is no table."""
    return any(
        _CACHE.search(name) and f"{path}.{name}".lstrip(".") not in tables
        for path, part in model.named_modules()
        for name in (*vars(part), *part._buffers.keys(), *part._modules.keys())
    )


def forgets(model: nn.Module, ways: Sequence[Convention], tables: Collection[str] = ()) -> bool:
    """Whether nothing but positions that the caller gives was taken for a sign of memory.

    ``tables`` are the names of stored tensors that positions are made of: a table of cosines may be called a cache.
    """
    names = {name for way in ways for name in (*way.counts, *way.ranges)}
    remembers = any(way.cache or way.given for way in ways)
    return not remembers and names <= POSITION_ARGUMENTS and not _holds_memory(model, tables)


def _said(cache: str, flags: Sequence[str], offsets: Sequence[str]) -> str:
    """The arguments; empty when the model is only called again."""
    return ", ".join(dict.fromkeys((*([cache] if cache else ()), *flags, *offsets)))


def _named(specs: Sequence[CacheSpec]) -> Convention:
    made: dict[str, Callable[[], Any]] = {"dict": dict, "list": list}
    memory = next((spec for spec in specs if spec.kind in ("output", "dict", "list")), None)
    return Convention(
        "--cache " + ", ".join(spec.name for spec in specs),
        {spec.name: spec.value for spec in specs if spec.kind == "literal"},
        tuple(spec.name for spec in specs if spec.kind == "seen"),
        tuple(spec.name for spec in specs if spec.kind == "positions"),
        memory.name if memory else "",
        made.get(memory.kind) if memory else None,
        memory.path if memory and memory.kind == "output" else None if memory is None else (),
    )


# -- what forward returned -----------------------------------------------------------------------------------


def taken(output: Any, convention: Convention) -> Any:
    """The memory in what forward returned; None when there is none."""
    if convention.path:
        for step in convention.path:
            output = (
                getattr(output, step) if isinstance(step, str) and hasattr(output, step) else output[step]
            )
        return output
    return None if convention.path is not None else _memory(output, convention.cache)


def _memory(output: Any, name: str) -> Any:
    """What looks like memory: under the argument's own name, under a cache's name, else the last nest of tensors."""
    named = _names(output)
    if name in named:
        return named[name]
    found = [item for key, item in named.items() if _CACHE.search(key) and item is not None]
    if found:
        return found[-1]
    parts = list(output) if type(output) in (tuple, list) else []
    nests = [item for item in parts[1:] if not isinstance(item, torch.Tensor) and _has_tensor(item)]
    tensors = [item for item in parts[1:] if isinstance(item, torch.Tensor) and item.dim() > 2]
    return (nests or tensors or [None])[-1]


def _names(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): item for key, item in output.items()}
    if hasattr(output, "_asdict"):
        return dict(output._asdict())
    if isinstance(output, (torch.Tensor, tuple, list)) or not hasattr(output, "__dict__"):
        return {}
    return dict(vars(output))


def _has_tensor(item: Any, depth: int = 4) -> bool:
    if isinstance(item, torch.Tensor):
        return True
    if not depth or isinstance(item, (str, int, float, nn.Module)) or item is None:
        return False
    if isinstance(item, Mapping):
        return any(_has_tensor(part, depth - 1) for part in item.values())
    if isinstance(item, (tuple, list)):
        return any(_has_tensor(part, depth - 1) for part in item)
    return any(_has_tensor(part, depth - 1) for part in getattr(item, "__dict__", {}).values())
