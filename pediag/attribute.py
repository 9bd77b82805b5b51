"""What of a model's output is owed to positions and what to tokens, and what its heads look at, on real inputs.

A target goes through the pipeline of :mod:`pediag.check` up to its rules, which tells where positions enter. The model
itself then runs on the inputs, and other values are put in the place of those that enter there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from pediag.check import Known, Progress, alone, look, refuse
from pediag.errors import TraceError, UsageError
from pediag.report.attribution import Attribution
from pediag.rules import registry
from pediag.rules.run import run
from pediag.settings import decided
from pediag.targets import Config, maximum_length, open_target, staying, understood

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pediag.attributing.keeping import Kept
    from pediag.attributing.model import AttentionMap, TextAttribution
    from pediag.attributing.slots import Baseline
    from pediag.attributing.tokens import Fed, Reader
    from pediag.settings import Allowed
    from pediag.targets import Target
    from pediag.trace import Session, Trace

MOST_STEPS = 4096
PRIMES = (173, 101, 61, 53, 47, 43, 37, 31, 29, 23, 19, 17, 13, 11, 7, 5)
"""Lengths of the first pass for a model that takes short inputs only: such as are seldom the size of anything else."""


def attribute(
    target: str | os.PathLike[str] | nn.Module,
    inputs: Any = None,
    *,
    texts: str | Iterable[str] = (),
    of: Callable[[Any], torch.Tensor] | int | str | None = None,
    tokenizer: Any = None,
    attention: bool = True,
    gradients: bool = True,
    baseline: Baseline = "mean",
    steps: int = 512,
    seq_len: int | None = None,
    config: str | os.PathLike[str] | None = None,
    trust: Allowed = False,
    progress: Progress | None = None,
) -> Attribution:
    """Attribute an output of a model to its positions and to its tokens, and map what its heads look at.

    ``target`` is a live module or what the command line takes. It runs on ``inputs`` (a tensor, a tuple, or a mapping
    from names of arguments; a list of mappings for several; of a batch each text by itself, without its padding) and on
    each of ``texts``, which ``tokenizer`` reads: the one in the target's folder, unless a folder or an object is given;
    else on what ``example_inputs`` beside the target gives for ``seq_len`` tokens, or on random tokens.

    ``of`` is the number that is attributed: a function of the output, an index of a class or of a token of the
    vocabulary, or one of "next", "mask", "mean", "first", "class"; without it the output decides. ``baseline`` is what
    added positions are compared with: the "mean" of their rows, "zero", or the "first" row. At most ``steps`` steps are
    taken for the integral. Without ``gradients`` there are only maps of attention, without ``attention`` none.

    Raises LoadError, TraceError and UsageError as :func:`pediag.check`, and UsageError where captum is not installed.
    The model is left as it was.
    """
    _refuse(baseline, steps, gradients, attention)
    say = progress.step if progress is not None else _silent
    say("opening")
    from pediag.attributing import loading, tokens

    if seq_len is not None:
        refuse(seq_len, ())
    trusted, told = decided(trust, target)
    opened = open_target(
        target, config=understood(Config.from_file(config)) if config is not None else None, trust=trusted
    )
    say("loading the model")
    model = loading.real_model(opened)
    reader = tokens.reader_of(tokenizer, opened)
    with _countable(), staying(opened.spec):
        listed = _listed(inputs, texts, opened, model, reader, seq_len)
    with alone(model), _countable(), staying(opened.spec):
        found = _Run(opened, model, listed, reader, say)
        return found.made(of, baseline, steps, gradients=gradients, attention=attention, told=told)


def _countable() -> AbstractContextManager[None]:
    """Out of the inference mode of the caller, in which no gradient can be taken."""
    import torch

    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _refuse(baseline: str, steps: int, gradients: bool, attention: bool) -> None:
    from pediag.attributing.slots import BASELINES

    if baseline not in BASELINES:
        raise UsageError(f"baseline {baseline!r} is unknown; the known ones are {', '.join(BASELINES)}")
    if type(steps) is not int or not 16 <= steps <= MOST_STEPS:
        raise UsageError(f"steps must be a whole number from 16 to {MOST_STEPS}; got {steps!r}")
    if not gradients and not attention:
        raise UsageError("neither gradients nor attention: nothing to measure")
    if gradients:
        from pediag.attributing.gradients import method

        method()


def _listed(
    inputs: Any,
    texts: str | Iterable[str],
    opened: Target,
    model: nn.Module,
    reader: Reader | None,
    length: int | None,
) -> list[Fed]:
    """All calls of the model that are asked for."""
    from pediag.attributing import tokens

    lines = [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    if strange := [line for line in lines if not isinstance(line, str)]:
        raise UsageError(f"texts must be a text or a list of them; got a {type(strange[0]).__name__}")
    if lines and reader is None:
        raise UsageError(
            "a text needs a tokenizer: none is beside the target; give --tokenizer FOLDER, or --input"
        )
    several = inputs if isinstance(inputs, list) and inputs and isinstance(inputs[0], dict) else [inputs]
    rows = [row for one in several if one is not None for row in tokens.single(one)]
    found = [tokens.of_inputs(row, model, reader) for row in rows]
    found += [tokens.of_text(line, reader, model) for line in lines if reader is not None]
    return found or [tokens.of_example(opened, model, length, reader)]


class _Run:
    """One model under observation, with the calls that are made of it."""

    def __init__(
        self,
        opened: Target,
        model: nn.Module,
        listed: Sequence[Fed],
        reader: Reader | None,
        say: Callable[[str], None],
    ) -> None:
        self.opened, self.model, self.listed, self.reader, self.say = opened, model, listed, reader, say
        self.known = self._look()
        self.kept: Kept | None = None

    def _look(self) -> Known:
        from pediag.targets import Target
        from pediag.trace.failures import GIVE_INPUTS

        first = self.listed[0]
        declared = maximum_length(self.opened.config) if self.opened.config is not None else None
        longest = self.opened.longest or declared
        short = next((prime for prime in PRIMES if prime <= (longest or 0)), longest)
        live = Target(
            self.opened.spec,
            self.opened.loader.replace("built without weights", "weights loaded"),
            self.opened.sha256,
            module=self.model,
            config=self.opened.config,
            example_inputs=first.example,
            notes=self.opened.notes,
            takes=None if longest is None else lambda length: length <= longest,
            longest=short,
        )
        self.say("finding where positions enter")
        try:
            return look(live, seq_len=first.length)
        except TraceError as error:
            told, advised, _ = str(error).partition(f"; {GIVE_INPUTS}")
            if not advised:  # the advice of check is of shapes, here are numbers
                raise
            raise TraceError(
                f"{told}; give inputs that forward takes: --input FILE, in Python inputs"
            ) from error

    def made(
        self, of: Any, baseline: Baseline, steps: int, *, gradients: bool, attention: bool, told: list[str]
    ) -> Attribution:
        from pediag.attributing.keeping import Kept
        from pediag.trace.isolation import untouched

        facets = self.known.facets
        texts: list[TextAttribution] = []
        maps: list[AttentionMap] = []
        with ExitStack() as stack:
            stack.enter_context(untouched(self.model))
            self.kept = Kept(self.model)
            stack.callback(self.kept.restore)
            for place, fed in enumerate(self.listed):
                self.say(f"attributing input {place + 1} of {len(self.listed)}")
                if gradients:
                    texts.append(self._attributed(fed, of, baseline, steps))
                if attention:
                    maps.append(self._map(fed))
        notes = [*told, *_rounded(self.model), *self.known.notes]
        facets.seq_len = max(fed.length for fed in self.listed)
        facets.attributions, facets.attention = texts or None, maps or None
        asked = [*(["PE801"] if attention else []), *(["PE802"] if gradients else [])]
        outcomes = run(registry.select(asked), facets)
        return Attribution(self.known.info, facets.encodings, texts, maps, outcomes, notes)

    def _trace(self, length: int) -> Trace:
        facets = self.known.facets
        if facets.target is not None and facets.target.seq_len == length:
            return self._ran(facets.target)
        assert facets.batches is not None
        session: Session = facets.batches.session
        return self._ran(session.at(length))

    def _ran(self, trace: Trace) -> Trace:
        if trace.failure is not None:
            raise TraceError(
                f"{self.opened.spec}: the pass at {trace.seq_len:,} tokens stopped: {trace.failure.message}"
                f"{self._too_long(trace.seq_len)}"
            )
        return trace

    def _too_long(self, length: int) -> str:
        longest = self.known.length
        if longest is None or length <= longest:
            return ""
        return f"; it is meant for {longest:,} tokens at most: give a shorter text"

    def _attributed(self, fed: Fed, of: Any, baseline: Baseline, steps: int) -> TextAttribution:
        from pediag.attributing.measure import attribution
        from pediag.attributing.moving import Runner

        facets = self.known.facets
        assert facets.structural is not None
        return attribution(
            Runner(self.model, fed.args, fed.kwargs, self.kept),
            facets.encodings,
            facets.structural,
            self._trace(fed.length),
            fed,
            target=of,
            baseline=baseline,
            reader=self.reader,
            steps=steps,
        )

    def _map(self, fed: Fed) -> AttentionMap:
        from pediag.attributing.heads import attention_map
        from pediag.attributing.moving import Runner

        structural = self.known.facets.structural
        expected = structural is not None and bool(structural.graph.attentions)
        return attention_map(
            Runner(self.model, fed.args, fed.kwargs, self.kept),
            fed.words,
            fed.separators(),
            expected=expected,
        )


def _rounded(model: nn.Module) -> list[str]:
    """A note on a model that computes in a half precision."""
    import torch

    halves = {
        str(item.dtype).removeprefix("torch.")
        for item in model.parameters()
        if item.dtype in (torch.float16, torch.bfloat16)
    }
    if not halves:
        return []
    return [
        f"the model computes in {' and '.join(sorted(halves))}, whose rounding is in the deltas: give model.float()"
    ]


def _silent(text: str) -> None:
    pass
