"""GGUF files that are damaged, cut short, or were made to do harm."""

from __future__ import annotations

import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pediag.errors import LoadError
from pediag.targets import open_target

gguf: Any = pytest.importorskip("gguf")

from pediag.targets.files.gguf.header import STRINGS_LIMIT, Unread  # noqa: E402
from tests.targets.files.gguf_files import KINDS, read_all, refused  # noqa: E402

HUGE = 2**60


# -- hostile headers ------------------------------------------------------------------------------------------


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: str | int, value: Any, length: int | None = None) -> bytes:
    """A key of the metadata; ``value`` in bytes, or a number of the named type."""
    code = kind if isinstance(kind, int) else int(gguf.GGUFValueType[kind])
    forms = {"UINT32": "<I", "FLOAT32": "<f", "FLOAT64": "<d", "BOOL": "<?"}
    raw = value if isinstance(value, bytes) else struct.pack(forms[str(kind)], value)
    return text(name, length) + struct.pack("<I", code) + raw


def listed(kind: int | str, count: int, raw: bytes = b"") -> bytes:
    code = kind if isinstance(kind, int) else int(gguf.GGUFValueType[kind])
    return struct.pack("<IQ", code, count) + raw


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    """An entry of the table; ``shape`` fastest first, as the format has it."""
    number = len(shape) if count is None else count
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", number, *shape, kind, offset)


