"""A directory with ``config.json``, a ``config.json`` alone, and stored tensors without code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pediag.errors import LoadError
from pediag.targets._paths import digest, first_bytes, shortened
from pediag.targets.config import Config
from pediag.targets.pretrained import add_recipe, with_config
from pediag.targets.safetensors import index_files, read_index, read_safetensors
from pediag.targets.target import LazyTensor, Target

Tensors = Mapping[str, LazyTensor]

TENSORS_ONLY = (
    "stored tensors have numbers but no code: name the model's factory, or add --config config.json"
)


def open_directory(spec: str, path: Path, *, config: Config | None = None, trust: bool = False) -> Target:
    """A pretrained model's folder: its config, a recipe to build it, and its tensors read lazily.

    Raises LoadError where there is no ``config.json``, or a file in it is damaged.
    """
    declared = path / "config.json"
    if not declared.is_file():
        raise _no_config(spec, path)
    target = Target(
        spec=spec, loader="config.json", config=Config.from_file(declared), sha256=digest(declared)
    )
    add_recipe(target)
    target.config = config or target.config
    target.tensors, target.notes = _stored(path, trust=trust)
    return target


def open_json(spec: str, path: Path, *, config: Config | None = None, trust: bool = False) -> Target:
    """A ``config.json`` alone, or the index of a sharded checkpoint."""
    first_bytes(path, spec)
    declared = Config.from_file(path)
    if "weight_map" in declared:
        tensors, notes = read_index(spec, path)
        target = Target(
            spec, "safetensors index", tensors=tensors, notes=notes, reason_not_runnable=TENSORS_ONLY
        )
        return with_config(target, config)
    return Target(
        spec=spec,
        loader="config alone",
        config=config or declared,
        sha256=digest(path),
        reason_not_runnable=f"a config alone is judged by what it declares: name its folder, {path.parent}, "
        "to build the model and run it",
    )


def open_safetensors(spec: str, path: Path, *, config: Config | None = None, trust: bool = False) -> Target:
    """One ``.safetensors`` file: tensors only, and a recipe where the user adds a config."""
    tensors = read_safetensors(spec, path)
    notes = []
    if config is None and (path.parent / "config.json").is_file():
        notes = [f"the config.json beside it was not read: name the folder {path.parent} to use it"]
    target = Target(
        spec, "safetensors", digest(path), tensors=tensors, notes=notes, reason_not_runnable=TENSORS_ONLY
    )
    return with_config(target, config)


def _stored(path: Path, *, trust: bool) -> tuple[Tensors, list[str]]:
    """The folder's tensors in the order in which transformers looks for them, and notes."""
    for name in ("model.safetensors", "diffusion_pytorch_model.safetensors"):
        if (path / name).is_file():
            return read_safetensors(os.fspath(path / name), path / name), []
    if (index := path / "model.safetensors.index.json").is_file():
        return read_index(os.fspath(index), index)
    if (pickled := path / "pytorch_model.bin").is_file():
        return _pickled([pickled], trust=trust)
    if (index := path / "pytorch_model.bin.index.json").is_file():
        shards = [path / name for name in index_files(os.fspath(index), index)]
        return _pickled([shard for shard in shards if shard.is_file()], trust=trust)
    return {}, ["no weights in the folder: rules that read stored numbers have nothing to read"]


def _pickled(paths: list[Path], *, trust: bool) -> tuple[Tensors, list[str]]:
    """Tensors of pickled shards; a shard that asks for code is left unread, with a note."""
    from pediag.targets.checkpoint import UnsafePickle, load_pickle, tensors_of

    tensors: dict[str, LazyTensor] = {}
    notes: list[str] = []
    for path in paths:
        try:
            held, read = load_pickle(os.fspath(path), path, trust=trust)
        except UnsafePickle as error:
            notes.append(str(error))
            continue
        tensors.update(tensors_of(held))
        notes += read
    return tensors, notes


def _no_config(spec: str, path: Path) -> LoadError:
    try:
        files = sorted(item.name for item in path.iterdir())
    except OSError as error:
        return LoadError(f"{spec}: {(error.strerror or str(error)).lower()}")
    if "adapter_config.json" in files:
        return LoadError(f"{spec}: holds an adapter, not a model: name the folder of its base model")
    usable = [
        name for name in files if name.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".py"))
    ]
    hint = f"; in it could be named: {shortened(usable, 6)}" if usable else ""
    return LoadError(f"{spec}: a directory without config.json{hint}")
