"""Writes ``pediag/targets/class_defaults.json``: what transformers' classes assume of positions, which keys they read.

Run with the transformers 5 release that the table is to speak of installed, and beside it the wheel of the last
release 4, which is read as text and not installed::

    pip download transformers==4.57.6 --no-deps -d wheels
    python -m tools.class_defaults wheels/transformers-4.57.6-py3-none-any.whl

Release 5 is asked by making each configuration with one key set and looking where its value arrives. Release 4 is
asked by the defaults of the arguments of each ``__init__``. Which keys are read at all is seen by whether the source of
a model, or of one that it takes from, holds the key's name: one that does not cannot read it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

from pediag.targets import families
from pediag.targets.class_defaults import FILE
from pediag.targets.declaration import BASES, SCALINGS

MARK = 123457.0
"""A base that no class assumes."""

KEYS = """alibi use_alibi alibi_bias_max position_embedding_type rotary_pct rotary_emb_fraction rope_pct
partial_rotary_factor rotary_dim no_rope_layers no_rope_layer_interval nope_layer_interval rope_ratio use_dynamic_ntk
relative_attention_num_buckets relative_attention_max_distance rope_freq_scale rope_scale rope_alpha ntk_alpha
compress_pos_emb alpha_value rope_dimension_count rope_scaling_type rope_scaling_factor yarn_ext_factor yarn_attn_factor
yarn_beta_fast yarn_beta_slow max_model_len """.split()
"""Keys that say something of positions, beside the scaling objects."""

TURNING = re.compile(r"(?:^|_)(?:rope|rotary|inv_freq)|RoPE|Rope|Rotary")
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def main(wheel: str) -> None:
    """Write the table."""
    FILE.write_text(_rendered(table(Path(wheel))), encoding="utf-8")


def table(wheel: Path | None) -> dict[str, Any]:
    """The whole table; without a wheel, without what release 4 assumes."""
    import transformers

    old, before = (_old(wheel), wheel.name.split("-")[1]) if wheel is not None else ({}, "")
    made = dict(_made())
    rotary = {}
    for kind, config in made.items():
        if entry := _rotary(kind, type(config)):
            changed = old.get(kind) if old.get(kind) != entry["base"] else None
            rotary[kind] = {**entry, **({"before": changed} if changed is not None else {})}
    composite = {kind: entry for kind, config in made.items() if (entry := _composite(config, rotary))}
    words = {kind: _words(type(config)) for kind, config in made.items()}
    plain = [
        kind
        for kind, config in made.items()
        if not any(map(TURNING.search, words[kind])) and not getattr(config, "sub_configs", None)
    ]
    readers = {key: [kind for kind in made if key in words[kind]] for key in KEYS}
    return {
        "transformers": transformers.__version__,
        "before": before,
        "rotary": rotary,
        "composite": composite,
        "readers": readers,
        "plain": plain,
        "others": [
            kind for kind in made if kind not in rotary and kind not in composite and kind not in plain
        ],
    }


def _rendered(values: Mapping[str, Any]) -> str:
    """JSON with one entry a line."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            inside = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inside}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


# -- the installed release ----------------------------------------------------------------------------------


def _made() -> Iterator[tuple[str, Any]]:
    """Every type of model whose configuration can be made without arguments."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    for kind in sorted(CONFIG_MAPPING_NAMES):
        try:
            yield kind, CONFIG_MAPPING[kind]()
        except Exception:  # a class that wants arguments, or whose own defaults are refused
            continue


def _parameters(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary parameters that a configuration came to, by type of layers; ``""`` for all."""
    found = vars(config).get("rope_parameters") or {}
    nested = {key: part for key, part in sorted(found.items()) if isinstance(part, dict)}
    return nested or ({"": found} if found else {})


def _rotary(kind: str, cls: type) -> dict[str, Any] | None:
    """What a class assumes; None for one without rotary encoding, or of images, whose angles go by rows."""
    parts = _parameters(cls())
    bases = {layer: part["rope_theta"] for layer, part in parts.items() if part.get("rope_theta")}
    kinds = {part.get("rope_type", "default") for part in parts.values()}
    if not bases or "axial" in kinds:
        return None
    entry: dict[str, Any] = {"base": bases[""] if set(bases) == {""} else bases}
    partial = {
        layer: part["partial_rotary_factor"]
        for layer, part in parts.items()
        if "partial_rotary_factor" in part
    }
    if kinds != {"default"}:
        entry["rope_type"] = {layer: part.get("rope_type", "default") for layer, part in parts.items()}
    if set(partial.values()) - {1.0}:
        entry["partial_rotary_factor"] = partial[""] if set(partial) == {""} else partial
    reads, with_scaling = _reads(cls, {}), _reads(cls, {"rope_scaling": {"rope_type": "default"}})
    if reads != {key: [""] for key in ("rope_theta", *SCALINGS)}:
        entry["reads"] = reads
        if later := {
            key: layers for key, layers in with_scaling.items() if key in BASES and key not in reads
        }:
            entry["reads_with_scaling"] = later
    if kind in families.BASES:
        made = cls()
        entry["shape"] = {key: getattr(made, key) for key in SHAPE}
    return entry


