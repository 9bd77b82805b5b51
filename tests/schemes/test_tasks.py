"""The answers of the toy tasks, by hand and by a loop of another kind."""

from __future__ import annotations

import pytest
import torch

from pediag.schemes.tasks import LAG, TASKS, UNANSWERED, WORDS, drawn


def test_lag_by_hand() -> None:
    words = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert TASKS["lag"].answers(words).tolist() == [[UNANSWERED] * 5 + [3, 1, 4]]


def test_recall_by_hand() -> None:
    words = torch.tensor([[3, 1, 3, 2, 3, 3, 1]])
    none = UNANSWERED
    assert TASKS["recall"].answers(words).tolist() == [[none, none, 1, none, 2, 3, 3]]


def test_recall_takes_the_latest_of_several() -> None:
    words = torch.randint(WORDS, (4, 60), generator=torch.Generator().manual_seed(0))
    answers = TASKS["recall"].answers(words)
    for row, answer in zip(words.tolist(), answers.tolist(), strict=True):
        for place, word in enumerate(row):
            earlier = [other for other in range(place) if row[other] == word]
            assert answer[place] == (row[earlier[-1] + 1] if earlier else UNANSWERED)


def test_first_by_hand() -> None:
    assert TASKS["first"].answers(torch.tensor([[7, 1, 2]])).tolist() == [[UNANSWERED, 7, 7]]


@pytest.mark.parametrize("name", list(TASKS))
def test_words_are_drawn_the_same_for_a_seed_and_guessing_does_not_help(name: str) -> None:
    task = TASKS[name]
    words, answers = drawn(task, 64, 80, torch.Generator().manual_seed(5))
    again, _ = drawn(task, 64, 80, torch.Generator().manual_seed(5))
    assert torch.equal(words, again)
    assert 0 <= int(words.min()) <= int(words.max()) < WORDS
    asked = answers[answers != UNANSWERED]
    assert len(asked) > 64 * (80 - LAG - 20)
    commonest = torch.bincount(asked, minlength=WORDS).max() / len(asked)
    assert commonest < 2.5 / WORDS
