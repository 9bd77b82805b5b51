"""Layers that treat positions alike: passes after the structural one run the first of them only.

Whether two layers are alike is read off the structural pass: the same joins at the same lines with the same position
values, and the same masks; and off the modules: the same classes with the same plain attributes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

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


__all__ = ["Depth", "depth", "shortened"]
