"""Where an encoding stands: the place of a finding, and its layers in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pediag.rules.finding import Where

if TYPE_CHECKING:
    from pediag.encodings import Encoding


def where(encoding: Encoding) -> Where:
    """The module and line where ``encoding`` enters first; of a declared one the line of its key."""
    module = encoding.modules[0] if encoding.modules else ""
    return Where(module, encoding.id, encoding.source_file, encoding.source_line)


def layers_text(encoding: Encoding) -> str:
    """``" (layers 0-31)"``, or nothing."""
    return f" ({encoding.layers})" if encoding.layers else ""
