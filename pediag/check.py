"""The pipeline: target -> trace -> encodings -> rules -> report."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

from pediag.errors import TraceError, UsageError
from pediag.process import lean, settled
from pediag.report.model import Report, TargetInfo
from pediag.rules import differences, registry
from pediag.rules.rule import Facets, Rule
from pediag.rules.run import NO_CONFIG, run
from pediag.settings import Allowed, decided
from pediag.targets import (
    Config,
    Example,
    Inputs,
    InputSpec,
    Target,
    fit_notes,
    maximum_length,
    open_target,
    read_inputs,
    serving_dtype,
    staying,
    trained_length,
    understood,
)
from pediag.targets.caches import CacheSpec, parse_cache_spec
from pediag.training import beside

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pediag.encodings import Encoding
    from pediag.trace import Session, Trace
    from pediag.trace.ranks import Gathers

Checkable = "str | os.PathLike[str] | nn.Module | Any"
GREATEST_LENGTH = 2**31
# Asked about when neither the user nor the model says a length: where half-precision faults show.
DEFAULT_LENGTH = 2048
# A trace hooks into every module call of the process, and has the model hold abstract tensors while it runs.
_ONE_AT_A_TIME = threading.RLock()
# The rules that say why a pass stops; left out by the user, a stop is only noted.
_EXPLAIN_STOPS = {"PE306", "PE502"}


class Progress(Protocol):
    """Is told what is being done."""

    def step(self, text: str) -> None:
        """Say the next piece of work."""


class _Silent:
    def step(self, text: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Options:
    """How a target is looked at. Lengths in tokens."""

    seq_len: int | None = None
    train_len: int | None = None
    dtype: str | None = None
    config: str | os.PathLike[str] | None = None
    inputs: tuple[InputSpec, ...] = ()
    trust: Allowed = False
    gather: bool = False
    cache: tuple[CacheSpec, ...] = ()
    beside: Callable[[Facets], None] | None = None
    example: Example | None = None


@dataclass(slots=True)
class _Seen:
    """A target with its traces, on the way to its facets."""

    target: Target
    facets: Facets
    notes: list[str] = field(default_factory=list)


def check(
    target: str | os.PathLike[str] | nn.Module,
    *,
    seq_len: int | None = None,
    train_len: int | None = None,
    dtype: str | torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    inputs: Inputs = (),
    cache: str | Iterable[str] = (),
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    trust: Allowed = False,
    gather: bool = False,
    reference: str | os.PathLike[str] | nn.Module | None = None,
    optimizer: Any = None,
    ranks: bool | Gathers = False,
    pictures: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Judge how a model encodes positions, with every selected rule, at ``seq_len`` tokens.

    ``target`` is a live module or what the command line takes. ``seq_len`` defaults to the longest the model
    declares or holds rows for. ``dtype`` is the dtype the model will be cast to. ``inputs`` are specs such as
    ``"input_ids=int64[B,N]"``, the arguments of forward (a tensor, a tuple, a dictionary by name), or a function of the
    length that returns them. ``cache`` says how forward is given what it remembers, such as ``"past=out[1]"``, where
    that cannot be told. ``select`` and ``ignore`` are codes, names or prefixes. With ``gather`` sharded tables that
    positions need are read from all ranks; every rank must call then, with the same options. ``trust`` lets code that
    came with the target run; a path is the settings file of the user's that says so. ``reference`` is a target that
    encodes positions as this one should: what differs is an error, see :func:`pediag.diff`. With ``pictures`` the
    report keeps the numbers that the HTML report draws.

    ``optimizer`` is the optimiser of a live model, or a list of them. With ``ranks`` what the ranks of
    torch.distributed hold of positions is compared; every rank must call then. A :class:`pediag.Ranks` says more.

    Raises LoadError when the target cannot be opened, TraceError when it cannot be run abstractly and no rule
    can say why, UsageError for an option that cannot be meant. The model is left as it was.
    """
    rules = registry.select(registry.split(select), registry.split(ignore, "ignore"))
    options = _options(seq_len, train_len, dtype, config, inputs, trust, gather)
    with beside(target, optimizer, ranks) as add:
        options = replace(options, cache=_cache_specs(cache), beside=add)
        return _report(target, rules, options, progress, reference, pictures=pictures)


