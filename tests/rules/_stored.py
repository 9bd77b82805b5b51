"""Files without code, for the rules that judge what lies in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import pediag
from pediag.report import Report


def judged(folder: Path, state: Mapping[str, Tensor], code: str, **options: Any) -> Report:
    """The report of one rule on a safetensors file with these tensors."""
    from safetensors.torch import save_file

    path = folder / "stored.safetensors"
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    return pediag.check(path, select=[code], **options)
