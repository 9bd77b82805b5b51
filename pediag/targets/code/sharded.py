"""Tensors that are not whole where the model would use them: spread over ranks, or kept on another device.

Their shapes are known. The numbers of what is spread need all ranks; what is kept elsewhere is read when asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

GATHER = "call pediag.check(model, gather=True) on every rank"
SUMMON = "check it under FullyShardedDataParallel.summon_full_params(model), entered on every rank"
ZERO = "check it under deepspeed.zero.GatheredParameters(model.parameters()), entered on every rank"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What is known of a tensor that a stand-in without numbers takes the place of.

    ``device`` is where the model uses it. ``reason`` goes on after the tensor's name and says why its numbers are
    not at hand; ``gather`` reads them when every rank that holds a part calls it, ``read`` without the others.
    """

    device: torch.device
    reason: str = ""
    gather: Callable[[], torch.Tensor] | None = None
    read: Callable[[], torch.Tensor] | None = None


def elsewhere(tensor: torch.Tensor) -> Elsewhere | None:
    """What is known of ``tensor`` if it only stands for one that is not whole here; else None."""
    found = getattr(tensor, "_pediag_elsewhere", None)
    return found if isinstance(found, Elsewhere) else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one plain tensor of its full shape; a stand-in without numbers where this rank has not all."""
    if _is_dtensor(tensor):
        return _of_dtensor(tensor)
    if hasattr(tensor, "ds_id") and hasattr(tensor, "ds_shape"):
        return _of_zero(tensor)
    return tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor`` as a plain tensor, without numbers when it is but a part."""
    if not _is_dtensor(tensor):
        return whole(tensor)
    full, local = whole(tensor), _local(tensor)
    known = elsewhere(full)
    return full if known is None else _stand_in(tuple(local.shape), tensor, known)


def flat_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """The owner, name and whole value of every parameter that an FSDP1 wrapper keeps in its flat one."""
    handle: Any = getattr(module, "_handle", None)
    flat: Any = getattr(handle, "flat_param", None)
    if flat is None or not hasattr(flat, "_param_infos"):
        return
    values = _of_flat(handle, flat)
    for (name, owner, _), value in zip(flat._param_infos, values, strict=True):
        yield owner, name, value
    first = {(owner, name): value for (name, owner, _), value in zip(flat._param_infos, values, strict=True)}
    for name, owner, _, first_name, first_owner, _ in flat._shared_param_infos:
        yield owner, name, first[first_owner, first_name]


def computes_in(module: nn.Module) -> torch.dtype | None:
    """The dtype that a sharding wrapper or hook casts the parameters of ``module`` to; None where it casts none."""
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    policies = [
        getattr(module, "mixed_precision", None),
        *(getattr(item, "_mp_policy", None) for item in owners),
    ]
    found = [getattr(policy, "param_dtype", None) for policy in policies]
    return next((dtype for dtype in found if isinstance(dtype, torch.dtype)), None)


def used_on(module: nn.Module) -> torch.device | None:
    """The device that an offloading hook of accelerate has ``module`` run on; None without one."""
    devices = [getattr(hook, "execution_device", None) for hook in _offloading(module)]
    found = next((device for device in devices if device is not None), None)
    return None if found is None else torch.device(found)


def brought(module: nn.Module, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A stand-in on ``device`` for a tensor of ``module`` that hooks would bring there, read where it is kept."""
    maps = (getattr(hook, "weights_map", None) for hook in _offloading(module))
    kept = next((kept for kept in maps if kept is not None), None)
    if tensor.is_meta and kept is None:
        return tensor
    stored: Any = kept if tensor.is_meta else {name: tensor}
    return _stand_in(tuple(tensor.shape), tensor, Elsewhere(device, read=lambda: stored[name]))


def _offloading(module: nn.Module) -> list[Any]:
    """The hooks of accelerate on ``module``, one by one."""
    hook = module.__dict__.get("_hf_hook")
    return [] if hook is None else [hook, *getattr(hook, "hooks", ())]


def _is_dtensor(tensor: torch.Tensor) -> bool:
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def _local(tensor: Any) -> torch.Tensor:
    local = tensor._local_tensor
    assert isinstance(local, torch.Tensor)
    return local.detach()


def _of_dtensor(tensor: Any) -> torch.Tensor:
    mesh, local = tensor.device_mesh, _local(tensor)
    pairs = list(enumerate(tensor.placements))
    ranks = 1
    for axis, placement in pairs:
        ranks *= 1 if placement.is_replicate() else mesh.size(axis)
    if ranks == 1 and mesh.get_coordinate() is not None:
        return _alike(local, tensor)
    reason = f"is sharded over {ranks} ranks: {GATHER}"
    if mesh.get_coordinate() is None:
        reason = "is held by other ranks only: check the model on one of those"
    known = Elsewhere(local.device, reason, lambda: tensor.detach().full_tensor())
    return _stand_in(tuple(tensor.shape), tensor, known)


def _of_zero(tensor: Any) -> torch.Tensor:
    shape = tuple(tensor.ds_shape)
    if tuple(tensor.shape) == shape:
        return tensor if isinstance(tensor, torch.Tensor) else torch.as_tensor(tensor)
    known = Elsewhere(tensor.device, f"is partitioned over ranks by DeepSpeed: {ZERO}")
    return _stand_in(shape, tensor, known)


def _of_flat(handle: Any, flat: Any) -> list[torch.Tensor]:
    shapes = [tuple(shape) for shape in flat._shapes]
    if not handle.is_sharded(flat.data) and flat.numel() >= sum(flat._numels):
        with torch.no_grad():
            views = list(handle._get_unflat_views())
        return [_alike(view.detach(), flat) for view in views]
    reason = f"is in a flat parameter sharded over {handle.world_size} ranks: {SUMMON}"
    known = Elsewhere(flat.device, reason)
    return [_stand_in(shape, flat, known) for shape in shapes]


def _alike(plain: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """``plain``, as a parameter where ``original`` is one."""
    if not isinstance(original, nn.Parameter):
        return plain
    return nn.Parameter(plain, requires_grad=original.requires_grad)


def _stand_in(shape: tuple[int, ...], original: torch.Tensor, known: Elsewhere) -> torch.Tensor:
    with torch.inference_mode(False):
        empty = torch.empty(shape, dtype=original.dtype, device="meta")
        made = _alike(empty, original)
    made._pediag_elsewhere = known  # type: ignore[attr-defined]
    return made
