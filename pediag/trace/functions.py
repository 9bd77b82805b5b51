"""The function mode: facts that exist only above the dispatcher.

A dropout that is switched off, a move to the device where the tensor already is, a tensor made without a
device, and a fused attention as one call: none of these reaches the dispatcher as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from pediag.trace.evaluate import Unavailable, real_numbers
from pediag.trace.frames import user_frame
from pediag.trace.graph import Attention, Dropout, Node, Provenance, Site, Transfer
from pediag.trace.place import DependsOnContent
from pediag.trace.recorder import Recorder

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
    torch.feature_dropout,
    torch.alpha_dropout,
}
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as}
_FACTORIES = {
    torch.arange,
    torch.range,
    torch.linspace,
    torch.logspace,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.eye,
    torch.empty,
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.frombuffer,
    torch.from_numpy,
    torch.tril_indices,
    torch.triu_indices,
    torch.Tensor.__new__,
}
# With a tensor in hand these are conversions, with a device also moves.
_CONVERSIONS = {torch.as_tensor, torch.asarray}
# What stands for an accelerator that this machine does not have.
_HERE = torch.device("cpu")
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


def _absent(device: Any) -> bool:
    """Whether a device is named that this machine does not have; code written for one runs on what there is."""
    if not isinstance(device, (str, torch.device)):
        return False
    kind = str(device).partition(":")[0]
    if kind in ("cpu", "meta"):
        return False
    backend = getattr(torch, kind, None)
    return backend is not None and hasattr(backend, "is_available") and not backend.is_available()


class Functions(TorchFunctionMode):
    """Watches calls of torch functions while a recorder records their operations."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.handlers: dict[Any, Callable[..., Any]] = {}
        for group, handler in (
            (_DROPOUTS, self._dropout),
            (_MOVES, self._move),
            (_FACTORIES, self._factory),
            (_READS, self._read),
            ({torch.Tensor.__format__}, self._written),
            ({torch.Tensor.new_tensor}, self._like_another),
            (_RECURRENT, self._recurrent),
            ({F.scaled_dot_product_attention}, self._attention),
        ):
            self.handlers.update(dict.fromkeys(group, handler))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and "device" in kwargs and _absent(kwargs["device"]):
            kwargs = {**kwargs, "device": _HERE}
        handler = self.handlers.get(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler(func, args, kwargs or {})

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs["input"]
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        recorder = self.recorder
        if not recorder.place.constructing:
            node = recorder.node_of(recorder.abstract(tensor))
            recorder.graph.dropouts.append(
                Dropout(node, float(probability), recorder.place.module, user_frame())
            )
        return tensor

    def _factory(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = self.recorder.place
        outer = place.host, place.making
        if func in _CONVERSIONS and args and isinstance(args[0], torch.Tensor):
            return self._move(func, args, kwargs)
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            args = (self._numbers(args[0]), *args[1:])
        device = kwargs.get("device")
        place.host = device == "cpu" or (device is None and torch.get_default_device().type == "cpu")
        place.making = True
        try:
            return func(*args, **kwargs)
        finally:
            place.host, place.making = outer

    def _numbers(self, item: Any) -> Any:
        """A list of numbers with those in it that are tensors read as such."""
        if isinstance(item, (list, tuple)):
            return [self._numbers(part) for part in item]
        scalar = isinstance(item, FakeTensor) and item.dim() == 0
        return self._read(torch.Tensor.item, (item,), {}) if scalar else item

    def _recurrent(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A recurrent layer knows order by itself, whatever its kernel is made of."""
        if not self.recorder.place.constructing:
            self.recorder.noticer.ordered.append(func.__name__)
        return func(*args, **kwargs)

    def _like_another(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made of numbers where another one is."""
        return self._factory(func, args, {"device": args[0].device, **kwargs})

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_functorch_wrapped_tensor(args[0]):
            # Within torch.vmap: what it stands for is met below.
            return func(*args, **kwargs)
        if not self.recorder.place.constructing:
            args = (self.recorder.abstract(args[0]), *args[1:])
        if func is torch.Tensor.cuda and _absent("cuda"):
            result = args[0].view_as(args[0])
        else:
            result = func(*(_HERE if _absent(item) else item for item in args), **kwargs)
        recorder = self.recorder
        if recorder.place.constructing or not self._names_device(func, args[1:], kwargs):
            return result
        node = recorder.node_of(args[0])
        if not node.host or not node.shape:
            return result
        transfer = Transfer(node, recorder.place.module, user_frame(), self._birth(node))
        recorder.graph.transfers.append(transfer)
        moved, _ = recorder.graph.add("buffer", (recorder.node_of(result),), {}, node.provenance, result)
        moved.moving = node.moving
        moved.names = node.names if node.op == "leaf" else []
        result = result.view_as(result)
        recorder.give(result, moved)
        recorder.moves.append((moved, transfer))
        return result

    def _names_device(self, func: Any, rest: Any, kwargs: Any) -> bool:
        """Whether a conversion moves to a device that is not spelled as the host."""
        if func in (torch.Tensor.cuda, torch.Tensor.type_as):
            return True
        named = [*rest, kwargs.get("device")]
        for item in named:
            if isinstance(item, (torch.Tensor, torch.device)):
                return True
            if isinstance(item, str):
                return item != "cpu"
        return False

    def _birth(self, node: Node) -> Any:
        """The frame where the oldest host-born operand was made."""
        while True:
            born = [operand for operand in node.inputs() if operand.host and operand.shape]
            if not born:
                return node.frame
            node = born[0]

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        node = self.recorder.node_of(args[0])
        if node.provenance is Provenance.CONTENT:
            raise DependsOnContent(f"content is read with .{func.__name__}()")
        try:
            value = self.recorder.evaluator(node)
        except Unavailable as reason:
            raise DependsOnContent(str(reason)) from None
        with real_numbers():
            return func(value, *args[1:], **kwargs)

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number in a text, such as the name of an expert; one of content is written as what stands for it."""
        tensor = args[0]
        node = self.recorder.node_of(self.recorder.abstract(tensor)) if tensor.dim() == 0 else None
        if node is None or node.provenance is Provenance.CONTENT:
            return func(*args, **kwargs)
        return format(self._read(torch.Tensor.item, (tensor,), {}), *args[1:])

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        recorder, graph = self.recorder, self.recorder.graph
        query, key, value, mask = (call.get(name) for name in names[:4])
        assert query is not None and key is not None and value is not None
        nodes = [recorder.node_of(item) if item is not None else None for item in (query, key, value, mask)]
        provenance = max(node.provenance for node in nodes if node is not None)
        if provenance is not Provenance.CONTENT:
            return func(*args, **kwargs)
        if mask is not None:
            self._check_mask(query, key, mask)
        batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            query.shape[:-2], key.shape[:-2] if not call.get("enable_gqa") else ()
        )
        result = query.new_empty((*batch, query.shape[-2], value.shape[-1]))
        operands = tuple(node for node in nodes if node is not None)
        node, _ = graph.add("attention", operands, {}, provenance, result, share=False)
        recorder.give(result, node)
        frame = node.frame = user_frame()
        module = node.module = recorder.place.module
        q, k, v, m = nodes
        assert q is not None and k is not None
        causal = bool(call.get("is_causal"))
        graph.attentions.append(Attention(q, k, v, m, causal, node, module, frame, call.get("scale"), True))
        if m is not None and m.provenance is Provenance.POSITION:
            graph.sites.append(Site("bias", "attention", node, (q, k), (m,), module, frame))
        return result

    def _check_mask(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> None:
        """Raise what the attention itself would when the mask does not cover its queries and keys."""
        scores = (query.shape[-2], key.shape[-2])
        if all(
            size in (1, wanted) for size, wanted in zip(mask.shape[-2:], scores[-mask.dim() :], strict=False)
        ):
            return
        recorder = self.recorder
        text = f"a mask {tuple(mask.shape)} does not fit scores of {scores[0]} queries and {scores[1]} keys"
        error = recorder.failed(RuntimeError(text))
        content, position = recorder.node_of(query), recorder.node_of(recorder.abstract(mask))
        module, frame = recorder.failed_module, recorder.failed_frame
        recorder.failed_site = Site("failed", "attention", content, (content,), (position,), module, frame)
        raise error