def inspect(
    target: str | os.PathLike[str] | nn.Module,
    *,
    seq_len: int | None = None,
    train_len: int | None = None,
    dtype: str | torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    inputs: Inputs = (),
    trust: Allowed = False,
    gather: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Describe what encodes position in a model: a report without findings. Raises as check()."""
    return _report(target, (), _options(seq_len, train_len, dtype, config, inputs, trust, gather), progress)


def _cache_specs(cache: str | Iterable[str]) -> tuple[CacheSpec, ...]:
    specs = tuple(parse_cache_spec(item) for item in ((cache,) if isinstance(cache, str) else cache))
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--cache {twice}: is given twice; give each argument once")
    return specs


def _options(
    seq_len: int | None,
    train_len: int | None,
    dtype: str | torch.dtype | None,
    config: str | os.PathLike[str] | None,
    inputs: Inputs,
    trust: Allowed,
    gather: bool,
) -> Options:
    for name, value in (("seq_len", seq_len), ("train_len", train_len)):
        if value is not None and (type(value) is not int or not 1 <= value <= GREATEST_LENGTH):
            raise UsageError(
                f"{name} must be a whole number of tokens from 1 to {GREATEST_LENGTH}; got {value!r}"
            )
    specs, example = read_inputs(inputs)
    if config is not None and not isinstance(config, (str, os.PathLike)):
        raise UsageError(f"config must be the path of a config.json; got a {type(config).__name__}")
    return Options(seq_len, train_len, serving_dtype(dtype), config, specs, trust, gather, example=example)


def refuse(seq_len: int | None, inputs: Inputs) -> None:
    """Raise UsageError for a length in tokens or inputs that :func:`look` would not take."""
    _options(seq_len, None, None, None, inputs, False, False)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a target before any rule has judged it; ``notes`` as in a report."""

    info: TargetInfo
    facets: Facets
    notes: list[str]

    @property
    def length(self) -> int | None:
        """The longest input in tokens that the target is meant for; None where nothing tells."""
        return _own_length(self.facets.config, self.facets.encodings)


def look(
    target: str | os.PathLike[str] | nn.Module | Target,
    *,
    seq_len: int | None = None,
    dtype: str | torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    inputs: Inputs = (),
    trust: Allowed = False,
    progress: Progress | None = None,
) -> Known:
    """What there is to know of a target at ``seq_len`` tokens, for a comparison. Raises as inspect()."""
    options = _options(seq_len, None, dtype, config, inputs, trust, False)
    with alone(target), lean():
        return _known(target, options, progress or _Silent())


@contextmanager
def alone(*targets: Any) -> Iterator[None]:
    """While numbers of these targets are computed: nothing else is traced, and nothing of the caller's is in force."""
    with ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        for target in targets:
            stack.enter_context(_plainly(target))
        yield


def _known(target: Any, options: Options, step: Progress) -> Known:
    report, facets = _judged(target, (), options, step, None)
    return Known(report.target, facets, report.notes)


def _report(
    target: Any,
    rules: Sequence[Rule],
    options: Options,
    progress: Progress | None,
    reference: Any = None,
    *,
    pictures: bool = False,
) -> Report:
    step = progress or _Silent()
    with alone(target, *([reference] if reference is not None else [])), lean():
        report, facets = _judged(target, rules, options, step, reference)
        if pictures:
            from pediag.report.html import measured

            step.step("measuring for pictures")
            report.pictures = measured.of_target(facets)
        return report


def _judged(
    target: Any, rules: Sequence[Rule], options: Options, step: Progress, reference: Any
) -> tuple[Report, Facets]:
    step.step("opening")
    declared = understood(Config.from_file(options.config)) if options.config is not None else None
    trust, told = decided(options.trust, target)
    opened = target if isinstance(target, Target) else open_target(target, config=declared, trust=trust)
    if options.example is not None:
        opened = replace(opened, example_inputs=options.example)
    seen = _run_as_theirs(opened, options, step)
    if options.beside is not None:
        options.beside(seen.facets)
    if reference is not None:
        _refer(seen, reference, options, step)
    step.step("checking rules")
    report = Report(
        target=TargetInfo(opened.spec, opened.loader, opened.sha256),
        seq_len=seen.facets.seq_len,
        train_len=seen.facets.train_len,
        encodings=seen.facets.encodings,
        outcomes=differences.named(run(rules, seen.facets), seen.facets),
        notes=[*(registry.left_out() if rules else ()), *told, *opened.notes, *seen.notes],
    )
    _raise_unexplained(seen, report, inspecting=not rules, given=bool(options.inputs or options.example))
    return report, seen.facets


def _refer(seen: _Seen, reference: Any, options: Options, step: Progress) -> None:
    """Let the rules know what the reference is. Raises UsageError where it has nothing to compare with."""
    from pediag.encodings import encodes_position

    inputs = options.inputs if _takes(reference, options.inputs) else ()
    known = _known(reference, Options(seq_len=seen.facets.seq_len, inputs=inputs, trust=options.trust), step)
    if not encodes_position(known.facets.encodings):
        raise UsageError(
            f"--reference {known.info.spec}: no position encoding was found in it to compare with"
        )
    seen.facets.reference = known.facets
    seen.facets.shared[differences.REFERENCE] = known.info.spec
    seen.notes += [f"compared with {known.info.spec}", *(f"reference: {note}" for note in known.notes)]


def _takes(reference: Any, inputs: Sequence[InputSpec]) -> bool:
    """Whether the forward of a live reference has all the inputs that were given for the target."""
    forward = getattr(reference, "forward", None)
    return forward is not None and {spec.name for spec in inputs} <= set(signature(forward).parameters)


def _plainly(target: Any) -> AbstractContextManager[None]:
    """Of a live model, whose caller may have set devices and casts: compute without them. A spec has no caller."""
    if isinstance(target, (str, os.PathLike)):
        return nullcontext()
    from pediag.trace.isolation import on_host

    return on_host()


def _run_as_theirs(target: Target, options: Options, step: Progress) -> _Seen:
    with staying(target.spec):
        return _see(target, options, step)


def _see(target: Target, options: Options, step: Progress) -> _Seen:
    """All facets of an opened target."""
    train_len = options.train_len or (trained_length(target.config) if target.config else None)
    facets = Facets(
        seq_len=options.seq_len or 0, train_len=train_len, dtype=options.dtype, config=target.config
    )
    seen = _Seen(target, facets)
    facets.tensors = target.tensors or None
    if target.config is None:
        facets.gaps["config"] = f"{NO_CONFIG}: the target declares nothing"
    if not target.tensors:
        facets.gaps["tensors"] = "the target stores no tensors"
    if target.missing:
        facets.gaps["files"] = f"{target.missing}; a tensor of positions may lie there: add what is missing"
    session = None
    if target.module is None and target.build is None:
        facets.gaps["trace"] = target.reason_not_runnable or "the target holds no code to run"
    else:
        session = _session(target, options, seen, step)
    settled()
    if session is not None:
        seen.notes += fit_notes(target, session.model) if target.module is None else []
        _trace(session, options, seen, step)
    _read(target, session, options, seen, step)
    facets.seq_len = facets.seq_len or _declared(target.config) or DEFAULT_LENGTH
    return seen


def _read(target: Target, session: Session | None, options: Options, seen: _Seen, step: Progress) -> None:
    """What stored tensors and the config tell by themselves; of a model that runs, only what it does not read."""
    from pediag import encodings

    facets = seen.facets
    tensors = target.tensors
    if session is not None:
        read = session.read_from_storage
        tensors = {name: tensor for name, tensor in tensors.items() if name not in read}
    if tensors:
        step.step("reading stored tensors")
    found = encodings.stored(tensors) if tensors else []
    if session is not None:
        facets.unread = found
        return
    declared = encodings.declared(target.config, options.seq_len) if target.config is not None else []
    facets.encodings = encodings.together(found, declared)
    facets.seq_len = facets.seq_len or _own_length(target.config, [*found, *declared]) or 0


def _session(target: Target, options: Options, seen: _Seen, step: Progress) -> Session | None:
    """The model under observation; None, with the reason kept, when only its declaration can be judged."""
    step.step("importing torch")
    from pediag.trace import Session
    from pediag.trace.conventions import check_cache

    step.step("building without weights" if target.module is None else "making the model abstract")
    try:
        made = Session(target, options.inputs)
        check_cache(made.model, options.cache)
        return made
    except TraceError as error:
        if target.module is not None or target.config is None:
            raise
        seen.facets.gaps["trace"] = str(error)
        seen.notes.append(str(error))
        return None


def _trace(session: Session, options: Options, seen: _Seen, step: Progress) -> None:
    """Trace at the structural length, recognise, then trace at the length asked about."""
    from pediag.encodings import explain, recognise
    from pediag.trace.batches import Batches
    from pediag.trace.beside import fixed_places
    from pediag.trace.steps import Steps

    facets = seen.facets
    step.step("tracing")
    facets.structural = structural = session.structural()
    if options.gather and (read := session.gather()):
        seen.notes.append(f"read from all ranks: {', '.join(read)}")
    step.step("recognising encodings")
    facets.encodings = recognise(structural)
    if session.target.config is not None:
        explain(facets.encodings, session.target.config, structural.seq_len)
    if unread := _unread(structural, facets.encodings):
        facets.gaps["numbers"] = f"a position signal is not recognised: {unread}"
    along = _along_tokens(structural, facets.encodings)
    own = fixed_places(structural) or _own_length(session.target.config, along)
    facets.seq_len = (known := options.seq_len or _taken(session.target, own)) or DEFAULT_LENGTH
    if structural.failure is not None:
        facets.gaps["target"] = structural.failure.message
        return
    if session.whole:
        facets.batches, facets.steps = Batches(session), Steps(session, options.cache)
    else:
        facets.gaps["steps"] = "the model was not run as a whole, only its parts"
    step.step(f"tracing at {facets.seq_len:,} tokens")
    facets.target = session.at(facets.seq_len)
    if known is None:
        _guessed_length(seen, structural)


def _along_tokens(trace: Trace, encodings: list[Encoding]) -> list[Encoding]:
    """The encodings that bound the number of tokens: where text is read too, not those of an image's patches."""
    from pediag.encodings import encodes_position
    from pediag.trace.beside import of_places

    kept = [encoding for encoding in encodings if not of_places(encoding.node, trace)]
    return kept if encodes_position(kept) else encodings


def _unread(trace: Trace, encodings: Sequence[Encoding]) -> str:
    """Why the numbers of a signal that was not recognised are not at hand; empty where they are, or never can be."""
    from pediag.trace import Away, Unavailable

    unknown = [encoding for encoding in encodings if encoding.scheme == "unrecognised"]
    for node in (node for encoding in unknown for site in encoding.sites for node in site.position):
        try:
            trace.value(node)
        except Away as reason:
            return str(reason)
        except Unavailable:
            continue
    return ""


def _guessed_length(seen: _Seen, structural: Trace) -> None:
    facets = seen.facets
    if facets.target is not None and facets.target.failure is not None:
        facets.target, facets.seq_len = None, structural.seq_len
    seen.notes.append(f"the model declares no length: judged at {facets.seq_len:,} tokens; give --seq-len")


def _declared(config: Config | None) -> int | None:
    """The longest input that a config declares; the trained length where it says that alone (a scaling's original)."""
    return (maximum_length(config) or trained_length(config)) if config is not None else None


def _taken(target: Target, length: int | None) -> int | None:
    """The longest input of up to ``length`` tokens that the target's code says it takes."""
    most = min((item for item in (length, target.longest) if item is not None), default=None)
    if most is None or target.takes is None:
        return most
    return next((n for n in range(most, max(0, most - DEFAULT_LENGTH), -1) if target.takes(n)), most)


def _own_length(config: Config | None, encodings: Sequence[Encoding]) -> int | None:
    """The longest input the model is meant for: what it declares, or the rows of its shortest table.

    Of a declared learned table the rows that are kept aside for padding count as none (RoBERTa: 514 of which 512).
    """
    from pediag.encodings import Learned, Rotary, Sinusoidal

    tabled = [e for e in encodings if isinstance(e, (Learned, Rotary, Sinusoidal)) and e.table is not None]
    sure = [e for e in tabled if not e.doubt] or tabled
    lengths = [e.table.rows - e.table.first for e in sure if e.table is not None]
    lengths += [e.parameters["rows"] for e in encodings if isinstance(e, Learned) and e.origin == "config"]
    declared = _declared(config)
    if declared is not None:
        lengths.append(declared)
    return min((length for length in lengths if length <= GREATEST_LENGTH), default=None)


def _raise_unexplained(seen: _Seen, report: Report, *, inspecting: bool, given: bool) -> None:
    """A model that cannot run and of which no rule says why is a load error, not a clean bill."""
    structural, target = seen.facets.structural, seen.facets.target
    if structural is None or _explains(report):
        return
    from pediag.trace.failures import told, why

    if structural.failure is not None:
        tried = f"forward({structural.inputs}) with B={structural.sizes.batch}, N={structural.sizes.tokens}"
        raise TraceError(f"{seen.target.spec}: {tried} {why(structural.failure, given=given)}")
    if target is None or target.failure is None or inspecting:
        return
    if target.failure.abstract or not {outcome.rule.code for outcome in report.outcomes} >= _EXPLAIN_STOPS:
        report.notes.append(f"the pass at {report.seq_len:,} tokens stopped: {told(target.failure)}")
        return
    raise TraceError(
        f"{seen.target.spec}: forward({target.inputs}) runs at N={structural.sizes.tokens} and at "
        f"N={target.sizes.tokens} raised {told(target.failure)}; check it at a --seq-len that the model takes"
    )


def _explains(report: Report) -> bool:
    return any(finding.severity == "error" for finding in report.findings)
