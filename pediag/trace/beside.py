"""Parts that forward leaves out: the tower of images of a model that is fed text alone runs by itself beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from pediag.trace.inputs import Candidate, Input, Maker, Sizes, declares_inputs

if TYPE_CHECKING:
    from pediag.trace.session import Trace

Run = Callable[[Maker], "Trace"]

# Axes of an input that is no row of numbers for the text as a whole: an image, a clip, frames of sound.
_AXES = 3


def left_out(model: nn.Module, trace: Trace) -> dict[str, nn.Module]:
    """By path: the outermost parts with a declared main input in which the pass recorded nothing."""
    entered = {node.module for node in trace.graph.nodes}
    found: dict[str, nn.Module] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not path or inside or not declares_inputs(part) or not any(True for _ in part.parameters()):
            continue
        if not any(name == path or name.startswith(f"{path}.") for name in entered):
            found[path] = part
    return found


def with_parts(maker: Maker, parts: dict[str, nn.Module], run: Run) -> tuple[Maker, Trace | None]:
    """``maker`` with those ``parts`` beside it that run for inputs made up from what they declare, and its pass.

    The likeliest inputs of all parts are tried together, then those of each part by itself. Without a part that runs
    there is no pass.
    """
    from pediag.trace.declared import of_model

    ways = {path: list(of_model(part)) for path, part in parts.items()}
    chosen = {path: makers[0] for path, makers in ways.items() if makers}
    trace = run(_beside(maker, chosen)) if chosen else None
    if trace is None or trace.failure is None:
        return _beside(maker, chosen), trace
    for path in list(chosen):
        alone = (way for way in ways[path] if run(_only(path, way)).failure is None)
        if (way := next(alone, None)) is None:
            del chosen[path]
        else:
            chosen[path] = way
    trace = run(_beside(maker, chosen)) if chosen else None
    return _beside(maker, chosen), trace


def _beside(maker: Maker, chosen: dict[str, Maker]) -> Maker:
    def made(sizes: Sizes) -> Candidate:
        return replace(maker(sizes), beside={path: way(sizes).kwargs for path, way in chosen.items()})

    return made


def _only(path: str, way: Maker) -> Maker:
    return lambda sizes: Candidate(beside={path: way(sizes).kwargs}, parts_only=True)


def fed_fixed(candidate: Candidate, sizes: Sizes) -> bool:
    """Whether some input of the call is as long at every length: an image, thirty seconds of sound."""
    return any(_is_fixed(item, sizes) for item in candidate.inputs())


def follows_length(candidate: Candidate) -> bool:
    """Whether some input of the call grows with the number of tokens."""
    return any(_grows(item) for item in candidate.inputs() if not item.literal)


def _is_fixed(item: Input, sizes: Sizes) -> bool:
    if item.literal or item.role != "content" or _grows(item):
        return False
    shape = item.shape(sizes)
    return len(shape) >= _AXES and not {sizes.tokens, sizes.keys} & set(shape)


def _grows(item: Input) -> bool:
    return item.value is not None or any(isinstance(dim, str) and dim != "B" for dim in item.dims)
