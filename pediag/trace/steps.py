"""The step probe: a prefill, single tokens and a chunk on the model's own cache, beside one pass over all tokens."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch

from pediag.targets.caches import CacheSpec
from pediag.trace.chain import Chain, Pass
from pediag.trace.conventions import Convention, NoCache, conventions, forgets, taken
from pediag.trace.depth import Depth, depth
from pediag.trace.dimensions import changed_each, free, lengths_of
from pediag.trace.evaluate import Evaluator, Unavailable, real_numbers
from pediag.trace.graph import Attention, Graph, Node, ancestors
from pediag.trace.inputs import Candidate, Input, Sizes, made_up
from pediag.trace.place import Lengths, explain
from pediag.trace.rows import Rows
from pediag.trace.session import Session
from pediag.trace.snapshot import Snapshot

# Tokens of the prefill and of the last chunk, long first; two single tokens stand between.
_PREFILLS = (37, 41, 43, 47, 31, 29, 23, 17, 11, 7, 5)
_CHUNKS = (19, 17, 23, 13, 11, 7, 5, 3)
_ENCODED = (53, 59, 61, 67, 71, 73, 79)
_SINGLES = 2
# Attentions after which a long input has changed all that it changes, where layers are alike.
_ENOUGH = 4
_TRIED = 7
_T = TypeVar("_T")
_HOW = (
    "give --cache NAME=VALUE, such as 'past=out[1]' (what forward returned there), 'state={}' or 'start=seen' (the "
    "number of tokens before)"
)


class Unrunnable(Exception):
    """Cached steps could not be run; the message says why and how to tell pediag."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens of each cached pass, and of the encoder's input where there is one."""

    parts: tuple[int, ...]
    encoded: int

    @property
    def total(self) -> int:
        """All tokens, N."""
        return sum(self.parts)

    def sizes(self, tokens: int, second: bool) -> Sizes:
        """Batch 1; ``second`` says that the stepped sequence is the second of two."""
        return Sizes(1, self.encoded, tokens) if second else Sizes(1, tokens, self.encoded)

    def lengths(self, tokens: int, seen: int) -> Lengths:
        """What counts tokens in a pass of ``tokens`` after ``seen`` others."""
        exact = tuple(size for size in dict.fromkeys((tokens, seen + tokens, self.encoded)) if size > 1)
        around = {size + step for size in exact for step in (-1, 0, 1)} - {0, 1}
        return Lengths(around, 1, exact)


@dataclass(slots=True)
class Cached:
    """Cached passes beside the pass over all tokens. ``stopped`` says why those after the last are missing.

    ``rows`` reads the position side of each; ``convention`` is how the cache was given; ``depth`` says which layers
    were left out, being like others.
    """

    full: Pass
    passes: list[Pass]
    convention: Convention
    rows: Rows
    stopped: str = ""
    depth: Depth = field(default_factory=Depth)

    @property
    def prefill(self) -> Pass:
        """The first pass, on an empty cache."""
        return self.passes[0]


