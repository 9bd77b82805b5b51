"""Toy tasks whose answers need positions, at any length. All words are drawn evenly, so nothing can be guessed.

Shapes: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 16
"""Words of the tasks: guessing is right once in 16."""

LAG = 5
"""Tokens that ``lag`` looks back."""

UNANSWERED = -100
"""Target where there is nothing to answer; what torch's cross entropy leaves out."""


def lag(words: Tensor) -> Tensor:
    """At each token the word ``LAG`` tokens before it; ``words`` (B, N) int64. Pure distance, the content is noise."""
    answers = torch.full_like(words, UNANSWERED)
    answers[:, LAG:] = words[:, :-LAG]
    return answers


def recall(words: Tensor) -> Tensor:
    """At each token the word that followed when its word was last there; ``words`` (B, N) int64.

    Needs content and order at once: the previous token, and the latest of several matches.
    """
    answers = torch.full_like(words, UNANSWERED)
    rows = torch.arange(words.shape[0])
    followed = torch.full((words.shape[0], WORDS), UNANSWERED)
    for place in range(words.shape[1]):
        now = words[:, place]
        if place:
            followed[rows, words[:, place - 1]] = now
        answers[:, place] = followed[rows, now]
    return answers


def first(words: Tensor) -> Tensor:
    """At each token the word that the text began with; ``words`` (B, N) int64. Distance grows with the text."""
    answers = words[:, :1].expand_as(words).clone()
    answers[:, 0] = UNANSWERED
    return answers


@dataclass(frozen=True, slots=True)
class Task:
    """A task: what the right answers (B, N) to words (B, N) are, and in a few words what it asks."""

    name: str
    asks: str
    answers: Callable[[Tensor], Tensor]


TASKS = {
    task.name: task
    for task in (
        Task("lag", f"the word {LAG} tokens back", lag),
        Task("recall", "the word that followed the latest earlier occurrence of this one", recall),
        Task("first", "the word that the text began with", first),
    )
}
"""Every task, by name."""


def drawn(task: Task, batch: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words and answers, both (B, N) int64 on the CPU."""
    words = torch.randint(WORDS, (batch, tokens), generator=generator)
    return words, task.answers(words)
