"""What a training step costs with each scheme: time in turn with the others, bytes of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pediag.schemes.decoder import Decoder
from pediag.schemes.encodings import SCHEMES
from pediag.schemes.model import Cost, Setting
from pediag.schemes.tasks import TASKS, drawn
from pediag.schemes.training import new, optimizer_of, step, timed

ROUNDS = 15
"""Steps of each scheme that are timed, one a round: what slows the machine meets all schemes alike."""


def costs(setting: Setting, progress: Callable[[str], None], rounds: int = ROUNDS) -> list[Cost]:
    """The cost of one step at ``seq_len`` for every scheme; the first two rounds warm up and do not count.

    Learned tables have a row for each of the ``seq_len`` tokens here.
    """
    names = setting.schemes
    seconds: dict[str, list[float]] = {name: [] for name in names}
    at_length = replace(setting, train_len=setting.seq_len)
    models = {name: new(at_length, SCHEMES[name], setting.first_seed) for name in names}
    optimizers = {name: optimizer_of(model) for name, model in models.items()}
    task = next(iter(TASKS.values()))
    texts = torch.Generator().manual_seed(setting.first_seed)
    words, answers = (part.to(setting.device) for part in drawn(task, setting.batch, setting.seq_len, texts))
    for number in range(rounds + 2):
        progress(f"timing steps at {setting.seq_len:,} tokens, round {number + 1} of {rounds + 2}")
        for name in names:
            with timed(seconds[name], setting.device):
                step(models[name], optimizers[name], words, answers)
    peaks = {
        name: _peak(lambda name=name: step(models[name], optimizers[name], words, answers), setting.device)  # type: ignore[misc]
        for name in names
    }
    return [Cost(name, tuple(seconds[name][2:]), *_bytes(models[name]), peaks[name]) for name in names]


def _bytes(model: Decoder) -> tuple[int, int]:
    """Bytes of the trained and of the constant tensors that the scheme adds."""
    parameters, tables = 0, 0
    for module in model.positions():
        parameters += sum(one.numel() * one.element_size() for one in module.parameters())
        tables += sum(one.numel() * one.element_size() for one in module.buffers())
    return parameters, tables


def _peak(work: Callable[[], object], device: str) -> int:
    """The most bytes of tensors that ``work`` allocated beyond what lay there before it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = int(torch.cuda.memory_allocated())
        work()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before
    with _Allocated() as allocated:
        work()
    return int(allocated.peak)


class _Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operators return, while they live; what a kernel needs inside is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
