"""A fixed bias on the scores favours keys that are farther away.

## What it does

Takes the whole bias of each attention as the softmax sees it, with the mask, and looks at the keys that each query
sees. It fires when the bias rises with distance into the past (the sign is wrong), and, where nothing hides the
future, when keys ahead lose nothing with distance or even gain: a bias of the past alone (zero for all keys ahead)
and the form ``s * j`` by key position, which are right under a causal mask only.

## Why it matters

ALiBi is a penalty on distance. With the sign turned, attention starts at the farthest token and has to be learned
against the bias. Without a causal mask a bias that is zero ahead prefers every key ahead to every key behind, and
``s * j`` prefers the end of the text from everywhere. The loss still falls, so it is seen late or never.

## What is checked

Up to a constant per row, which softmax does not see, the bias of a head is ``-s (i - j)`` on keys j <= i and ``-t
(j - i)`` on keys j > i that are not hidden. It fires when s < 0, and when s > 0 and t <= 0. ``-s |i - j|``, ``s *
j`` under a causal mask, slopes of their own for each direction, and heads that look one way each are silent. A
fixed bias that is no straight line is judged by its sign only: it fires when it rises with every step into the
past.

## Known limits

Of what training moves only that all heads are turned is told, as a warning: slopes, and functions of the distance
(KERPLE). Tables, whose far distances share a row, are not judged.
A mask that is given by the caller and is not among the inputs pediag makes up counts as none: whoever calls forward
without it gets this bias. A bias between unlike sequences is told by PE312.

## Fix

Causal: ``-slope * (i - j)``, and hide the keys ahead. Bidirectional: ``-slope * (i - j).abs()``.

## References

- Press, Smith and Lewis 2022 (2108.12409), section 3; the authors on attention without a causal mask:
  ofirpress/attention_with_linear_biases#5.
- meta-pytorch/attention-gym#86 (issue #29): ``q_idx - kv_idx`` instead of ``kv_idx - q_idx``.
- lucidrains/x-transformers#88: the causal form under bidirectional attention.
- ofirpress/attention_with_linear_biases#9, mosaicml/llm-foundry#186: rising numbers by key are right under a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pediag.rules._bias import Biased, biased, causes, layers_of, one_each
from pediag.rules.finding import Evidence, Finding, Fix
from pediag.rules.rule import CouldNotCheck, Facets, rule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pediag.encodings.model import Alibi, Floats
    from pediag.encodings.total import Total

FLAT = 1e-6
"""A slope below this share of the steepest is none."""


@dataclass(frozen=True, slots=True)
class _Said:
    """The fault, the heads that have it, and the fall per token of the worst, in logits; expected is above zero.

    Of what is no straight line ``fall`` is the steepest, and ``rise`` the whole over ``tokens``, in logits.
    """

    kind: str
    heads: int
    of: int
    fall: float
    trained: bool
    rise: float = 0.0
    tokens: int = 0


@rule(
    code="PE405",
    name="alibi-favours-distance",
    severity="error",
    basis="theorem",
    needs=("trace",),
    references=("Press et al. 2022, 2108.12409, section 3", "meta-pytorch/attention-gym#86"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each line where a bias of one fault enters."""
    items = one_each([item for item in biased(facets, "alibi", "unrecognised") if item.site.kind == "bias"])
    known = [(item, total) for item in items if (total := item.total()) is not None]
    if items and not known:
        raise CouldNotCheck("the numbers of the bias are not at hand: load the weights that it is made of")
    told = [
        (item, said) for item, total in known if not item.crosses() and (said := _said(total)) is not None
    ]
    for group, said in causes(told):
        yield _finding(facets, group, said)


def _said(total: Total) -> _Said | None:
    found = total.linear()
    if found is None:
        bent = _bent(total)
        return None if bent is not None and bent.trained and bent.heads < bent.of else bent
    steep = FLAT * float(np.abs(found.slopes).max(initial=0.0))
    turned = found.slopes < -steep
    if turned.any():
        if total.trained and not turned.all():
            return None
        side = "past" if _sees_behind(total) else "future"
        return _Said(side, int(turned.sum()), turned.size, float(found.slopes.min()), total.trained)
    ahead = _ahead(found)
    wrong = (found.slopes > steep) & (ahead <= steep) & _sees_both(total)
    if not wrong.any() or total.trained:
        return None
    kind = "key" if found.form == "key" else "ahead"
    return _Said(kind, int(wrong.sum()), wrong.size, float(ahead[wrong].min()), False)


