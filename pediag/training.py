"""What a training run knows beside its model: optimisers, and what the other ranks hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pediag.errors import UsageError

if TYPE_CHECKING:
    from pediag.rules.rule import Facets
    from pediag.trace.ranks import Gathers, RankState


@contextmanager
def beside(model: Any, optimizer: Any, ranks: bool | Gathers) -> Iterator[Callable[[Facets], None] | None]:
    """What adds the optimisers and the ranks to the facets of a target; None where neither is given.

    Raises UsageError for what is neither, and where there are no ranks.
    """
    if optimizer is None and ranks is False:
        yield None
        return
    from pediag.targets.code.optimizers import innermost, listed, optimised
    from pediag.trace.ranks import Ranks, refuse_ranks, tell

    refuse_ranks(ranks)
    optimizers = listed(optimizer) if optimizer is not None else []
    if optimizers:
        if isinstance(model, (str, os.PathLike)):
            raise UsageError("optimizer goes with a live model: pediag.check(model, optimizer=optimizer)")
        innermost(model)
    exchange = Ranks() if ranks is True else ranks or None
    answered = False

    def add(facets: Facets) -> None:
        nonlocal answered
        if optimizers:
            facets.optimiser = optimised(optimizers, model)
        if exchange is not None:
            mine = held(facets, exchange)
            answered = True
            facets.ranks = exchange.gather(mine)

    try:
        yield add
    except BaseException as error:
        if exchange is not None and not answered:
            tell(exchange, error)
        raise
    finally:
        if ranks is True and isinstance(exchange, Ranks):
            exchange.close()


def held(facets: Facets, exchange: Gathers) -> RankState:
    """What this rank holds of positions: tensors by name, schemes by place."""
    from dataclasses import replace

    from pediag.encodings import encodes_position
    from pediag.encodings.leaves import position_leaves
    from pediag.trace.ranks import digest, state

    rank = getattr(exchange, "rank", 0)
    made = state(rank, {}, exchange.position_ids, exchange.sequence)
    left_out = []
    for _, leaf in position_leaves(facets.encodings):
        try:
            numbers = digest(leaf.source()) if leaf.source is not None else None
        except Exception:  # spread over ranks, or kept where it cannot be read
            numbers = None
        if numbers is None:
            left_out += leaf.names
        else:
            made.tensors.update(dict.fromkeys(leaf.names, numbers))
    for encoding in encodes_position(facets.encodings):
        place = encoding.modules[0] if encoding.modules else ""
        made.schemes[f"{encoding.scheme} in {place or 'the model'}"] = encoding.title
    return replace(made, left_out=tuple(left_out))