@dataclass(frozen=True, slots=True)
class History:
    """A short pass on a model as it came, and the same one after longer inputs of ``longer`` tokens each.

    ``refused`` is the longer pass that stopped after a short one, where the model as it came takes that length.
    """

    before: Pass
    after: Pass
    longer: tuple[int, ...]
    rows: Rows
    refused: Pass | None = None
    _own: Evaluator = field(default_factory=Evaluator, repr=False)
    _made_up: Evaluator = field(default_factory=lambda: Evaluator(surrogates=True), repr=False)

    def values(self, one: Node, other: Node) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The numbers of two position values, as the model computes them, in float64; None when there are none.

        Where weights have no numbers, both are computed with made up ones.
        """
        for evaluator in (self._own, self._made_up):
            try:
                found = evaluator(one), evaluator(other)
            except Unavailable:
                continue
            with real_numbers():
                a, b = (torch.view_as_real(value) if value.is_complex() else value for value in found)
                return a.double(), b.double()
        return None


class Steps:
    """What cached steps of one model show. Nothing runs before it is asked for; what ran is kept."""

    def __init__(self, session: Session, specs: Sequence[CacheSpec] = ()) -> None:
        self.session = session
        self.specs = specs
        self._runner: _Runner | None = None
        self._found: dict[object, Any] = {}

    def cached(self) -> Cached:
        """Cached passes by the convention with the fewest arguments that the trace confirms.

        Raises NoCache where the model takes no cache, Unrunnable where none of the known conventions works.
        """
        return self._once("cached", lambda: self._search(told=False))

    def told(self) -> Cached | None:
        """The same where the caller tells the model its positions besides; None where it cannot be told."""
        cached = self.cached()
        if cached.convention.positions:
            return cached
        try:
            return self._once("told", lambda: self._search(told=True))
        except (NoCache, Unrunnable):
            return None

    def history(self, lengths: Sequence[int]) -> History:
        """A short pass after inputs of those of ``lengths`` (in tokens) that run. Raises Unrunnable when none does."""
        return self._once(("history", *lengths), lambda: self._after(lengths))

    def _once(self, key: object, make: Callable[[], _T]) -> _T:
        if key not in self._found:
            try:
                self._found[key] = make()
            except (NoCache, Unrunnable) as reason:
                self._found[key] = reason
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        return cast("_T", found)

    def _run(self) -> _Runner:
        if self._runner is None:
            structural = self.session.structural()
            if structural.failure is not None:
                raise Unrunnable(f"the forward pass stopped: {structural.failure.message}")
            runner = _Runner(self.session)
            runner.run_full()
            self._runner = runner
        return self._runner

    def _search(self, *, told: bool) -> Cached:
        ways = conventions(self.session.model, self.specs)
        runner = self._run()
        if not self.session.structural().graph.attentions:
            raise NoCache("the model has no attention")
        chosen = [way for way in ways if way.positions or not told]
        for way in chosen[:_TRIED]:
            cached = runner.run(way)
            if cached is not None:
                return cached
        if runner.untold:
            raise Unrunnable(runner.untold)
        if not any(way.said for way in ways) or (
            not self.specs and forgets(self.session.model, ways, self._tables())
        ):
            raise NoCache("forward takes no cache")
        refused = itertools.islice(runner.refused.items(), 2)
        tried = "; ".join(f"{said or 'called again'}: {why}" for said, why in refused)
        raise Unrunnable(f"cached steps could not be run ({tried}): {_HOW}")

    def _tables(self) -> set[str]:
        """Names of the stored tensors that positions are made of."""
        entering = (node for site in self.session.structural().graph.sites for node in site.position)
        return {name for node in entering for part in ancestors(node) if part.stored for name in part.names}

    def _after(self, lengths: Sequence[int]) -> History:
        runner = self._run()
        usable = tuple(length for length in lengths if length > runner.plan.total)
        longer, refused = usable, None
        if usable:
            after, refused = runner.run_again(usable, short=True)
            if after is not None:
                return History(runner.full, after, usable, Rows(runner.full))
        while longer:
            after, stopped = runner.run_again(longer)
            if after is not None:
                alone = refused is not None and refused.tokens in longer
                return History(runner.full, after, longer, Rows(runner.full), refused if alone else None)
            longer = tuple(length for length in longer if stopped is None or length != stopped.tokens)
        tried = ", ".join(map(str, usable)) or "one longer than the short one"
        raise Unrunnable(f"no input of {tried} tokens runs: give a shorter --seq-len")


class _Runner:
    """Runs the plan by one convention after the other."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.graph = Graph()
        self.refused: dict[str, str] = {}
        self.untold = ""
        self.before = Snapshot().of_model(session.model)
        self.depth = depth(session.model, session.structural())
        self.plan, self.second = self._planned()
        sizes = self.plan.sizes(self.plan.total, self.second)
        names = list(inspect.signature(session.model.forward).parameters)
        self.whole = _by_name(_one_text(_fixed(session.called(sizes), sizes), sizes), names)

    def _planned(self) -> tuple[Plan, bool]:
        """The plan, and whether the decoder's sequence is the second of two inputs."""
        session = self.session
        most = session.structural().sizes.tokens
        sizes = session.structural().sizes
        second = _is_second(session.called(sizes), sizes)
        most = sizes.keys if second else most
        return Plan(_parts(session, most), next(_encoded(session))), second

    def run_full(self) -> None:
        """The pass over all tokens, through all layers where fewer do not run. Raises Unrunnable when it stops."""
        self._run_full()
        if self.full.failure is not None and self.depth.kept:
            self.depth, self.graph = Depth(), Graph()
            self._run_full()
        if self.full.failure is not None:
            stopped = self.full.failure.message
            raise Unrunnable(f"the pass over {self.plan.total} tokens stopped: {stopped}")

    def _run_full(self) -> None:
        total = self.plan.total
        with self._chain() as chain:
            self.full = chain.run(
                Candidate([], dict(self.whole)),
                self.plan.sizes(total, self.second),
                self.plan.lengths(total, 0),
                tokens=total,
            )

    def _chain(self) -> Chain:
        return Chain(self.session, self.graph, self.before, self.depth)

    def run(self, way: Convention) -> Cached | None:
        """The plan by one convention; None, with the reason kept, when no earlier token was seen again."""
        rows = Rows(self.full)
        found = Cached(self.full, [], way, rows, depth=self.depth)
        try:
            memory = way.start() if way.start is not None else None
        except Exception as error:
            self.refused.setdefault(way.said, explain(error))
            return None
        with self._chain() as chain:
            seen = 0
            for tokens in self.plan.parts:
                done = self._step(chain, way, memory, seen, tokens)
                if done.failure is not None:
                    found.stopped = f"after {seen} tokens, {tokens} more raised {done.failure.message}"
                    break
                found.passes.append(done)
                rows.add(done)
                returned = _quietly(taken, done.output, way)
                memory = returned if returned is not None else memory
                seen += tokens
        return found if self._confirmed(found) else None

    def run_again(self, longer: Sequence[int], *, short: bool = False) -> tuple[Pass | None, Pass | None]:
        """The pass over all tokens after inputs of other lengths, first of all itself where ``short``.

        None, with the pass that stopped, when one does.
        """
        with self._chain() as chain:
            if short and (done := self._whole(chain)).failure is not None:
                return None, done
            for length in longer:
                sizes = self.plan.sizes(length, self.second)
                done = chain.run(
                    _one_text(_fixed(self.session.called(sizes), sizes), sizes),
                    sizes,
                    self.plan.lengths(length, 0),
                    follow=self.full.trace,
                    tokens=length,
                    enough=lambda graph: len(graph.attentions) >= _ENOUGH,
                )
                if done.failure is not None:
                    return None, done
            again = self._whole(chain)
        return (again, None) if again.failure is None else (None, done)

    def _whole(self, chain: Chain) -> Pass:
        total = self.plan.total
        return chain.run(
            Candidate([], dict(self.whole)),
            self.plan.sizes(total, self.second),
            self.plan.lengths(total, 0),
            follow=self.full.trace,
            tokens=total,
        )

    def _step(self, chain: Chain, way: Convention, memory: Any, seen: int, tokens: int) -> Pass:
        own = sliced(self.whole, self.plan.total, seen, tokens)
        told = {name for name, item in own.items() if isinstance(item, Input) and item.role == "positions"}
        own.update({name: item for name, item in way.arguments(seen, tokens).items() if name not in told})
        given = {way.cache: memory} if way.cache and memory is not None else {}
        if given:
            own.pop(way.cache, None)
        return chain.run(
            Candidate([], own),
            self.plan.sizes(tokens, self.second),
            self.plan.lengths(tokens, seen),
            follow=self.full.trace,
            given=given,
            seen=seen,
            tokens=tokens,
        )

    def _confirmed(self, found: Cached) -> bool:
        said = found.convention.said
        if len(found.passes) < 2:
            self.refused.setdefault(said, found.stopped)
            return False
        if found.rows.remembers(found.passes[1]):
            return True
        self.refused.setdefault(said, "no attention of the cached step sees earlier tokens")
        step = found.passes[1]
        if not self.untold and any(
            _keys(one) == step.seen + step.tokens for one in step.trace.graph.attentions
        ):
            self.untold = (
                f"cached steps ran ({said}) with a key for each of {step.seen + step.tokens} tokens, but which is of "
                "which token is not followed, as where keys are made anew from kept hidden states, or tokens run in "
                "several streams"
            )
        return False


