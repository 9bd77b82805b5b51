"""Who trusts the code that came with a file."""

from __future__ import annotations

Trust = bool | str
"""Whether code that came with the target may run; a text says what allows it, such as ``trust in pyproject.toml``."""


def trusted_by(trust: Trust) -> str:
    """What allows the code to run, for a note."""
    return trust if isinstance(trust, str) else "--trust"
