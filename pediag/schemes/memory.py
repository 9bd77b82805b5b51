"""What a comparison takes at the least, so that one that cannot fit is refused before it starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pediag.errors import UsageError

if TYPE_CHECKING:
    from pediag.schemes.model import Setting

FLOAT = 4
"""Bytes of a float32."""

COPIES = 4
"""Floats of a trained weight: itself, its gradient and the two moments of AdamW."""

KEPT = 15
"""Widths of a token that a layer keeps for its backward pass: two norms' inputs and outputs, queries, keys and values,
what attention returns, and the two of four widths within the feed-forward part."""

MASKED = frozenset({"alibi", "t5", "shaw"})
"""Schemes whose bias makes a mask of heads x tokens x tokens."""


def least(setting: Setting) -> int:
    """Bytes that the decoders of all schemes and one step of the greediest take at the least.

    Each decoder has about 12 width^2 weights a layer; all stay in memory, so that their steps can take turns.
    """
    weights = 12 * setting.d_model**2 * setting.layers * COPIES * len(setting.schemes)
    tokens = setting.batch * setting.seq_len
    step = KEPT * tokens * setting.d_model * setting.layers
    mask = setting.heads * setting.seq_len**2 if MASKED.intersection(setting.schemes) else 0
    return FLOAT * (weights + step + mask)


def refuse_too_large(setting: Setting) -> None:
    """Raise UsageError where the device has not even what the comparison takes at the least."""
    need, has = least(setting), _memory(setting.device)
    if has is not None and need > has:
        raise UsageError(
            f"this takes {need / 2**30:,.0f} GiB of memory at the least, and {setting.device} has {has / 2**30:,.0f}: "
            "give a smaller --d-model, --layers, --seq-len or --batch, or fewer --schemes"
        )


def _memory(device: str) -> int | None:
    """Bytes of memory of the device, or None where that cannot be told."""
    import torch

    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[1])
    if device != "cpu":
        return None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
