"""The attention factor of a scaled rotation is not the one that the declaration implies.

## What it does

Measures how much longer a rotated vector is than it was, which is the factor on cosines and sines, and the scale of
the softmax where a declaration changes that too. Compares both with what the declared scaling implies, and says what
was found: no factor, one applied twice, that of another formula.

## Why it matters

YaRN and LongRoPE were fitted together with a factor on the logits. Without it, or with it twice, every score of the
rotated channels is scaled alike: attention is too flat or too sharp at each length. One token alone shows nothing,
since a softmax over one key is 1.

## What is checked

``sqrt(cos^2 + sin^2)``, s being the declared factor and f(m) = 0.1 m ln s + 1:

- YaRN: ``attention_factor`` where declared, else f(mscale) / f(mscale_all_dim) where both are, else f(1);
- LongRoPE: ``attention_factor`` where declared, else sqrt(1 + ln s / ln L0), s also as the ratio of the lengths;
- all others: 1, as long as it is the cosines and sines that carry the factor.

DeepSeek's latent attention (``qk_rope_head_dim``) multiplies the softmax scale by f(mscale_all_dim)^2 besides: with
equal mscales the factor on the cosines is 1 and this is everything. A factor that stands on the softmax in place of
cosines and sines is the same where the whole head turns, and silent; so is one on the channels that turn, before or
after they do, where a part of the head turns.

## Known limits

- ``attn_factor`` (vLLM) multiplies YaRN's factor there and is not read elsewhere: numbers with and without it pass.
- Frequencies that are not the declared ones are PE202 and PE203; the factor is then not judged.
- Scales of the softmax that have other reasons (query_pre_attn_scalar, attention_multiplier) are not judged.
- Whether cached keys carry the same factor as fresh ones is not seen in one pass.

## Fix

Multiply cosines and sines by the implied factor, once; of a latent attention multiply the softmax scale too.

## References

- onnxruntime/mobius 548; Avarok-Cybersecurity/atlas 342; raullenchai/Rapid-MLX 1225; ggml-org/llama.cpp 17945.
- Peng et al. 2309.00071, section 3.4; DeepSeek-V2 2405.04434 and its published code; Ding et al. 2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pediag.rules.finding import Evidence, Finding, Fix, Where
from pediag.rules.rule import Facets, NotApplicable, rule
from pediag.rules.state import _known, _rebuild
from pediag.rules.state._logits import logit_scale, turned_scale
from pediag.rules.state._rebuild import Meant, Served
from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import attention_factor, mscale_softmax_factor, yarn_attention_factor

if TYPE_CHECKING:
    from pediag.trace.graph import Attention

CLOSE = 1e-3
"""Relative: factors are declared with four digits or more, and YaRN's smallest published one is 7 % above 1."""

HALVES = 4.0
"""Roundoffs of a table in half precision by which a mean length may be off."""

SCALED = ("yarn", "longrope")
"""Types that imply a factor."""


@rule(
    code="PE204",
    name="attention-factor-unlike-config",
    severity="error",
    basis="published result",
    needs=("config", "trace"),
    references=("Peng et al. 2309.00071, section 3.4", "DeepSeek-V2 2405.04434"),
)
def check(facets: Facets) -> Iterator[Finding]:
    """One finding for each rotation with another factor, and for each kind of attention with another scale."""
    served = [item for item in _rebuild.served(facets) if item.built.encoding.origin == "trace"]
    if not served:
        raise NotApplicable("no rotation of the running model can be compared with a declaration")
    for item in served:
        if item.same:
            wanted = implied(facets, item.meant)
            if wanted and not _close(item, wanted):
                if not any(_on_softmax(facets, item, value) for value in wanted):
                    yield _of_rotation(facets, item, wanted[0])
            elif wanted:
                yield from _of_softmax(facets, item)


def implied(facets: Facets, one: Meant) -> list[float]:
    """The factors on cosines and sines that a declaration may mean, the published reading first; none if unsound."""
    keys = {key: value for key, value in one.scaling.items() if value is not None}
    lengths = [keys.get("max_position_embeddings"), facets.seq_len]
    found = [_factor(keys, length) for length in lengths if isinstance(length, int)]
    if one.kind == "longrope":
        without = {key: value for key, value in keys.items() if key != "factor"}
        found += [_factor(without, length) for length in lengths if isinstance(length, int)]
        found += [_number(keys.get(key)) for key in ("short_mscale", "long_mscale")]
    if one.kind == "yarn":
        factor, mscale = _number(keys.get("factor")), _number(keys.get("mscale"))
        if factor and mscale and not keys.get("mscale_all_dim"):
            found.append(yarn_attention_factor(factor, mscale))
        more = _number(keys.get("attn_factor"))
        found += [value * more for value in found[:1] if value is not None and more]
    return list(dict.fromkeys(value for value in found if value is not None))


def _factor(keys: dict[str, Any], length: int) -> float | None:
    try:
        return attention_factor(keys, length)
    except (TheoryError, TypeError, ValueError, ZeroDivisionError):
        return None


def _number(value: Any) -> float | None:
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if sound else None


def _allowed(item: Served) -> float:
    return max(CLOSE, HALVES * item.built.encoding.precision)


def _close(item: Served, wanted: list[float]) -> bool:
    encoding = item.built.encoding
    found = encoding.attention_factor
    if any(abs(found / value - 1) <= _allowed(item) for value in wanted):
        return True
    # Queries and keys that carry half of the score scale each, D ** -0.25, after they were turned.
    halved = [value * encoding.head_width**-0.25 for value in wanted] if encoding.head_width else []
    if any(abs(found / value - 1) <= _allowed(item) for value in halved) and not _carried(item):
        return True
    return item.meant.kind not in SCALED and not _carried(item)


