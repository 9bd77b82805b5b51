"""What opening a target yields: the facets that are at hand, each as lazy as it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pediag.targets.config import Config


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A stored tensor that is read only when asked for.

    ``shape`` is in elements, ``dtype`` a plain name such as ``"float32"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor] = field(repr=False)

    def load(self) -> torch.Tensor:
        """The numbers, on the CPU, with ``shape`` and ``dtype``.

        Raises LoadError when the file changed, shrank or vanished since it was opened.
        """
        return self.read()


@dataclass(slots=True)
class Target:
    """One thing to check. At most one of ``module`` and ``build`` is set.

    - ``module``: a live model, with its numbers.
    - ``build``: a recipe that constructs the model without weights; the caller enters its abstract mode.
    - ``tensors``: stored tensors by name; empty when there are none.
    - ``prefix``: the name under which the stored tensors' base model may or may not sit (``"bert"``); set by
      ``build``.
    - ``example_inputs``: the user's own ``example_inputs(seq_len)``, with ``seq_len`` in tokens.
    - ``reason_not_runnable``: why there is neither ``module`` nor ``build``; empty when there is one.
    """

    spec: str
    loader: str
    sha256: str | None = None
    module: nn.Module | None = None
    build: Callable[[], nn.Module] | None = None
    tensors: Mapping[str, LazyTensor] = field(default_factory=dict)
    config: Config | None = None
    example_inputs: Callable[[int], Any] | None = None
    notes: list[str] = field(default_factory=list)
    reason_not_runnable: str = ""
    prefix: str = ""


WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def tensor_for(target: Target, name: str) -> LazyTensor | None:
    """The stored tensor that belongs to the module's parameter or buffer ``name``, or None.

    Tried in turn: the name itself, with the base model's prefix stripped or added, with the prefixes that
    data-parallel and compiling wrappers add, and the one stored name that differs by a leading component.
    """
    tensors = target.tensors
    candidates = [name]
    if target.prefix:
        candidates += [name.removeprefix(f"{target.prefix}."), f"{target.prefix}.{name}"]
    candidates += [wrapper + candidate for wrapper in WRAPPER_PREFIXES for candidate in candidates]
    found = next((tensors[candidate] for candidate in candidates if candidate in tensors), None)
    return found or (None if target.prefix else _by_one_component(tensors, name))


def _by_one_component(tensors: Mapping[str, LazyTensor], name: str) -> LazyTensor | None:
    """The only tensor whose name has one leading component more or less than ``name``."""
    _, dot, shorter = name.partition(".")
    if dot and "." in shorter and shorter in tensors:
        return tensors[shorter]
    longer = [stored for stored in tensors if stored.partition(".")[2] == name] if dot else []
    return tensors[longer[0]] if len(longer) == 1 else None
