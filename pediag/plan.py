"""Plans a longer text: what each known option would do to an encoding, by its formulas and by what is published.

Nothing is run but what recognising the encoding needs, and nothing is measured. Free of torch for flags and configs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pediag._published import MEN, OTHERS, PUBLISHED
from pediag.errors import UsageError
from pediag.report.plan import Option, Plan
from pediag.rules.reach._lengths import UNSCALED, as_written, factor_for
from pediag.theory import frequencies as formulas
from pediag.theory._adequate import listed
from pediag.theory._checks import TheoryError
from pediag.theory.reach import critical_base, first_negative

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

SCHEMES = {
    "rope": "rotary",
    "rotary": "rotary",
    "learned": "learned",
    "sinusoidal": "sinusoidal",
    "t5": "t5-buckets",
    "alibi": "alibi",
}
"""What ``--scheme`` takes, and the scheme it stands for."""

LONGEST_SCANNED = 1 << 20
"""Tokens up to which the first failing distance is looked for; a second or so an option."""

LOW, HIGH = 1.0, 4.0
"""Llama 3.1's published low_freq_factor and high_freq_factor."""

DECLARED = 4.0
"""Times the trained length up to which a publisher has users declare YaRN by themselves (Qwen2.5 README: 4)."""

FULL_TURN = 2 * math.pi


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary encoding as it was trained: ``w`` (r/2,) radians per token, over ``trained`` tokens."""

    base: float
    width: int
    head_width: int
    trained: int
    w: Floats
    scaling: dict[str, Any] = field(default_factory=dict)
    reach: int = 0

    @property
    def still(self) -> int:
        """Pairs of the head that do not turn."""
        return max(0, (self.head_width - self.width) // 2)


def plan(
    target: str | os.PathLike[str] | Any = None,
    *,
    seq_len: int | None = None,
    train_len: int | None = None,
    scheme: str | None = None,
    base: float | None = None,
    width: int | None = None,
    head_width: int | None = None,
    trust: bool = False,
) -> Plan:
    """The options for ``seq_len`` tokens, of a target or of an encoding that is given by its numbers.

    ``width`` is the rotary width in channels, ``head_width`` that of the whole head. Raises UsageError when the
    length is missing, when a target and numbers are given together, or when numbers are missing; LoadError for a
    target that can not be opened.
    """
    if seq_len is None:
        raise UsageError("plan needs the wanted length: give --seq-len N")
    numbers = {"--scheme": scheme, "--base": base, "--width": width, "--head-width": head_width}
    given = [name for name, value in numbers.items() if value is not None]
    if target is not None:
        if given:
            raise UsageError(f"{given[0]} describes an encoding, and TARGET has one: give one of the two")
        return _of_target(target, seq_len, train_len, trust=trust)
    if scheme is None:
        raise UsageError("plan needs a TARGET, or --scheme with the numbers of an encoding")
    return _of_numbers(scheme, base, width, head_width, train_len, seq_len)


def _of_numbers(
    scheme: str,
    base: float | None,
    width: int | None,
    head_width: int | None,
    train_len: int | None,
    seq_len: int,
) -> Plan:
    if scheme not in SCHEMES:
        raise UsageError(f"--scheme {scheme!r} is unknown: give one of {', '.join(SCHEMES)}")
    kind = SCHEMES[scheme]
    needed = {"--train-len": train_len} | ({"--base": base, "--width": width} if kind == "rotary" else {})
    if missing := [name for name, value in needed.items() if value is None]:
        raise UsageError(f"--scheme {scheme} needs {' and '.join(missing)}")
    assert train_len is not None
    if kind != "rotary":
        if base is not None or width is not None or head_width is not None:
            raise UsageError(f"--base and --width describe rotary encodings; {scheme} has none")
        return _other(f"--scheme {scheme}", kind, train_len, seq_len)
    assert base is not None and width is not None
    if head_width is not None and head_width < width:
        raise UsageError(
            f"--head-width {head_width} is below --width {width}: the rotary part is in the head"
        )
    w = formulas.inverse_frequencies(base, width)
    return _rotary(f"--scheme {scheme}", Rope(base, width, head_width or width, train_len, w), seq_len)


def _of_target(target: Any, seq_len: int, train_len: int | None, *, trust: bool) -> Plan:
    from pediag.check import inspect

    report = inspect(target, seq_len=seq_len, train_len=train_len, trust=trust)
    known = [one for one in report.encodings if one.scheme in SCHEMES.values()]
    spec = report.target.spec
    if not known:
        raise UsageError(f"{spec}: no encoding was recognised that has options for a longer text")
    if report.train_len is None:
        raise UsageError(f"{spec}: declares no length that it was trained at: give --train-len N")
    chosen = _farthest(known)
    made = _planned(spec, chosen, report.train_len, seq_len, _longest(target, trust=trust))
    if len(known) > 1:
        made.notes.append(f"of {len(known)} encodings {chosen.id} ({chosen.title}) is planned for")
    return made


def _farthest(known: list[Any]) -> Any:
    """The encoding that limits the length: one without a window, of rotary ones that of the largest base."""

    def order(one: Any) -> tuple[bool, float]:
        base = one.parameters.get("base")
        return getattr(getattr(one, "seen", None), "window", None) is None, float(base or 0)

    return max(known, key=order)


def _longest(target: Any, *, trust: bool) -> int:
    """The longest input in tokens that the target's config declares; 0 without one."""
    from pediag.targets import maximum_length, open_target

    config = open_target(target, trust=trust).config
    return (maximum_length(config) or 0) if config is not None else 0


