"""From what a user named to a Target: one function that picks the opener."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pediag.errors import LoadError
from pediag.targets.target import Target

if TYPE_CHECKING:
    from torch import nn

    from pediag.targets.config import Config


def open_target(
    target: nn.Module | str | os.PathLike[str], *, config: Config | None = None, trust: bool = False
) -> Target:
    """Open a live module or a spec; see the package. Raises LoadError with one line that says what to do."""
    if isinstance(target, (str, os.PathLike)):
        raise LoadError(f"{os.fspath(target)}: cannot be opened yet")
    return Target(f"{type(target).__name__} (live)", "live module", module=target, config=config)
