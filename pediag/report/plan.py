"""A plan for a longer text: its options as data, as a table, and as JSON values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pediag.report.json import SCHEMA_VERSION

Tuning = Literal["none", "advised", "needed", "retrain"]
Values = Mapping[str, Any]

CAUTION = "Nothing was measured on the model: these numbers follow from its frequencies, the rest from publications."


@dataclass(slots=True)
class Option:
    """One way to a length: what it does to this model by theory, what is published of it, and what to write.

    ``first_failing`` is the first distance in tokens with B(m) < 0, None when there is none below the length.
    ``unseen`` counts pairs that meet angles beyond those of training, ``lost`` is the most that a pair turns less per
    token, in radians. All are None, and ``computed`` False, where no formula tells.
    """

    name: str
    tuning: Tuning
    evidence: str
    sources: tuple[str, ...]
    effect: str = ""
    computed: bool = False
    first_failing: int | None = None
    unseen: int | None = None
    lost: float | None = None
    attention_factor: float | None = None
    patch: Values | None = None
    patch_v4: Values | None = None


@dataclass(slots=True)
class Plan:
    """The options of one encoding for ``seq_len`` tokens, ``train_len`` of which were trained."""

    subject: str
    scheme: str
    train_len: int
    seq_len: int
    parameters: Values
    options: list[Option]
    recommended: str
    reason: str
    notes: list[str] = field(default_factory=list)


def as_json(plan: Plan) -> dict[str, Any]:
    """``{"schema_version": 1, "plan": {...}}``; a patch is None where the option is no mere declaration."""
    head = {
        "subject": plan.subject,
        "scheme": plan.scheme,
        "train_len": plan.train_len,
        "seq_len": plan.seq_len,
        "parameters": dict(plan.parameters),
        "recommended": plan.recommended,
        "reason": plan.reason,
        "caution": CAUTION,
        "notes": list(plan.notes),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "plan": {**head, "options": [_option(one) for one in plan.options]},
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        "name": option.name,
        "tuning": option.tuning,
        "computed": option.computed,
        "first_failing_distance": option.first_failing,
        "unseen_pairs": option.unseen,
        "lost_rad_per_token": option.lost,
        "attention_factor": option.attention_factor,
        "effect": option.effect,
        "evidence": option.evidence,
        "sources": list(option.sources),
        "patch": {"v5": option.patch, "v4": option.patch_v4} if option.patch else None,
    }


def render(plan: Plan, console: Console) -> None:
    """Print the table of options, the recommendation, and the patch of what is recommended."""
    times = plan.seq_len / plan.train_len
    console.print(
        Text(
            f"{plan.subject} · {plan.scheme} · trained to {plan.train_len:,} · wanted {plan.seq_len:,} "
            f"({times:.3g} times)",
            style="bold",
        )
    )
    console.print(_table(plan))
    for option in plan.options:
        console.print(_words(option))
    console.print()
    console.print(Text(f"recommended  {plan.recommended}: {plan.reason}"))
    console.print(Text(CAUTION))
    for note in plan.notes:
        console.print(Text(f"note  {note}"))
    for line in _patches(plan):
        console.print(Text(line), soft_wrap=True)


def _table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    computed = any(option.computed for option in plan.options)
    table.add_column("option", style="bold", no_wrap=True)
    table.add_column("tuning", no_wrap=True)
    for title in ("B(m) < 0 from", "new angles", "rad/token lost", "factor") if computed else ():
        table.add_column(title, justify="right", no_wrap=True)
    for option in plan.options:
        table.add_row(option.name, option.tuning, *(_numbers(option, plan) if computed else ()))
    return table


def _words(option: Option) -> Text:
    """What an option does, what is published of it, and where."""
    said = " ".join(part for part in (option.effect, option.evidence) if part)
    sources = f" [{'; '.join(option.sources)}]" if option.sources else ""
    return Text.assemble((option.name, "bold"), f": {said}{sources}")


def _numbers(option: Option, plan: Plan) -> tuple[str, ...]:
    if not option.computed:
        return ("-", "-", "-", "-")
    pairs = int(plan.parameters["rotary_width"]) // 2
    first = "never" if option.first_failing is None else f"{option.first_failing:,}"
    return first, f"{option.unseen} of {pairs}", f"{option.lost:.3g}", f"{option.attention_factor:.4g}"


def _patches(plan: Plan) -> Iterator[str]:
    for option in plan.options:
        if option.name == plan.recommended and option.patch is not None:
            yield f"transformers 5  {json.dumps(option.patch)}"
            yield f"transformers 4  {json.dumps(option.patch_v4)}"
            yield "the patches of the other options: --format json"
