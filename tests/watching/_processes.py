"""Ranks as real processes, gloo on the CPU. Run by ``python -m tests.watching._processes FOLDER RANK WORLD NAME``.

What each rank finds is written to ``FOLDER/RANK.json``; a file of the folder is the store in which they meet.
"""

from __future__ import annotations

import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pediag
from tests.watching._models import Learned, Turned, batch, made, train


def told(report: pediag.Report) -> list[Any]:
    return [(item.code, item.message, item.evidence.measured, item.where.line) for item in report.findings]


def checked(model: torch.nn.Module, ranks: Any = True) -> list[Any]:
    return told(pediag.check(model, ranks=ranks, select=["PE804"], seq_len=32))


def table(rank: int, world: int) -> Any:
    """Rank 1 drew another table; then all are equal; then its frequencies are in half precision."""
    model = made(Learned)
    if rank == 1:
        model.where.data += 0.25
    found = [checked(model), checked(made(Learned))]
    turned = made(Turned)
    if rank == 1:
        turned.w = turned.w.bfloat16()
    return [*found, checked(turned)]


def parts(rank: int, world: int) -> Any:
    """Parts of one sequence of 24 tokens: offset lost, contiguous, zigzag, striped; and two of one sequence each."""
    size, half = 24 // world, 12 // world
    ids = {
        "lost": torch.arange(size),
        "contiguous": torch.arange(size) + rank * size,
        "zigzag": torch.cat([torch.arange(half) + at * half for at in (rank, 2 * world - 1 - rank)]),
        "striped": torch.arange(rank, 24, world),
    }
    model = made(Turned)
    return {
        **{name: checked(model, pediag.Ranks(row, one_sequence=True)) for name, row in ids.items()},
        "data parallel": checked(model, pediag.Ranks(ids["lost"])),
        "alone": checked(model, pediag.Ranks(ids["lost"], one_sequence=[rank])),
    }


def watched(rank: int, world: int) -> Any:
    """A training under DDP; at step 3 rank 1 casts its frequencies; positions of the parts overlap all along."""
    model = made(Turned)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    ids = torch.arange(20)[None]
    called = type(model).forward
    model.forward = lambda tokens, position_ids=None: called(model, tokens, position_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ranks = pediag.Ranks(one_sequence=True)
        with pediag.watch(wrapped, optimizer, every=2, ranks=ranks, inputs=["tokens=int64[B,N]"]) as watch:
            for step, at in enumerate(range(1, 7), 1):
                rows = batch(at)
                out = wrapped(rows[:, :-1], position_ids=ids)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten()).backward()
                if step == 3 and rank == 1:
                    model.w = model.w.bfloat16()
                optimizer.step()
    return [(item.code, item.message) for item in watch.findings], watch.steps


def missing(rank: int, world: int) -> Any:
    """Rank 1 takes no part after the start: the others go on after the time limit."""
    model = made(Learned)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = pediag.Ranks(limit_s=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pediag.watch(model, optimizer, every=2, ranks=ranks) as watch:
            if rank == 1:
                return "left"
            for _ in train(model, optimizer, 5):
                pass
    try:
        pediag.Ranks(limit_s=2)
    except pediag.errors.PediagError as error:
        return [str(item.message) for item in caught], watch.steps, watch.last["step"], str(error)
    return "a group of ranks that are gone"


def failing(rank: int, world: int) -> Any:
    """On rank 1 the model cannot be looked at; the others hear of it and do not wait."""
    model: Any = made(Learned) if rank != 1 else "no_such_model.pt"
    try:
        report = pediag.check(model, ranks=True, select=["PE804"], seq_len=32)
    except pediag.errors.PediagError as error:
        return str(error)
    return [outcome.reason for outcome in report.outcomes]


def all_but_missing(rank: int, world: int) -> Any:
    """Processes cost seconds to start: one set for all that leaves them whole."""
    return {part.__name__: part(rank, world) for part in (table, parts, watched, failing)}


def main() -> None:
    folder, rank, world, name = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder / 'store'}", timedelta(seconds=60), rank=rank, world_size=world
    )
    found = globals()[name](rank, world)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if name != "missing":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
