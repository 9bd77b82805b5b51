"""GGUF files as the gguf package writes them: tensors, laziness, split files."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pediag.encodings import from_tensors
from pediag.errors import LoadError
from pediag.targets import open_target

gguf: Any = pytest.importorskip("gguf")

from fixtures.formats import make_gguf  # noqa: E402
from pediag.targets.files.gguf import opening as opener  # noqa: E402
from pediag.targets.files.gguf.header import Unread, read_header  # noqa: E402
from tests.targets.files.gguf_files import FIXTURE, KINDS, of_kind, refused, written  # noqa: E402

BLOCKED = [kind for kind in KINDS if gguf.GGML_QUANT_SIZES[kind][0] > 1]


# -- what the package writes ----------------------------------------------------------------------------------


def test_the_fixture_is_what_its_maker_writes(tmp_path: Path) -> None:
    assert make_gguf.make(tmp_path).read_bytes() == FIXTURE.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int16", "int32", "int64"])
def test_types_that_pytorch_holds_stay_as_they_are(tmp_path: Path, dtype: str) -> None:
    stored = {"x": np.arange(24).reshape(2, 3, 4).astype(dtype), "y": np.array([7], dtype=dtype)}
    tensors = open_target(written(tmp_path / "m.gguf", stored)).tensors
    assert list(tensors) == ["x", "y"]
    for name, numbers in stored.items():
        assert tensors[name].shape == numbers.shape
        assert tensors[name].dtype == dtype
        assert torch.equal(tensors[name].load(), torch.from_numpy(numbers))


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    numbers = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    path = of_kind(tmp_path / "m.gguf", KINDS.BF16, numbers.view(torch.uint8).numpy())
    tensor = open_target(path).tensors["x"]
    assert (tensor.shape, tensor.dtype) == ((3, 8), "bfloat16")
    assert torch.equal(tensor.load(), numbers)


@pytest.mark.parametrize("at_once", [1, 700, 2**22])
@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_quantised_bytes_become_what_the_package_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, at_once: int
) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (5, 2 * size), dtype=np.uint8)
    monkeypatch.setattr(opener, "AT_ONCE", at_once)
    tensor = open_target(of_kind(tmp_path / "m.gguf", kind, raw)).tensors["x"]
    assert (tensor.shape, tensor.dtype) == ((5, 2 * block), "float32")
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        with pytest.raises(LoadError, match=f"'x' is {kind.name}, which the gguf package cannot"):
            tensor.load()
        return
    assert tensor.load().dtype == torch.float32
    np.testing.assert_array_equal(tensor.load().numpy(), expected)


@pytest.mark.parametrize(("kind", "levels"), [("Q8_0", 127), ("Q4_0", 8)])
def test_quantised_numbers_are_near_to_what_they_were(tmp_path: Path, kind: str, levels: int) -> None:
    numbers = np.random.default_rng(1).standard_normal((6, 3, 64)).astype(np.float32)
    path = of_kind(tmp_path / "m.gguf", KINDS[kind], gguf.quants.quantize(numbers, KINDS[kind]))
    blocks = (open_target(path).tensors["x"].load().numpy() - numbers).reshape(-1, 32)
    # a step is the largest of a block over the levels; Q4_0 has one level less on one side
    steps = np.abs(numbers.reshape(-1, 32)).max(axis=1, keepdims=True) / levels
    assert np.all(np.abs(blocks) <= 1.01 * steps)


def test_nothing_but_the_header_is_read_on_opening(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"x": np.array([5, 6, 7, 8], dtype=np.float32)})
    tensor = open_target(path).tensors["x"]
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<4f", 5, 6, 7, 8), struct.pack("<4f", 1, 2, 3, 4)))
    loaded = tensor.load()
    assert loaded.tolist() == [1, 2, 3, 4]
    after = path.read_bytes()
    loaded.zero_()
    assert path.read_bytes() == after != data


def test_a_large_vocabulary_is_stepped_over(tmp_path: Path) -> None:
    words = [f"token {index}" for index in range(262_144)]

    def say(writer: Any) -> None:
        writer.add_token_list(words)
        writer.add_token_scores([0.0] * len(words))
        writer.add_context_length(77)

    path = written(tmp_path / "m.gguf", {}, say)
    tracemalloc.start()
    read_header("m.gguf", path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**18  # the texts alone are 3 MB
    target = open_target(path)
    assert target.config is not None
    assert target.config.get("tokenizer.ggml.tokens") == Unread("texts", len(words))
    assert target.config.get("tokenizer.ggml.scores") == Unread("numbers", len(words))
    assert target.config.get("vocab_size") == len(words)
    assert target.config.get("max_position_embeddings") == 77


def test_a_file_that_vanished_or_shrank(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", {"x": np.zeros(64, dtype=np.float32)})
    tensor = open_target(path).tensors["x"]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(LoadError, match="changed or vanished"):
        tensor.load()
    path.unlink()
    with pytest.raises(LoadError, match="changed or vanished"):
        tensor.load()


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors", "sha256-0123", "model.Q4_K_M"])
def test_the_content_decides_not_the_suffix(tmp_path: Path, name: str) -> None:
    shutil.copy(FIXTURE, tmp_path / name)
    target = open_target(tmp_path / name)
    assert target.loader == "GGUF version 3"
    assert "rope_freqs.weight" in target.tensors


def test_something_else_under_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, says in (
        (b"NOPE" * 20, "does not begin with GGUF"),
        (b"", "empty file"),
        (b"<html>", "HTML"),
    ):
        path.write_bytes(content)
        assert says in refused(path)


def test_the_reason_names_the_original_model() -> None:
    target = open_target(FIXTURE)
    assert target.module is None and target.build is None
    assert "name the folder of the model it was made from, Tiny" in target.reason_not_runnable


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(FIXTURE).endswith("needs the gguf package: pip install 'pediag[gguf]'")


def test_a_package_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise AttributeError("type object 'Rope' has no attribute 'FREQ_BASE_SWA'")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(
        LoadError, match=r"m\.gguf: .* cannot be used .*FREQ_BASE_SWA.*: pip install 'pediag\[gguf\]'"
    ):
        opener.open_gguf("m.gguf", FIXTURE)


# -- split files ----------------------------------------------------------------------------------------------


def split(folder: Path) -> list[Path]:
    """Three tensors in three files, by the package's own writer."""
    tensors = {f"t{index}": np.full((2, 3), index, dtype=np.float32) for index in range(3)}
    written(folder / "m.gguf", tensors, lambda writer: writer.add_context_length(99), split_max_tensors=1)
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("named", [0, 1, 2])
def test_any_part_opens_all(tmp_path: Path, named: int) -> None:
    parts = split(tmp_path)
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    target = open_target(parts[named])
    assert [(name, one.load()[0, 0].item()) for name, one in target.tensors.items()] == [
        ("t0", 0),
        ("t1", 1),
        ("t2", 2),
    ]
    assert target.notes == []
    assert target.config is not None and target.config.get("max_position_embeddings") == 99


