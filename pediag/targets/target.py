"""What opening a target yields: the facets that are at hand, each as lazy as it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pediag.targets._matching import Names

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pediag.targets.config import Config
    from pediag.targets.inputs import InputSpec


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A stored tensor that is read only when asked for.

    ``shape`` is in elements, ``dtype`` a plain name such as ``"float32"``. ``copied``: its numbers do not lie in the
    file as they are used, so that loading takes memory and reads all of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor] = field(repr=False)
    copied: bool = False

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
    - ``renamed``: the stored names of parameters that the library names otherwise, ``""`` of those that it makes of
      several stored ones; set by ``build``.
    - ``example_inputs``: the user's own ``example_inputs(seq_len)``, with ``seq_len`` in tokens.
    - ``names``: an index of the names in ``tensors``, made when one is first asked for.
    - ``inputs``: what the code takes, in the letters of ``--input``, where the target says so itself.
    - ``takes``, ``longest``: whether it takes an input of so many tokens, and the longest, where it says so.
    - ``in_parts``: of a live model, what makes it with this rank's part of its linear layers; that is None where they
      are whole.
    - ``missing``: which files of the weights are not there, as ``"1 of 2 weight files are missing: ..."``; else empty.
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
    missing: str = ""
    inputs: tuple[InputSpec, ...] = ()
    takes: Callable[[int], bool] | None = None
    longest: int | None = None
    prefix: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict, repr=False)
    in_parts: Callable[[], nn.Module | None] | None = None
    names: tuple[Mapping[str, LazyTensor], Names] | None = field(default=None, repr=False, compare=False)


def tensor_for(target: Target, name: str) -> LazyTensor | None:
    """The stored tensor that belongs to the module's parameter or buffer ``name``, or None.

    Tried in turn: the name itself, the one that the library loads it from, then without what data-parallel, compiling,
    sharding and checkpointing wrappers add to either, with the base model's prefix stripped or added, under the
    attribute in which a trainer holds the model, and the one stored name that differs by a leading component.
    """
    tensors = target.tensors
    if name in tensors:
        return tensors[name]
    if (known := target.renamed.get(name)) is not None:
        return tensors.get(known)
    if target.names is None or target.names[0] is not tensors or target.names[1].prefix != target.prefix:
        target.names = tensors, Names(tensors, target.prefix)
    found = target.names[1].find(name)
    return None if found is None else tensors[found]