def _reads(cls: type, beside: Mapping[str, Any]) -> dict[str, list[str]]:
    """Key -> the types of layers at which its base arrives, written ``beside`` others; without keys that do not."""
    objects = {key: {"rope_type": "default", "rope_theta": MARK} for key in SCALINGS}
    found = {}
    for key, value in {**dict.fromkeys(BASES, MARK), **objects}.items():
        try:
            parts = _parameters(cls(**deepcopy({**beside, key: value})))
        except Exception:  # refused loudly
            continue
        if layers := [layer for layer, part in parts.items() if part.get("rope_theta") == MARK]:
            found[key] = layers
    return found


def _composite(config: Any, rotary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary models inside one, by the key of their section, and the keys that are handed down to them."""
    inside = {}
    for name in getattr(config, "sub_configs", None) or ():
        kind = getattr(vars(config).get(name), "model_type", "")
        if kind in rotary:
            inside[name] = kind
    if not inside:
        return None
    handed = []
    for key, value in (("rope_theta", MARK), ("rope_scaling", {"rope_type": "default", "rope_theta": MARK})):
        try:
            made = type(config)(**{key: value})
        except Exception:  # refused loudly
            continue
        parts = [part for name in inside for part in _parameters(getattr(made, name)).values()]
        if any(part.get("rope_theta") == MARK for part in parts):
            handed.append(key)
    return {"sections": inside, **({"hands_down": handed} if handed else {})}


def _words(cls: type) -> frozenset[str]:
    """The words in the source of a model: its folder's files, those of its base classes, and what these import from."""
    waiting = [
        Path(inspect.getfile(base)).parent
        for base in cls.__mro__
        if base.__module__.startswith("transformers.models.")
    ]
    seen: dict[Path, frozenset[str]] = {}
    while waiting:
        folder = waiting.pop()
        if folder not in seen:
            seen[folder], others = _folder(folder)
            waiting += others
    return frozenset().union(*seen.values())


@cache
def _folder(folder: Path) -> tuple[frozenset[str], list[Path]]:
    """The words of a model's configuration and modelling files, and the folders that they import from."""
    files = [path for kind in ("configuration", "modeling") for path in sorted(folder.glob(f"{kind}_*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = set(re.findall(r"^\s*from \.\.(\w+)(?:\.\w+)? import", text, re.MULTILINE)) - {"auto"}
    return frozenset(re.findall(r"\w+", text)), [folder.parent / name for name in sorted(names)]


# -- the release before it ----------------------------------------------------------------------------------


def _old(wheel: Path) -> dict[str, Any]:
    """Type of model -> the base, or the bases by type of layers, that release 4 assumes."""
    classes: dict[str, ast.ClassDef] = {}
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if re.fullmatch(r"transformers/models/\w+/configuration_\w+\.py", name):
                tree = ast.parse(files.read(name))
                classes.update((node.name, node) for node in tree.body if isinstance(node, ast.ClassDef))
    found = {}
    for node in classes.values():
        kind, bases = _model_type(node), _bases(node, classes)
        if kind and bases:
            apart = {key or "full_attention": base for key, base in bases.items()}
            found[kind] = bases[""] if set(bases) == {""} else apart
    return found


def _model_type(node: ast.ClassDef) -> str:
    for item in node.body:
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant):
            names = [name.id for name in item.targets if isinstance(name, ast.Name)]
            if "model_type" in names:
                return str(item.value.value)
    return ""


def _bases(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, float]:
    """The defaults of a class's own ``__init__``, else of the class that it is made from."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names = [arg.arg for arg in item.args.args][-len(item.args.defaults) or None :]
            given = zip(names, item.args.defaults, strict=False)
            bases = {BASES[name]: _number(value) for name, value in given if name in BASES}
            return {layer: base for layer, base in bases.items() if base is not None}
    above = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    return _bases(above[0], classes) if above else {}


def _number(node: ast.expr) -> float | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the wheel of transformers 4; see the head of this file")
    main(sys.argv[1])
