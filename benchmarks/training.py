"""A step of training beside pediag.watch, and the same step without it, in turn in one process on one thread.

Each model has a process of its own, ``python -m benchmarks.training MODEL``, which prints JSON. Processor time counts.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Limit, Row, complaint, process

if TYPE_CHECKING:
    import torch
    from torch import nn

EVERY = 100
LIMIT = Limit("ratio", 1.02)
MODELS = {"characters": "0.1 M parameters, 16 x 64 characters", "gpt2": "GPT-2 small, 1 x 256 tokens"}
STEPS = {"characters": (300, 20), "gpt2": (8, 4)}
"""Steps that are taken, and of how many one is measured, so that there are several to take the median of."""


def rows() -> Iterator[Row]:
    """For each model a step beside the watch, and the look at the start, out of a process of its own."""
    for model, told in MODELS.items():
        usage = process([sys.executable, "-m", "benchmarks.training", model])
        wrong = complaint([usage])
        got: dict[str, Any] = {} if wrong else json.loads(usage.out.splitlines()[-1])
        step = got.get("plain")
        note = (
            wrong
            or f"a measured step takes {got['measured'] - step:.3g} s more, another {got['other'] - step:.1g} s"
        )
        name = f"a step of training beside the watch, {told}"
        yield Row(name, got.get("watched"), step, "the step alone", "s", LIMIT, note)
        yield Row(f"the look at the start, {told}", got.get("look"), step, "a step alone", "s", None, wrong)


def main() -> None:
    """Measure one model and print what was taken, in seconds of processor time."""
    import torch

    import pediag

    torch.set_num_threads(1)
    steps, every = STEPS[sys.argv[1]]
    plain, other = (_ready(sys.argv[1]) for _ in range(2))
    began = time.process_time()
    with warnings.catch_warnings(), pediag.watch(other[0], other[1], every=every, attention=False) as watch:
        warnings.simplefilter("ignore")
        look = time.process_time() - began
        for taken in (plain, other):
            for _ in range(2):
                _step(*taken)
        times = [(_step(*plain), _step(*other), watch.steps % every == 0) for _ in range(steps)]
    measured = median(b for _, b, at in times if at)
    between = median(b for _, b, at in times if not at)
    found = {
        "plain": median(a for a, _, _ in times),
        "measured": measured,
        "other": between,
        "watched": (measured + (EVERY - 1) * between) / EVERY,
        "look": look,
    }
    print(json.dumps(found))


def _ready(name: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    import torch

    torch.manual_seed(0)
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        model: nn.Module = GPT2LMHeadModel(GPT2Config())
        ids = torch.randint(0, 50257, (1, 256))
    else:
        from fixtures.training.characters import Characters

        model, ids = Characters("learned"), torch.randint(0, 256, (16, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), ids


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    from torch.nn.functional import cross_entropy

    began = time.process_time()
    out = model(ids)
    logits = out if not hasattr(out, "logits") else out.logits
    optimizer.zero_grad()
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    return time.process_time() - began


if __name__ == "__main__":
    main()
