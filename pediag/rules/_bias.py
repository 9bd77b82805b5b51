"""What the rules on biases share: attentions with what is added to their scores, families that are declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pediag.rules.finding import Where
from pediag.rules.rule import CouldNotCheck, Facets, NotApplicable

if TYPE_CHECKING:
    from pediag.encodings import Encoding
    from pediag.encodings.model import Floats
    from pediag.encodings.scores import Scores
    from pediag.encodings.total import Total
    from pediag.theory.alibi import SlopeMatch
    from pediag.trace import Site, Trace

RELATIVE = ("alibi", "t5-buckets", "clipped", "relative-table", "content-relative")
"""Schemes that tell how far a key is from a query."""

PUBLISHED_ALIBI = (
    "bloom",
    "mpt",
    "falcon",
    "baichuan",
    "jais",
    "refinedweb",
    "refinedwebmodel",
    "mosaic_gpt",
)
"""Types of models with published checkpoints that were trained with the published slopes."""

SCALED_WITH_SCORES = ("falcon", "refinedweb", "refinedwebmodel")
"""Types that scale the sum of scores and bias (transformers' Falcon); BLOOM and MPT scale the scores alone."""

T5_TYPES = (
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "switch_transformers",
    "pop2piano",
    "udop",
    "pix2struct_text_model",
)
"""Types whose scores are not scaled and whose buckets are T5's."""

FACTOR_RTOL = 0.01
"""A factor is the score scale up to this: bfloat16 rounding twice over is 0.8 %, and scales differ by 6 % and more."""

ZERO_SLOPE = 1e-6
"""A head has no bias when its slope is below this share of the steepest."""


@dataclass(slots=True)
class Biased:
    """One attention and an encoding that enters it at ``site``."""

    trace: Trace
    scores: Scores
    encoding: Encoding
    site: Site
    facets: Facets

    def total(self) -> Total | None:
        """The whole fixed bias of the attention; equal attentions of equal layers are computed once."""
        from pediag.encodings.scores import signature
        from pediag.encodings.total import total

        key = ("bias", id(self.trace), signature(self.scores))
        if key not in self.facets.shared:
            self.facets.shared[key] = total(self.trace, self.scores)
        found: Total | None = self.facets.shared[key]
        return found

    def scale(self) -> float | None:
        """The factor on queries times keys up to the softmax; None where it is not one."""
        from pediag.encodings.scores import after_product, prefactor, signature

        attention = self.scores.attention
        before = prefactor(attention.query) * prefactor(attention.key)
        if attention.fused:
            own = attention.scale
            return before * (own if own is not None else float(attention.query.shape[-1]) ** -0.5)
        key = ("scale", id(self.trace), signature(self.scores))
        if key not in self.facets.shared:
            self.facets.shared[key] = after_product(self.scores)
        after: float | None = self.facets.shared[key]
        return None if after is None else before * after

    @property
    def where(self) -> Where:
        """The line where the encoding enters this attention."""
        frame = self.site.frame
        file, line = (frame.file, frame.line) if frame is not None else (None, None)
        return Where(self.site.module, self.encoding.id, file, line)

    def crosses(self) -> bool:
        """Whether queries come from an input that the keys do not come from."""
        attention = self.scores.attention
        return bool(self.facts.inputs(attention.query) - self.facts.inputs(attention.key))

    @property
    def facts(self) -> Inputs:
        """Which inputs every value of the trace comes from."""
        known = self.facets.shared.setdefault(("inputs", id(self.trace)), Inputs(self.trace))
        assert isinstance(known, Inputs)
        return known


class Inputs:
    """The inputs of forward that values of a trace are computed from."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @cached_property
    def _of(self) -> dict[Any, frozenset[Any]]:
        found: dict[Any, frozenset[Any]] = {}
        for node in self._trace.graph.nodes:
            own = frozenset((node,)) if node.given and node.provenance.name == "CONTENT" else frozenset()
            found[node] = own.union(*(found.get(item, frozenset()) for item in node.inputs()))
        return found

    def inputs(self, node: Any) -> frozenset[Any]:
        """The inputs with tokens or features behind ``node``."""
        return self._of.get(node, frozenset())


def biased(facets: Facets, *schemes: str) -> list[Biased]:
    """Every attention with an encoding of ``schemes`` in its scores, in order, one entry for each pair of both.

    Raises NotApplicable when no encoding is of these, CouldNotCheck when none could be followed to a softmax.
    """
    from pediag.encodings.scores import all_scores

    trace = facets.structural
    wanted = [item for item in facets.encodings if item.scheme in schemes and item.origin == "trace"]
    wanted = [item for item in wanted if getattr(item, "kind", "bias") == "bias"]
    if not wanted:
        raise NotApplicable(f"no encoding of the kind {' or '.join(schemes)} in attention scores")
    if trace is None:
        raise CouldNotCheck(facets.gaps.get("trace", "the target holds no code to run"))
    key = ("scores", id(trace))
    if key not in facets.shared:
        facets.shared[key] = all_scores(trace)
    found = list(_pairs(facets, trace, wanted, facets.shared[key]))
    if not found:
        raise CouldNotCheck("no softmax was found after the scores that the bias is added to")
    return found


def _pairs(facets: Facets, trace: Trace, wanted: list[Encoding], scores: list[Scores]) -> Iterator[Biased]:
    by_site = {id(site): (one, site) for one in scores for site in one.sites}
    for encoding in wanted:
        seen: set[int] = set()
        for site in encoding.sites:
            one, found = by_site.get(id(site), (None, site))
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                yield Biased(trace, one, encoding, found, facets)


def model_type(facets: Facets) -> str:
    """The declared type of the model, in lower case; empty without one."""
    found = facets.config.get("model_type", "") if facets.config is not None else ""
    return str(found or "").lower()


def declares(facets: Facets, types: tuple[str, ...]) -> str:
    """The declared type, of the model or of a part of it, when it is one of ``types``; else empty."""
    if facets.config is None:
        return ""
    said = [str(values.get("model_type") or "").lower() for _, values in facets.config.sections()]
    return next((name for name in said if name in types), "")


def declared_exponent(facets: Facets) -> float | None:
    """What a config declares as ``alibi_bias_max``: the exponent of the smallest slope."""
    if facets.config is None:
        return None
    values = [section.get("alibi_bias_max") for _, section in facets.config.sections()]
    return next(
        (float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0), None
    )


def one_each(items: list[Biased]) -> list[Biased]:
    """The first entry of every attention: what reaches its softmax is one bias, in however many parts it is added."""
    return list({id(item.scores): item for item in reversed(items)}.values())[::-1]


def causes(items: list[tuple[Biased, Any]]) -> list[tuple[list[Biased], Any]]:
    """Pairs of an attention and what is said of it, joined where the same is said of one line."""
    groups: dict[Any, tuple[list[Biased], Any]] = {}
    for item, said in items:
        place = (item.where.file, item.where.line, item.encoding.scheme, repr(said))
        groups.setdefault(place, ([], said))[0].append(item)
    return list(groups.values())


def layers_of(items: list[Biased]) -> str:
    """``" (layers 0-31)"`` for attentions of several layers, or nothing."""
    from pediag.encodings.grouping import layers

    paths = list(dict.fromkeys(item.where.module for item in items))
    named = layers(paths) if len(paths) > 1 else ""
    return f" ({named})" if named else ""


# -- slopes -------------------------------------------------------------------------------------------------


def slopes_at_softmax(item: Biased) -> SlopeMatch | None:
    """The formula of the slopes that reach the softmax; None when they follow none, are trained or unknown."""
    total = item.total()
    if total is None or total.trained or item.crosses():
        return None
    found = total.linear()
    if found is None or found.form == "sides" or not same_for_all(total):
        return None
    return formula_of(item, found.slopes)


def formula_of(item: Biased | None, found: Floats) -> SlopeMatch | None:
    """The formula that slopes (H,) follow: that of the slopes as they enter, where these are a multiple of them.

    Twice the published slopes of 8 heads are also a series that starts at 1; what enters tells which it is.
    """
    from pediag.theory.alibi import SlopeMatch, match_slopes

    given = biased_heads(found)
    entered = biased_heads(item.encoding.slopes) if item is not None else given  # type: ignore[attr-defined]
    if not given.size:
        return None
    if entered.size == given.size:
        ratio = given / entered
        match = match_slopes(entered)
        if match is not None and abs(ratio / ratio[0] - 1.0).max() <= FACTOR_RTOL / 2:
            times = float(ratio[0]) if abs(ratio[0] - 1.0) > 1e-3 else 1.0
            return SlopeMatch(match.name, match.factor * times, match.exponent, match.rounded)
    return match_slopes(given)


def same_for_all(total: Total) -> bool:
    """Whether all heads see the same keys: heads that look one way each share the slopes between them."""
    return bool((total.shown == total.shown[:1]).all())


def biased_heads(slopes: Floats) -> Floats:
    """The slopes that are not zero: some models leave a part of the heads without a bias."""
    found: Floats = slopes[abs(slopes) > ZERO_SLOPE * abs(slopes).max(initial=0.0)]
    return found


def wrong_factor(facets: Facets, item: Biased, factor: float) -> tuple[float, float, str] | None:
    """(expected factor, score scale, what happened) when a factor on published slopes is a misplaced scale."""
    scale = item.scale()
    head = float(item.scores.attention.query.shape[-1]) ** -0.5
    with_scores = bool(declares(facets, SCALED_WITH_SCORES))
    expected = (scale or head) if with_scores else 1.0
    ratio = factor / expected
    if abs(ratio - 1.0) <= FACTOR_RTOL:
        return None
    told = scale if scale is not None else head
    for used in dict.fromkeys((told, head)):
        if abs(used - 1.0) <= FACTOR_RTOL:
            continue
        for times, why in _reasons(used):
            if abs(ratio - times) <= FACTOR_RTOL * times:
                return expected, told, why
    for count in range(2, 6):
        if abs(ratio - count) <= FACTOR_RTOL * count:
            return expected, told, f"the bias is added {count} times over"
    return None


def _reasons(scale: float) -> Iterator[tuple[float, str]]:
    yield scale, f"the bias is multiplied by the score scale {scale:.4g}, as if it were added before it"
    yield (
        1.0 / scale,
        f"the bias is divided by the score scale {scale:.4g}, which is not applied to it afterwards",
    )
    yield scale * scale, f"the bias is multiplied by the score scale {scale:.4g} twice"
    yield 2.0 * scale, f"the bias is added 2 times over, and multiplied by the score scale {scale:.4g}"
