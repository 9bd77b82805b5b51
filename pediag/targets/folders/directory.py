"""A directory with ``config.json``, a ``config.json`` alone, and stored tensors without code."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from pediag.errors import LoadError
from pediag.targets._content import refuse_special
from pediag.targets._paths import digest, first_bytes, shortened
from pediag.targets._trust import Trust
from pediag.targets.config import Config
from pediag.targets.files.safetensors import read_safetensors
from pediag.targets.folders.layouts import beside_config, not_a_model
from pediag.targets.folders.original import is_original, open_original, open_original_folder
from pediag.targets.folders.pretrained import add_recipe, with_config
from pediag.targets.folders.weights import elsewhere, read_index, weights_in
from pediag.targets.target import Target

TENSORS_ONLY = (
    "stored tensors have numbers but no code: name the model's factory, or add --config config.json"
)
CONFIG, ADAPTER, PARAMS = "config.json", "adapter_config.json", "params.json"
MODEL_STEMS = ("model", "diffusion_pytorch_model", "pytorch_model")

FILES_LIMIT = 10_000
"""Names of a folder that are looked at."""


def open_directory(spec: str, path: Path, *, config: Config | None = None, trust: Trust = False) -> Target:
    """A pretrained model's folder: its config, a recipe to build it, and its tensors read lazily.

    An adapter's folder opens its base model where that is at hand; a ``params.json`` is read where there is no
    ``config.json``. Raises LoadError where there is none of these, or a file in it is damaged.
    """
    names = _names(spec, path)
    for name in (CONFIG, ADAPTER, PARAMS):
        if name in names:
            refuse_special(f"{spec}/{name}".replace("//", "/"), path / name)
    if ADAPTER in names and (CONFIG not in names or not _has_weights(path)):
        from pediag.targets.folders.adapter import open_adapter

        return open_adapter(spec, path, config=config, trust=trust)
    if CONFIG in names:
        return _pretrained(spec, path, names, config, trust)
    if PARAMS in names:
        return open_original_folder(spec, path, config=config, trust=trust)
    raise not_a_model(spec, path, names)


def open_json(spec: str, path: Path, *, config: Config | None = None, trust: Trust = False) -> Target:
    """A ``config.json`` alone, a ``params.json``, an adapter's config, or the index of a sharded checkpoint."""
    first_bytes(path, spec)
    declared = Config.from_file(path)
    if "weight_map" in declared:
        return _indexed(spec, path, config, trust)
    if "peft_type" in declared:
        from pediag.targets.folders.adapter import open_adapter

        return open_adapter(spec, path.parent, config=config, trust=trust, declared=declared)
    if is_original(declared):
        return open_original(spec, path, declared, config=config)
    return Target(
        spec=spec,
        loader="config alone",
        config=config or declared,
        sha256=digest(path),
        reason_not_runnable=f"a config alone is judged by what it declares: name its folder, {path.parent}, "
        "to build the model and run it",
    )


def open_safetensors(spec: str, path: Path, *, config: Config | None = None, trust: Trust = False) -> Target:
    """One ``.safetensors`` file: tensors only, and a recipe where the user adds a config."""
    tensors = read_safetensors(spec, path)
    notes = []
    if config is None and (path.parent / CONFIG).is_file():
        notes = [f"the config.json beside it was not read: name the folder {path.parent} to use it"]
    target = Target(
        spec, "safetensors", digest(path), tensors=tensors, notes=notes, reason_not_runnable=TENSORS_ONLY
    )
    return with_config(target, config)


def _indexed(spec: str, path: Path, config: Config | None, trust: Trust) -> Target:
    read = read_index(spec, path, trust=trust)
    assert read is not None
    kind = "safetensors" if read.files[0].endswith(".safetensors") else "torch.save"
    target = Target(
        spec,
        f"{kind} index",
        digest(path),
        tensors=read.tensors,
        notes=read.notes,
        reason_not_runnable=TENSORS_ONLY,
        missing=read.missing,
    )
    return with_config(target, config)


def _pretrained(spec: str, path: Path, names: list[str], config: Config | None, trust: Trust) -> Target:
    """A folder in the transformers layout."""
    declared = path / CONFIG
    target = Target(spec=spec, loader=CONFIG, config=Config.from_file(declared), sha256=digest(declared))
    add_recipe(target, folder=path, trust=trust)
    target.config = config or target.config
    read = weights_in(path, MODEL_STEMS, trust=trust)
    target.tensors, target.missing = read.tensors, read.missing
    target.notes += read.notes or ([] if read.files else [_no_weights(path, names)])
    target.notes += beside_config(path, names)
    return target


def _no_weights(path: Path, names: list[str]) -> str:
    """A note on a folder without weights that are read."""
    told = "no weights in the folder: rules that read stored numbers have nothing to read"
    if other := elsewhere(names):
        return f"no weights that are read in the folder; {other}"
    for name in names:
        if (path / name).is_dir() and _has_weights(path / name):
            return f"{told}; there are some in {path / name}"
    if others := [name for name in names if _is_weight(name) and (path / name).is_file()]:
        told = "no weights under the names that transformers reads"
        return f"{told}; to check another file, name it: {shortened(others, 4)}"
    return told


def _has_weights(path: Path) -> bool:
    try:
        listed = [item.name for item in islice(path.iterdir(), FILES_LIMIT)]
    except OSError:
        return False
    return any(name.startswith((*MODEL_STEMS, "consolidated")) and _is_weight(name) for name in listed)


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json"))


def _names(spec: str, path: Path) -> list[str]:
    """Sorted names in a folder. Raises LoadError where it cannot be listed."""
    try:
        return sorted(islice(os.listdir(path), FILES_LIMIT))
    except OSError as error:
        raise LoadError(f"{spec}: {(error.strerror or str(error)).lower()}") from None
