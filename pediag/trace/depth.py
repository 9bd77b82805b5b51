"""Layers that treat positions alike: passes after the structural one run the first of them only.

Whether two layers are alike is read off the structural pass: the same joins at the same lines with the same position
values, and the same masks; and off the modules: the same classes with the same plain attributes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import torch

    from pediag.trace.session import Trace

# Shorter lists are run whole; two of a kind are kept, since what one layer leaves behind may reach the next.
_FEWEST = 4
_CLASSES = 8
_KEPT_OF_A_KIND = 2
_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class Depth:
    """``kept`` has how many layers of a list are run, by its path; ``alike`` those left out that are like one run."""

    kept: dict[str, int] = field(default_factory=dict)
    alike: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def everywhere(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """The paths of ``modules``, and those of the same parts of the layers that were left out."""
        found: dict[str, None] = {}
        for path in modules:
            found[path] = None
            for layer, others in self.alike.items():
                if path == layer or path.startswith(f"{layer}."):
                    found.update(dict.fromkeys(other + path[len(layer) :] for other in others))
        return tuple(found)


def depth(model: nn.Module, trace: Trace) -> Depth:
    """How much of each list of layers has to run, as the structural pass ``trace`` shows it."""
    found = Depth()
    lists = {path: part for path, part in model.named_modules() if _is_stack(part)}
    if not lists:
        return found
    joins = _joins(trace)
    for path, part in lists.items():
        if any(path.startswith(f"{outer}.") for outer in found.kept):
            continue
        own = _numbering(part)
        kinds = [_kind(f"{path}.{place}", layer, own, joins) for place, layer in enumerate(part.children())]
        kept = _prefix(kinds)
        if 2 * kept <= len(kinds):
            found.kept[path] = kept
            found.alike.update(_alike(path, kinds, kept))
    return found


@contextmanager
def shortened(model: nn.Module, depth: Depth) -> Iterator[None]:
    """Within, the lists of layers hold those only that have to run."""
    lists = [(model.get_submodule(path), kept) for path, kept in depth.kept.items()]
    whole = [(part, part._modules) for part, _ in lists]
    try:
        for part, kept in lists:
            part._modules = dict(list(part._modules.items())[:kept])
        yield
    finally:
        for part, modules in whole:
            part._modules = modules


def first_layers(model: nn.Module, structural: Trace, run: Callable[[], Trace]) -> Trace:
    """What ``run`` traces of ``model`` with the layers that have to run, and what the others would have added to it.

    A model that does not run without them runs whole.
    """
    found = depth(model, structural)
    if found.kept:
        with shortened(model, found):
            trace = run()
        if trace.failure is None:
            graph = trace.graph
            graph.sites, graph.attentions = _spread(graph.sites, found), _spread(graph.attentions, found)
            graph.dropouts, graph.transfers = _spread(graph.dropouts, found), _spread(graph.transfers, found)
            graph.constant_sites = _spread(graph.constant_sites, found)
            return trace
    return run()


def present(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of ``tensors`` whose names the model has now, which may be some of its layers only."""
    parts = {name for name, _ in model.named_modules(remove_duplicate=False)}
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in parts}


def _spread(items: list[Any], depth: Depth) -> list[Any]:
    """``items`` in the order of a whole pass, those of layers left out made of those of the last layer like them."""
    like = {other: layer for layer, others in depth.alike.items() for other in others}
    for path in depth.kept:
        end = max((n + 1 for n, item in enumerate(items) if item.module.startswith(f"{path}.")), default=0)
        left = (other for other in like if other.rpartition(".")[0] == path)
        added: list[Any] = []
        for other in sorted(left, key=lambda other: int(other.rpartition(".")[2])):
            added += [
                replace(item, module=other + item.module[len(like[other]) :])
                for item in items[:end]
                if item.module == like[other] or item.module.startswith(f"{like[other]}.")
            ]
        items = [*items[:end], *added, *items[end:]]
    return items


def _is_stack(part: nn.Module) -> bool:
    if type(part) is not nn.ModuleList or len(part) < _FEWEST:
        return False
    return len({type(layer) for layer in part.children()}) <= _CLASSES


def _joins(trace: Trace) -> dict[str, list[Any]]:
    """By module path: what joins content with positions there, and what attention runs there."""
    found: dict[str, list[Any]] = defaultdict(list)
    for site in trace.graph.sites:
        found[site.module].append((site.kind, site.op, site.frame, tuple(map(id, site.position))))
    for item in trace.graph.attentions:
        mask = id(item.mask) if item.mask is not None else None
        found[item.module].append(("attention", mask, item.causal, item.scale, item.frame, item.query.shape))
    return found


def _numbering(layers: nn.Module) -> set[tuple[str, str]]:
    """The attributes that hold the number of their layer in every layer, as (submodule, name)."""
    found: set[tuple[str, str]] | None = None
    for place, layer in enumerate(layers.children()):
        holding = {
            (name, key)
            for name, part in layer.named_modules()
            for key, value in vars(part).items()
            if type(value) is int and value == place
        }
        found = holding if found is None else found & holding
    return found or set()


def _kind(
    path: str, layer: nn.Module, numbering: set[tuple[str, str]], joins: dict[str, list[Any]]
) -> object:
    """Equal for layers that treat positions alike."""
    parts: list[Any] = []
    for name, part in layer.named_modules():
        whole = f"{path}.{name}".rstrip(".")
        plain = tuple(
            (key, value)
            for key, value in vars(part).items()
            if type(value) in _PLAIN and (name, key) not in numbering and key != "training"
        )
        shapes = tuple((key, tuple(item.shape)) for key, item in part._buffers.items() if item is not None)
        parts.append((name, type(part), plain, shapes, tuple(joins.get(whole, ()))))
    return tuple(parts)


def _prefix(kinds: list[object]) -> int:
    """The fewest first layers among which each kind stands as often as is kept of it, or as often as there is."""
    wanted = {kind: min(_KEPT_OF_A_KIND, kinds.count(kind)) for kind in kinds}
    for place, kind in enumerate(kinds):
        wanted[kind] -= 1
        if all(left <= 0 for left in wanted.values()):
            return place + 1
    return len(kinds)


def _alike(path: str, kinds: list[object], kept: int) -> dict[str, tuple[str, ...]]:
    """By path of a kept layer: those like it that were left out; one kept layer of a kind speaks for them."""
    left: dict[object, list[str]] = defaultdict(list)
    for place, kind in enumerate(kinds[kept:], kept):
        left[kind].append(f"{path}.{place}")
    return {f"{path}.{place}": tuple(left[kind]) for place, kind in enumerate(kinds[:kept]) if kind in left}


__all__ = ["Depth", "depth", "first_layers", "present", "shortened"]
