"""Passes of the same model on other batches: padded on the left, with other position ids, of another length.

Nothing is run before it is asked for, and each pass once. A pass ends as soon as the joins that are asked about were
met, so that it costs the first layers only. Content stays abstract: what is compared are the positions at a join.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pediag.targets.inputs import POSITION_ARGUMENTS
from pediag.trace.evaluate import Evaluator, Unavailable, real_numbers
from pediag.trace.frames import Frame
from pediag.trace.graph import Node, Site
from pediag.trace.inputs import Candidate, Input, Sizes
from pediag.trace.padding import Padding
from pediag.trace.place import Enough
from pediag.trace.session import Session, Trace

# What arguments that say which tokens are padding are called; a calling convention, not a diagnosis.
KEEPING = ("attention_mask", "input_mask", "token_mask", "valid_mask")
HIDING = ("key_padding_mask", "src_key_padding_mask", "padding_mask", "pad_mask", "encoder_padding_mask")
EITHER = ("mask",)
# What arguments that say which document of a packed batch a token is of are called.
DOCUMENTS = ("document_ids", "doc_ids", "documents", "segment_ids", "sequence_ids", "seq_ids", "seq_idx")

# Numbers closer than this, relative to the largest, are one: two programs for the same rows may round differently.
_SAME = 1e-5
_PADS_PER_ROW = 4


@dataclass(slots=True)
class Pass:
    """One pass: its trace, and what the batch was. ``pads`` has the width of the padding of each text in tokens.

    ``given`` names the arguments that were set, ``documents`` has the lengths of the packed texts in tokens. ``told``
    says whether anything told the model of padding, ``hidden`` that true stands for padding in its mask, ``sure`` that
    the mask is known to mean what it is taken for.
    """

    trace: Trace
    given: tuple[str, ...] = ()
    pads: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    told: bool = True
    sure: bool = True
    hidden: bool = False
    value: Evaluator = field(default_factory=lambda: Evaluator(surrogates=True))
    places: dict[object, Site] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = dict(_placed(self.trace.graph.sites))

    def rows(self, site: Site, which: int = 0, *, prompted: bool = False) -> torch.Tensor | None:
        """Positions at a site as (texts or 1, tokens, numbers); None where they cannot be told.

        With ``prompted`` also those of more tokens than were given: of a prompt that the model puts in front, and the
        text. Parameters enter as fixed random numbers, so two positions are alike where they read the same row.
        """
        node = site.position[which]
        axes = _axes(node, self.trace.sizes, prompted)
        if axes is None:
            return None
        try:
            value = self.value(node)
        except Unavailable:
            return None
        with real_numbers():
            batch, token = axes
            flat = value.movedim(token, 0) if batch is None else value.movedim((batch, token), (0, 1))
            flat = flat[None] if batch is None else flat
            flat = torch.view_as_real(flat.contiguous()) if flat.is_complex() else flat
            return flat.reshape(*flat.shape[:2], -1).double()

    def apart(self) -> bool:
        """Whether attention hides each of two packed texts from the other, by a mask or a value added to scores."""
        masks = [item.mask for item in self.trace.graph.attentions if item.mask is not None]
        masks += [node for site in self.trace.graph.sites if site.kind == "bias" for node in site.position]
        return len(self.documents) == 2 and any(self._hides(mask) for mask in dict.fromkeys(masks))

    def _hides(self, mask: Node) -> bool:
        first = self.documents[0]
        try:
            value = self.value(mask)
        except Unavailable:
            return False
        with real_numbers():
            if value.dim() < 2 or min(value.shape[-2:]) <= first:
                return False
            value = value.reshape(-1, *value.shape[-2:])[0].double()
            across, own = value[first:, :first], value[first:, first:].diagonal()
            return bool((across == across.flatten()[0]).all()) and bool((own != across.flatten()[0]).all())


class Batches:
    """The passes of a session that has run. ``sites`` are the joins of the structural pass that are asked about."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._passes: dict[object, Pass | None] = {}
        self._plain: Pass | None = None

    # -- what is asked ------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session itself, for passes of other kinds."""
        return self._session

    @property
    def plain(self) -> Pass:
        """The structural pass itself."""
        if self._plain is None:
            self._plain = Pass(self._session.structural())
        return self._plain

    def ids_argument(self) -> str:
        """The argument that takes position ids; empty where forward has none, or several (places on a page)."""
        given = dict(self._named(self._candidate()))
        marked = [
            name for name, item in given.items() if isinstance(item, Input) and item.role == "positions"
        ]
        if marked:
            alone = len(marked) == 1 and not given[marked[0]].dtype.is_floating_point
            return marked[0] if alone else ""
        return next((name for name in self._accepted() if name in POSITION_ARGUMENTS), "")

    def mask_argument(self) -> str:
        """The argument that says which tokens are padding; empty where forward has none."""
        given = dict(self._named(self._candidate()))
        shape = self._shape()
        for name, item in given.items():
            if isinstance(item, Input) and item.role == "mask" and item.shape(self._sizes) == shape:
                return name
        accepted = self._accepted()
        return next((name for name in (*KEEPING, *HIDING, *EITHER) if name in accepted), "")

    def document_argument(self) -> str:
        """The argument that says of which document of a packed batch a token is; empty where forward has none."""
        accepted = {**self._accepted(), **dict(self._named(self._candidate()))}
        return next((name for name in DOCUMENTS if name in accepted), "")

    def stored(self) -> dict[str, Node]:
        """Every parameter and buffer of the model by name, as its passes start from it."""
        return dict(self._session.leaves)

    def unread(self) -> dict[str, Node]:
        """The parameters and buffers that no operation of the structural pass reads, copies of read ones left out."""
        read = {item for node in self.plain.trace.graph.nodes for item in node.inputs()}
        return {name: node for name, node in self._session.leaves.items() if node not in read}

    def declared(self) -> set[int]:
        """The whole numbers that the model's own modules hold as attributes, not those of torch."""
        modules = (
            part for part in self._session.model.modules() if not type(part).__module__.startswith("torch.")
        )
        return {item for part in modules for item in vars(part).values() if type(item) is int}

    def is_table(self, name: str) -> bool:
        """Whether a parameter is one of an embedding or of a module that is not torch's own."""
        owner = self._session.model.get_submodule(name.rpartition(".")[0])
        return isinstance(owner, nn.Embedding) or not type(owner).__module__.startswith("torch.")

    def is_embedding(self, name: str) -> bool:
        """Whether a parameter is the table of a torch embedding."""
        return isinstance(self._session.model.get_submodule(name.rpartition(".")[0]), nn.Embedding)

    def home(self, name: str) -> Frame | None:
        """Where the class begins whose module holds a tensor, torch's own classes left out; None where unknown."""
        path = name.rpartition(".")[0]
        while True:
            kind = type(self._session.model.get_submodule(path))
            if not kind.__module__.startswith("torch."):
                break
            if not path:
                return None
            path = path.rpartition(".")[0]
        try:
            return Frame(inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1], kind.__name__)
        except (OSError, TypeError):
            return None

    def padded(self, sites: Sequence[Site]) -> Pass | None:
        """A batch padded on the left, each text by another width; None where nothing tells the model of padding.

        Position ids are those that the model itself would generate with.
        """
        return self._once("padded", sites, self._padded)

    def packed(self, sites: Sequence[Site]) -> Pass | None:
        """Two texts in one row, with position ids that start again; None where forward takes no ids."""
        return self._once("packed", sites, self._packed)

    def turned(self, sites: Sequence[Site]) -> Pass | None:
        """Position ids in reverse order; None where forward takes no ids."""
        return self._once("turned", sites, self._turned)

    def documents(self, sites: Sequence[Site]) -> Pass | None:
        """Two texts in one row, told by their document ids; None where forward takes none."""
        return self._once("documents", sites, self._by_document)

    def alone(self, sites: Sequence[Site], tokens: int) -> Pass | None:
        """One text of ``tokens`` tokens, without padding."""
        sizes = Sizes(self._sizes.batch, tokens, self._sizes.keys)
        return self._once(("alone", tokens), sites, lambda wanted: self._pass(wanted, {}, sizes=sizes))

    # -- how it is run ------------------------------------------------------------------------------------

    def _once(
        self, key: object, sites: Sequence[Site], run: Callable[[Sequence[Site]], Pass | None]
    ) -> Pass | None:
        wanted = frozenset(place for place, site in self.plain.places.items() if site in _Same(sites))
        known = (key, wanted)
        if known not in self._passes:
            self._passes[known] = run(sites)
        return self._passes[known]

    def _padded(self, sites: Sequence[Site]) -> Pass | None:
        shape, axis = self._shape(), self._token_axis()
        name = self.mask_argument()
        batch, tokens = (shape[1 - axis], shape[axis]) if len(shape) > 1 else (1, shape[0])
        widths = _widths(batch, tokens)
        with real_numbers():
            pads = torch.arange(tokens)[None] < torch.tensor(widths)[:, None]
            kept = ~pads
        values: dict[str, Any] = {}
        if name:
            values[name] = self._mask(name, pads, axis)
            values.update(self._generated(kept))
        with real_numbers():
            laid = pads if axis or len(shape) < 2 else pads.T
            padding = Padding(laid, ~laid, _pad_ids(self._session.model), not name)
        made = self._pass(sites, values, padding=padding)
        if made is not None:
            made.pads, made.told = widths, bool(name) or padding.asked
            made.hidden, made.sure = name in HIDING, name not in (*HIDING, *EITHER)
        return made

    def _mask(self, name: str, pads: torch.Tensor, axis: int) -> torch.Tensor:
        known = dict(self._named(self._candidate())).get(name)
        dtype = known.dtype if isinstance(known, Input) and not known.literal else None
        with real_numbers():
            kept = pads if name in HIDING else ~pads
            kept = kept if axis else kept.T
            default = torch.bool if name in (*HIDING, *EITHER) else torch.int64
            return kept.to(dtype or default).contiguous()

    def _generated(self, kept: torch.Tensor) -> dict[str, torch.Tensor]:
        """Position ids as the model's own ``generate`` makes them of a padding mask; nothing where it makes none."""
        model: Any = self._session.model
        can = getattr(model, "can_generate", None)
        if not hasattr(model, "prepare_inputs_for_generation") or (can is not None and not can()):
            return {}
        with real_numbers():
            ids = torch.full(kept.shape, 7)
            mask = kept.long()
            try:
                made: dict[str, Any] = {}
                prepare = getattr(model, "_prepare_position_ids_for_generation", None)
                if prepare is not None and "position_ids" in self._accepted():
                    made["position_ids"] = prepare(ids, {"attention_mask": mask})
                ready = model.prepare_inputs_for_generation(ids, attention_mask=mask, **made)
            except Exception:
                return {}
        found = ready.get("position_ids") if isinstance(ready, dict) else None
        return {"position_ids": found} if isinstance(found, torch.Tensor) else {}

    def _packed(self, sites: Sequence[Site]) -> Pass | None:
        name, tokens = self.ids_argument(), self._sizes.tokens
        if not name:
            return None
        first = _first_document(tokens)
        with real_numbers():
            ids = torch.cat((torch.arange(first), torch.arange(tokens - first)))
        made = self._with_ids(sites, name, ids)
        if made is not None:
            made.documents = (first, tokens - first)
        return made

    def _turned(self, sites: Sequence[Site]) -> Pass | None:
        name = self.ids_argument()
        if not name:
            return None
        with real_numbers():
            ids = torch.arange(self._sizes.tokens - 1, -1, -1)
        return self._with_ids(sites, name, ids)

    def _with_ids(self, sites: Sequence[Site], name: str, ids: torch.Tensor) -> Pass | None:
        """The pass with one row of position ids, in the shape that forward takes them in."""
        known = dict(self._named(self._candidate())).get(name)
        shape, axis = self._shape(), self._token_axis()
        if isinstance(known, Input) and not known.literal:
            return self._pass(sites, {name: _laid(ids, known.shape(self._sizes))})
        shapes = [shape, (len(ids),), tuple(n if k == axis else 1 for k, n in enumerate(shape))]
        made = None
        for wanted in shapes:
            made = self._pass(sites, {name: _laid(ids, wanted)})
            if made is None or made.trace.failure is None or made.trace.failure.table is not None:
                return made
        return made

    def _by_document(self, sites: Sequence[Site]) -> Pass | None:
        name, tokens = self.document_argument(), self._sizes.tokens
        if not name:
            return None
        first = _first_document(tokens)
        with real_numbers():
            ids = (torch.arange(tokens) >= first).long() + 1
        made = self._pass(sites, {name: _laid(ids, self._shape())})
        if made is not None:
            made.documents = (first, tokens - first)
        return made

    def _pass(
        self,
        sites: Sequence[Site],
        values: dict[str, torch.Tensor],
        *,
        sizes: Sizes | None = None,
        padding: Padding | None = None,
    ) -> Pass | None:
        same = _Same(sites)
        wanted = {place for place, site in self.plain.places.items() if site in same}
        trace = self._session.varied(
            lambda candidate: self._changed(candidate, values), sizes, padding=padding, met=_Met(wanted)
        )
        return Pass(trace, tuple(values))

    def _changed(self, candidate: Candidate, values: dict[str, torch.Tensor]) -> Candidate:
        names = list(self._accepted())
        args, kwargs = list(candidate.args), dict(candidate.kwargs)
        for name, value in values.items():
            item = Input(value.dtype, role="mask", value=value)
            if name in POSITION_ARGUMENTS:
                item = Input(value.dtype, role="positions", value=value)
            place = names.index(name) if name in names else len(args)
            if place < len(args):
                args[place] = item
            else:
                kwargs[name] = item
        return Candidate(args, kwargs, candidate.given)

    # -- what the model takes -----------------------------------------------------------------------------

    @property
    def _sizes(self) -> Sizes:
        return self._session.structural().sizes

    def _candidate(self) -> Candidate:
        return self._session.called(self._sizes)

    def _accepted(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self._session.model.forward).parameters
        return {
            name: item
            for name, item in parameters.items()
            if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)
        }

    def _named(self, candidate: Candidate) -> list[tuple[str, Any]]:
        names = list(self._accepted())
        return [*zip(names, candidate.args, strict=False), *candidate.kwargs.items()]

    def _shape(self) -> tuple[int, ...]:
        """Texts and tokens of the main input, in the order in which it has them."""
        for item in self._candidate().inputs():
            shape = () if item.literal else item.shape(self._sizes)
            if item.role == "content" and self._sizes.tokens in shape[:2]:
                return shape[:2]
        return (self._sizes.batch, self._sizes.tokens)

    def _token_axis(self) -> int:
        shape = self._shape()
        return max(k for k, size in enumerate(shape) if size == self._sizes.tokens)


