"""Parts that forward leaves out: the tower of images of a model that is fed text alone runs by itself beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from pediag.trace.inputs import Candidate, Input, Maker, Sizes, declares_inputs

if TYPE_CHECKING:
    from pediag.trace.graph import Node
    from pediag.trace.session import Trace

Run = Callable[[Maker, Sizes], "Trace"]

# Axes of an input that is no row of numbers for the text as a whole: an image, a clip, frames of sound.
_AXES = 3


def left_out(model: nn.Module, trace: Trace | None = None) -> dict[str, nn.Module]:
    """By path: the outermost parts with a declared main input in which the pass recorded nothing; all without one."""
    entered = {node.module for node in trace.graph.nodes} if trace is not None else set()
    found: dict[str, nn.Module] = {}
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not path or inside or not declares_inputs(part) or not any(True for _ in part.parameters()):
            continue
        if not any(name == path or name.startswith(f"{path}.") for name in entered):
            found[path] = part
    return found


def with_left_out(model: nn.Module, maker: Maker, trace: Trace, run: Run) -> tuple[Maker, Trace]:
    """``maker`` with the parts beside it that its pass left out and that run, and its pass; as it is without one.

    The inputs of parts are made up from what they declare: the likeliest of all parts are tried together, then those
    of each part by itself, then of its own parts.
    """
    from pediag.trace.declared import of_model

    parts = {} if trace.fed.given else left_out(model, trace)
    likeliest = {path: next(of_model(part), None) for path, part in parts.items()}
    chosen = {path: way for path, way in likeliest.items() if way is not None}
    again = run(_beside(maker, chosen), trace.sizes) if chosen else None
    if again is not None and again.failure is not None:
        chosen = _by_themselves(parts, trace.sizes, run)
        again = run(_beside(maker, chosen), trace.sizes) if chosen else None
    return (maker, trace) if again is None or again.failure is not None else (_beside(maker, chosen), again)


def in_parts(model: nn.Module, sizes: Sizes, run: Run) -> tuple[Maker, Trace] | None:
    """A pass of the parts of ``model`` that run by themselves and of what these leave out; None where none runs."""
    chosen = _by_themselves(left_out(model), sizes, run)
    made, trace = _of_parts(chosen, sizes, run) if chosen else (None, None)
    if made is None or trace is None or trace.failure is not None:
        return None
    inner = _by_themselves(left_out(model, trace), sizes, run)
    more = _of_parts({**chosen, **inner}, sizes, run) if inner else (made, trace)
    return more if more[1].failure is None else (made, trace)


def _of_parts(chosen: Mapping[str, Maker], sizes: Sizes, run: Run) -> tuple[Maker, Trace]:
    made = _beside(lambda sizes: Candidate(parts_only=True), dict(chosen))
    return made, run(made, sizes)


def not_run(model: nn.Module, trace: Trace) -> list[str]:
    """That parts with an input of their own did not run, and what to do: a note of the report, or none."""
    left = [] if trace.fed.given else [f"`{path}`" for path in left_out(model, trace)]
    if not left:
        return []
    many = len(left) > 1
    return [
        f"{', '.join(left)} {'do' if many else 'does'} not run on inputs that are made up, so nothing of "
        f"{'them' if many else 'it'} is judged: give inputs with --input, or check {'each' if many else 'it'} by itself"
    ]


def apart(stopped: Trace, made: Trace) -> str:
    """That parts were run in place of the whole, and why: a note of the report."""
    why = stopped.failure.message if stopped.failure is not None else ""
    return (
        f"its forward was not run as a whole, since {stopped.inputs} stops ({why}): what is judged are the parts that "
        f"run by themselves, {made.inputs}; give its inputs with --input to judge the whole"
    )


def _by_themselves(parts: Mapping[str, nn.Module], sizes: Sizes, run: Run) -> dict[str, Maker]:
    """How to call each part that runs; in place of one that does not, its own parts."""
    from pediag.trace.declared import of_model

    chosen: dict[str, Maker] = {}
    for path, part in parts.items():
        ways = (way for way in of_model(part) if run(_only(path, way), sizes).failure is None)
        if (way := next(ways, None)) is not None:
            chosen[path] = way
        else:
            inner = {f"{path}.{name}": module for name, module in left_out(part).items()}
            chosen.update(_by_themselves(inner, sizes, run))
    return chosen


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
    if item.literal or item.role != "content" or item.value is not None or _grows(item):
        return False
    shape = item.shape(sizes)
    alone = len(shape) > 1 and all(isinstance(dim, int) for dim in item.dims)
    return (alone or len(shape) >= _AXES) and not {sizes.tokens, sizes.keys} & set(shape)


def _grows(item: Input) -> bool:
    return item.value is None and any(
        isinstance(dim, str) and ("N" in dim or "M" in dim) for dim in item.dims
    )


def fixed_places(trace: Trace) -> int | None:
    """The most places that attention runs along, where no input grows with the number of tokens; else None."""
    fed = trace.fed
    if fed.given or not fed.inputs() or follows_length(fed):
        return None
    return max(trace.places, default=None)


def of_places(node: Node | None, trace: Trace) -> bool:
    """Whether a value moves along places alone whose number is fixed, such as the patches of an image."""
    moving = {node.shape[axis] for axis in node.moving} if node is not None else set()
    sides = {side for grid in trace.lengths.grids for side in grid}
    return bool(moving) and moving <= trace.places | sides
