"""What one rule says of a config given as an object."""

from __future__ import annotations

from typing import Any

from pediag.rules.finding import Finding
from pediag.rules.registry import find
from pediag.rules.rule import Facets, NotApplicable
from pediag.targets import Config

SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 4}
"""A model with heads of 128 channels."""


def found(code: str, config: Any, seq_len: int = 4096) -> list[Finding]:
    """The findings of a rule; none where it does not apply."""
    given = config if isinstance(config, Config) else Config.from_object(config)
    try:
        return list(find(code).check(Facets(seq_len=seq_len, config=given)))
    except NotApplicable:
        return []


def one(code: str, model_type: str, **keys: Any) -> Finding:
    """The only finding on a model of that type with those keys."""
    (finding,) = found(code, {"model_type": model_type, **SIZES, **keys})
    return finding


def none(code: str, model_type: str, **keys: Any) -> bool:
    """Whether a rule has nothing to say of a model of that type with those keys."""
    return found(code, {"model_type": model_type, **SIZES, **keys}) == []