class _Met:
    """Told of every site as it is met, it ends the pass when all that are wanted were; where none is, never."""

    def __init__(self, wanted: set[object]) -> None:
        self._left = set(wanted)
        self._seen: Counter[object] = Counter()

    def __call__(self, site: Site) -> None:
        """Raises Enough at the last site that is wanted."""
        place = _place(site, self._seen)
        if place in self._left:
            self._left.discard(place)
            if not self._left:
                raise Enough


class _Same:
    """Sites told by identity: they hold tensors' nodes and compare by value otherwise."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._known = {id(site) for site in sites}

    def __contains__(self, site: Site) -> bool:
        return id(site) in self._known


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two pieces of rows hold the same numbers, up to rounding; what is not finite counts as one."""
    with real_numbers():
        one, other = one.nan_to_num(), other.nan_to_num()
        largest = max(float(one.abs().max()), float(other.abs().max()), 1e-30)
        return bool(((one - other).abs() <= _SAME * largest).all())


def shift(row: torch.Tensor, pads: int, plain: torch.Tensor) -> int | None:
    """By how many positions the tokens behind ``pads`` of padding stand later than in a text without it.

    ``row`` and ``plain`` are (tokens, numbers); only 0 and up to ``pads`` are looked for. None where it is not one
    number for all of them.
    """
    real = row[pads:]
    steps: list[int] = [0, pads, *range(1, pads)]
    for step in steps:
        count = min(len(real), len(plain) - step)
        if count > 0 and alike(real[:count], plain[step : step + count]):
            return step
    return None