@pytest.mark.parametrize(
    ("gone", "says"), [(1, "m-00002-of-00003.gguf"), (0, "the first holds the model's keys")]
)
def test_a_part_that_is_missing_is_said(tmp_path: Path, gone: int, says: str) -> None:
    parts = split(tmp_path)
    parts[gone].unlink()
    target = open_target(parts[2])
    assert len(target.tensors) == 2
    assert target.notes[0].startswith("1 of 3 files are missing: ") and says in target.notes[0]


def test_a_part_under_another_name(tmp_path: Path) -> None:
    part = split(tmp_path)[1].rename(tmp_path / "part.gguf")
    target = open_target(part)
    assert list(target.tensors) == ["t1"]
    assert "does not say which" in target.notes[0]


def test_parts_of_different_models(tmp_path: Path) -> None:
    parts = split(tmp_path)
    shutil.copy(FIXTURE, parts[1])
    assert "its split.count differs" in refused(parts[0]).replace(str(parts[1]), str(parts[0]))
    shutil.copy(parts[0], parts[1])
    assert "tensor 't0' stands in two of its files" in refused(parts[0])
    parts[2].write_bytes(parts[2].read_bytes()[:40])
    with pytest.raises(LoadError, match=r"m-00003-of-00003\.gguf: .*cut short"):
        open_target(parts[0])


def test_a_quantised_matrix_is_not_dequantised_in_search_of_positions(tmp_path: Path) -> None:
    kind = KINDS.Q8_0
    block, size = gguf.GGML_QUANT_SIZES[kind]
    path = of_kind(tmp_path / "m.gguf", kind, np.zeros((4096, 4096 // block * size), dtype=np.uint8))
    tensors = open_target(path).tensors
    tracemalloc.start()
    assert from_tensors.read(tensors) == []
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert not tensors["x"].load().any()
