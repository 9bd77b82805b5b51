"""Safetensors headers, honest and hostile."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from pediag.encodings.from_tensors import reading
from pediag.errors import LoadError
from pediag.targets import open_target

HUGE = 2**62


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
def test_what_the_library_wrote_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    library = pytest.importorskip("safetensors.torch")
    stored = {
        "x": torch.arange(12).reshape(3, 4).to(dtype),
        "empty": torch.empty(0, 5, dtype=dtype),
        "scalar": torch.tensor(1).to(dtype),
    }
    library.save_file(stored, tmp_path / "m.safetensors", metadata={"format": "pt"})
    tensors = open_target(tmp_path / "m.safetensors").tensors
    assert set(tensors) == set(stored)
    for name, tensor in stored.items():
        assert tensors[name].shape == tuple(tensor.shape)
        assert f"torch.{tensors[name].dtype}" == str(dtype)
        assert torch.equal(tensors[name].load().double(), tensor.double())
        assert tensors[name].load().dtype == dtype


def test_bytes_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    values = [1.5, -2.0]
    header = {"b": entry("U8", [1], 0, 1), "x": entry("F32", [2], 1, 9)}
    raw = json.dumps(header).encode()
    for pad in range(8):
        path = write(tmp_path / "m.safetensors", raw + b" " * pad, b"\x07" + struct.pack("<2f", *values))
        assert open_target(path).tensors["x"].load().tolist() == values
        assert open_target(path).tensors["b"].load().tolist() == [7]


@pytest.mark.parametrize(("pad", "rows", "looked_into"), [(0, 9000, True), (1, 9000, False), (1, 8000, True)])
def test_bytes_that_are_not_aligned_are_not_copied_in_search_of_positions(
    tmp_path: Path, pad: int, rows: int, looked_into: bool
) -> None:
    raw = json.dumps({"x": entry("F32", [rows, 1024], 0, rows * 4096)}).encode()
    aligned = raw + b" " * (-len(raw) % 8 + pad)
    path = write(tmp_path / "m.safetensors", aligned)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + rows * 4096)
    tensor = open_target(path).tensors["x"]
    assert tensor.copied is bool(pad)
    assert (reading.stored(0, tensor).open() is not None) is looked_into


def test_writing_to_a_loaded_tensor_leaves_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": entry("F32", [1], 0, 4)}, struct.pack("<f", 1.0))
    before = path.read_bytes()
    open_target(path).tensors["x"].load().zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"x": entry("F32", [10**12, 10**6], 0, 4)}, "shape [1000000000000, 1000000] F32 cannot be 4 bytes"),
        ({"x": entry("F32", [HUGE, HUGE], 0, 4)}, "cannot be 4 bytes"),
        ({"x": entry("F32", [2**64], 0, 4)}, "malformed shape"),
        ({"x": entry("F32", [-1, -1], 0, 4)}, "malformed shape"),
        ({"x": entry("F32", [1.0], 0, 4)}, "malformed shape"),
        ({"x": entry("F32", [True], 0, 4)}, "malformed shape"),
        ({"x": entry("F32", [1] * 1000, 0, 4)}, "malformed shape"),
        ({"x": entry("F32", "1", 0, 4)}, "malformed shape"),
        ({"x": entry("F32", [1], 0, HUGE)}, "would end at byte"),
        ({"x": entry("F32", [1], 4, 0)}, "cut short"),
        ({"x": entry("F32", [1], -4, 0)}, "malformed offsets"),
        ({"x": entry("F32", [3], 0, 4)}, "cannot be 4 bytes"),
        ({"x": entry("F33", [1], 0, 4)}, "unknown dtype 'F33'; known: BOOL"),
        ({"x": entry([], [1], 0, 4)}, "unknown dtype"),
        ({"x": {"dtype": "F32"}}, "malformed"),
        ({"x": 3}, "is not an object"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 2, 6)}, "'x' and 'y' claim the same bytes"),
        ([1], "not a JSON object"),
        (b"{", "header is not valid"),
        (b"\xff\xfe", "header is not valid"),
        (b'{"x": NaN}', "NaN is no JSON number"),
        (b'{"x": {}, "x": {}}', "a name stands twice"),
        (b'{"x": ' + b"[" * 200_000, "header is not valid"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: Any, says: str) -> None:
    assert says in refused(write(tmp_path / "m.safetensors", header, b"\0" * 8))


def test_a_header_longer_than_the_file_or_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert "would end beyond the file" in refused(write(path, {}, length=2**63))
    assert "would end beyond the file" in refused(write(path, {}, length=10**8))
    path.write_bytes(b"abc")
    assert "not a safetensors file" in refused(path)
    path.write_bytes(b"")
    assert "empty file" in refused(path)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**8))
        file.truncate(10**8 + 8)
    assert "above the limit" in refused(path)


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": entry("F32", [4], 0, 16)}, b"\0" * 12)
    assert "cut short: tensor 'x' would end at byte" in refused(path)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": entry("F32", [2], 0, 8)}, b"\0" * 8)
    lazy = open_target(path).tensors["x"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(LoadError, match="changed or vanished"):
        lazy.load()
    path.unlink()
    with pytest.raises(LoadError, match="changed or vanished"):
        lazy.load()


def test_an_index_and_its_shards(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {name: entry("F32", [1], 0, 4)}, struct.pack("<f", 1.0))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}})
    )
    target = open_target(index)
    assert set(target.tensors) == {"a", "b"}
    assert target.notes == ["1 of 3 weight files are missing: c.safetensors"]
    for name in ("../secret", "/etc/passwd", "", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert "which is no file in this folder" in refused(index)
    index.write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    assert "none of the 1 files that it names is there" in refused(index)
    index.write_text(json.dumps({"weight_map": []}))
    assert "an index needs a weight_map" in refused(index)


def test_a_config_beside_the_file_is_pointed_at(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": entry("F32", [1], 0, 4)}, b"\0" * 4)
    (tmp_path / "config.json").write_text("{}")
    target = open_target(path)
    assert target.config is None
    assert target.module is None
    assert "name the folder" in target.notes[0]
