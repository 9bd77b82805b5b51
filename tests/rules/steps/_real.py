"""Real passes of the cached fixtures in float64: all tokens at once, and a prompt with steps on the own cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

PARTS = (9, 1, 1, 5)


def ids() -> Tensor:
    """(1, 16) token ids."""
    return torch.randint(0, 90, (1, sum(PARTS)), generator=torch.Generator().manual_seed(7))


def whole(factory: Callable[[], nn.Module]) -> Tensor:
    """(1, N, D) of one pass."""
    with torch.no_grad():
        return _logits(factory().double()(ids()))


def decoded(factory: Callable[[], nn.Module], parts: tuple[int, ...] = PARTS) -> Tensor:
    """(1, N, D) of a prompt, single tokens and a chunk."""
    model = factory().double()
    found, memory, seen = [], None, 0
    with torch.no_grad():
        for n in parts:
            out = model(ids()[:, seen : seen + n], **_arguments(model, memory, seen))
            memory = _memory(model, out, memory)
            found.append(_logits(out))
            seen += n
    return torch.cat(found, 1)


def _arguments(model: nn.Module, memory: Any, seen: int) -> dict[str, Any]:
    """What the fixture's forward takes besides its tokens."""
    accepted = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {}
    for name in accepted:
        if name == "start_pos":
            given[name] = seen
        elif name == "use_cache":
            given[name] = True
        elif name in ("incremental_state", "cache"):
            given[name] = {} if memory is None else memory
        elif name == "kv_cache":
            given[name] = _store(model) if memory is None else memory
        elif name in ("past", "layer_past", "past_key_values"):
            given[name] = memory
    model.given = given  # type: ignore[assignment]
    return given


def _store(model: nn.Module) -> Any:
    return inspect.getmodule(type(model)).Store()  # type: ignore[union-attr]


def _memory(model: nn.Module, out: Any, memory: Any) -> Any:
    kept = next(_kept(model), None)
    if kept is not None:
        return kept
    if isinstance(out, dict):
        return out["past_key_values"]
    return out[1] if isinstance(out, tuple) else memory


def _kept(model: nn.Module) -> Iterator[Any]:
    given: dict[str, Any] = model.given  # type: ignore[assignment]
    yield from (given[name] for name in ("incremental_state", "cache", "kv_cache") if name in given)


def _logits(out: Any) -> Tensor:
    first = out["logits"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    assert isinstance(first, Tensor)
    return first
