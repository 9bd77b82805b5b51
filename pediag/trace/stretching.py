"""An example whose tensors are as long at every length: its tokens over and over, so that it is judged at any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pediag.trace.dimensions import ROWS
from pediag.trace.failures import too_long
from pediag.trace.inputs import Candidate, Input, Maker, Sizes
from pediag.trace.tokens import contracts_tokens

if TYPE_CHECKING:
    from pediag.trace.session import Trace

Run = Callable[[Maker, Sizes], "Trace"]

# Fewer tokens are no text: a pair of sizes, the coordinates of a point.
_FEWEST = 4


def following(
    makers: Iterator[Maker], sizes_of: Callable[[int], Sizes], run: Run, notes: list[str]
) -> Iterator[Maker]:
    """``makers``, each of an example that ignores the length made to follow it, which ``notes`` tell then.

    Its tensors of tokens (texts by tokens, or by tokens and channels) are repeated along the tokens. It stays as it is
    where such a call does not run, or attention does not go along the tokens then. ``sizes_of`` gives shorter sizes
    for higher numbers below ``ROWS``.
    """
    for maker in map(_once, makers):
        axis = next((axis for axis in (1, 0) if _is_followed(maker, axis, sizes_of, run)), None)
        if axis is not None:
            notes.append(
                f"the inputs given are of {_tokens(maker(sizes_of(0)), axis):,} tokens at every length: they are "
                "repeated to the length that is judged"
            )
        yield maker if axis is None else _repeating(maker, axis)


def _once(maker: Maker) -> Maker:
    """``maker``, asked once where it is asked for the same sizes again."""
    last: dict[Sizes, Candidate] = {}

    def made(sizes: Sizes) -> Candidate:
        if sizes not in last:
            call = maker(sizes)
            last.clear()
            last[sizes] = call
        return last[sizes]

    return made


def _is_followed(maker: Maker, axis: int, sizes_of: Callable[[int], Sizes], run: Run) -> bool:
    for sizes in map(sizes_of, range(ROWS)):
        tokens = _tokens(maker(sizes), axis)
        if tokens is None or tokens == sizes.tokens:
            return False
        trace = run(_repeating(maker, axis), sizes)
        if trace.failure is None:
            return contracts_tokens(trace)
        if not too_long(trace.failure):
            return False
    return False


def _repeating(maker: Maker, axis: int) -> Maker:
    def made(sizes: Sizes) -> Candidate:
        call = maker(sizes)
        tokens = _tokens(call, axis)
        if tokens is None or tokens == sizes.tokens:
            return call

        def longer(item: Any) -> Any:
            if not isinstance(item, Input) or item.literal or item.value.shape[axis : axis + 1] != (tokens,):
                return item
            return replace(item, value=_longer(item.value, axis, sizes.tokens, item.role))

        args = [longer(item) for item in call.args]
        return replace(call, args=args, kwargs={name: longer(item) for name, item in call.kwargs.items()})

    return made


def _tokens(call: Candidate, axis: int) -> int | None:
    """How many tokens the example has along ``axis``; None where its tensors do not tell.

    Whole numbers tell, or vectors where there are none; all have to agree, and no other axis may be as long.
    """
    given = [*call.args, *call.kwargs.values()]
    tensors = [item for item in given if isinstance(item, Input) and not item.literal]
    if not call.given or any(item.value is None or item.value.is_sparse for item in tensors):
        return None
    whole = [item for item in tensors if item.value.dim() == 2 and not item.value.is_floating_point()]
    vectors = [item for item in tensors if item.value.dim() == 3 and item.value.is_floating_point()]
    telling = [item for item in whole if item.role == "content"] or vectors
    lengths = {item.value.shape[axis] for item in (*whole, *telling)}
    if not telling or len(lengths) != 1 or min(lengths) < _FEWEST:
        return None
    (tokens,) = lengths
    others = [size for item in tensors for at, size in enumerate(item.value.shape) if at != axis]
    return None if tokens in others else tokens


def _longer(value: torch.Tensor, axis: int, tokens: int, role: str) -> torch.Tensor:
    """``value`` over and over along ``axis``; positions that count on do so."""
    if role == "positions" and bool((value.diff(dim=axis) == 1).all()):
        shape = [1] * value.dim()
        shape[axis] = tokens
        return value.narrow(axis, 0, 1) + torch.arange(tokens, device=value.device).view(shape)
    places = torch.arange(tokens, device=value.device) % value.shape[axis]
    return value.index_select(axis, places)
