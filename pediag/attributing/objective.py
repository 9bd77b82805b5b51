"""Which number of an output is attributed: one chosen by what the output is, or the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pediag.errors import UsageError

Target = "Callable[[Any], torch.Tensor] | int | str | None"
NAMES = ("next", "token", "class", "mean", "first", "mask")
GRAMMAR = "next, mask, mean, first, class, or an index such as 3 (a class, or a token of the vocabulary)"


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of the model beside its output. ``rows`` is the size of the table of tokens, 0 without one."""

    rows: int = 0
    causal: bool = False
    masked: int | None = None
    name: Callable[[int], str] | None = None

    def token(self, index: int, width: int) -> str:
        """A token of the vocabulary as a person reads it; of scores of another ``width`` the entry is no token."""
        if width < self.rows:
            return f"entry {index}"
        return repr(self.name(index)) if self.name is not None else f"token {index}"


@dataclass(frozen=True, slots=True)
class Objective:
    """The number that is attributed: ``of`` takes it from an output, ``told`` says which one it is."""

    told: str
    of: Callable[[Any], torch.Tensor]

    def __call__(self, output: Any) -> torch.Tensor:
        """The number, a tensor without axes. Raises UsageError where it is none."""
        value = self.of(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
            raise UsageError("target must return one real number, as a tensor of one element")
        return value.reshape(())


def objective(output: Any, target: Any, shown: Shown) -> Objective:
    """What to attribute of ``output``. Raises UsageError for a target that this output has not."""
    if callable(target):
        return Objective(getattr(target, "__name__", "target"), target)
    main = main_tensor(output)
    if isinstance(target, str) and target.lstrip("-").isdecimal():
        target = int(target)
    if target is None:
        target = _chosen(output, main, shown)
    if isinstance(target, bool) or not isinstance(target, (int, str)):
        raise UsageError(f"target {target!r} is unknown: give {GRAMMAR}, or a function of the output")
    scores = isinstance(target, int) or target in ("next", "mask", "token")
    if scores and _named(output, "last_hidden_state") and not _named(output, "logits"):
        raise UsageError(
            f"target {target}: the output is a vector for each token, not scores: give mean, first, or a function"
        )
    if isinstance(target, int):
        return _indexed(main, target, shown)
    if target not in _MADE:
        raise UsageError(f"target {target!r} is unknown: give {GRAMMAR}")
    return _MADE[target](main, shown)


def main_tensor(output: Any) -> torch.Tensor:
    """The tensor that an output is about: its logits, its last hidden state, or its first of real numbers."""
    for name in ("logits", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    several = output if isinstance(output, (tuple, list)) else [output]
    items = output.values() if isinstance(output, Mapping) else several
    for item in items:
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            return item
    raise UsageError("the output holds no tensor of real numbers: give target, a function of the output")


def _chosen(output: Any, main: torch.Tensor, shown: Shown) -> str:
    """What is attributed unless the user says."""
    if main.dim() == 2 and main.shape[0] == 1 and main.shape[-1] > 1:
        return "class"
    if main.dim() < 3:
        return "mean"
    vocabulary = main.shape[-1] == shown.rows or (
        _named(output, "logits") and main.shape[-1] >= shown.rows > 0
    )
    if not vocabulary:
        return "mean"
    if shown.masked is not None:
        return "mask"
    return "next" if shown.causal else "token"


def _named(output: Any, name: str) -> bool:
    return isinstance(
        output.get(name) if isinstance(output, Mapping) else getattr(output, name, None), torch.Tensor
    )


def _indexed(main: torch.Tensor, index: int, shown: Shown) -> Objective:
    if not 0 <= index < main.shape[-1]:
        raise UsageError(f"target {index}: the output has {main.shape[-1]} numbers at its end, from 0 on")
    if main.dim() >= 3:
        place = shown.masked if shown.masked is not None else -1
        where = f"token {place}" if place >= 0 else "the last token"
        return Objective(
            f"log-odds of {shown.token(index, main.shape[-1])} at {where}",
            lambda o: _odds(main_tensor(o)[0, place], index),
        )
    return Objective(f"logit of class {index}", lambda o: main_tensor(o).reshape(-1)[index])


def _next(main: torch.Tensor, shown: Shown) -> Objective:
    best = int(_rows(main, "next")[0, -1].argmax())
    return Objective(
        f"log-odds of {shown.token(best, main.shape[-1])}, the likeliest next token",
        lambda o: _odds(main_tensor(o)[0, -1], best),
    )


def _mask(main: torch.Tensor, shown: Shown) -> Objective:
    place = shown.masked
    if place is None:
        raise UsageError("target mask: the input holds no mask token of the tokenizer")
    best = int(_rows(main, "mask")[0, place].argmax())
    return Objective(
        f"log-odds of {shown.token(best, main.shape[-1])}, the likeliest at the mask (token {place})",
        lambda o: _odds(main_tensor(o)[0, place], best),
    )


def _token(main: torch.Tensor, shown: Shown) -> Objective:
    """Of all tokens: for a model that fills in masks where none is given."""
    best = _rows(main, "token")[0].argmax(-1)
    return Objective(
        "mean log-odds of the likeliest token at each place",
        lambda o: torch.stack(
            [_odds(row, int(index)) for row, index in zip(main_tensor(o)[0], best, strict=True)]
        ).mean(),
    )


def _class(main: torch.Tensor, shown: Shown) -> Objective:
    if main.dim() != 2:
        raise UsageError(f"target class: the output is of shape {tuple(main.shape)}, not one row of classes")
    best = int(main[0].argmax())
    return Objective(f"logit of class {best}, the predicted one", lambda o: main_tensor(o)[0, best])


def _mean(main: torch.Tensor, shown: Shown) -> Objective:
    pooled = _pooled(main.detach())
    way = pooled / pooled.norm().clamp_min(1e-30)
    return Objective(
        "length of the mean output, along its own direction", lambda o: (_pooled(main_tensor(o)) * way).sum()
    )


def _first(main: torch.Tensor, shown: Shown) -> Objective:
    row = _rows(main, "first")[0, 0].detach().float()
    way = row / row.norm().clamp_min(1e-30)
    return Objective(
        "length of the first token's output, along its own direction",
        lambda o: (main_tensor(o)[0, 0].float() * way).sum(),
    )


def _pooled(main: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of a batch of one."""
    return main.float().reshape(-1, main.shape[-1]).mean(0) if main.dim() else main.float().reshape(1)


def _rows(main: torch.Tensor, target: str) -> torch.Tensor:
    if main.dim() < 3:
        raise UsageError(f"target {target}: the output is of shape {tuple(main.shape)}, not one row a token")
    return main.detach()


def _odds(logits: torch.Tensor, index: int) -> torch.Tensor:
    """Log p / (1 - p) of one entry: as log p while that is small, and not flat where it is near 1."""
    others = torch.cat((logits[:index], logits[index + 1 :])).float()
    return logits[index].float() - torch.logsumexp(others, -1)


_MADE: dict[str, Callable[[torch.Tensor, Shown], Objective]] = {
    "next": _next,
    "mask": _mask,
    "token": _token,
    "class": _class,
    "mean": _mean,
    "first": _first,
}
