"""Positional schemes side by side on the user's own machine: what a step costs, and what is learned on toy tasks.

A toy, and said to be one: small decoders, seconds of training, tasks that no one has a use for. It stands where tables
without a source stand elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pediag.errors import UsageError
from pediag.schemes import memory
from pediag.schemes.model import Comparison, Setting, mean, median

if TYPE_CHECKING:
    from pediag.schemes.model import Behaviour

LEAST_STEPS, MOST_STEPS = 20, 2_000
"""Steps that a budget of minutes is turned into, at the least and at the most."""

LEARNED = 0.5
"""Share of right answers at the trained length below which a task was not learned."""

LARGEST = {"d_model": 8_192, "heads": 256, "layers": 64, "seq_len": 131_072, "batch": 4_096, "seeds": 100}
DEFAULT_TASKS = ("lag", "recall")
DEFAULT_TRAIN_LEN = 32


def bench_schemes(
    *,
    d_model: int = 64,
    heads: int = 4,
    layers: int = 2,
    seq_len: int = 256,
    train_len: int | None = None,
    batch: int = 32,
    schemes: str | Iterable[str] = (),
    tasks: str | Iterable[str] = (),
    seeds: int = 3,
    first_seed: int = 0,
    steps: int | None = None,
    minutes: float = 5.0,
    device: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Time a training step with each scheme at ``seq_len`` tokens, and train small decoders on toy tasks.

    They are trained at ``train_len`` tokens (``seq_len`` up to 32 if None) with ``seeds`` seeds each, and tried at 1, 2
    and 4 times that. Without ``schemes`` all, without ``tasks`` "lag" and "recall". ``steps`` of training each, or
    without them as many as fit into about ``minutes``. ``device`` is "auto", "cpu", "cuda" or another that torch has.

    An interruption (KeyboardInterrupt) ends it early: what was measured comes back, with ``complete`` False; before
    anything was, it is raised again. Raises UsageError where an argument cannot be meant, or the memory cannot do. On a
    CPU the shares of right answers are the same for the same seeds and threads; the times are not.
    """
    setting = Setting(
        d_model, heads, layers, seq_len, min(seq_len, DEFAULT_TRAIN_LEN) if train_len is None else train_len, batch,
        _named(schemes, "scheme"), _named(tasks, "task"), seeds, first_seed, steps, minutes, _device(device),
    )  # fmt: skip
    _refuse(setting)
    memory.refuse_too_large(setting)
    made = Comparison(setting, _made(setting.device), chance=_chance())
    told = progress if progress is not None else _silent
    try:
        _measure(made, told)
    except KeyboardInterrupt:
        if not made.costs:
            raise
        made.complete = False
    return made


def _measure(made: Comparison, progress: Callable[[str], None]) -> None:
    from pediag.schemes import costs, training
    from pediag.schemes.encodings import SCHEMES
    from pediag.schemes.tasks import TASKS

    setting = made.setting
    made.costs = costs.costs(setting, progress)
    runs = [
        (seed, task, scheme)
        for seed in range(setting.first_seed, setting.first_seed + setting.seeds)
        for task in setting.tasks
        for scheme in setting.schemes
    ]
    made.steps = _steps(made, len(runs))
    found: dict[tuple[str, str, int], Behaviour] = {}
    for number, (seed, task, scheme) in enumerate(runs, start=1):
        progress(
            f"{scheme} on {task}, seed {seed}: training {number} of {len(runs)}, {made.steps} steps each"
        )
        training.behaviours(setting, SCHEMES[scheme], TASKS[task], seed, made.steps, found)
        made.behaviours = list(found.values())
    made.notes += _unlearned(made)


def _unlearned(made: Comparison) -> list[str]:
    """Tasks that no scheme learned, of which the numbers at other lengths tell nothing."""
    best = dict.fromkeys(made.setting.tasks, 0.0)
    for one in made.behaviours:
        if one.length == made.setting.train_len and one.accuracies:
            best[one.task] = max(best[one.task], mean(one.accuracies))
    return [
        f"no scheme learned {task} ({share:.2f} right at most): its rows tell nothing; allow more steps or minutes"
        for task, share in best.items()
        if share < LEARNED
    ]


