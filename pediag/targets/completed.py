"""Rotary declarations with what the model's class assumes of the keys that are left out. Imports no torch.

A published config may leave out its base (Llama 1 and 2, Gemma 3) or the width of a head (Gemma, Qwen3); the class of
transformers that reads it then takes its own. What was filled in is told, so that nobody takes it for declared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pediag.targets.class_defaults import UNLESS, Assumed, assumed, models_of_text, turns
from pediag.targets.config import Config
from pediag.targets.declaration import BASES, SCALINGS, RopeDeclaration, Said, declarations, undeclared
from pediag.targets.rope_keys import (
    LATENT,
    OWN_BASE,
    UNLIKE_LAYERS,
    own_head_width,
    own_share,
)

SIZES = ("hidden_size", "d_model", "n_embd", "num_attention_heads", "n_head", "num_hidden_layers", "n_layer")
"""Keys of which an object that describes a whole model has at least one."""

PLAIN = ("default", "proportional")
"""Types of a class's own scaling that are known whole from its defaults; others have numbers beside the type."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A rotary declaration, the type of model whose class completes it, and what it was completed with.

    ``assumed`` is by the keys of :class:`RopeDeclaration`, "rope_theta" for the base; empty where all is declared.
    """

    declared: RopeDeclaration
    kind: str = ""
    assumed: Mapping[str, Any] | None = None


def completed(config: Config) -> list[Completed]:
    """Every rotary encoding that ``config`` and the classes of transformers that read it come to.

    Nothing is filled in for types that transformers does not know, for configs that bring code of their own
    (``auto_map``) and for formats with another reader. A base that is written as null is not filled in either: the
    class takes it as it stands.
    """
    spoken = declarations(config)
    if config.typed or config.get("auto_map"):
        return [Completed(one) for one in spoken]
    found: list[Completed] = []
    told: set[str] = set()
    for path, values, kind in models_of_text(config):
        told.add(path)
        here = [one for one in spoken if one.section == path]
        found += _section(config, path, values, kind, here)
    return [*found, *(Completed(one) for one in spoken if one.section not in told)]


def _section(
    config: Config, path: str, values: Mapping[str, Any], kind: str, spoken: list[RopeDeclaration]
) -> Iterator[Completed]:
    if kind in UNLESS and not turns(kind, values):
        return  # another key turns rotation off, so what is said of it is read by nothing
    known = _known(kind, values)
    if known is None or not (spoken or any(values.get(key) for key in SIZES)):
        yield from (Completed(one) for one in spoken)
        return
    silent = undeclared(config, path, values, kind)
    for one in _by_layer(known, silent, spoken):
        made = _filled(one, kind, known, values)
        if made is not None:
            yield made


def _known(kind: str, values: Mapping[str, Any]) -> Assumed | None:
    """What the class assumes, None where it is not known whole; a list of bases by layer is read by no formula here."""
    if kind in OWN_BASE:
        return Assumed({"": OWN_BASE[kind]}, reads={})
    if kind in UNLIKE_LAYERS or not turns(kind, values) or values.get("layer_rope_theta"):
        return None
    return assumed(kind)


def _by_layer(
    known: Assumed, silent: RopeDeclaration, spoken: list[RopeDeclaration]
) -> Iterator[RopeDeclaration]:
    """What is declared, and one declaration for each type of layers of the class that nothing is said of."""
    flat = next((one for one in spoken if not one.layer_type), None)
    layers = [layer for layer in known.bases if layer]
    if not layers or (flat is not None and flat.base is not None):
        yield from spoken or [silent]
        return
    said = {one.layer_type: one for one in spoken if one.layer_type}
    for layer in layers:
        if layer in said:
            yield said.pop(layer)
        elif flat is not None and any(layer in known.reads.get(key, ()) for key in SCALINGS):
            yield replace(flat, layer_type=layer)
        else:
            yield replace(silent, layer_type=layer)
    yield from said.values()


def _filled(one: RopeDeclaration, kind: str, known: Assumed, values: Mapping[str, Any]) -> Completed | None:
    """A declaration with its gaps filled; None where the class's own scaling or width is not known."""
    layer = one.layer_type if one.layer_type in known.bases else ""
    base = known.bases.get(layer)
    if one.base is not None or _null(values, known, layer) or base is None:
        filled, theta = one, {}
    else:
        scaled = one.type is not None or one.scaling
        if not scaled and known.types.get(layer, "default") not in PLAIN:
            return None
        filled, theta = replace(one, base=Said(base, "")), {"rope_theta": base}
        if not scaled and (own := known.types.get(layer)) not in (None, "default"):
            filled = replace(filled, type=Said(own, ""))
    widths = _widths(filled, kind, known, layer)
    if widths is None:
        return Completed(one, kind) if not theta else None
    model = {**filled.model, **{key: Said(value, "") for key, value in widths.items()}}
    if filled.type is not None and filled.type.value == "proportional" and "partial_rotary_factor" in widths:
        inside = {"partial_rotary_factor": Said(widths["partial_rotary_factor"], "")}
        filled = replace(filled, scaling={**filled.scaling, **inside})
    return Completed(replace(filled, model=model), kind, {**theta, **widths})


def _null(values: Mapping[str, Any], known: Assumed, layer: str) -> bool:
    """Whether a base is written as null where the class reads it."""
    keys = [key for key, layers in known.reads.items() if layer in layers and key in BASES]
    inside = [part for key in SCALINGS if isinstance(part := values.get(key), Mapping)]
    inside += [part for whole in inside if isinstance(part := whole.get(layer), Mapping)]
    return any(key in values and values[key] is None for key in keys) or any(
        "rope_theta" in part and part["rope_theta"] is None for part in inside
    )


def _widths(one: RopeDeclaration, kind: str, known: Assumed, layer: str) -> dict[str, Any] | None:
    """The widths that the class takes where none are written; None where it is not one number for all layers."""
    if kind in LATENT:
        return {key: width for key, width in zip(_TURNING, LATENT[kind], strict=True) if one.get(key) is None}
    if one.get("qk_rope_head_dim") is not None or one.get("rotary_dim") is not None:
        return {}
    found: dict[str, Any] = {}
    if one.get("head_dim") is None:
        if own := own_head_width(kind):
            found["head_dim"] = own
        else:
            sizes = ("hidden_size", "num_attention_heads")
            found |= {key: known.shape[key] for key in sizes if one.get(key) is None and key in known.shape}
    if one.get("partial_rotary_factor") is None:
        share = known.partial.get(layer, 1.0) if known.partial else own_share(kind)
        if share is None:
            return None
        found |= {"partial_rotary_factor": share} if share != 1 else {}
    return found


_TURNING = ("qk_rope_head_dim", "qk_nope_head_dim")
