"""Which of the tensors that a training checkpoint holds are the model's, and its configuration. Imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pediag.errors import LoadError
from pediag.targets._paths import one_line, shortened
from pediag.targets.config import Config, looks_like_config, refuse_endless
from pediag.targets.files.torchsave.rebuilding import Numberless, NumpyArray, Part, StoredTensor
from pediag.targets.files.torchsave.unpickle import Named, Opaque
from pediag.targets.target import LazyTensor

STATE_KEYS = (
    *(
        "model",
        "state_dict",
        "module",
        "model_state_dict",
        "model_state",
        "model_dict",
        "net",
        "network",
        "weights",
    ),
    *("params", "generator", "netG", "backbone", "teacher", "student"),
    *(
        "ema",
        "ema_state_dict",
        "model_ema",
        "state_dict_ema",
        "ema_model",
        "params_ema",
        "g_ema",
        "shadow_params",
    ),
)
"""Under which keys training code keeps a model, the one to prefer first; averaged copies last."""

BESIDE = (
    "optim",
    "lr_sched",
    "sched",
    "scaler",
    "amp",
    "rng",
    "cuda_rng",
    "loss_scale",
    "discriminator",
    "netD",
)
"""How the keys begin that hold tensors of the training and not of the model."""

CONFIG_KEYS = (
    *("config", "model_config", "model_args", "hyper_parameters", "hparams", "args", "cfg", "model_params"),
    *("model_kwargs", "params"),
)
INNER_CONFIG_KEYS = ("model", "model_config", "config", "model_args", "network", "args", "hparams")

NESTING = 8
"""Levels of mappings that are searched for tensors."""

WALK_LIMIT = 2_000_000
"""Values that are looked at in one file; the same one is counted each time it is met."""

NAME_LIMIT = 4096
"""Characters of a tensor's name."""


@dataclass(slots=True)
class State:
    """The model's tensors by dotted name, and what a person should know of where they were found."""

    tensors: dict[str, LazyTensor]
    notes: list[str] = field(default_factory=list)


class _Walk:
    """Looks through nested mappings, no further than ``WALK_LIMIT`` values."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._met = 0

    def tensors(self, value: object, depth: int = NESTING, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Every tensor in a mapping of mappings by its dotted name."""
        if not isinstance(value, Mapping) or depth == 0:
            return
        for key, item in value.items():
            self._count()
            if isinstance(item, Mapping):
                yield from self.tensors(item, depth - 1, self._name(prefix, key) + ".")
            elif _is_tensor(item):
                yield self._name(prefix, key), item

    def any(self, value: object) -> bool:
        """Whether there is a tensor in it."""
        return _is_tensor(value) or next(self.tensors(value), None) is not None

    def _name(self, prefix: str, key: object) -> str:
        name = f"{prefix}{key}" if isinstance(key, (str, int, float, Opaque, Named)) else f"{prefix}<key>"
        if len(name) > NAME_LIMIT:
            raise LoadError(f"{self.spec}: a name in it is above {NAME_LIMIT} characters, which no model has")
        return name

    def _count(self) -> None:
        self._met += 1
        if self._met > WALK_LIMIT:
            raise LoadError(f"{self.spec}: nests its values without end; no checkpoint holds that many")


def state_of(held: object, spec: str) -> State:
    """The model's tensors in what a file held. Raises LoadError for one that is out of all proportion."""
    walk = _Walk(spec)
    named, taken, left = _chosen(walk, held)
    state = State({})
    without: dict[str, list[str]] = {}
    for name, item in named:
        if (kind := _without_numbers(item)) is not None:
            without.setdefault(kind, []).append(name)
        else:
            state.tensors[name] = _lazy(name, item)
    if taken or left:
        beside = f"; left out: {shortened(left)}" if left else ""
        state.notes.append(f"the tensors under {taken!r} were read{beside}" if taken else beside[2:])
    state.notes += [f"{kind} are not read: {shortened(names, 4)}" for kind, names in without.items()]
    return state


