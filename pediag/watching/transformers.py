"""The watch as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

from pediag.errors import UsageError
from pediag.watching.run import Watch, counted

try:
    from transformers import TrainerCallback
except ImportError as _error:
    raise UsageError("transformers is not installed: pip install 'pediag[transformers]'") from _error


class WatchCallback(TrainerCallback):  # type: ignore[misc]
    """``Trainer(..., callbacks=[WatchCallback(every=100, log="run.jsonl")])``.

    Takes what :func:`pediag.watch` takes, but model and optimizer, which the trainer has. ``watch`` is the running one.
    A training that is resumed goes on with the trainer's count of steps.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.watch: Watch | None = None
        self.counts = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Start the watch of the trainer's model and optimiser."""
        self._close()
        first = self.options.get("first_step", int(state.global_step))
        options = {**self.options, "first_step": first}
        optimizer, self.counts = counted(given.get("optimizer"))
        self.watch = Watch(given["model"], optimizer, **options)
        self.watch.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at the gradients where the optimiser does not tell of its steps."""
        if self.counts and self.watch is not None:
            self.watch.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Count a step where the optimiser does not tell of it."""
        if self.counts and self.watch is not None:
            self.watch.after_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the watch."""
        self._close()

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()
