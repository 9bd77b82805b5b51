"""Trains a decoder on a toy task and tries it at longer texts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pediag.schemes.decoder import Decoder
from pediag.schemes.encodings import Rotary, Scheme
from pediag.schemes.model import Behaviour, Setting
from pediag.schemes.tasks import UNANSWERED, WORDS, Task, drawn

LEARNING_RATE = 1e-3
WARM_UP = 50
"""Steps over which the learning rate rises."""

CLIP_NORM = 1.0
"""Largest norm of the gradient."""

TIMES = (1, 2, 4)
"""Lengths that are tried, in trained lengths."""

TRIED_TOKENS = 16_384
"""Tokens a try has, over all its texts."""


def new(setting: Setting, scheme: Scheme, seed: int) -> Decoder:
    """A decoder with the weights of ``seed``, on the device of ``setting``; torch's own random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(setting, scheme, WORDS).to(setting.device)


def optimizer_of(model: Decoder) -> torch.optim.Optimizer:
    """AdamW without weight decay, which would pull position tables to zero."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)


def step(model: Decoder, optimizer: torch.optim.Optimizer, words: Tensor, answers: Tensor) -> float:
    """One step on words and answers (B, N); the mean cross entropy in nats before it."""
    loss = _loss(model(words), answers)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    return float(loss.detach())


def trained(setting: Setting, scheme: Scheme, task: Task, seed: int, steps: int) -> Decoder:
    """A decoder after ``steps`` steps at the trained length. Same numbers for the same seed on the same machine."""
    model = new(setting, scheme, seed)
    optimizer = optimizer_of(model)
    texts = torch.Generator().manual_seed(seed + 1)
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARM_UP)
        words, answers = drawn(task, setting.batch, setting.train_len, texts)
        step(model, optimizer, words.to(setting.device), answers.to(setting.device))
    return model


def tried(
    setting: Setting, scheme: Scheme, task: Task, model: Decoder, seed: int
) -> Iterator[tuple[str, int, float, float, str]]:
    """Name (with its scaling), length, share of right answers, loss in nats, reason why there is none of either."""
    for times in TIMES:
        length = times * setting.train_len
        texts = torch.Generator().manual_seed(seed + 2 + times)
        words, answers = drawn(task, max(TRIED_TOKENS // length, 1), length, texts)
        if scheme.name == "learned" and times > 1:
            yield scheme.name, length, 0.0, 0.0, "no rows"
            continue
        for kind in ("", *(scheme.scalings if times > 1 else ())):
            _scale(model, kind, float(times))
            right, loss = answered(model, words.to(setting.device), answers.to(setting.device))
            yield f"{scheme.name} + {kind}" if kind else scheme.name, length, right, loss, ""
        _scale(model, "", 1.0)


@torch.no_grad()
def answered(model: Decoder, words: Tensor, answers: Tensor) -> tuple[float, float]:
    """Share of right answers and mean cross entropy in nats, over what is asked in (B, N)."""
    logits = model(words)
    asked = answers != UNANSWERED
    right = (logits.argmax(-1) == answers)[asked].double().mean()
    return float(right), float(_loss(logits, answers))


def _loss(logits: Tensor, answers: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=UNANSWERED)


def _scale(model: Decoder, kind: str, factor: float) -> None:
    for module in model.positions():
        if isinstance(module, Rotary):
            module.scale(kind, factor)


def behaviours(
    setting: Setting,
    scheme: Scheme,
    task: Task,
    seed: int,
    steps: int,
    found: dict[tuple[str, str, int], Behaviour],
) -> None:
    """Train once and add what came of it to ``found``, by scheme, task and length."""
    model = trained(setting, scheme, task, seed, steps)
    for name, length, right, loss, reason in tried(setting, scheme, task, model, seed):
        one = found.setdefault((name, task.name, length), Behaviour(name, task.name, length, reason=reason))
        if not reason:
            one.accuracies.append(right)
            one.losses.append(loss)


@contextlib.contextmanager
def timed(seconds: list[float], device: str) -> Iterator[None]:
    """Add the wall time of what is done within, once the device has done it."""
    _wait(device)
    start = time.perf_counter()
    yield
    _wait(device)
    seconds.append(time.perf_counter() - start)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
