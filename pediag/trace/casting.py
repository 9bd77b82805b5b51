"""A pass of a live model as if its parameters and buffers were held in other dtypes; nothing of it is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch

from pediag.trace.graph import Node
from pediag.trace.session import Session, Trace


def cast_as(session: Session, formats: Mapping[str, torch.dtype]) -> Trace | None:
    """The structural pass with the parameters and buffers named in ``formats`` held in those dtypes.

    What the code makes in the dtype of its activations follows, as after ``model.to(dtype)``. None for a model that was
    built without weights: it is built in the dtype that it declares.
    """
    if session.abstract:
        return None
    session.structural()
    fakes, leaves = dict(session.fakes), dict(session.leaves)
    try:
        with session.fake_mode:
            session.fakes.update({name: fakes[name].to(dtype) for name, dtype in formats.items()})
        session.leaves.update({name: _in(leaves[name], dtype) for name, dtype in formats.items()})
        return session.varied(lambda candidate: candidate)
    finally:
        session.fakes.update(fakes)
        session.leaves.update(leaves)


def whole_model(session: Session, dtype: torch.dtype) -> Trace | None:
    """The structural pass of the model after ``.to(dtype)``: every floating parameter and buffer is cast."""
    floating = {name: dtype for name, fake in session.fakes.items() if fake.is_floating_point()}
    return cast_as(session, floating)


def _in(leaf: Node, dtype: torch.dtype) -> Node:
    other = copy.copy(leaf)
    other.dtype = dtype
    if leaf.source is not None:
        other.source = _cast(leaf.source, dtype)
    return other


def _cast(source: Callable[[], torch.Tensor], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: source().to(dtype)