def _chosen(walk: _Walk, held: object) -> tuple[list[tuple[str, Any]], str, list[str]]:
    """Named tensors, the dotted key under which they were, and the keys beside it that hold tensors too."""
    if _is_tensor(held):
        return [("tensor", held)], "", []
    if isinstance(held, (list, tuple)):
        return [(str(place), item) for place, item in enumerate(held) if _is_tensor(item)], "", []
    if _is_optimiser(held):
        return [], "", ["the state of an optimiser"]
    taken: list[str] = []
    left: list[str] = []
    while isinstance(held, Mapping) and len(taken) < NESTING:
        key = next(
            (key for key in STATE_KEYS if isinstance(held.get(key), Mapping) and walk.any(held[key])), None
        )
        beside = [other for other in held if other != key and (key is not None or _is_beside(other))]
        left += [".".join([*taken, one_line(other, 60)]) for other in beside if walk.any(held[other])]
        if key is None:
            apart = set(beside)
            held = {name: item for name, item in held.items() if name not in apart}
            break
        taken.append(key)
        held = held[key]
    return list(walk.tensors(held)), ".".join(taken), left


def _is_optimiser(held: object) -> bool:
    """Whether it is what ``torch.optim.Optimizer.state_dict`` gives: averages of gradients by parameter number."""
    return isinstance(held, Mapping) and set(held) == {"state", "param_groups"}


def _is_beside(key: object) -> bool:
    return isinstance(key, str) and "." not in key and key.startswith(BESIDE)


def _is_tensor(value: object) -> bool:
    if isinstance(value, (StoredTensor, Numberless, NumpyArray)):
        return True
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _without_numbers(item: Any) -> str | None:
    """In what way a tensor is not plain numbers; None for one that is."""
    if isinstance(item, Numberless):
        return item.kind
    if isinstance(item, NumpyArray):
        return "arrays of other things than numbers" if item.dtype is None else None
    if isinstance(item, StoredTensor):
        return None
    kinds = (
        ("tensors on the meta device", item.is_meta),
        ("quantised tensors", item.is_quantized),
        ("nested tensors", item.is_nested),
        ("sparse tensors", item.layout is not sys.modules["torch"].strided),
    )
    return next((kind for kind, held in kinds if held), None)


def _lazy(name: str, item: Any) -> LazyTensor:
    """A stored or live tensor as one that is read when asked for."""
    if isinstance(item, StoredTensor):
        return LazyTensor(name, item.shape, item.dtype, item.checked(name).load, item.copied)
    if isinstance(item, NumpyArray):
        return LazyTensor(name, item.shape, str(item.dtype), item.load)
    return LazyTensor(name, tuple(item.shape), str(item.dtype).removeprefix("torch."), lambda: item)


def config_in(held: object) -> Config | None:
    """The configuration that a checkpoint carries beside its tensors, be it one level further in.

    Raises LoadError for one that is out of all proportion.
    """
    if not isinstance(held, Mapping):
        return None
    for key in CONFIG_KEYS:
        value = _plainly(held.get(key), [PLAIN_LIMIT], NESTING)
        if isinstance(value, dict):
            inner = [value.get(name) for name in INNER_CONFIG_KEYS]
            for part in (value, *inner):
                if isinstance(part, dict) and looks_like_config(part):
                    refuse_endless(part, f"the configuration under {key!r}")
                    return Config.from_object(part)
    return None


PLAIN_LIMIT = 100_000
"""Values of a configuration that are copied."""


def _plainly(value: Any, left: list[int], depth: int) -> Any:
    """A copy of plain values as text and numbers; what is none is left out of mappings."""
    left[0] -= 1
    if left[0] < 0 or depth == 0:
        return None
    if isinstance(value, (Named, Opaque)):
        return repr(value)
    if type(value) is int:
        return value if value.bit_length() < 64 else None
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plainly(item, left, depth - 1) for item in value[: left[0]]]
    if not isinstance(value, Mapping):
        if not (isinstance(value, argparse.Namespace) or dataclasses.is_dataclass(value)):
            return None if isinstance(value, (Part, bytes, bytearray)) or _is_tensor(value) else value
        value = Config.from_object(value).values
    plain: dict[str, Any] = {}
    for key, item in value.items():
        if left[0] < 0:
            break
        if isinstance(key, str):
            plain[key] = _plainly(item, left, depth - 1)
    return plain


def contents(held: object) -> str:
    """What a file without a model's tensors holds, in words."""
    if isinstance(held, Mapping):
        keys = (one_line(key, 60) if isinstance(key, (str, int)) else "<key>" for key in held)
        return f"a mapping without tensors (keys: {shortened(keys, 6)})" if held else "an empty mapping"
    kind = held.kind if isinstance(held, Opaque) else type(held).__name__
    return f"one {kind}"
