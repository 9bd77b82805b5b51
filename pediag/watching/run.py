"""The watch beside a training run: looks once, counts steps, measures every N of them, and never ends the run."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pediag.check import look, refuse
from pediag.errors import PediagError, PediagWarning, UsageError
from pediag.rules.finding import Finding
from pediag.rules.learning.pe804_ranks_disagree import COUNTED_TWICE
from pediag.rules.registry import find
from pediag.rules.rule import Facets, NotApplicable
from pediag.rules.run import run
from pediag.targets import Inputs, read_inputs
from pediag.targets.code.optimizers import innermost, listed, optimised
from pediag.trace.ranks import Ranks, RankState, refuse_ranks, require_ranks, state
from pediag.version import __version__
from pediag.watching import findings, measures
from pediag.watching.constants import Constants
from pediag.watching.probe import Hook, Probe
from pediag.watching.subjects import Held, Spot, Subjects, given_positions, subjects
from pediag.watching.writers import SCHEMA_VERSION, JsonLines, TensorBoard, Writer

LEAST_STEPS = 20
"""Steps after which a table that has not moved is told; warm-up starts at a rate of 0."""

LOOK = "the look at the model"

OTHERS = 4
"""Parameters beside those of positions that are kept to tell whether training moves anything."""


class Watch:
    """What :func:`pediag.watch` gives: a context manager.

    ``findings`` are what was found so far, ``steps`` the steps counted, ``last`` the record of the last measured one.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        every: int = 100,
        log: str | os.PathLike[str] | None = None,
        tensorboard: Any = None,
        ranks: bool | Ranks = False,
        attention: bool = False,
        seq_len: int | None = None,
        inputs: Inputs = (),
        first_step: int = 0,
    ) -> None:
        for name, value, least in (("every", every, 1), ("first_step", first_step, 0)):
            if type(value) is not int or value < least:
                raise UsageError(f"{name} must be a whole number of steps from {least} on; got {value!r}")
        refuse_ranks(ranks)
        specs, example = read_inputs(inputs)
        inputs = specs if example is None else example
        refuse(seq_len, inputs)
        self.model, self.root = model, innermost(model)
        self.optimizers = listed(optimizer) if optimizer is not None else []
        if optimizer is not None and not self.optimizers:
            raise UsageError("optimizer is an empty list: give one, or none and call step()")
        self.every, self.steps, self.first_step = every, first_step, first_step
        self.findings: list[Finding] = []
        self.last: dict[str, Any] = {}
        self.seq_len, self.inputs, self.attention = seq_len, inputs, attention
        self._ranks_wanted, self._ranks = ranks, None if isinstance(ranks, bool) else ranks
        self._log, self._board = log, tensorboard
        self._writers: list[Writer] = []
        self._off: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._hooks: list[Any] = []
        self._gradient: dict[str, float | None] = {}
        self._cost = 0.0
        self._watched = Subjects()
        self._constants = Constants([])
        self._probe: Probe | None = None
        self._start: dict[str, torch.Tensor] = {}
        self._from_zero: set[str] = set()
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ids: Any = None
        self._listening: Any = None
        self._overlapped = False
        self._began = 0.0
        self._open = False

    # -- from the start to the end --------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        if self._open:
            raise UsageError("this watch is already running; make another one")
        if self._ranks_wanted is True:
            require_ranks()
        self._writers = list(self._made_writers())
        self._open, self._began = True, time.perf_counter()
        if self._ranks_wanted is True:
            self._quietly("ranks", self._make_ranks)
        self._quietly(LOOK, self._look)
        self._quietly("ranks", self._compare_ranks)
        if self.optimizers:
            counting = self.optimizers[0]
            self._hooks = [
                counting.register_step_pre_hook(lambda *_: self.before_step()),
                counting.register_step_post_hook(lambda *_: self.after_step()),
            ]
        self._arm()
        self._cost = time.perf_counter() - self._began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the watch: every hook off, every file closed. Once is enough."""
        if not self._open:
            return
        self._open = False
        while self._hooks:
            self._hooks.pop().remove()
        self._disarm()
        if self._ranks_wanted is True and self._ranks is not None:
            with suppress(Exception):
                self._ranks.close()
        self._write({"kind": "end", "step": self.steps, "cost_s": self._cost, "run_s": self._since()})
        for writer in self._writers:
            with suppress(Exception):
                writer.close()

    def _since(self) -> float:
        return time.perf_counter() - self._began

    def _make_ranks(self) -> None:
        self._ranks = Ranks()

    def _made_writers(self) -> Iterator[Writer]:
        """Rank 0 writes; the others only where ``{rank}`` stands in the name."""
        rank = torch.distributed.get_rank() if _distributed() else 0
        if self._log is not None:
            path = self._path()
            if rank == 0 or "{rank}" in path:
                yield JsonLines(path.replace("{rank}", str(rank)))
        if self._board is not None and rank == 0:
            yield TensorBoard(self._board)

    def _path(self) -> str:
        if not isinstance(self._log, (str, os.PathLike)):
            raise UsageError(f"log must be the name of a file; got a {type(self._log).__name__}")
        return os.fspath(self._log)

    def _look(self) -> None:
        known = look(self.model, seq_len=self.seq_len, inputs=self.inputs)
        self._watched = subjects(known.facets, self.root)
        self._constants = Constants(self._watched.constants)
        for held in self._watched.tables:
            tensor = held.now()
            if tensor is not None:
                self._start[held.name] = start = measures.local(tensor).clone()
                if not bool(start.any()):  # it has to grow first: its size at the beginning tells nothing
                    self._from_zero.add(held.encoding)
        self._keep_others()
        self._probe = (
            None if _compiled(self.model) else Probe(self.root, self._watched, attention=self.attention)
        )
        self._write(self._beginning(known.info.spec, known.notes))
        if not self._watched.encodings:
            text = "no position encoding was found in the model: nothing of positions is watched"
            self._write({"kind": "problem", "step": self.steps, "part": "encodings", "message": text})
            self._warn(f"pediag.watch: {text}")
        self._quietly("the rules", lambda: self._rules(known.facets))

    def _beginning(self, spec: str, notes: list[str]) -> dict[str, Any]:
        watched = self._watched
        compiled = self._probe is None and _compiled(self.model)
        told = ["compiled: scale ratios and attention are not measured"] if compiled else []
        return {
            "kind": "start",
            "schema_version": SCHEMA_VERSION,
            "pediag": __version__,
            "time": time.time(),
            "step": self.steps,
            "every": self.every,
            "model": spec,
            "seq_len": watched.seq_len,
            "encodings": watched.encodings,
            "tables": [held.name for held in watched.tables],
            "constants": [held.name for held in watched.constants],
            "spots": [spot.name for spot in watched.spots] if self._probe is not None else [],
            "notes": [*notes, *told],
        }

    def _keep_others(self) -> None:
        own = {id(held.now()) for held in self._watched.parameters}
        others = [item for item in self.root.parameters() if item.requires_grad and id(item) not in own]
        for item in sorted(others, key=lambda item: item.numel())[:: max(1, len(others) // OTHERS)][:OTHERS]:
            if item.numel() <= 1 << 20:
                self._others.append((item, measures.local(item).clone()))

    def _rules(self, facets: Facets) -> None:
        """What the optimisers do with positions."""
        if not self.optimizers:
            return
        facets.optimiser = optimised(self.optimizers, self.root)
        for outcome in run([find("PE803")], facets):
            for finding in outcome.findings:
                self._tell(finding)

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Count a step where no optimiser is watched; before the gradients are set to zero."""
        if self.optimizers:
            raise UsageError("steps are counted by the optimiser; call step() only where none was given")
        self.before_step()
        self.after_step()

    def before_step(self) -> None:
        """Look at the gradients, if the step that comes is one that is measured.

        Within a backward pass, where optimisers that step in hooks are called, they are not all there yet.
        """
        if self._open and self._measured(self.steps + 1) and torch._C._current_graph_task_id() == -1:
            self._timed("gradients", self._look_at_gradients)

    def after_step(self) -> None:
        """Count a step that was taken, and measure it if it is one of those."""
        if not self._open:
            return
        self.steps += 1
        if "constants" not in self._off:
            self._quietly("constants", self._look_for_casts)
        if self._measured(self.steps):
            self._timed("a measured step", self._measure)
        if self._measured(self.steps + 1):
            self._timed("hooks", self._arm)

    def _measured(self, step: int) -> bool:
        return step % self.every == 0 or step == self.first_step + 1

    def _arm(self) -> None:
        """Look at the next forward pass."""
        if not self._measured(self.steps + 1):
            return
        if self._probe is not None and "activations" not in self._off:
            self._probe.arm()
        if self._ranks is not None and self._ranks.sequence and self._ranks.position_ids is None:
            self._listening = self.root.register_forward_pre_hook(Hook(self._take_ids), with_kwargs=True)

    def _take_ids(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        found = given_positions(module, args, kwargs)
        self._ids = found if found is not None else self._ids

    def _disarm(self) -> None:
        if self._probe is not None:
            self._probe.disarm()
        if self._listening is not None:
            self._listening.remove()
            self._listening = None

    def _look_for_casts(self) -> None:
        for change in self._constants.casts():
            self._tell(findings.changed(change, self.steps, self._watched.seq_len))
            self._write(_event(change, self.steps))

    def _look_at_gradients(self) -> None:
        own = {id(held.now()) for held in self._watched.parameters}
        positions: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for item in self.root.parameters():
            if item.grad is not None:
                (positions if id(item) in own else others).append(item.grad)
        mine, rest = measures.squared_norm(positions), measures.squared_norm(others)
        total = mine + rest
        self._gradient = {"share": mine / total if total > 0 else None, "norm": total**0.5}

    def _measure(self) -> None:
        record: dict[str, Any] = {"kind": "step", "step": self.steps, "time": time.time()}
        began = time.perf_counter()
        self._disarm()
        if self._probe is not None:
            record["scale"], record["attention"] = dict(self._probe.scale), dict(self._probe.attention)
            if self._probe.trouble is not None:
                trouble, self._probe.trouble = self._probe.trouble, None
                self._problem("activations", trouble)
            self._judge_scale()
        record["gradient"], self._gradient = self._gradient, {}
        record["tables"] = {held.name: self._table(held) for held in self._watched.tables}
        self._judge_tables(record["tables"])
        changes = self._constants.changes()
        for change in changes:
            self._tell(findings.changed(change, self.steps, self._watched.seq_len))
            self._write(_event(change, self.steps))
        record["constants_changed"] = [change.held.name for change in changes]
        self._quietly("ranks", self._compare_ranks)
        record["cost_s"] = time.perf_counter() - began
        self.last = record
        self._write(record)

    def _table(self, held: Held) -> dict[str, Any]:
        tensor, start = held.now(), self._start.get(held.name)
        if tensor is None or start is None:
            return {"drift": None, "rank": None, "moved": None}
        now = measures.local(tensor)
        if now.shape != start.shape or now.numel() == 0:
            return {"drift": None, "rank": None, "moved": None}
        start = start.to(now.device)
        moved = now.dtype != start.dtype or not torch.equal(now, start)
        return {"drift": measures.drift(now, start), "rank": measures.effective_rank(now), "moved": moved}

    # -- what is said ---------------------------------------------------------------------------------------

    def _judge_scale(self) -> None:
        assert self._probe is not None
        by_name: dict[str, Spot] = {spot.name: spot for spot in self._watched.spots}
        for name, ratio in self._probe.scale.items():
            if by_name[name].encoding not in self._from_zero:
                self._tell(findings.scale(by_name[name], ratio, self.steps))

    def _judge_tables(self, tables: dict[str, dict[str, Any]]) -> None:
        count = self.steps - self.first_step
        still = [held for held in self._watched.tables if tables[held.name]["moved"] is False]
        if not still or count < LEAST_STEPS or not any(_moved(*pair) for pair in self._others):
            return
        trained = sum(item.requires_grad for item in self.root.parameters())
        if 2 * trained > sum(
            1 for _ in self.root.parameters()
        ):  # adapters leave nearly all frozen on purpose
            self._tell(findings.unmoved(still, self.steps, count, self._stepped()))

    def _stepped(self) -> set[int] | None:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return {id(item) for group in groups for item in group["params"]} if groups else None

    def _compare_ranks(self) -> None:
        ranks = self._ranks
        if ranks is None:
            return
        facets = Facets(self._watched.seq_len)
        facets.ranks = ranks.gather(replace(self._mine(ranks), step=self.steps))
        steps = sorted({one.step for one in facets.ranks})
        if len(steps) > 1:
            told = " and ".join(map(str, steps[:4]))
            raise PediagError(f"ranks: they are at steps {told}; give all the same every and first_step")
        try:
            for finding in find("PE804").check(facets):
                self._judge_ranks(finding)
        except NotApplicable:
            self._ranks = None

    def _mine(self, ranks: Ranks) -> RankState:
        """What this rank sends; also where it failed, for the others wait for it."""
        held = [*self._watched.constants, *self._watched.tables]
        ids = ranks.position_ids if ranks.position_ids is not None else self._ids
        try:
            tensors = {item.name: tensor for item in held if (tensor := item.now()) is not None}
            return state(ranks.rank, tensors, ids, ranks.sequence if ids is not None else ())
        except Exception as error:
            return RankState(ranks.rank, error=_told(error))

    def _judge_ranks(self, finding: Finding) -> None:
        """Positions that two ranks count are told at the second time in succession: texts may end where parts do."""
        if finding.evidence.unit == COUNTED_TWICE and not self._overlapped:
            self._overlapped = True
            return
        self._tell(self._placed(finding))

    def _placed(self, finding: Finding) -> Finding:
        """A finding on a tensor with its place, which a rule without a trace does not know."""
        held = [*self._watched.constants, *self._watched.tables]
        own = next((item for item in held if item.name == finding.where.module), None)
        if own is not None:
            finding = replace(finding, where=own.where, scheme=own.scheme)
        return findings.stamped("PE804", finding)

    def _tell(self, finding: Finding | None) -> None:
        """Warn of a finding, once for each rule and place."""
        if finding is None or (key := (finding.code, f"{finding.where} {finding.scheme}")) in self._told:
            return
        self._told.add(key)
        self.findings.append(finding)
        self._write(findings.as_record(finding, self.steps))
        place = (finding.where.file or "pediag.watch", finding.where.line or 1)
        self._warn(f"{finding.code} {finding.name}: {finding.message} {finding.fix.summary}", place)

    def _warn(self, text: str, place: tuple[str, int] = ("pediag.watch", 1)) -> None:
        with suppress(PediagWarning):  # where warnings are errors, training goes on all the same
            warnings.warn_explicit(text, PediagWarning, *place)

    def _write(self, record: dict[str, Any]) -> None:
        for writer in list(self._writers):
            try:
                writer.write(record)
            except Exception as error:
                self._writers.remove(writer)
                with suppress(Exception):
                    writer.close()
                self._warn(f"pediag.watch writes no more to its {type(writer).__name__}: {_told(error)}")

    def _timed(self, part: str, do: Callable[[], None]) -> None:
        began = time.perf_counter()
        self._quietly(part, do)
        self._cost += time.perf_counter() - began

    def _quietly(self, part: str, do: Callable[[], None]) -> None:
        """Do it; an error becomes one warning, and this part is done no more."""
        if part in self._off:
            return
        try:
            do()
        except Exception as error:
            self._problem(part, error)

    def _problem(self, part: str, error: Exception) -> None:
        if part in self._off:
            return
        self._off.add(part)
        if part == "ranks":
            self._ranks = None
        what = "ranks are" if part == "ranks" else f"{part} is"
        what += " not watched any more"
        if part == LOOK:
            what = "the model could not be looked at, so its positions are not watched"
            self._write(self._beginning(type(self.root).__name__, ["the model could not be looked at"]))
        self._write({"kind": "problem", "step": self.steps, "part": part, "message": _told(error)})
        self._warn(f"pediag.watch: {what}: {_told(error)}")


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PediagError) else f"{type(error).__name__}: {text}"[:300]


def _event(change: Any, step: int) -> dict[str, Any]:
    return {
        "kind": "change",
        "step": step,
        "tensor": change.held.name,
        "what": change.kind,
        "before": change.before,
        "after": change.after,
        "largest": change.largest,
    }


def _moved(parameter: torch.Tensor, start: torch.Tensor) -> bool:
    now = measures.local(parameter)
    return now.shape != start.shape or not torch.equal(now, start.to(now.device))


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _compiled(model: Any) -> bool:
    """Whether forward runs compiled, where a look at single operations would change what is run."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any(
        part.__dict__.get("_compiled_call_impl") is not None or type(part).__name__ == "OptimizedModule"
        for part in parts
    )


def counted(optimizer: Any) -> tuple[Any, bool]:
    """The optimiser, and whether somebody else has to count its steps: one that is not of torch.optim tells nothing."""
    try:
        return (listed(optimizer), False) if optimizer is not None else (None, True)
    except UsageError:
        return None, True