def _keys(attention: Attention) -> int:
    """How many keys an attention has."""
    size: int = attention.key.shape[-2 if attention.fused else -1]
    return size


def _quietly(read: Any, *args: Any) -> Any:
    try:
        return read(*args)
    except (LookupError, AttributeError, TypeError):
        return None


def _parts(session: Session, most: int) -> tuple[int, ...]:
    """Tokens of each pass: none of the lengths that occur equals a size of the model, where that can be."""
    takes = session.target.takes or (lambda size: True)
    for apart in (free, _unequal):
        for prefill, chunk in itertools.product(_PREFILLS, _CHUNKS):
            parts = (prefill, *(1,) * _SINGLES, chunk)
            sums = list(itertools.accumulate(parts))
            sizes = {*sums, chunk}
            if sums[-1] > most or chunk >= prefill or not all(apart(size, session.dims) for size in sizes):
                continue
            if all(takes(size) for size in sizes):
                return parts
    raise Unrunnable(f"no inputs short enough for cached steps: the model runs up to {most} tokens")


def _unequal(size: int, dims: set[int]) -> bool:
    return size not in dims


def _encoded(session: Session) -> Iterator[int]:
    structural = session.structural().sizes
    yield from (size for size in _ENCODED if free(size, session.dims) and size <= structural.tokens)
    yield structural.tokens


