"""Files that torch.save wrote: nothing of a pickle runs unless it is trusted."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pediag.errors import LoadError
from pediag.targets import open_target, tensor_for


class Runs:
    """Creates the file ``ran`` when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(spec: object, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(spec, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_state_dict_gives_tensors_only(tmp_path: Path, suffix: str, legacy: bool) -> None:
    path = tmp_path / f"m{suffix}"
    torch.save(STATE, path, _use_new_zipfile_serialization=not legacy)
    target = open_target(path)
    assert target.loader == "torch.save file (no code run)"
    assert target.module is None
    assert target.build is None
    assert "name the model's factory" in target.reason_not_runnable
    lazy = target.tensors["a.weight"]
    assert (lazy.shape, lazy.dtype) == ((2, 3), "float32")
    assert torch.equal(lazy.load(), STATE["a.weight"])
    assert target.tensors["b"].dtype == "bfloat16"
    assert target.sha256 is not None
    assert len(target.sha256) == 64


@pytest.mark.parametrize("key", ["model", "state_dict", "module", "model_state_dict"])
def test_a_training_checkpoint_is_looked_into(tmp_path: Path, key: str) -> None:
    held = {"optimizer": {"state": {0: {"step": torch.ones(1)}}}, key: dict(STATE), "epoch": 3}
    torch.save({**held, "model_args": {"n_layer": 2, "block_size": 64}}, tmp_path / "m.pt")
    target = open_target(tmp_path / "m.pt")
    assert set(target.tensors) == set(STATE)
    assert target.config is not None
    assert target.config.get("block_size") == 64


def test_doubly_nested_and_grouped_state_dicts(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": dict(STATE)}}, tmp_path / "m.pt")
    assert set(open_target(tmp_path / "m.pt").tensors) == set(STATE)
    torch.save({"encoder": dict(STATE), "decoder": {"c": torch.ones(1)}}, tmp_path / "n.pt")
    assert set(open_target(tmp_path / "n.pt").tensors) == {"encoder.a.weight", "encoder.b", "decoder.c"}


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_runs_nothing(tmp_path: Path, legacy: bool) -> None:
    mark = tmp_path / "ran"
    held = {"a": torch.ones(2), "evil": Runs(mark)}
    torch.save(held, tmp_path / "m.pt", _use_new_zipfile_serialization=not legacy)
    text = refused("m.pt")
    assert f"it asks for {os.mkdir.__module__}.mkdir;" in text
    assert "--trust" in text
    assert not mark.exists()
    assert open_target("m.pt", trust=True).notes == ["--trust was used: code in m.pt ran"]
    assert mark.exists()


def test_every_class_that_is_asked_for_is_listed(tmp_path: Path) -> None:
    for legacy in (False, True):
        torch.save(
            nn.Sequential(nn.Linear(2, 2), nn.GELU()), "m.pt", _use_new_zipfile_serialization=not legacy
        )
        text = refused("m.pt")
        for name in ("container.Sequential", "linear.Linear", "activation.GELU"):
            assert f"torch.nn.modules.{name}" in text


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_bare_pickles_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    Path("m.pt").write_bytes(pickle.dumps({"e": Runs(mark)}, protocol=protocol))
    assert "m.pt: " in refused("m.pt")
    assert not mark.exists()


def test_a_trusted_whole_module_is_live() -> None:
    torch.save(nn.Linear(3, 2), "m.pt")
    target = open_target("m.pt", trust=True)
    assert isinstance(target.module, nn.Linear)
    assert target.notes == ["--trust was used: code in m.pt ran"]
    torch.save({"model": nn.Linear(3, 2), "epoch": 1}, "n.pt")
    assert isinstance(open_target("n.pt", trust=True).module, nn.Linear)


def test_trust_changes_nothing_for_plain_tensors() -> None:
    torch.save(STATE, "m.pt")
    target = open_target("m.pt", trust=True)
    assert target.loader == "torch.save file (no code run)"
    assert target.notes == []


def test_a_trusted_pickle_whose_classes_are_missing_says_so() -> None:
    code = "import torch\nclass Net(torch.nn.Module): pass\ntorch.save(Net(), 'm.pt')\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    assert "__main__.Net" in refused("m.pt")
    text = refused("m.pt", trust=True)
    assert "AttributeError" in text
    assert "run where the code of its classes can be imported" in text


def test_damaged_files() -> None:
    torch.save(STATE, "m.pt")
    whole = Path("m.pt").read_bytes()
    for size in (5, len(whole) // 2, len(whole) - 3):
        Path("t.pt").write_bytes(whole[:size])
        assert "t.pt: damaged or cut short" in refused("t.pt")
    torch.save(STATE, "l.pt", _use_new_zipfile_serialization=False)
    legacy = Path("l.pt").read_bytes()
    for size in (1, 3, len(legacy) // 2, len(legacy) - 2):
        Path("t.pt").write_bytes(legacy[:size])
        assert "t.pt: " in refused("t.pt")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"hello", "not a file that torch.save wrote"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "HTML page"),
        (b"GGUF\x03\x00", "GGUF"),
    ],
)
def test_files_that_are_something_else(content: bytes, says: str) -> None:
    Path("m.pt").write_bytes(content)
    assert says in refused("m.pt")


def test_archives_that_are_something_else() -> None:
    with zipfile.ZipFile("m.pt", "w") as archive:
        archive.writestr("readme", "x")
    assert "not one that torch.save wrote" in refused("m.pt")
    with zipfile.ZipFile("m.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"\0" * 10_000)
    assert "compressed" in refused("m.pt")


def test_contents_without_tensors() -> None:
    torch.save({"epoch": 3}, "m.pt")
    assert "a mapping without tensors (keys: epoch)" in refused("m.pt")
    torch.save("text", "m.pt")
    assert "holds one str" in refused("m.pt")


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.json"])
def test_a_file_that_may_not_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    Path(name).write_bytes(b"content")
    monkeypatch.setattr(Path, "open", denied)
    assert refused(name) == f"{name}: permission denied"


def test_unknown_kinds_of_file() -> None:
    for name, says in (
        ("m.onnx", "ONNX"),
        ("m.safetensor", "did you mean .safetensors?"),
        ("m", "without extension"),
    ):
        Path(name).write_bytes(b"content")
        assert says in refused(name)
    Path("folder").mkdir()
    assert "a directory without config.json" in refused("folder")


def test_names_of_wrapped_models() -> None:
    torch.save({f"module.{name}": tensor for name, tensor in STATE.items()}, "m.pt")
    target = open_target("m.pt")
    found = tensor_for(target, "a.weight")
    assert found is not None
    assert found.name == "module.a.weight"
    assert tensor_for(target, "absent.weight") is None


def test_huge_shapes_in_a_pickle_cost_nothing() -> None:
    class Huge:
        def __reduce__(self) -> tuple[Any, Any]:
            storage = torch.ones(1).untyped_storage()
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (typed, 0, (10**9, 10**6), (10**6, 1), False, {})

    torch.save({"a": Huge()}, "m.pt")
    assert "m.pt: damaged or cut short" in refused("m.pt")
