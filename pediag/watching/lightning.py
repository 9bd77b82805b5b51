"""The watch as a callback of Lightning."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from pediag.errors import UsageError
from pediag.watching.run import Watch, counted


def _callback() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise UsageError("lightning is not installed: pip install lightning")


if TYPE_CHECKING:
    _Callback = object
else:
    _Callback = _callback()


class WatchCallback(_Callback):
    """``Trainer(callbacks=[WatchCallback(every=100, log="run.jsonl")])``.

    Takes what :func:`pediag.watch` takes, but the optimizer, which the trainer has. ``model`` names the attribute of
    the LightningModule that is the network, or finds it; without it that is the LightningModule itself where it has a
    forward, else its largest part. ``watch`` is the running one.
    """

    def __init__(self, model: str | Callable[[Any], nn.Module] | None = None, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options
        self.watch: Watch | None = None
        self.counts = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the watch."""
        self._close()
        optimizers, self.counts = counted(list(trainer.optimizers) or None)
        options = {"first_step": int(trainer.global_step), **self.options}
        self.watch = Watch(network(pl_module, self.model), optimizers, **options)
        self.watch.__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look at the gradients where the optimiser does not tell of its steps."""
        if self.counts and self.watch is not None:
            self.watch.before_step()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Count a step where the optimiser does not tell of it."""
        if self.counts and self.watch is not None and trainer.global_step > self.watch.steps:
            self.watch.after_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch of a training that failed."""
        self._close()

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def network(module: nn.Module, named: str | Callable[[Any], nn.Module] | None = None) -> nn.Module:
    """The network of a LightningModule. Raises UsageError for a name that is no part of it."""
    if callable(named):
        return named(module)
    if named is not None:
        found = getattr(module, named, None)
        if not isinstance(found, nn.Module):
            raise UsageError(f"model={named!r}: {type(module).__name__} has no part of this name")
        return found
    home = type(module).forward.__module__
    if not home.startswith(("lightning.", "pytorch_lightning.")):
        return module
    parts = list(module.children())
    return max(parts, key=lambda part: sum(item.numel() for item in part.parameters())) if parts else module
