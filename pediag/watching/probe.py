"""Looks at activations in the forward pass of a sampled step: where positions are added, and where attention looks.

Hooks are on the modules concerned for that one step, and off again after it; between sampled steps nothing is left.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from pediag.targets.code.optimizers import module_at
from pediag.trace.frames import user_frame
from pediag.trace.graph import op_name
from pediag.watching import measures
from pediag.watching.subjects import Spot, Subjects

_FUSED = "_scaled_dot_product"
_SOFTMAX = frozenset(("_softmax", "_safe_softmax"))


class Hook:
    """A hook that stays behind where a model is copied or saved while it is on: the copy has one that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call what stands behind it."""
        self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Hook], tuple[Any, ...]]:
        return Hook, (_nothing,)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Probe:
    """Measures one forward pass at a time: ``scale`` by spot, ``attention`` by module path."""

    def __init__(self, root: nn.Module, watched: Subjects, *, attention: bool) -> None:
        self.spots: dict[tuple[str, str, tuple[str, int]], list[Spot]] = {}
        for spot in watched.spots:
            self.spots.setdefault((spot.module, spot.op, spot.line), []).append(spot)
        self.attending = frozenset(watched.attentions) if attention else frozenset()
        self.places: dict[str, nn.Module] = {}
        for path in dict.fromkeys([spot.module for spot in watched.spots] + sorted(self.attending)):
            self.places[path] = module_at(root, path)
        self.scale: dict[str, float] = {}
        self.attention: dict[str, dict[str, float]] = {}
        self.trouble: Exception | None = None
        self._hooks: list[Any] = []
        self._modes: list[tuple[str, _Looking]] = []
        self._thread = threading.get_ident()
        self._turns: Counter[object] = Counter()
        self._seen: set[str] = set()

    @property
    def armed(self) -> bool:
        """Whether hooks are on."""
        return bool(self._hooks)

    def arm(self) -> None:
        """Look at the next forward pass."""
        self.disarm()
        self._thread = threading.get_ident()
        self.scale, self.attention = {}, {}
        self._turns.clear()
        self._seen.clear()
        for path, module in self.places.items():
            before, after = self._entering(path), self._leaving(path)
            self._hooks.append(module.register_forward_pre_hook(Hook(before)))
            self._hooks.append(module.register_forward_hook(Hook(after), always_call=True))

    def disarm(self) -> None:
        """Take every hook off, and end what an interrupted forward has left (KeyboardInterrupt runs no hook)."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._modes:
            mode = self._modes.pop()[1]
            if threading.get_ident() == self._thread and _get_current_dispatch_mode() is mode:
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _entering(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            # A checkpointed block runs again in the backward pass, maybe in another thread.
            evaluation = not module.training and not torch.is_grad_enabled()
            if (
                torch.compiler.is_compiling()  # first, for the compiler reads what comes before it
                or evaluation
                or path in self._seen
                or threading.get_ident() != self._thread
            ):
                return
            mode = _Looking(self, path)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._modes.append((path, mode))

        return hook

    def _leaving(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
                return
            if self._modes and self._modes[-1][0] == path:
                self._modes.pop()[1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
                self._seen.add(path)

        return hook

    def meet(self, path: str, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation of interest inside the module at ``path``, before it runs."""
        try:
            if name.startswith(_FUSED):
                self._fused(path, func, args, kwargs)
            else:
                self._addition(path, name, args)
        except Exception as error:  # what is measured must not end a training
            self.trouble = error

    def _addition(self, path: str, name: str, args: tuple[Any, ...]) -> None:
        frame = user_frame(3)
        if frame is None:
            return
        for spot in self.spots.get((path, name, (frame.file, frame.line)), ()):
            positions, content = (_tensor(args, place) for place in (spot.positions, spot.content))
            if positions is None or content is None or not _fits(spot, positions):
                continue
            form = (spot.module, spot.op, spot.line, spot.positions, spot.axes, spot.single)
            if spot.turn == 1 or self._turns[form] + 1 == spot.turn:
                self._turns[form] += 1
                if spot.name not in self.scale:
                    ratio = measures.scale_ratio(positions, content)
                    if ratio is not None:
                        self.scale[spot.name] = ratio
                return

    def _fused(self, path: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in self.attending or path in self.attention:
            return
        names = [argument.name for argument in func._schema.arguments]
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        found = measures.profile(
            call["query"],
            call["key"],
            mask=call.get("attn_mask", call.get("attn_bias")),
            causal=bool(call.get("is_causal")),
            scale=call.get("scale"),
        )
        if found is not None:
            self.attention[path] = found

    def finished(self, path: str, out: Any) -> None:
        """A softmax inside the module at ``path``, after it ran."""
        try:
            if path in self.attending and path not in self.attention and isinstance(out, torch.Tensor):
                found = measures.of_softmax(out)
                if found is not None:
                    self.attention[path] = found
        except Exception as error:
            self.trouble = error


def _tensor(args: tuple[Any, ...], place: int) -> torch.Tensor | None:
    item = args[place] if place < len(args) else None
    return item if isinstance(item, torch.Tensor) else None


def _fits(spot: Spot, positions: torch.Tensor) -> bool:
    """Whether a tensor has the form of the positions of a spot: what tells them from other terms of one line."""
    return positions.dim() == spot.axes and all(positions.shape[axis] == 1 for axis in spot.single)


class _Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of one module's forward, and passes on those of higher order (FlexAttention) as they are."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled inside runs as it would without this mode."""
        return True

    def __init__(self, probe: Probe, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.probe = probe
        self.path = path
        self.wanted = {op for module, op, _ in probe.spots if module == path}
        self.names: dict[Any, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.names.get(func)
        if name is None:
            name = self.names[func] = op_name(func) if isinstance(func, torch._ops.OpOverload) else ""
        if name in self.wanted or name.startswith(_FUSED):
            self.probe.meet(self.path, func, name, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if name in _SOFTMAX:
            self.probe.finished(self.path, out)
        return out