def matching(there: Pass, place: object, site: Site) -> Site | None:
    """The site of another pass that does what ``site`` at ``place`` does: the same line, else the first like it."""
    found = there.places.get(place)
    if found is not None:
        return found
    others = (one for one in there.places.values() if one.module == site.module and one.op == site.op)
    return next(others, None)


def _placed(sites: Iterable[Site]) -> Iterable[tuple[object, Site]]:
    seen: Counter[object] = Counter()
    for site in sites:
        yield _place(site, seen), site


def _place(site: Site, seen: Counter[object]) -> object:
    where = (site.module, site.op, site.frame)
    seen[where] += 1
    return where, seen[where]


def _axes(node: Node, sizes: Sizes, prompted: bool = False) -> tuple[int | None, int] | None:
    """The axes of texts and of tokens of a value; None where it has no axis of tokens."""
    tokens = [axis for axis, size in enumerate(node.shape) if size == sizes.tokens]
    if prompted and not tokens:
        tokens = [axis for axis, size in enumerate(node.shape) if size > sizes.tokens and axis in node.moving]
    if not tokens:
        return None
    token = next((axis for axis in tokens if axis in node.moving), tokens[0])
    batch = next(
        (axis for axis, size in enumerate(node.shape) if size == sizes.batch and axis != token), None
    )
    return (batch if sizes.batch > 1 else None), token


def _widths(batch: int, tokens: int) -> tuple[int, ...]:
    """Padding of each text in tokens, the first without any where there are several."""
    step = max(1, min(_PADS_PER_ROW, tokens // (2 * max(batch, 2))))
    return tuple(step * row for row in range(batch)) if batch > 1 else (step,)


def _first_document(tokens: int) -> int:
    """Tokens of the first of two packed texts, the longer one."""
    return tokens - max(1, tokens // 3)


def _laid(ids: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A row of ids in a shape that has their length in some axis."""
    with real_numbers():
        axes = [axis for axis, size in enumerate(shape) if size == len(ids)]
        if not axes:
            return ids
        view = [1] * len(shape)
        view[axes[-1]] = len(ids)
        return ids.view(view).expand(tuple(shape)).contiguous()


def _pad_ids(model: nn.Module) -> frozenset[int]:
    """Token ids that the model declares to be padding."""
    declared = getattr(getattr(model, "config", None), "pad_token_id", None)
    found = {declared} if type(declared) is int else set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            found.add(module.padding_idx)
    return frozenset(found)
