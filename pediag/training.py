"""What a training run knows beside its model: optimisers, and what the other ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pediag.errors import UsageError

if TYPE_CHECKING:
    from pediag.rules.rule import Facets
    from pediag.targets import Target
    from pediag.trace.ranks import Gathers, RankState


@contextmanager
def beside(optimizer: Any, ranks: bool | Gathers) -> Iterator[Callable[[Facets, Target], None] | None]:
    """What adds the optimisers and the ranks to the facets of a target; None where neither is given.

    Raises UsageError for what is no optimiser, and where there are no ranks.
    """
    if optimizer is None and ranks is False:
        yield None
        return
    from pediag.targets.code.optimizers import listed
    from pediag.trace.ranks import Ranks, tell

    optimizers = listed(optimizer) if optimizer is not None else []
    exchange = Ranks() if ranks is True else ranks or None
    answered = False

    def add(facets: Facets, target: Target) -> None:
        nonlocal answered
        if optimizers:
            facets.optimised = _optimised(optimizers, target)
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


def _optimised(optimizers: list[Any], target: Target) -> Any:
    from pediag.targets.code.optimizers import optimised

    if target.module is None:
        raise UsageError("optimizer goes with a live model: pediag.check(model, optimizer=optimizer)")
    return optimised(optimizers, target.module)


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