# -- parts of a call -----------------------------------------------------------------------------------------


def _is_second(candidate: Candidate, sizes: Sizes) -> bool:
    """Whether an input runs along the second length. Along the first may run none: sound or pictures of one size."""
    found = [item.shape(sizes) for item in candidate.inputs() if not item.literal]
    return any(sizes.keys in shape and sizes.tokens not in shape for shape in found)


def sliced(whole: Mapping[str, Any], total: int, seen: int, tokens: int) -> dict[str, Any]:
    """The arguments for ``tokens`` tokens after ``seen`` others, cut out of those for all ``total`` of them."""

    def cut(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: cut(part) for name, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(cut(part) for part in item)
        return _cut(item, total, seen, tokens) if isinstance(item, Input) and not item.literal else item

    return {name: cut(item) for name, item in whole.items()}


def _cut(item: Input, total: int, seen: int, tokens: int) -> Input:
    shape = tuple(int(size) for size in item.dims) if item.value is None else tuple(item.value.shape)
    axes = [axis for axis, size in enumerate(shape) if size == total]
    ends = dict.fromkeys(axes, (seen, tokens))
    if item.role == "mask" and axes:
        ends[axes[-1]] = (0, seen + tokens)
    sizes = tuple(ends[axis][1] if axis in ends else size for axis, size in enumerate(shape))
    if item.role == "content":
        return Input(item.dtype, sizes, item.role)
    value = item.value if item.value is not None else made_up(item, shape, Sizes(0, total, total))
    for axis, (start, length) in ends.items():
        value = value.narrow(axis, start, length)
    return Input(item.dtype, sizes, item.role, value)


def _by_name(whole: Candidate, names: Sequence[str]) -> dict[str, Any]:
    return {**dict(zip(names, whole.args, strict=False)), **whole.kwargs}


def _fixed(candidate: Candidate, sizes: Sizes) -> Candidate:
    """The call with sizes in place of letters."""
    return changed_each(
        candidate, lambda item: item if item.value is not None else replace(item, dims=item.shape(sizes))
    )


def _one_text(candidate: Candidate, sizes: Sizes) -> Candidate:
    """The call with the first text alone, where the user's example has several."""
    texts = lengths_of(candidate, sizes).batch
    if not candidate.given or texts == 1:
        return candidate

    def first(item: Input) -> Input:
        axis = next((axis for axis, size in enumerate(item.shape(sizes)[:2]) if size == texts), None)
        if item.value is None or axis is None:
            return item
        return replace(item, value=item.value.narrow(axis, 0, 1))

    return changed_each(candidate, first)