def _planned(spec: str, encoding: Any, trained: int, seq_len: int, longest: int) -> Plan:
    from pediag.encodings import Rotary

    if not isinstance(encoding, Rotary):
        return _other(spec, encoding.scheme, trained, seq_len)
    base = encoding.parameters.get("base")
    if not isinstance(base, (int, float)):
        raise UsageError(
            f"{spec}: the rotary frequencies follow no base; no formula tells what an option does"
        )
    scaling = {
        key: value for key, value in encoding.parameters.get("scaling", {}).items() if value is not None
    }
    reach = _reach(scaling, trained, longest)
    head = encoding.head_width or encoding.width
    rope = Rope(float(base), encoding.width, head, trained, encoding.frequencies, scaling, reach)
    return _rotary(spec, rope, seq_len)


def _reach(scaling: dict[str, Any], trained: int, longest: int) -> int:
    """The length in tokens that a scaling is declared for; 0 without one. A declared maximum beyond it was tuned."""
    factor = scaling.get("factor")
    if scaling.get("rope_type", "default") in UNSCALED or scaling.get("rope_type") == "longrope":
        return longest if scaling.get("rope_type") == "longrope" else 0
    return max(longest, int(trained * factor)) if isinstance(factor, (int, float)) and factor > 1 else 0


# -- rotary -------------------------------------------------------------------------------------------------


def _rotary(subject: str, rope: Rope, n: int) -> Plan:
    options = [*_declared(rope, n), *_structural(rope, n)]
    recommended, reason = _choice(rope, n)
    parameters = {
        "base": rope.base,
        "rotary_width": rope.width,
        "head_width": rope.head_width,
        "scaling": rope.scaling or {"rope_type": "default"},
        "factor": factor_for(rope.trained, n),
    }
    return Plan(subject, "rotary", rope.trained, n, parameters, options, recommended, reason, _notes(rope, n))


def _notes(rope: Rope, n: int) -> list[str]:
    notes = []
    smallest = listed(rope.width, n) if n > rope.trained else None
    if smallest is not None:
        notes.append(
            f"trained from the start at this length, a base of {smallest[0]:,.0f} is the smallest with B(m) >= 0 up to "
            f"{smallest[1]:,} tokens (unscaled, width {rope.width}; {MEN})"
        )
    if n > LONGEST_SCANNED:
        notes.append(f"distances are scanned to {LONGEST_SCANNED:,} tokens only")
    return notes


def _choice(rope: Rope, n: int) -> tuple[str, str]:
    """The recommended option and why."""
    s = n / rope.trained
    if n <= rope.trained:
        return "keep", "the length was trained."
    if n <= rope.reach:
        return "keep", f"the declared scaling is made for {rope.reach:,} tokens."
    if s <= DECLARED:
        return "yarn", (
            f"at {s:.3g} times the trained length it leaves fast pairs alone and slow ones at trained angles, and "
            "Qwen2.5 has its users declare it at up to 4 times; measure retrieval at this length, and tune if it "
            "falls short."
        )
    return "yarn", (
        f"{s:.3g} times the trained length is more than the 4 that Qwen2.5 has its users declare: expect to tune with "
        "it. Where longer training is possible anyway, a larger base needs no scaling afterwards; which is better for "
        "this model only measuring can tell."
    )


def _declared(rope: Rope, n: int) -> Iterator[Option]:
    """Options that are formulas of the frequencies."""
    s = factor_for(rope.trained, n)
    base, r, t = rope.base, rope.width, rope.trained
    yield _kept(rope, n)
    if n <= t:
        return
    longer = {"max_position_embeddings": n}
    original = {"original_max_position_embeddings": t}
    yield _option(
        rope,
        n,
        "linear",
        formulas.linear(base, r, s),
        1.0,
        "needed",
        {"rope_type": "linear", "factor": s},
        longer,
    )
    if r >= 4:
        grown = formulas.ntk_base(base, r, s)
        yield _option(
            rope,
            n,
            "ntk",
            formulas.inverse_frequencies(grown, r),
            1.0,
            "advised",
            {"rope_type": "default", "rope_theta": grown},
            longer,
        )
        yield _option(
            rope,
            n,
            "dynamic-ntk",
            formulas.dynamic_ntk(base, r, 1.0, n, t),
            1.0,
            "none",
            {"rope_type": "dynamic", "factor": 1.0},
            {"max_position_embeddings": t},
        )
    yield _option(
        rope,
        n,
        "yarn",
        formulas.yarn(base, r, s, t),
        formulas.yarn_attention_factor(s),
        "none" if s <= DECLARED else "advised",
        {"rope_type": "yarn", "factor": s, **original},
        longer,
    )
    bands = {"low_freq_factor": LOW, "high_freq_factor": HIGH}
    yield _option(
        rope,
        n,
        "llama3",
        formulas.llama3(base, r, s, LOW, HIGH, t),
        1.0,
        "needed",
        {"rope_type": "llama3", "factor": s, **bands, **original},
        longer,
    )
    yield Option(
        "longrope",
        "advised",
        *PUBLISHED["longrope"],
        effect=(
            f"Each of {r // 2} pairs gets a factor of its own, found by a search on the model: no formula gives them."
        ),
        attention_factor=formulas.longrope_attention_factor(s, t),
    )
    if t > FULL_TURN:
        larger = critical_base(base, t, n)
        yield _option(
            rope,
            n,
            "larger-base",
            formulas.inverse_frequencies(larger, r),
            1.0,
            "needed",
            {"rope_type": "default", "rope_theta": larger},
            longer,
        )


