"""``pediag.watch``: beside a training run, what becomes of its positions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pediag.watching.run import Watch

if TYPE_CHECKING:
    from pediag.targets import Inputs
    from pediag.trace.ranks import Ranks


def watch(
    model: Any,
    optimizer: Any = None,
    *,
    every: int = 100,
    log: str | os.PathLike[str] | None = None,
    tensorboard: Any = None,
    ranks: bool | Ranks = False,
    attention: bool = False,
    seq_len: int | None = None,
    inputs: Inputs = (),
    first_step: int = 0,
) -> Watch:
    """Watch how a model learns positions while it trains: ``with pediag.watch(model, optimizer): ...``.

    Steps are counted by ``optimizer``, the first of a list of them; without one call ``step()`` after each backward
    pass. The first step and every ``every``-th are measured: the size of positions beside content where they are
    added, how far tables have moved and their rank, whether frequencies and tables of formulas are what they were, the
    share of positions in the gradient, and with ``attention`` where heads look. ``log`` is a file of JSON lines,
    ``tensorboard`` a folder or a SummaryWriter. With ``ranks`` all ranks of torch.distributed compare what they hold,
    at the start and at measured steps. ``first_step`` is the number of steps before, of a training that is resumed.
    ``seq_len`` and ``inputs`` are those of :func:`pediag.check`, for the one look at the model at the start.

    What is found is warned of once (:class:`pediag.errors.PediagWarning`) and kept in ``findings``. An error of the
    watch's own is a warning too, and training goes on. Raises UsageError for arguments that cannot be meant.
    """
    return Watch(
        model,
        optimizer,
        every=every,
        log=log,
        tensorboard=tensorboard,
        ranks=ranks,
        attention=attention,
        seq_len=seq_len,
        inputs=inputs,
        first_step=first_step,
    )
