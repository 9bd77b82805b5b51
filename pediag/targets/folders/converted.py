"""Stored names that transformers 5 changes when it loads a checkpoint: published files keep those of older releases.

ViT, Swin, LLaVA, Qwen2-VL, mixtures of experts and others: parameters of the built model are not named as in the file,
or are made of several stored ones. What becomes of each name the library tells; no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def stored_names(model: Any, stored: Iterable[str]) -> Mapping[str, str]:
    """For each parameter or buffer of a model of transformers that another name fills: that name among ``stored``.

    A parameter that is made of several stored tensors has ``""``. Empty where the library has no such table.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        conversions = get_model_conversion_mapping(model)
    except Exception:  # before version 5, or a class of the user's own that is no model to it
        return {}
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamings = [one for one in conversions if not isinstance(one, WeightConverter)]
    names = dict.fromkeys(_names(model), True)
    found: dict[str, str] = {}
    for key in stored:
        try:
            renamed, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        except Exception:  # a name that its patterns cannot take is left as it is
            continue
        if pattern is None:
            if renamed != key and renamed in names:
                found.setdefault(renamed, key)
        else:
            found.update((made, "") for made in _made(renamed, pattern, converters) if made in names)
    return {name: key for name, key in found.items() if key not in names or not key}


def _names(model: Any) -> Iterator[str]:
    for name, _ in model.named_parameters(remove_duplicate=False):
        yield name
    for name, _ in model.named_buffers(remove_duplicate=False):
        yield name


def _made(renamed: str, pattern: str, converters: Iterable[Any]) -> Iterator[str]:
    """All parameters that a conversion makes, of which ``renamed`` is the first."""
    yield renamed
    for one in converters:
        if pattern in one.source_patterns:
            first, *others = one.target_patterns
            yield from (renamed.replace(first, other) for other in others)