def _kept(rope: Rope, n: int) -> Option:
    """The encoding as it is."""
    factor = formulas.attention_factor(_sound(rope.scaling))
    fine = n <= max(rope.trained, rope.reach)
    made = _option(rope, n, "keep", rope.w, factor, "none" if fine else "retrain")
    if fine:
        declared = f"The declared scaling is made for {rope.reach:,} tokens."
        made.evidence, made.effect = "", declared if n > rope.trained else "The length was trained."
    return made


def _sound(scaling: dict[str, Any]) -> dict[str, Any]:
    """A scaling whose attention factor can be computed; none where keys are missing."""
    try:
        formulas.attention_factor(scaling)
    except TheoryError:
        return {}
    return scaling


def _structural(rope: Rope, n: int) -> Iterator[Option]:
    """Options that change the model."""
    if n <= rope.trained:
        return
    capped = _option(rope, n, "sliding-window", rope.w, 1.0, "advised", seen=rope.trained)
    capped.effect = (
        f"Distances stay below {rope.trained:,} tokens, so none is new; farther text is not seen directly."
    )
    yield capped
    yield Option(
        "alibi", "retrain", *PUBLISHED["alibi"], effect="A model trained with rotations can not switch."
    )
    yield Option(
        "nope", "retrain", *PUBLISHED["nope"], effect="Layers without rotation know order by the causal mask."
    )


def _option(
    rope: Rope,
    n: int,
    name: str,
    w: Floats,
    factor: float,
    tuning: Any,
    scaling: dict[str, Any] | None = None,
    lengths: dict[str, Any] | None = None,
    *,
    seen: int | None = None,
) -> Option:
    distances = min(seen or n, LONGEST_SCANNED)
    plain = formulas.inverse_frequencies(rope.base, rope.width)
    made = Option(name, tuning, *PUBLISHED[name])
    made.computed = True
    made.first_failing = first_negative(w, distances, rope.still)
    made.unseen = unseen(w, plain, seen or n, rope.trained)
    made.lost = float(max(0.0, (plain - w).max()))
    made.attention_factor = factor
    if scaling is not None:
        made.patch, made.patch_v4 = _patches(rope, scaling, lengths or {})
    return made


def unseen(w: Floats, trained_w: Floats, n: int, trained: int) -> int:
    """Pairs that meet angles at ``n`` tokens which ``trained`` tokens at ``trained_w`` never reached.

    A pair that went all the way round in training has seen every angle.
    """
    reached = trained_w * trained
    return int(np.count_nonzero((reached < FULL_TURN) & (w * n > reached * (1 + 1e-9))))


def _patches(
    rope: Rope, scaling: dict[str, Any], lengths: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What to write into a config.json, as transformers 5 and 4 spell it."""
    theta = as_written(scaling.get("rope_theta", rope.base))
    rest = {key: value for key, value in scaling.items() if key != "rope_theta"}
    part = {"partial_rotary_factor": rope.width / rope.head_width} if rope.width < rope.head_width else {}
    new = {**lengths, "rope_parameters": {**rest, "rope_theta": theta, **part}}
    plain = rest == {"rope_type": "default"}
    return new, {**lengths, "rope_theta": theta, **part, "rope_scaling": None if plain else rest}


# -- other schemes ------------------------------------------------------------------------------------------


def _other(subject: str, scheme: str, trained: int, n: int) -> Plan:
    options = list(OTHERS[scheme])
    parameters = {"factor": factor_for(trained, n)}
    name, reason = _other_choice(scheme, trained, n)
    if n <= trained:
        options = [Option("keep", "none", "", (), "The length was trained.")]
    return Plan(subject, scheme, trained, n, parameters, options, name, reason)


def _other_choice(scheme: str, trained: int, n: int) -> tuple[str, str]:
    if n <= trained:
        return "keep", "the length was trained."
    if scheme == "alibi":
        return (
            "keep",
            "perplexity is reported to hold; measure retrieval at this length before relying on it.",
        )
    if scheme == "t5-buckets":
        return "tune", "it runs as it is; how well at this length only tuning and measuring can tell."
    return "windows", (
        "it needs no training; where text must be seen as a whole, the table has to be extended and the model tuned."
    )