def _ahead(found: Alibi) -> Floats:
    """Fall per token into the future, (H,), in logits."""
    if found.form == "sides":
        return np.asarray(found.parameters["ahead"], dtype=np.float64)
    return {"distance": found.slopes, "key": -found.slopes, "past": 0.0 * found.slopes}[found.form]


def _sees_behind(total: Total) -> bool:
    """Whether any query sees a key before it; a model that reads from the end sees none."""
    return bool(np.tril(total.shown, -1).any())


def _sees_both(total: Total) -> NDArray[np.bool_]:
    """Whether a head (H,) sees keys behind and several ahead."""
    rows, keys = total.shown.shape[1:]
    offset = np.arange(keys)[None, :] - np.arange(rows)[:, None]
    behind = (total.shown & (offset < 0)).any(axis=(1, 2))
    ahead = ((total.shown & (offset > 0)).sum(axis=2) > 1).any(axis=1)
    return np.asarray(behind & ahead)


def _bent(total: Total) -> _Said | None:
    """A bias that rises with every step into the past, though not in a straight line."""
    rows, keys = total.shown.shape[1:]
    if rows != keys or rows < 3:
        return None
    seen = np.arange(keys)[None, :] <= np.arange(rows)[:, None]
    if not (total.shown | ~seen).all():
        return None
    steps = np.diff(total.bias[:, -1, ::-1], axis=-1)
    profiles = [total.bias[:, row, row::-1] - total.bias[:, row, row : row + 1] for row in range(rows)]
    alike = all(
        np.allclose(part, profiles[-1][:, : part.shape[1]], rtol=1e-3, atol=1e-4) for part in profiles
    )
    rising = (steps > 0).all(axis=1)
    if not alike or not rising.any():
        return None
    return _Said(
        kind="past",
        heads=int(rising.sum()),
        of=rising.size,
        fall=-float(steps[rising].max()),
        trained=total.trained,
        rise=float(steps[rising].sum(axis=1).max()),
        tokens=rows,
    )


def _finding(facets: Facets, items: list[Biased], said: _Said) -> Finding:
    item = items[0]
    much = abs(said.fall) * (facets.seq_len - 1)
    heads = f"{said.heads} of {said.of} heads" if said.of > 1 else "the only head"
    name = f"{item.encoding.id}{layers_of(items)}"
    return Finding(
        message=_message(said, name, heads),
        effect=_effect(said, much, facets.seq_len),
        where=item.where,
        evidence=Evidence(float(f"{said.fall:.6g}"), None, 0.0, "logits lost per token", facets.seq_len),
        fix=_fix(said),
        severity="warning" if said.trained else None,
        scheme=item.encoding.scheme,
    )


def _message(said: _Said, name: str, heads: str) -> str:
    rise = abs(said.fall)
    if said.kind in ("past", "future"):
        way = f"with every token of distance into the {said.kind}"
        much = "up to " if said.tokens else ""
        return f"The bias {name} grows by {much}{rise:.4g} logits {way}, in {heads}."
    if said.kind == "key":
        return (
            f"The bias {name} goes by the key's position and nothing hides the keys ahead: they gain "
            f"{rise:.4g} logits per token of distance, in {heads}."
        )
    return (
        f"The bias {name} takes off logits for distance behind alone and nothing hides the keys ahead: they lose "
        f"{0.0 if rise < FLAT else said.fall:.4g} logits per token, in {heads}."
    )


def _effect(said: _Said, much: float, seq_len: int) -> str:
    if said.tokens:
        more = f", and of {seq_len:,} with still more" if seq_len > said.tokens else ""
        return f"Of {said.tokens:,} tokens the last sees the first with {said.rise:.4g} logits more than itself{more}."
    if said.kind == "past":
        return f"Of {seq_len:,} tokens the last sees the first with {much:.4g} logits more than itself."
    if said.kind in ("key", "future"):
        return f"Of {seq_len:,} tokens the first sees the last with {much:.4g} logits more than itself."
    return f"Each of {seq_len:,} tokens sees every token ahead, however far, with no less than its nearest one behind."


def _fix(said: _Said) -> Fix:
    if said.tokens:
        return Fix("Turn the sign: what is added falls with distance, so a minus goes before it.")
    if said.kind == "past":
        return Fix("Turn the sign: key position minus query position, times a positive slope.")
    if said.kind == "future":
        return Fix(
            "Turn the sign: query position minus key position, times a positive slope, where keys ahead are seen."
        )
    if said.kind == "key":
        return Fix("Use -slope * (i - j).abs(), or hide the keys ahead: is_causal=True or a causal mask.")
    return Fix(
        "Hide the keys ahead (a causal mask that does not depend on the caller), or use -slope * (i - j).abs()."
    )