def file(
    path: Path,
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    keys, tensors = keys or [], tensors or []
    head = (
        b"GGUF"
        + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
        + b"".join([*keys, *tensors])
    )
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


FLOATS = b"\0" * 64
X = tensor("x", [4])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"version": 1}, "GGUF version 1 is not read, only 2 and 3"),
        ({"version": 4}, "GGUF version 4 is not read"),
        ({"version": 0}, "GGUF version 0 is not read"),
        ({"version": 3 << 24}, "big-endian"),
        ({"counts": (HUGE, 0)}, f"claims {HUGE} tensors"),
        ({"counts": (0, HUGE)}, f"claims {HUGE} keys"),
        ({"counts": (2**64 - 1, 2**64 - 1)}, "claims"),
        ({"counts": (1, 0)}, "goes on past its end"),
        ({"keys": [key("a", "STRING", text("x", HUGE))]}, "goes on past its end"),
        ({"keys": [key("a", "STRING", text("x", 2**64 - 1))]}, "goes on past its end"),
        ({"keys": [key("a", "UINT32", 1, length=HUGE)]}, f"the name of a key is {HUGE} bytes long"),
        ({"keys": [key(b"\xff\xfe", "UINT32", 1)]}, "the name of a key is no UTF-8 text"),
        ({"keys": [key("a", "ARRAY", listed("UINT8", HUGE))]}, "goes on past its end"),
        ({"keys": [key("a", "ARRAY", listed("UINT64", 2**64 - 1))]}, "goes on past its end"),
        ({"keys": [key("a", "ARRAY", listed("STRING", HUGE))]}, f"'a' claims {HUGE} texts"),
        ({"keys": [key("a", "ARRAY", listed("STRING", 3, text("x", HUGE)))]}, "goes on past its end"),
        ({"keys": [key("a", "ARRAY", listed("ARRAY", 1, listed("UINT8", 1, b"1")))]}, "lists in a list"),
        ({"keys": [key("a", "ARRAY", listed(99, 1))]}, "a list of the unknown type 99"),
        ({"keys": [key("a", 13, b"")]}, "'a' has the unknown type 13"),
        ({"keys": [key("a", "UINT32", 1), key("a", "UINT32", 2)]}, "the key 'a' stands twice"),
        ({"keys": [key("a", "FLOAT32", math.nan)]}, "'a' is NaN"),
        ({"keys": [key("a", "FLOAT64", math.nan)]}, "'a' is NaN"),
        ({"keys": [key("a", "ARRAY", listed("FLOAT32", 2, struct.pack("<2f", 1, math.nan)))]}, "'a' is NaN"),
        (
            {"keys": [key("general.alignment", "UINT32", 0)]},
            "general.alignment is 0; it must be a power of two",
        ),
        ({"keys": [key("general.alignment", "UINT32", 24)]}, "general.alignment is 24; it must"),
        ({"keys": [key("general.alignment", "STRING", text("32"))]}, "general.alignment is '32'; it must"),
        ({"keys": [key("general.alignment", "BOOL", True)]}, "general.alignment is True; it must"),
        (
            {"keys": [key("general.alignment", "UINT32", 2**31)], "tensors": [X], "data": FLOATS},
            f"would end at byte {2**31 + 16}",
        ),
        ({"tensors": [X, X], "data": FLOATS}, "tensor 'x' stands twice"),
        ({"tensors": [X, tensor("y", [4])], "data": FLOATS}, "'x' and 'y' claim the same bytes"),
        ({"tensors": [tensor("x", [4], offset=8)], "data": FLOATS}, "no multiple of the alignment 32"),
        ({"tensors": [tensor("x", [4], offset=2**63)], "data": FLOATS}, "would end at byte"),
        ({"tensors": [tensor("x", [4], offset=64)], "data": FLOATS}, "would end at byte"),
        (
            {"tensors": [tensor("x", [4], kind=4)], "data": FLOATS},
            "the type 4, which the installed gguf package",
        ),
        ({"tensors": [tensor("x", [4], kind=2**32 - 1)], "data": FLOATS}, "the type 4294967295"),
        ({"tensors": [tensor("x", [40], kind=2)], "data": FLOATS}, "rows of 40, which Q4_0 cannot hold"),
        ({"tensors": [tensor("x", [], kind=2)], "data": FLOATS}, "rows of 1, which Q4_0 cannot hold"),
        (
            {"tensors": [tensor("x", [2**32, 2**32])], "data": FLOATS},
            "claims the shape [4294967296, 4294967296]",
        ),
        ({"tensors": [tensor("x", [2**63, 2])], "data": FLOATS}, "claims the shape"),
        ({"tensors": [tensor("x", [2**40, 0, 2**40])], "data": FLOATS}, "claims the shape"),
        ({"tensors": [tensor("x", [2**40])], "data": FLOATS}, "would end at byte"),
        ({"tensors": [tensor("x", [1], count=2**32 - 1)], "data": FLOATS}, "claims 4294967295 dimensions"),
        ({"tensors": [tensor("a\nb", [4], kind=4)], "data": FLOATS}, r"'a\nb'"),
    ],
)
def test_hostile_headers(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    assert says in refused(file(tmp_path / "m.gguf", **made))


def test_no_architecture(tmp_path: Path) -> None:
    path = file(tmp_path / "m.gguf", keys=[key("x", "FLOAT32", 1.5)])
    target = open_target(path)
    assert target.config is not None and target.config.values == {"x": 1.5}
    assert "general.architecture" in target.notes[0]


def test_odd_files_that_are_sound(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert not open_target(file(path)).tensors
    assert not open_target(file(path, version=2)).tensors
    read = open_target(
        file(path, tensors=[tensor("s", []), tensor("e", [3, 0], offset=32)], data=FLOATS)
    ).tensors
    assert (read["s"].shape, read["e"].shape) == ((), (0, 3))
    assert read["s"].load().item() == 0.0 and tuple(read["e"].load().shape) == (0, 3)
    narrow = [key("general.alignment", "UINT32", 1)]
    values = b"\x07" + struct.pack("<2f", 1.5, -2.0)
    for pad in range(1, 9):
        keys = [*narrow, key("p" * pad, "BOOL", True)]
        head = b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + b"".join(keys)
        head += tensor("b", [1], kind=int(KINDS.I8)) + tensor("x", [2], offset=1)
        path.write_bytes(head + values)
        assert open_target(path).tensors["x"].load().tolist() == [1.5, -2.0]


def test_a_file_of_nothing_but_empty_texts_is_refused_early(tmp_path: Path) -> None:
    path = file(tmp_path / "m.gguf", keys=[key("a", "ARRAY", listed("STRING", STRINGS_LIMIT + 1))])
    with path.open("r+b") as stream:
        stream.truncate(2**33)
    assert "claims 4194305 texts" in refused(path)


def test_long_texts_are_not_kept(tmp_path: Path) -> None:
    long = "x" * 2**17
    path = file(
        tmp_path / "m.gguf",
        keys=[
            key("a", "STRING", text(long)),
            *(key(f"k{index}", "STRING", text("y" * 2**16)) for index in range(200)),
        ],
    )
    config = open_target(path).config
    assert config is not None
    assert config.get("a") == Unread("text", 2**17)
    kept = [value for value in config.values.values() if isinstance(value, str)]
    assert 0 < sum(map(len, kept)) <= 2**23


def told(path: Path) -> str:
    """The refusal of a file, or an empty text when all of it could be read; another exception fails the test."""
    try:
        read_all(open_target(path))
    except LoadError as error:
        return str(error)
    return ""


def small(folder: Path) -> Path:
    """A file of some hundred bytes with every kind of value that is looked at."""

    def say(writer: Any) -> None:
        writer.add_context_length(4096)
        writer.add_rope_freq_base(10000.0)
        writer.add_rope_dimension_count(16)
        writer.add_head_count([2, 2])
        writer.add_embedding_length(64)
        writer.add_sliding_window_pattern(2)
        writer.add_block_count(2)
        writer.add_token_list(["a", "b"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    quantised = gguf.quants.quantize(np.ones((2, 32), dtype=np.float32), KINDS.Q8_0)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    say(writer)
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8).astype(np.float32))
    writer.add_tensor("w", quantised, raw_dtype=KINDS.Q8_0)
    writer.add_tensor("h", np.ones((2, 2), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def test_cut_at_every_byte(tmp_path: Path) -> None:
    path = small(tmp_path)
    whole = path.read_bytes()
    last = len(whole.rstrip(b"\0"))
    assert not told(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert len(told(path).splitlines()) == (1 if size < last else 0), f"cut at {size} of {len(whole)}"
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes(tmp_path: Path, seed: int) -> None:
    path = small(tmp_path)
    whole = path.read_bytes()
    dice = random.Random(seed)
    lines = set()
    for _ in range(800):
        damaged = bytearray(whole)
        for _ in range(dice.choice((1, 1, 2, 5))):
            damaged[dice.randrange(4, len(whole))] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        path.write_bytes(damaged)
        lines.add(len(told(path).splitlines()))
    assert lines == {0, 1}
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


def test_a_file_far_larger_than_memory_opens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    file(
        path,
        tensors=[tensor("small", [4], offset=0), tensor("large", [2**16, 2**20], offset=32)],
        data=b"\0" * 32,
    )
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + 2**38)
    tensors = open_target(path).tensors
    assert tensors["large"].shape == (2**20, 2**16)
    assert tensors["small"].load().tolist() == [0, 0, 0, 0]
