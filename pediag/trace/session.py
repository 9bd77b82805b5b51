"""Runs a model abstractly, first at a short prime length, then at the length that is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pediag.errors import TraceError
from pediag.targets import InputSpec, Target, tensor_for
from pediag.targets.code.sharded import Elsewhere, elsewhere
from pediag.trace.beside import apart, fed_fixed, follows_length, in_parts, not_run, with_left_out
from pediag.trace.collectives import needed
from pediag.trace.constructed import deterministic
from pediag.trace.depth import first_layers, present
from pediag.trace.devices import device_of
from pediag.trace.dimensions import (
    ROWS,
    batch_apart,
    dimensions,
    kernels,
    lengths_of,
    sizes_apart,
    told_apart,
)
from pediag.trace.evaluate import BUDGET, Evaluator, absent, constant
from pediag.trace.failures import Failure, distance, laborious, stopped, too_long
from pediag.trace.functions import Functions
from pediag.trace.graph import Graph, Node, Provenance, Site
from pediag.trace.grids import Grid, as_positions, axes_of_places, grids
from pediag.trace.inputs import Candidate, Input, Maker, Sizes, candidates, check_names, made_up, transposed
from pediag.trace.isolation import (
    as_called,
    at_end,
    converting,
    eager,
    held,
    module_paths,
    quiet_kernels,
    uncollected,
    untouched,
)
from pediag.trace.numbers import digest
from pediag.trace.padding import Padding
from pediag.trace.place import Effort, Enough, Laborious, Lengths, explain
from pediag.trace.plain import plain_attributes, unregistered
from pediag.trace.recorder import Recorder
from pediag.trace.sites import classify
from pediag.trace.stretching import following
from pediag.trace.tokens import at_length, attended, contracts_tokens, folds_texts

_SHARED_BELOW = 1 << 22
_SPLIT = "it is split over ranks and runs by their exchanges only: check it before parallelize_module"


@dataclass(slots=True)
class Trace:
    """One recorded pass. ``value(node)`` gives a node's number as the model computes it.

    ``places`` are the sizes that attention runs along where it does not run along the tokens that were fed.
    ``unregistered`` names the plain attributes that were read and that do not follow the model from device to device.
    """

    graph: Graph
    sizes: Sizes
    lengths: Lengths
    value: Evaluator
    inputs: str
    failure: Failure | None = None
    ordered: list[str] = field(default_factory=list)
    provenances: dict[Any, Provenance] = field(default_factory=dict)
    scores: set[Any] = field(default_factory=set)
    joins: dict[Any, set[int]] = field(default_factory=dict)
    batched: tuple[int, ...] = ()
    places: frozenset[int] = frozenset()
    unregistered: dict[Node, str] = field(default_factory=dict)
    effort: Effort = field(default_factory=Effort)
    fed: Candidate = field(default_factory=Candidate)

    @property
    def seq_len(self) -> int:
        """Length of the main input in tokens."""
        return self.sizes.tokens


class Session:
    """One model under observation. Raises TraceError when it cannot be built or run abstractly at all."""

    def __init__(self, target: Target, specs: Sequence[InputSpec] = ()) -> None:
        self.target = target
        self.specs = specs or target.inputs
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.abstract = target.module is None
        self.read_from_storage: set[str] = set()
        self._built = Graph()
        self._structural: Trace | None = None
        self._take(target.module if target.module is not None else self._build())

    # -- the model ----------------------------------------------------------------------------------------

    def _take(self, model: nn.Module) -> None:
        """Observe ``model`` from now on."""
        self.model = model
        self.leaves: dict[str, Node] = {}
        self.fakes: dict[str, torch.Tensor] = {}
        self._device = device_of(model)
        self._make_leaves()
        check_names(model, self.specs)
        self._maker: Callable[[Sizes], Candidate] | None = None
        self._places: set[int] = set()
        self._grids: frozenset[Grid] = frozenset()
        self._fixed = False
        self._dims, self._kernels = dimensions(model), kernels(model)
        self._batch = batch_apart(self._dims)

    def _build(self) -> nn.Module:
        assert self.target.build is not None
        recorder = Recorder(self._built, self.fake_mode, Lengths(set(), 0))
        recorder.place.constructing = True
        try:
            with self.fake_mode, recorder, Functions(recorder), torch.no_grad(), converting():
                model = self.target.build()
        except Exception as error:
            raise TraceError(
                f"{self.target.spec}: the model cannot be built without weights: {explain(error)}"
            ) from error
        return model.eval()

    def _make_leaves(self) -> None:
        holder = Recorder(self._built, self.fake_mode, Lengths(set(), 0))
        holder.place.constructing = True
        shared: dict[Any, Node] = {}
        for name, tensor in self._named_tensors():
            if self.abstract:
                fake, node = tensor, self._stored_leaf(holder, name, tensor)
            else:
                fake = self._fake(tensor)
                node = self._live_leaf(holder, name, tensor, shared)
            if name not in node.names:
                node.names.append(name)
            node.trainable = isinstance(tensor, nn.Parameter)
            node.gradient = node.trainable and tensor.requires_grad
            node.host, node.stored = False, True
            self.fakes[name], self.leaves[name] = fake, node

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            fake = self.fake_mode.from_tensor(tensor)
        except Exception as error:
            raise TraceError(
                f"a {type(tensor).__name__} cannot be made abstract: {explain(error)}"
            ) from error
        fake.fake_device = self._used_on(tensor)
        return fake

    def _used_on(self, tensor: torch.Tensor) -> torch.device:
        """Where the model uses a tensor; one without numbers would be where the others are."""
        known = elsewhere(tensor)
        return known.device if known is not None else self._device if tensor.is_meta else tensor.device

    def _live_leaf(self, holder: Recorder, name: str, tensor: torch.Tensor, shared: dict[Any, Node]) -> Node:
        """A leaf of a live tensor; fixed tables with the same numbers are one leaf, so layers share them."""
        if (known := elsewhere(tensor)) is not None:
            return self._absent_leaf(holder, name, tensor, known)
        key = None
        if not isinstance(tensor, nn.Parameter) and tensor.numel() <= _SHARED_BELOW:
            key = digest(tensor) if tensor.device.type != "meta" else None
        if key is not None and key in shared:
            return shared[key]
        node = holder.leaf(tensor, Provenance.WEIGHT)
        if tensor.is_meta:
            node.source, node.device = (
                absent(f"{name} has no numbers (meta device): load its weights"),
                self._device.type,
            )
        if key is not None:
            shared[key] = node
        return node

    def _absent_leaf(self, holder: Recorder, name: str, tensor: torch.Tensor, known: Elsewhere) -> Node:
        """A leaf of a tensor that is not whole here, or is read from where it is kept."""
        node = holder.leaf(tensor, Provenance.WEIGHT)
        node.source, node.device = known.read or absent(f"{name} {known.reason}"), known.device.type
        return node

    def _stored_leaf(self, holder: Recorder, name: str, tensor: torch.Tensor) -> Node:
        """A leaf of a tensor that was built abstractly: from the checkpoint, else as its program says, else unknown."""
        stored = tensor_for(self.target, name)
        made = holder.node_of(tensor)
        if stored is not None and stored.shape == tuple(tensor.shape):
            self.read_from_storage.add(stored.name)
            node = holder.leaf(tensor, Provenance.WEIGHT)
            node.source = stored.load
        elif deterministic(made):
            node, _ = self._built.add("buffer", (made,), {}, Provenance.WEIGHT, tensor)
        else:
            node = holder.leaf(tensor, Provenance.WEIGHT)
            node.source = None
        return node

    # -- the passes ---------------------------------------------------------------------------------------

    def structural(self) -> Trace:
        """The pass at a short prime length that equals no size of the model."""
        if self._structural is None:
            self._structural = self._first_that_runs()
            if self._structural.failure is not None and self.target.in_parts is not None:
                self._structural = self._in_parts(self._structural)
        return self._structural

    def _in_parts(self, first: Trace) -> Trace:
        """The pass of the model that holds this rank's part only; ``first`` where that does not run either."""
        whole, maker = self.model, self._maker
        assert self.target.in_parts is not None
        parts = self.target.in_parts()
        if parts is None:
            return first
        self._take(parts)
        trace = self._first_that_runs()
        if trace.failure is not None:
            self._take(whole)
            self._maker = maker
            assert first.failure is not None
            first.failure = replace(first.failure, advice=_SPLIT)
            return first
        self.target.notes.append(
            "its code takes one rank's part of the linear layers, so that is what it runs with"
        )
        return trace

    def gather(self) -> list[str]:
        """Read what is spread over ranks and position code of the structural pass needs; return its names.

        Every rank must call this, in the same order among its collectives: the tensors are read one by one, by name.
        """
        trace = self.structural()
        wanted = needed(trace.graph)
        named = sorted(name for name, leaf in self.leaves.items() if leaf in wanted)
        stand_ins = dict(self._named_tensors())
        read = []
        for name in named:
            known = elsewhere(stand_ins[name])
            if known is not None and known.gather is not None and self.leaves[name].numel <= BUDGET:
                self.leaves[name].source = constant(known.gather().cpu())
                read.append(name)
        trace.value = Evaluator()
        return read

    def at(self, seq_len: int) -> Trace:
        """The pass at ``seq_len`` tokens, following the structural one; of layers that are alike the first run only."""
        sizes, structural = Sizes(1, seq_len, seq_len), self.structural()
        return first_layers(self.model, structural, lambda: self._run(self.called(sizes), sizes, structural))

    def called(self, sizes: Sizes) -> Candidate:
        """How the structural pass calls the model, at ``sizes``."""
        assert self.structural() and self._maker is not None
        return self._maker(sizes)

    def varied(
        self,
        change: Callable[[Candidate], Candidate],
        sizes: Sizes | None = None,
        *,
        padding: Padding | None = None,
        met: Callable[[Site], None] | None = None,
    ) -> Trace:
        """A pass like the structural one with its call changed, settled by itself; it ends where ``met`` raises Enough.

        ``padding`` tells which token ids are padding.
        """
        sizes = sizes or self.structural().sizes
        return self._run(change(self.called(sizes)), sizes, None, padding=padding, met=met)

    def _first_that_runs(self) -> Trace:
        failed: list[tuple[Trace, Maker]] = []
        ways = candidates(self.model, self.specs, self.target.example_inputs)
        for maker in told_apart(following(ways, self._sizes, self._run_by, self.target.notes), self._dims):
            for row in range(ROWS):
                sizes = self._sizes(row)
                trace = self._run(maker(sizes), sizes, None)
                if trace.failure is None:
                    self._maker, trace = with_left_out(self.model, maker, trace, self._run_by)
                    self.target.notes += not_run(self.model, trace)
                    return self._oriented(self._maker, trace)
                longer = failed[-1][0].failure if failed and failed[-1][1] is maker else None
                if longer is not None and longer.table is not None:
                    failed.pop()  # this shorter input got past the table that ended
                failed.append((trace, maker))
                if not too_long(trace.failure):
                    break
        if not failed:
            raise TraceError(
                f"{self.target.spec}: forward() takes no input that could be made up; give --input"
            )
        trace, self._maker = min(failed, key=lambda pair: distance(pair[0].failure))
        if trace.failure is not None and (trace.failure.site is not None or self._batch == 1):
            return trace
        return (self._alone() if not trace.fed.given else None) or self._pieces(trace)

    def _alone(self) -> Trace | None:
        """The pass of one text, for a model that is made for few: it holds a cache of so many, say."""
        kept = self._batch, self._maker
        self._batch = 1
        trace = self._first_that_runs()
        if trace.failure is None:
            self.target.notes.append(f"it does not run on {kept[0]} texts at once, so one is given")
            return trace
        self._batch, self._maker = kept
        return None

    def _pieces(self, stopped: Trace) -> Trace:
        """The pass of the parts that run by themselves; ``stopped``, that of the whole, where none does."""
        given = self.specs or self.target.example_inputs
        made = in_parts(self.model, self._sizes(1), self._run_by) if not given else None
        if made is None:
            return stopped
        self._maker, trace = made
        self.target.notes.append(apart(stopped, trace))
        return self._oriented(*made)

    def _run_by(self, maker: Maker, sizes: Sizes) -> Trace:
        return self._run(maker(sizes), sizes, None)

    def _oriented(self, maker: Maker, trace: Trace) -> Trace:
        """The trace with the sequence along the axis that attention runs over."""
        trace = self._unfolded(maker, trace)
        fed, self._fixed = trace.fed, fed_fixed(trace.fed, trace.sizes)
        if contracts_tokens(trace):
            return self._attended(maker, trace) if self._fixed else trace
        if trace.graph.attentions and (follows_length(fed) or fed.given):

            def swapped(sizes: Sizes) -> Candidate:
                return transposed(maker(sizes))

            turned = self._run(swapped(trace.sizes), trace.sizes, None)
            if turned.failure is None and contracts_tokens(turned):
                self._maker = swapped
                return turned
        return self._attended(maker, trace)

    def _unfolded(self, maker: Maker, trace: Trace) -> Trace:
        """The trace of one text alone where tokens of all texts lie along one axis when positions turn them."""
        if trace.sizes.batch == 1 or not folds_texts(trace):
            return trace
        alone = Sizes(1, trace.sizes.tokens, trace.sizes.keys)
        again = self._run(maker(alone), alone, None)
        return trace if again.failure is not None or folds_texts(again) else again

    def _attended(self, maker: Maker, trace: Trace) -> Trace:
        """The trace with the places that attention does run over as tokens: patches, frames after a stride."""
        places = attended(trace, self.model) - (trace.lengths.sequence if self._fixed else set())
        if not places:
            return trace
        self._grids = grids(trace, self.model, places)
        self._places = places | {rows * columns for rows, columns in self._grids}
        again = self._run(maker(trace.sizes), trace.sizes, None)
        if again.failure is None:
            return again
        self._places, self._grids = set(), frozenset()
        return trace

    @property
    def whole(self) -> bool:
        """Whether the model's own forward runs, not some of its parts only."""
        return not self.structural().fed.parts_only

    @property
    def dims(self) -> set[int]:
        """Every size that the model's tensors and integer attributes have."""
        return self._dims

    def _sizes(self, row: int) -> Sizes:
        return sizes_apart(row, self._dims, self._batch, self.target)

    def _run(
        self,
        candidate: Candidate,
        sizes: Sizes,
        structural: Trace | None,
        *,
        padding: Padding | None = None,
        met: Callable[[Site], None] | None = None,
    ) -> Trace:
        graph = Graph()
        lengths = lengths_of(candidate, sizes)
        if self._places:
            tokens = structural.sizes.tokens if structural is not None and not self._fixed else sizes.tokens
            lengths.sequence |= at_length(self._places, tokens, sizes.tokens)
            lengths.grids = self._grids
        reference = structural.provenances if structural is not None else None
        recorder = Recorder(graph, self.fake_mode, lengths, reference=reference)
        if structural is not None:
            recorder.effort = structural.effort.several()
            recorder.noticer.known_scores, recorder.noticer.known_joins = structural.scores, structural.joins
        recorder.dims, recorder.padding, recorder.noticer.met = self._dims, padding, met
        recorder.settler.places, recorder.settler.kernels = self._places, self._kernels
        plain = plain_attributes(self.model)
        recorder.plain_attributes = {key: name for key, (name, _) in plain.items()}
        for name, fake in self.fakes.items():
            recorder.give(fake, self._entering(graph, name, fake, lengths))
        arguments = [self.make(recorder, item, sizes) for item in candidate.args]
        keywords = {name: self.make(recorder, item, sizes) for name, item in candidate.kwargs.items()}
        beside = self.make(recorder, candidate.beside, sizes)
        whole, tensors = not candidate.parts_only, present(self.model, self.fakes)
        with untouched(self.model):
            failure, _ = self.call(recorder, arguments, keywords, tensors, beside=beside, whole=whole)
        trace = Trace(graph, sizes, lengths, Evaluator(), str(candidate), failure)
        trace.places, trace.effort, trace.fed = frozenset(self._places), recorder.effort, candidate
        trace.unregistered = unregistered(self.model, graph)
        trace.ordered, trace.provenances = recorder.noticer.ordered, recorder.settler.known
        trace.scores, trace.joins = recorder.noticer.scores, recorder.noticer.joins
        classify(trace, structural)
        return trace

    def _entering(self, graph: Graph, name: str, fake: torch.Tensor, lengths: Lengths) -> Node:
        """A stored tensor as it enters a pass; one with a row for each of a fixed number of places moves."""
        leaf, places = self.leaves[name], self._places & lengths.sequence
        axes = axes_of_places(leaf, places, lengths.grids) if name not in self._kernels else ()
        return as_positions(graph, leaf, axes, fake) if axes else leaf

    def call(
        self,
        recorder: Recorder,
        arguments: list[Any],
        keywords: dict[str, Any],
        tensors: dict[str, Any],
        *,
        tied: bool = True,
        beside: Mapping[str, dict[str, Any]] | None = None,
        whole: bool = True,
    ) -> tuple[Failure | None, Any]:
        """Run forward once under ``recorder``, and the parts ``beside`` it: why it stopped, and what it returned.

        ``tensors`` stand for parameters and buffers and take up what forward puts in their place. What else it
        changes stays, until the caller's ``untouched`` ends. ``tied``: what is one tensor now stays one. Without
        ``whole`` only the parts run.
        """
        with ExitStack() as stack:
            for context in (as_called(), uncollected(), quiet_kernels(), converting(), eager()):
                stack.enter_context(context)
            stack.enter_context(module_paths(self.model, recorder.place))
            stack.enter_context(at_end(self.model, lambda: recorder.mark_kept(held(self.model))))
            for mode in (torch.no_grad(), self.fake_mode, recorder, Functions(recorder)):
                stack.enter_context(mode)
            try:
                result = self._called("", arguments, keywords, tensors, tied) if whole else None
                for path, given in (beside or {}).items():
                    self._called(path, [], given, tensors, tied)
                return None, result
            except Enough:
                return None, None
            except Laborious as reason:
                return laborious(recorder, reason), None
            except Exception as error:
                return stopped(recorder, error), None

    def _called(self, path: str, args: list[Any], kwargs: Any, tensors: dict[str, Any], tied: bool) -> Any:
        """What the part at ``path`` returns, the model itself where that is empty."""
        part = self.model.get_submodule(path)
        if self.abstract:
            return part(*args, **kwargs)
        if path:
            start = f"{path}."
            tensors = {name[len(start) :]: item for name, item in tensors.items() if name.startswith(start)}
        return torch.func.functional_call(part, tensors, tuple(args), kwargs, tie_weights=tied)

    def make(self, recorder: Recorder, item: Any, sizes: Sizes) -> Any:
        """The argument that an :class:`Input`, or a nest of them, stands for at these sizes."""
        if isinstance(item, dict):
            return {name: self.make(recorder, part, sizes) for name, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(self.make(recorder, part, sizes) for part in item)
        if not isinstance(item, Input):
            return item
        if item.literal:
            return item.value
        shape = item.shape(sizes)
        with self.fake_mode:
            fake: Any = torch.empty(shape, dtype=item.dtype, device="cpu")
        fake.fake_device = self._device
        node, _ = recorder.graph.add("leaf", (), {}, _PROVENANCE[item.role], fake, share=False)
        node.names, node.given = ["input"], True
        if item.role != "content":
            real = item.value if item.value is not None else made_up(item, shape, sizes)
            node.source = lambda: real
            node.moving = tuple(axis for axis, size in enumerate(shape) if size in recorder.lengths.sequence)
        recorder.give(fake, node)
        return fake


_PROVENANCE = {"content": Provenance.CONTENT, "positions": Provenance.POSITION, "mask": Provenance.MASK}
