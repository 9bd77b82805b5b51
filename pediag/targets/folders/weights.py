"""The weights in a folder: single or in shards, as safetensors or pickles. Imports no torch for safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pediag.errors import LoadError
from pediag.targets._content import content_suffix
from pediag.targets._paths import first_bytes, shortened
from pediag.targets._trust import Trust
from pediag.targets.config import Config
from pediag.targets.files.safetensors import read_safetensors
from pediag.targets.target import LazyTensor

STEMS = ("model", "pytorch_model", "diffusion_pytorch_model", "consolidated", "adapter_model")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
"""Weight files of a folder, the suffix to prefer first."""

ELSEWHERE = {
    "tf_model.h5": "TensorFlow weights: convert them with transformers 4, from_pretrained(..., from_tf=True)",
    "flax_model.msgpack": "Flax weights: convert them with transformers 4, from_pretrained(..., from_flax=True)",
    "model.onnx": "an ONNX graph: name the model that it was exported from",
    "weights.npz": "NumPy arrays, as MLX keeps them: save them with safetensors.numpy.save_file",
    "saved_model.pb": "a TensorFlow SavedModel: name the PyTorch model",
}
"""Weights that are not read: what they are, and what to do."""

MOST_SHARDS = 10_000
"""Files of one checkpoint; the largest published ones have a few hundred."""

_SHARD = re.compile(r"(?P<stem>.+?)[-.](?P<number>\d{2,5})(-of-(?P<count>\d{5}))?(?P<suffix>\.\w+)")


@dataclass(slots=True)
class Weights:
    """Tensors by name, notes on how they were read, and the files that they are in.

    ``missing`` says which files of the checkpoint are not there; empty where all are.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    missing: str = ""

    def lack(self, missing: list[str], count: int) -> None:
        """Note that so many of ``count`` files are not there."""
        if missing:
            self.missing = f"{len(missing)} of {count} weight files are missing: {shortened(missing, 4)}"
            self.notes.append(self.missing)


def weights_in(folder: Path, stems: Iterable[str] = STEMS, *, trust: Trust = False) -> Weights:
    """The weights that ``folder`` holds, in the order in which transformers looks for them; empty where none.

    A note tells of weights in another format beside those that are read. Raises LoadError for damaged files, and
    UnsafePickle for pickles that ask for code.
    """
    found = [name for stem in stems for suffix in SUFFIXES for name in _candidates(folder, stem, suffix)]
    if not found:
        shards = _unlisted(folder, stems)
        return _shards(folder, shards, trust) if shards else Weights()
    first = found[0]
    read = read_index(os.fspath(folder / first), folder / first, trust=trust)
    if read is None:
        read = _one(folder / first, trust)
    others = [name for name in found[1:] if Path(name).suffixes[-1:] != [".json"] or ".index." in name]
    if others:
        read.notes.append(f"{first} was read; the weights beside it were not: {shortened(others, 4)}")
    return read


def read_index(spec: str, path: Path, *, trust: Trust = False) -> Weights | None:
    """The tensors of a sharded checkpoint by its ``*.index.json``; None for a file that is no index.

    Notes tell of shards that are missing, and of tensors that are not in the file that the index names. Raises
    LoadError for an index that is malformed, names files outside its folder, or of which no file is there.
    """
    if path.suffix != ".json":
        return None
    places = weight_map(spec, path)
    shards = sorted(set(places.values()))
    present = [name for name in shards if os.path.isfile(path.parent / name)]
    missing = [name for name in shards if name not in set(present)]
    if not present:
        raise LoadError(f"{spec}: none of the {len(shards)} files that it names is there")
    read = Weights(files=present)
    for name in present:
        _add(read, path.parent / name, trust)
    read.lack(missing, len(shards))
    lost = [name for name, place in places.items() if place not in set(missing) and name not in read.tensors]
    if lost:
        told = shortened((f"{name} (in {places[name]})" for name in lost), 3)
        read.notes.append(
            f"{len(lost)} of the tensors that the index names are not in the file it says: {told}"
        )
    return read


def weight_map(spec: str, path: Path) -> Mapping[str, str]:
    """Tensor name -> file name of an index. Raises LoadError for names that are no file in its folder."""
    places = Config.from_file(path).values.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise LoadError(f"{spec}: an index needs a weight_map of tensor name -> file name")
    for name in {name if isinstance(name, str) else "" for name in places.values()}:
        if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise LoadError(f"{spec}: the weight_map names {name!r}, which is no file in this folder")
    return places


def read_file(path: Path, *, trust: Trust = False) -> Weights:
    """The tensors of one weight file: safetensors or what torch.save wrote, as its content says."""
    return _one(path, trust)


def elsewhere(names: Iterable[str]) -> str:
    """What weights in formats that are not read are, and what to do; an empty string where there are none."""
    return next((f"{name} holds {ELSEWHERE[name]}" for name in names if name in ELSEWHERE), "")


def _candidates(folder: Path, stem: str, suffix: str) -> list[str]:
    names = (f"{stem}{suffix}", f"{stem}{suffix}.index.json")
    return [name for name in names if (folder / name).is_file()]


def _one(path: Path, trust: Trust) -> Weights:
    read = Weights(files=[path.name])
    _add(read, path, trust)
    return read


def _shards(folder: Path, names: list[str], trust: Trust) -> Weights:
    read = Weights(files=names)
    for name in names:
        _add(read, folder / name, trust)
    absent, count = _uncounted(names)
    read.lack(absent, count)
    return read


def _uncounted(names: list[str]) -> tuple[list[str], int]:
    """Shards that are not among ``names`` though their count says that they exist, and the count."""
    part = _SHARD.fullmatch(names[0])
    if part is None or part["count"] is None:
        return [], len(names)
    count, digits = int(part["count"]), len(part["number"])
    if count > MOST_SHARDS:
        return [], len(names)
    ending = names[0][part.end("number") :]
    wanted = [f"{names[0][: part.start('number')]}{k:0{digits}d}{ending}" for k in range(1, count + 1)]
    return [name for name in wanted if name not in names], count


def _add(read: Weights, path: Path, trust: Trust) -> None:
    """Add the tensors of one file to those already read."""
    if _is_pickle(path):
        from pediag.targets.files.checkpoint import read_state

        state = read_state(os.fspath(path), path, trust=trust)
        read.tensors.update(state.tensors)
        read.notes += state.notes
    else:
        read.tensors.update(read_safetensors(os.fspath(path), path))


def _is_pickle(path: Path) -> bool:
    """Whether torch.save wrote the file, by its first bytes; by its suffix where these do not tell."""
    first_bytes(path, os.fspath(path))
    return (content_suffix(path) or path.suffix) != ".safetensors"


def _unlisted(folder: Path, stems: Iterable[str]) -> list[str]:
    """Shards of one checkpoint without an index: ``model-00001-of-00002.safetensors``, ``consolidated.00.pth``."""
    wanted = set(stems)
    for suffix in SUFFIXES:
        names = sorted(
            item.name for item in folder.iterdir() if item.name.endswith(suffix) and item.is_file()
        )
        matched = [name for name in names if (part := _SHARD.fullmatch(name)) and part["stem"] in wanted]
        if matched:
            return matched
    return []