def _carried(item: Served) -> bool:
    """Whether the cosines and sines themselves are as large as the factor: else something else scales the vector."""
    from pediag.encodings.program import Exact
    from pediag.trace import Unavailable
    from pediag.trace.evaluate import Evaluator

    site, found = item.built.encoding.sites[0], item.built.encoding.attention_factor
    evaluator = Evaluator(Exact())
    try:
        largest = max(float(evaluator(node).abs().max()) for node in site.position)
    except Unavailable:
        return False
    return abs(largest / found - 1) <= 0.02


# -- the softmax --------------------------------------------------------------------------------------------


def _on_softmax(facets: Facets, item: Served, wanted: float) -> bool:
    """Whether the softmax scale makes up for the factor that cosines and sines lack, over a head that turns whole.

    Of a head that turns in part, whether the channels that turn are scaled by themselves.
    """
    encoding = item.built.encoding
    if encoding.width != encoding.head_width:
        scales = [turned_scale(facets, attention) for attention in _attentions(facets, item)]
        due = wanted**2 / math.sqrt(encoding.head_width)
        return any(scale is not None and abs(scale / due - 1) <= 2 * _allowed(item) for scale in scales)
    for attention in _attentions(facets, item):
        scale = logit_scale(facets, attention)
        if scale is not None:
            whole = scale * math.sqrt(encoding.head_width) * encoding.attention_factor**2
            return abs(whole / wanted**2 - 1) <= 2 * _allowed(item)
    return False


def _attentions(facets: Facets, item: Served) -> list[Attention]:
    from pediag.rules.reach._attention import served

    trace = facets.structural
    return list(served(trace, item.built.encoding)) if trace is not None else []


def _of_softmax(facets: Facets, item: Served) -> Iterator[Finding]:
    """What is wrong with the softmax scale of latent attention, whose declaration implies one."""
    one, scaling = item.meant, item.meant.scaling
    latent = one.declared is not None and one.declared.get("qk_rope_head_dim") is not None
    factor, mscale = _number(scaling.get("factor")), _number(scaling.get("mscale_all_dim"))
    if not latent or one.kind != "yarn" or not factor or not mscale or not one.head:
        return
    wanted = mscale_softmax_factor(factor, mscale)
    for attention in _attentions(facets, item):
        scale = logit_scale(facets, attention)
        found = scale * math.sqrt(one.head) if scale is not None else wanted
        if abs(found / wanted - 1) > _allowed(item):
            yield _unlike(facets, item, attention, found, wanted)
            return


def _unlike(facets: Facets, item: Served, attention: Attention, found: float, wanted: float) -> Finding:
    one, frame = item.meant, attention.frame
    path = _rebuild.place(facets, one.scaling_at.rpartition(".")[0] + ".mscale_all_dim")
    return Finding(
        message=(
            f"The softmax scale is {found:.4g} times {one.head}^-0.5 where {path} implies {wanted:.4g} times"
            f"{_rebuild.layers(item)}: {_named(found, math.sqrt(wanted))}."
        ),
        effect=_effect(facets, found / wanted, "all scores"),
        where=Where(
            attention.module,
            item.built.encoding.id,
            frame.file if frame is not None else None,
            frame.line if frame is not None else None,
        ),
        evidence=Evidence(found, wanted, _allowed(item), "factor", facets.seq_len),
        fix=Fix(
            f"Multiply the softmax scale by {wanted:.6g}, the square of 0.1 mscale_all_dim ln(factor) + 1, beside "
            f"{one.head}^-0.5."
        ),
        scheme="rotary",
    )


# -- what is said -------------------------------------------------------------------------------------------


def _of_rotation(facets: Facets, item: Served, wanted: float) -> Finding:
    found = item.built.encoding.attention_factor
    declared = _rebuild.place(facets, item.meant.scaling_at)
    return Finding(
        message=(
            f"Cosines and sines{_rebuild.layers(item)} are scaled by {found:.6g} where {declared} declares "
            f"{_known.named(item.meant)}, which implies {wanted:.6g}: {_named(found, wanted)}."
        ),
        effect=_effect(facets, (found / wanted) ** 2, "the scores of the rotated channels"),
        where=_rebuild.where(facets, item),
        evidence=Evidence(found, wanted, _allowed(item), "factor", facets.seq_len),
        fix=Fix(f"Multiply cosines and sines by {wanted:.10g}, once, after they are computed."),
        scheme="rotary",
    )


def _named(found: float, wanted: float) -> str:
    """What a factor is in terms of the one that is due."""
    for value, text in (
        (1.0, "the factor is missing"),
        (wanted**2, "the factor is applied twice"),
        (1 / wanted, "the factor divides where it should multiply"),
        (math.sqrt(wanted), "its square root is applied"),
    ):
        if abs(found / value - 1) <= CLOSE and abs(value / wanted - 1) > CLOSE:
            return text
    return "it is another factor" if abs(wanted - 1) > CLOSE else "none is due"


def _effect(facets: Facets, ratio: float, what: str) -> str:
    flat = "flatter" if ratio < 1 else "sharper"
    return (
        f"At {facets.seq_len:,} tokens, as at any length above 1, {what} are {ratio:.4g} times those the model was "
        f"trained with: attention is {flat}. Nothing raises."
    )