def _steps(made: Comparison, runs: int) -> int:
    """Steps of each training: as asked for, or what fits the minutes by a step timed at the trained length."""
    setting = made.setting
    if setting.steps is not None:
        return setting.steps
    from dataclasses import replace

    from pediag.schemes import costs

    timed = costs.costs(replace(setting, seq_len=setting.train_len), _silent, rounds=5)
    second = sum(median(cost.seconds) for cost in timed) / len(timed)
    fitting = int(60.0 * setting.minutes / (runs * second))
    if fitting < LEAST_STEPS:
        need = runs * second * LEAST_STEPS / 60.0
        made.notes.append(
            f"{setting.minutes:g} minutes are too few; {LEAST_STEPS} steps each take about {need:.0f}"
        )
    return min(max(fitting, LEAST_STEPS), MOST_STEPS)


def _silent(text: str) -> None:
    """Shows nothing."""


def _named(given: str | Iterable[str], what: str) -> tuple[str, ...]:
    from pediag.schemes.encodings import SCHEMES
    from pediag.schemes.tasks import TASKS

    known = SCHEMES if what == "scheme" else TASKS
    words = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if strange := [word for word in words if not isinstance(word, str)]:
        raise UsageError(f"{what} {strange[0]!r} is no name; the known ones are {', '.join(known)}")
    names = list(dict.fromkeys(name.strip() for word in words for name in word.split(",") if name.strip()))
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise UsageError(f"{what} {unknown!r} is unknown; the known ones are {', '.join(known)}")
    if words and not names:
        raise UsageError(f"no {what} is named; the known ones are {', '.join(known)}")
    return tuple(names) or (tuple(SCHEMES) if what == "scheme" else DEFAULT_TASKS)


def _refuse(setting: Setting) -> None:
    """Raise UsageError for a number that cannot be meant."""
    from pediag.schemes.tasks import LAG

    for name, most in {**LARGEST, "train_len": setting.seq_len}.items():
        value = getattr(setting, name)
        option = f"--{name.replace('_', '-')}"
        if type(value) is not int or not 1 <= value <= most:
            beyond = " (--seq-len)" if name == "train_len" else ""
            raise UsageError(f"{option} {value}: give a whole number from 1 to {most:,}{beyond}")
    if setting.train_len <= LAG:
        raise UsageError(
            f"training at {setting.train_len} tokens: the tasks need more than {LAG}; give a longer one"
        )
    if setting.d_model % setting.heads or setting.head_width % 2:
        raise UsageError(
            f"--d-model {setting.d_model} over --heads {setting.heads}: each head needs an even number of channels"
        )
    if setting.steps is not None and (type(setting.steps) is not int or not 1 <= setting.steps <= 1_000_000):
        raise UsageError(f"--steps {setting.steps}: give a whole number from 1 to 1,000,000")
    minutes = setting.minutes
    if type(minutes) not in (int, float) or not 0.0 < minutes <= 10_000.0:
        shown = f"{minutes:g}" if isinstance(minutes, float) else minutes
        raise UsageError(f"--minutes {shown}: give a number above 0")
    if type(setting.first_seed) is not int or not 0 <= setting.first_seed < 2**62:
        raise UsageError(f"--seed {setting.first_seed}: give a whole number from 0")


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=torch.device(name)).sum().item()
    except (RuntimeError, AssertionError, ValueError, NotImplementedError, TypeError):
        raise UsageError(f"--device {name}: torch cannot use it here; give auto, cpu or cuda") from None
    return name


def _made(device: str) -> dict[str, str]:
    import torch

    from pediag.drift import made_with

    made = made_with()
    return {
        "pediag": made.pediag,
        "torch": made.torch,
        "device": made.device if device != "cpu" or not torch.cuda.is_available() else "cpu",
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
    }


def _chance() -> float:
    from pediag.schemes.tasks import WORDS

    return 1.0 / WORDS
