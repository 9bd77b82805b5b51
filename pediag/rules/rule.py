"""What a rule is: metadata, a docstring that is its page, and one function from facets to findings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pediag.rules.finding import Finding, Severity

if TYPE_CHECKING:
    from pediag.attributing.model import AttentionMap, TextAttribution
    from pediag.encodings import Encoding
    from pediag.targets import LazyTensor
    from pediag.targets.code.optimizers import Optimised
    from pediag.trace import Trace
    from pediag.trace.batches import Batches
    from pediag.trace.ranks import RankState
    from pediag.trace.steps import Steps

Facet = Literal["config", "tensors", "trace", "steps", "reference", "attention", "optimiser", "ranks"]
Basis = Literal["theorem", "published result", "measured here", "field report", "convention"]


class NotApplicable(Exception):
    """Raised by a rule on a target that has nothing for it to judge; the message is the reason."""


class CouldNotCheck(Exception):
    """Raised by a rule that lacks what it needs; the message says what is missing and how to give it."""


@dataclass(slots=True)
class Facets:
    """All that is known of one target; ``None`` where a kind of knowledge is missing.

    ``structural`` is the trace at a short prime length, where no two axes share a size; ``target`` the
    trace at ``seq_len`` tokens. ``gaps`` says, per missing facet, why it is missing.

    ``encodings`` are those of the running model; where nothing can be run, those that stored tensors and the config
    tell of (see ``Encoding.origin``). ``unread`` are encodings in stored tensors that the running model does not use.

    ``batches`` runs the model on other batches when a rule asks for it: padded, packed, with other position ids.
    ``steps`` runs cached steps when a rule asks for them.

    ``reference`` is what is known of the target to compare with. ``optimiser`` says which parameters the optimisers of
    a training run hold, ``ranks`` what each of its ranks holds of positions. ``attributions`` and ``attention`` are of
    real inputs, where such were given: see :func:`pediag.attribute`. ``shared`` keeps what one rule computed
    for others.
    """

    seq_len: int
    train_len: int | None = None
    dtype: str | None = None
    config: Any = None
    structural: Trace | None = None
    target: Trace | None = None
    tensors: Mapping[str, LazyTensor] | None = None
    encodings: list[Encoding] = field(default_factory=list)
    unread: list[Encoding] = field(default_factory=list)
    gaps: dict[str, str] = field(default_factory=dict)
    reference: Facets | None = None
    optimiser: Optimised | None = None
    ranks: list[RankState] | None = None
    batches: Batches | None = field(default=None, repr=False)
    steps: Steps | None = field(default=None, repr=False)
    attributions: list[TextAttribution] | None = field(default=None, repr=False)
    attention: list[AttentionMap] | None = field(default=None, repr=False)
    shared: dict[Any, Any] = field(default_factory=dict, repr=False)


Check = Callable[[Facets], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the catalogue, as ``pediag rules`` and ``pediag explain`` show it.

    ``needs`` are the facets it reads; where one is missing, any of ``instead`` lets it judge a part. ``package`` is the
    installed package that it comes with.
    """

    code: str
    name: str
    severity: Severity
    basis: Basis
    needs: tuple[Facet, ...]
    summary: str
    references: tuple[str, ...]
    page: str
    check: Check
    source: str
    instead: tuple[Facet, ...] = ()
    package: str = "pediag"

    def __reduce__(self) -> tuple[Callable[[str], Rule], tuple[str]]:
        """A rule goes to another process by its code."""
        from pediag.rules.registry import find

        return find, (self.code,)


def rule(
    *,
    code: str,
    name: str,
    severity: Severity,
    basis: Basis,
    needs: tuple[Facet, ...],
    instead: tuple[Facet, ...] = (),
    references: tuple[str, ...] = (),
) -> Callable[[Check], Rule]:
    """Declare the decorated function a rule; its module's docstring is the rule's page."""

    def declare(check: Check) -> Rule:
        module = inspect.getmodule(check)
        page = inspect.cleandoc((module.__doc__ if module else "") or "")
        return described(
            page,
            inspect.getfile(check),
            check,
            code=code,
            name=name,
            severity=severity,
            basis=basis,
            needs=needs,
            instead=instead,
            references=references,
        )

    return declare


def described(
    page: str,
    source: str,
    check: Check,
    *,
    code: str,
    name: str,
    severity: Severity,
    basis: Basis,
    needs: tuple[Facet, ...],
    instead: tuple[Facet, ...] = (),
    references: tuple[str, ...] = (),
    package: str = "pediag",
) -> Rule:
    """The rule whose page, source file and facts are given; the first line of the page is its summary."""
    return Rule(
        code=code,
        name=name,
        severity=severity,
        basis=basis,
        needs=needs,
        summary=page.partition("\n")[0],
        references=references,
        page=page,
        check=check,
        source=source,
        instead=instead,
        package=package,
    )
