"""Several passes of one model, one after the other: what it keeps between them stays until the last has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from pediag.trace.aliases import fresh
from pediag.trace.depth import Depth, shortened
from pediag.trace.evaluate import Evaluator
from pediag.trace.failures import Failure
from pediag.trace.graph import Graph
from pediag.trace.inputs import Candidate, Sizes
from pediag.trace.isolation import untouched
from pediag.trace.place import Enough, Lengths
from pediag.trace.plain import plain_attributes
from pediag.trace.recorder import Recorder
from pediag.trace.session import Session, Trace
from pediag.trace.sites import classify
from pediag.trace.snapshot import Snapshot


@dataclass(slots=True)
class Pass:
    """One forward on ``tokens`` tokens after ``seen`` others, and what it returned.

    Its values are the nodes ``first`` to ``last`` of the graph that all passes of a chain record into.
    """

    trace: Trace
    tokens: int
    seen: int
    first: int
    last: int
    output: Any = None

    @property
    def failure(self) -> Failure | None:
        """Why it stopped, if it did."""
        return self.trace.failure


class Chain:
    """Passes that see what those before them left in the model. Use it as a context: the model is restored at the end.

    ``graph`` is recorded into; chains that share one share the nodes of equal position values. ``before`` is the state
    of the model where it was taken down already, ``depth`` says which layers are run.
    """

    def __init__(
        self, session: Session, graph: Graph, before: Snapshot | None = None, depth: Depth | None = None
    ) -> None:
        self.session = session
        self.graph = graph
        self.before = before
        self.depth = depth or Depth()
        self.tensors: dict[str, Any] = {}
        self._strays: dict[int, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Chain:
        self._stack.enter_context(untouched(self.session.model, self.before))
        self._stack.enter_context(shortened(self.session.model, self.depth))
        self.tensors = _each_once(self.session)
        for name, fake in self.session.fakes.items():
            fake._pediag = fresh(self.session.leaves[name])  # type: ignore[attr-defined]
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self,
        candidate: Candidate,
        sizes: Sizes,
        lengths: Lengths,
        *,
        follow: Trace | None = None,
        given: Mapping[str, Any] | None = None,
        seen: int = 0,
        tokens: int = 0,
        enough: Callable[[Graph], bool] | None = None,
    ) -> Pass:
        """One forward; ``given`` are arguments that stand as they are, ``follow`` a pass whose provenances hold.

        Once ``enough`` says so of what was recorded the pass is over, and returned nothing.
        """
        own = Graph(nodes=self.graph.nodes, shared=self.graph.shared)
        recorder = self._recorder(own, lengths, follow)
        first = len(own.nodes)
        arguments = [self.session.make(recorder, item, sizes) for item in candidate.args]
        keywords = {name: self.session.make(recorder, item, sizes) for name, item in candidate.kwargs.items()}
        keywords.update(given or {})
        with ExitStack() as stack:
            if enough is not None:
                stack.enter_context(_Stopping(lambda: enough(own)))
            failure, output = self.session.call(recorder, arguments, keywords, self.tensors, tied=False)
        trace = Trace(own, sizes, lengths, Evaluator(), str(candidate), failure)
        trace.provenances, trace.scores = recorder.settler.known, recorder.noticer.scores
        trace.joins = recorder.noticer.joins
        classify(trace, follow)
        return Pass(trace, tokens or sizes.tokens, seen, first, len(own.nodes), output)

    def _recorder(self, graph: Graph, lengths: Lengths, follow: Trace | None) -> Recorder:
        session = self.session
        reference = follow.provenances if follow is not None else None
        recorder = Recorder(graph, session.fake_mode, lengths, reference=reference)
        if follow is not None:
            recorder.noticer.known_scores, recorder.noticer.known_joins = follow.scores, follow.joins
            recorder.noticer.by_shape = True
        recorder.plain_attributes = {key: name for key, (name, _) in plain_attributes(session.model).items()}
        recorder.strays = self._strays
        recorder.effort = session.structural().effort.several()
        return recorder


def _each_once(session: Session) -> dict[str, Any]:
    """The abstract tensors under one name of the module that holds each, so that a pass may replace them."""
    found = {}
    for path, module in session.model.named_modules():
        for name in (*module._parameters.keys(), *module._buffers.keys()):  # a scripted part has no iterator
            whole = f"{path}.{name}".lstrip(".")
            if whole in session.fakes:
                found[whole] = session.fakes[whole]
    return found


class _Stopping(ExitStack):
    """Ends the pass inside at the next module that runs once ``enough`` says so."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        super().__init__()
        from torch.nn.modules.module import register_module_forward_pre_hook

        def look(module: torch.nn.Module, args: Any) -> None:
            if enough():
                raise Enough

        self.callback(register_module_forward_pre_hook(look).remove)


__all__ = ["Chain", "Pass"]
