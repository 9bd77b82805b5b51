"""PEFT adapters: a folder with ``adapter_config.json`` and small weights that change a base model kept elsewhere.

The layout: https://huggingface.co/docs/peft/developer_guides/checkpoint. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pediag.errors import LoadError
from pediag.targets._matching import Names, bare_name
from pediag.targets._paths import digest, shortened
from pediag.targets._trust import Trust
from pediag.targets.config import Config
from pediag.targets.folders.pretrained import with_config
from pediag.targets.folders.weights import Weights, weights_in
from pediag.targets.target import LazyTensor, Target

STEMS = ("adapter_model",)
PREFIX = "base_model.model."
TABLES = (".lora_embedding_A", ".lora_embedding_B")
ROWS = ".token_adapter.trainable_tokens_delta"
"""How PEFT names what it learns of a table: a low-rank change, and single rows that are put in place of stored ones."""

_NO_BASE_NAMED = (
    "adapter_config.json names no base model (base_model_name_or_path): name the base model's folder"
)


def open_adapter(
    spec: str,
    path: Path,
    *,
    config: Config | None = None,
    trust: Trust = False,
    declared: Config | None = None,
) -> Target:
    """The base model that the adapter in folder ``path`` was made for, with what the adapter puts in its place.

    Where the base model is not at hand, the adapter's tensors alone, and what is missing. Raises LoadError for files
    that are damaged.
    """
    file = path / "adapter_config.json"
    settings = declared or Config.from_file(file)
    weights = weights_in(path, STEMS, trust=trust)
    kind = settings.get("peft_type")
    base = _base_folder(settings.get("base_model_name_or_path"), path)
    if base is None or config is not None:
        target = _alone(spec, settings, weights, kind)
        target.sha256 = digest(file) if file.is_file() else None
        return with_config(target, config)
    from pediag.targets.folders.directory import open_directory

    target = open_directory(os.fspath(base), base, trust=trust)
    target.notes = [
        f"the {_named(kind)} adapter {spec} on its base model {base}",
        *target.notes,
        *weights.notes,
    ]
    target.spec, target.sha256 = spec, digest(file) if file.is_file() else None
    target.loader = f"PEFT adapter on {target.loader}"
    _put_over(target, weights.tensors)
    target.notes += _told(settings, weights.tensors)
    return target


def _base_folder(name: object, path: Path) -> Path | None:
    """The folder of the base model, from the current folder as PEFT takes it or beside the adapter."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    try:
        found = next((one for one in (Path(name), path / name) if (one / "config.json").is_file()), None)
    except OSError:
        return None
    return None if found is None or (found / "adapter_config.json").is_file() else found


def _alone(spec: str, settings: Config, weights: Weights, kind: object) -> Target:
    """The adapter without its base."""
    name = settings.get("base_model_name_or_path")
    changes = "an adapter changes no positions unless it targets a position table or replaces one"
    missing = f"the base model {name} is not here: check its folder; {changes}" if name else _NO_BASE_NAMED
    if not weights.tensors:
        raise LoadError(f"{spec}: an adapter without weights (adapter_model.safetensors); {missing}")
    return Target(
        spec,
        f"PEFT adapter ({_named(kind)})",
        tensors=weights.tensors,
        notes=[*weights.notes, *_told(settings, weights.tensors)],
        reason_not_runnable=missing,
    )


def _named(kind: object) -> str:
    return {"LORA": "LoRA"}.get(kind, kind) if isinstance(kind, str) else "unnamed"


@dataclass(slots=True)
class _Over:
    """What an adapter puts in the place of stored tensors, by the base's names."""

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)


def _put_over(target: Target, given: Mapping[str, LazyTensor]) -> None:
    """Replace the base's tensors by those of the same name and shape that the adapter keeps whole."""
    over = _Over()
    names = Names(target.tensors, "")
    for name, tensor in given.items():
        stored = names.find(_in_base(name))
        if stored is None:
            continue
        if target.tensors[stored].shape == tensor.shape:
            over.tensors[stored] = replace(tensor, name=stored)
        else:
            shapes = f"{list(tensor.shape)} for {list(target.tensors[stored].shape)}"
            over.misfits.append(f"{stored} ({shapes})")
    target.tensors = {**target.tensors, **over.tensors}
    if over.tensors:
        target.notes.append(f"taken from the adapter: {shortened(over.tensors, 4)}")
    if over.misfits:
        target.notes.append(f"not taken from the adapter, as the shape differs: {shortened(over.misfits, 4)}")


def _in_base(name: str) -> str:
    """The base's name of a tensor that the adapter keeps whole."""
    inner = bare_name(name).removeprefix(PREFIX)
    return inner.replace(".modules_to_save.default", "").replace(".modules_to_save", "")


def _told(settings: Config, given: Mapping[str, Any]) -> list[str]:
    """Notes on what the adapter changes besides whole tensors."""
    notes = []
    tables = {_in_base(name).partition(part)[0] for name in given for part in TABLES if part in name}
    if tables:
        notes.append(
            f"the adapter adds a low-rank change to {shortened(sorted(tables), 4)}; it is not added here"
        )
    rows = {_in_base(name).partition(ROWS)[0] for name in given if ROWS in name}
    if rows:
        notes.append(
            f"the adapter puts single rows into {shortened(sorted(rows), 4)}; they are not put in here"
        )
    virtual = settings.get("num_virtual_tokens")
    if type(virtual) is int and virtual > 0:
        notes.append(
            f"the adapter puts {virtual} virtual tokens in front of the input, which take up positions"
        )
    return notes
