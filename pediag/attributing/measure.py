"""Attribution of one call of a model: from the sites of its positions to shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pediag.attributing import ablation
from pediag.attributing.entries import entries
from pediag.attributing.gradients import MOST_STEPS, Integrated, integrate
from pediag.attributing.model import LayerShare, Side, TextAttribution
from pediag.attributing.moving import Found, Runner, Wanted
from pediag.attributing.objective import Objective, Shown, objective
from pediag.attributing.slots import Baseline, Slot, position_slots, substitutes, token_slots
from pediag.encodings.model import Mask, Rotary
from pediag.errors import UsageError
from pediag.trace import Unavailable

if TYPE_CHECKING:
    from pediag.attributing.entries import Entry
    from pediag.attributing.tokens import Fed, Reader
    from pediag.encodings import Encoding
    from pediag.trace import Trace


def attribution(
    runner: Runner,
    encodings: Sequence[Encoding],
    structural: Trace,
    trace: Trace,
    fed: Fed,
    *,
    target: Any = None,
    baseline: Baseline = "mean",
    reader: Reader | None = None,
    steps: int = MOST_STEPS,
) -> TextAttribution:
    """What of the output of one call is owed to positions and to tokens.

    ``encodings`` are those of the pass ``structural``; ``trace`` is the pass of the length of the call.

    Raises UsageError where the model looks up no tokens, or lets no gradients through.
    """
    found = _entries(encodings, structural, trace)
    where = runner.find([Wanted(one.spot, one.forms) for one in found])
    placed, missed = position_slots(found, where, baseline)
    slots = [*placed, *token_slots(where, _inputs(runner), baseline)]
    if not any(slot.side == "token" for slot in slots):
        raise UsageError(
            "no table was seen in which the model looks up its tokens, and no input is of real numbers: there is "
            "nothing to attribute beside positions"
        )
    chosen = objective(runner.plain(), target, shown(causal(encodings, structural), where, fed, reader))
    return _attributed(runner, slots, chosen, fed, missed, steps)


def shown(past: bool, where: Found, fed: Fed, reader: Reader | None) -> Shown:
    """What the choice of a target may look at; ``past`` says that attention sees the past only."""
    rows = max((one.table.shape[0] for one in where.lookups), default=0)
    return Shown(rows, past, fed.masked, reader.name if reader else None)


def causal(encodings: Sequence[Encoding], structural: Trace) -> bool:
    """Whether attention sees the past only, as its masks and kernels tell."""
    told = (
        isinstance(one, Mask) and one.causal or isinstance(one, Rotary) and one.causal for one in encodings
    )
    return any(one.causal for one in structural.graph.attentions) or any(told)


def _entries(encodings: Sequence[Encoding], structural: Trace, trace: Trace) -> list[Entry]:
    try:
        return list(entries(encodings, structural, trace))
    except Unavailable as reason:
        raise UsageError(f"positions have no numbers here: {reason}") from None


def _inputs(runner: Runner) -> list[torch.Tensor]:
    return [item for item in (*runner.args, *runner.kwargs.values()) if isinstance(item, torch.Tensor)]


def _attributed(
    runner: Runner, slots: Sequence[Slot], chosen: Objective, fed: Fed, missed: list[str], steps: int
) -> TextAttribution:
    def score(variables: Sequence[torch.Tensor], moved: Sequence[Slot]) -> torch.Tensor:
        return chosen(runner.moved(*substitutes(moved, variables)))

    sides = {side: [slot for slot in slots if slot.side == side] for side in ("position", "token")}
    made = {
        side: integrate(lambda variables, own=own: score(variables, own), own, most=steps)  # type: ignore[misc]
        for side, own in sides.items()
        if own
    }
    value = made["token"].value
    _finite(chosen, value, [one for side in made.values() for one in side.attributions])
    test = ablation.Trial(lambda variables: score(variables, slots), slots, value)
    token = _side(sides["token"], made["token"], fed.length)
    position = _side(sides["position"], made["position"], fed.length) if sides["position"] else None
    layers = _layers(sides["position"], made.get("position"), token, test.by_module())
    found = TextAttribution(fed.words, chosen.told, value, position, token, layers, test.ablations())
    found.missed, found.references = missed, references(slots)
    _compare(found, test)
    return found


def _finite(chosen: Objective, value: float, attributions: Sequence[torch.Tensor]) -> None:
    """Raise UsageError where the number, or a gradient, is not finite: shares and deltas of such mean nothing."""
    if not math.isfinite(value):
        raise UsageError(
            f"{value} is what the model gives on this input ({chosen.told}): look for NaN and infinity in its weights"
        )
    if not all(bool(one.isfinite().all()) for one in attributions):
        raise UsageError(f"the gradient of the number that is attributed ({chosen.told}) is not finite")


def _compare(found: TextAttribution, test: ablation.Trial) -> None:
    """How the order of sizes agrees with that of ablations, over modules or, of a single one, over tokens."""
    if len(found.layers) >= ablation.FEWEST:
        found.agreement_over = "modules"
        pairs = [(one.share, one.ablation) for one in found.layers]
    elif found.position is not None and len(found.tokens) <= ablation.MOST_TOKENS:
        found.agreement_over = "tokens"
        pairs = list(zip(found.position.by_token, test.by_token(len(found.tokens)), strict=True))
    else:
        return
    found.agreement = ablation.agreement([one for one, _ in pairs], [other for _, other in pairs])


def _side(slots: Sequence[Slot], made: Integrated, length: int) -> Side:
    total = torch.zeros(length, dtype=torch.float64)
    for slot, one in zip(slots, made.attributions, strict=True):
        total += slot.by_token(one, length).cpu()
    return Side(total.tolist(), made.reference, made.delta, made.relative, made.steps)


def references(slots: Sequence[Slot]) -> list[str]:
    """From where to where each kind of value was moved, in words."""
    told = {f"{slot.encoding.id if slot.encoding else 'tokens'}: {slot.path}" for slot in slots}
    return sorted(told)


def _layers(
    slots: Sequence[Slot], made: Integrated | None, token: Side, falls: dict[tuple[str, str], float]
) -> list[LayerShare]:
    """The parts of each encoding in each module, as they enter; ``token`` is the other side."""
    parts: dict[tuple[str, str], torch.Tensor] = {}
    first: dict[tuple[str, str], Slot] = {}
    for slot, one in zip(slots, made.attributions if made is not None else [], strict=True):
        key, part = ablation.key_of(slot), slot.by_token(one, len(token.by_token)).cpu()
        parts[key] = parts[key] + part if key in parts else part
        first.setdefault(key, slot)
    whole = token.size + sum(float(one.abs().sum()) for one in parts.values())
    return [
        LayerShare(
            encoding=key[0],
            scheme=first[key].scheme,
            module=key[1],
            share=float(part.abs().sum()) / whole if whole else 0.0,
            total=float(part.sum()),
            ablation=falls[key],
            path=first[key].path,
            by_token=part.tolist(),
        )
        for key, part in parts.items()
    ]
