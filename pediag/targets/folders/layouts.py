"""Folders that are no model of a layout that is read: what they are, and which folder or file to name instead."""

from __future__ import annotations

from pathlib import Path

from pediag.errors import LoadError
from pediag.targets._paths import shortened
from pediag.targets.folders.weights import elsewhere

DECLARING = ("config.json", "params.json", "adapter_config.json")
USABLE = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pt2", ".gguf", ".py")


def not_a_model(spec: str, path: Path, names: list[str]) -> LoadError:
    """The error for a folder without a declaration, with what to name or do instead."""
    for telling in (_distributed, _diffusers, _sentences, _hub_cache, _deepspeed):
        if told := telling(path, names):
            return LoadError(f"{spec}: {told}")
    if other := elsewhere(names):
        return LoadError(f"{spec}: a directory without config.json; {other}")
    usable = [name for name in names if name.endswith(USABLE)]
    hint = f"; in it could be named: {shortened(usable, 6)}" if usable else ""
    if inner := _models_below(path, names):
        hint = f"; a model is in {shortened(inner, 3)}: name that folder"
    hint = hint or "; name the folder that holds a model's config.json, or a file of weights"
    return LoadError(f"{spec}: a directory without config.json{hint}")


def beside_config(path: Path, names: list[str]) -> list[str]:
    """Notes on what lies beside a ``config.json`` and is not looked at."""
    if "adapter_config.json" in names:
        return [
            f"the adapter beside it is not applied: name {path / 'adapter_config.json'} to open it on its base"
        ]
    return []


def _distributed(path: Path, names: list[str]) -> str:
    if ".metadata" not in names and not any(name.endswith(".distcp") for name in names):
        return ""
    return (
        "a distributed checkpoint: gather it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch "
        "FOLDER FILE.pt` and name the file"
    )


def _diffusers(path: Path, names: list[str]) -> str:
    if "model_index.json" not in names:
        return ""
    inner = _models_below(path, names)
    return f"a diffusers pipeline: name one of its parts{': ' + shortened(inner, 6) if inner else ''}"


def _sentences(path: Path, names: list[str]) -> str:
    """Sentence-transformers keep the transformer in a folder of its own, or at the top."""
    if "modules.json" not in names:
        return ""
    inner = _models_below(path, names)
    named = f": {shortened(inner, 3)}" if inner else ", which is not here"
    return f"a sentence-transformers model: name the folder of its transformer{named}"


def _hub_cache(path: Path, names: list[str]) -> str:
    """The cache of the Hugging Face hub: ``blobs``, ``refs``, ``snapshots``."""
    if not {"snapshots", "blobs"} <= set(names):
        return ""
    try:
        found = sorted(item for item in (path / "snapshots").iterdir() if item.is_dir())
    except OSError:
        found = []
    named = f": name {shortened(map(str, found), 3)}" if found else ", without a snapshot"
    return f"a cache of the Hugging Face hub{named}"


def _deepspeed(path: Path, names: list[str]) -> str:
    states = sorted(path.glob("*/mp_rank_*_model_states.pt")) or sorted(
        path.glob("mp_rank_*_model_states.pt")
    )
    if not states or not states[0].is_file():
        return ""
    return f"a DeepSpeed checkpoint: name {states[0]}, or what its zero_to_fp32.py makes of it"


def _models_below(path: Path, names: list[str]) -> list[str]:
    """Folders one level down that declare a model."""
    folders = [path / name for name in names if (path / name).is_dir()]
    return [str(folder) for folder in folders if any((folder / name).is_file() for name in DECLARING)]
