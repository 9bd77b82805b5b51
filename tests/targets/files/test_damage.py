"""Files that were cut short or have a byte changed: a target or one line, never anything else, and nothing written."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pediag.errors import LoadError
from pediag.targets import open_target
from tests.targets.files._pickles import config
from tests.targets.files.test_safetensors import entry, write

TRIES = 400
"""Per kind of file; half are cut short, half have one to three bytes changed."""

STATE = {
    "pos.weight": torch.arange(24.0).reshape(6, 4),
    "view": torch.arange(12.0)[2:8].reshape(2, 3).t(),
    "ids": torch.arange(5).expand(1, -1),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _zip(path: Path) -> Path:
    torch.save({"state_dict": STATE, "args": {"n_layer": 2, "block_size": 6}}, path / "m.pt")
    return path / "m.pt"


def _legacy(path: Path) -> Path:
    torch.save({"model": STATE, "epoch": 3}, path / "m.pt", _use_new_zipfile_serialization=False)
    return path / "m.pt"


def _safetensors(path: Path) -> Path:
    header = {
        "a": entry("F32", [2, 2], 0, 16),
        "b": entry("I64", [1], 16, 24),
        "__metadata__": {"format": "pt"},
    }
    return write(path / "m.safetensors", header, b"\1" * 24)


def _index(path: Path) -> Path:
    _safetensors(path)
    index = path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": 24}, "weight_map": dict.fromkeys("ab", "m.safetensors")})
    )
    return index


def _config(path: Path) -> Path:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    (path / "config.json").write_text(config(rope_scaling=rope))
    return path / "config.json"


def _params(path: Path) -> Path:
    values = {
        "dim": 16,
        "n_heads": 2,
        "n_layers": 1,
        "rope_theta": 5e5,
        "use_scaled_rope": True,
        "max_seq_len": 64,
    }
    (path / "params.json").write_text(json.dumps(values))
    return path / "params.json"


def _adapter(path: Path) -> Path:
    (path / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "base_model_name_or_path": "absent", "r": 2, "target_modules": ["q_proj"]}
        )
    )
    names = [f"base_model.model.layers.0.q_proj.lora_{part}.weight" for part in "AB"]
    header = {name: entry("F32", [2, 2], 16 * at, 16 * at + 16) for at, name in enumerate(names)}
    return write(path / "adapter_model.safetensors", header, b"\0" * 32)


def _adapter_config(path: Path) -> Path:
    _adapter(path)
    return path / "adapter_config.json"


MAKERS = (_zip, _legacy, _safetensors, _index, _config, _params, _adapter, _adapter_config)


def _damaged(whole: bytes, seed: int) -> Iterator[bytes]:
    """Half cut short, half with one to three bytes changed."""
    rng = random.Random(seed)
    for at in range(TRIES):
        if at % 2:
            yield whole[: rng.randrange(len(whole))]
            continue
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield bytes(changed)


def _told(spec: Path) -> str:
    """The message of a refusal; empty where the target opens and all its tensors load."""
    try:
        for tensor in open_target(spec).tensors.values():
            assert tensor.load().shape == tensor.shape
    except LoadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__.strip("_"))
def test_damage_gives_a_target_or_one_line(tmp_path: Path, maker: Callable[[Path], Path]) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    path = maker(folder)
    spec = folder if (folder / "adapter_config.json").exists() else path
    before = sorted(item.name for item in tmp_path.rglob("*"))
    opened = 0
    for content in _damaged(path.read_bytes(), seed=MAKERS.index(maker)):
        path.write_bytes(content)
        told = _told(spec)
        opened += not told
        assert "\n" not in told
        assert len(told) < 1500
    assert sorted(item.name for item in tmp_path.rglob("*")) == before
    assert 0 < opened < TRIES, "both outcomes occur, so the tries reach what they should"


def test_every_length_of_a_tiny_file(tmp_path: Path) -> None:
    for maker in (_zip, _legacy, _safetensors):
        path = maker(tmp_path)
        whole = path.read_bytes()
        assert open_target(path).tensors
        for length in range(0, len(whole) - 1, max(1, len(whole) // 700)):
            path.write_bytes(whole[:length])
            with pytest.raises(LoadError):
                open_target(path)
        path.unlink()


def test_bytes_of_another_format_under_every_suffix(tmp_path: Path) -> None:
    rng = random.Random(7)
    for maker in (_zip, _legacy, _safetensors, _config):
        source = maker(tmp_path)
        for suffix in (".pt", ".bin", ".safetensors", ".json", ".gguf", ".ckpt", ".pth", ".pt2", ""):
            path = tmp_path / f"copy{suffix}"
            shutil.copy(source, path)
            assert "\n" not in _told(path)
            path.write_bytes(rng.randbytes(200))
            with pytest.raises(LoadError):
                open_target(path)
            path.unlink()
