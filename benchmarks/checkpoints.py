"""Time and memory of `pediag check FILE` against the size of the file: 10 MB to 10 GB, mostly holes on the disk."""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.measure import MEBI, Limit, Row, Usage, complaint, interleaved, middle, python

ROUNDS = 2
WIDTH, ROWS, VOCABULARY = 1024, 2048, 1024
SIZES = {"10 MB": 10**7, "100 MB": 10**8, "1 GB": 10**9, "10 GB": 10**10}
MEMORY, GROWTH = Limit("measured", 1e9 / MEBI), Limit("ratio", 2.0)
IMPORTS = "import torch"
FINDS = 1
"""The exit status: the table of 2,048 rows is too short for the length asked about."""


def rows() -> Iterator[Row]:
    """For each format the time at each size beside the smallest, and the peak at the largest."""
    for suffix, write in (("safetensors", _write_safetensors), ("pt", _write_pt)):
        with tempfile.TemporaryDirectory() as folder:
            yield from _rows(Path(folder), suffix, write)


def _rows(folder: Path, suffix: str, write: Callable[[Path, int], None]) -> Iterator[Row]:
    jobs: dict[str, Sequence[str]] = {"imports": python(IMPORTS)}
    for name, size in SIZES.items():
        path = folder / f"{name.replace(' ', '')}.{suffix}"
        write(path, size)
        jobs[name] = _check(path)
    taken = interleaved(jobs, ROUNDS)
    smallest, *larger = SIZES
    least = middle(taken[smallest], "wall")
    for name in larger:
        wrong = _wrong(taken[name])
        measured = None if wrong else middle(taken[name], "wall")
        limit = GROWTH if name == larger[-1] else None
        yield Row(f".{suffix} of {name}: time", measured, least, smallest, "s", limit, wrong)
    wrong = _wrong(taken[larger[-1]])
    peak = None if wrong else middle(taken[larger[-1]], "peak")
    floor = middle(taken["imports"], "peak")
    yield Row(f".{suffix} of {larger[-1]}: peak memory", peak, floor, "importing torch", "MiB", MEMORY, wrong)


def _check(path: Path) -> list[str]:
    words = ["check", str(path), "--seq-len", str(2 * ROWS), "--format", "json", "--quiet"]
    return [sys.executable, "-m", "pediag", *words]


def _wrong(usages: Sequence[Usage]) -> str:
    """Why a run is no measurement: it stopped, or did not find the table."""
    wrong = complaint(usages, (FINDS,))
    if wrong:
        return wrong
    found = [item["scheme"] for item in json.loads(usages[0].out)["encodings"]]
    return "" if found == ["learned"] else f"recognised {found}, not one learned table"


def _shapes(size: int) -> dict[str, tuple[int, int]]:
    """Dummy matrices in bfloat16 that fill ``size`` bytes, and the vocabulary."""
    each = 4 * WIDTH * WIDTH
    count = max(1, size // (2 * each))
    blocks = {f"blocks.{k}.mlp.weight": (4 * WIDTH, WIDTH) for k in range(count)}
    return {"embed.weight": (VOCABULARY, WIDTH), **blocks}


def _table() -> bytes:
    """A smooth table, as training leaves it: slow waves of random height, in float32."""
    import numpy as np

    random = np.random.default_rng(0)
    m = np.arange(ROWS)[:, None] / ROWS
    waves = np.concatenate([np.cos(np.pi * k * m) for k in range(24)], axis=1)
    table = waves @ random.normal(size=(24, WIDTH)) + 0.3 * random.normal(size=(ROWS, WIDTH))
    return (0.02 * table).astype("<f4").tobytes()


def _write_safetensors(path: Path, size: int) -> None:
    header: dict[str, object] = {}
    table = _table()
    header["positions.weight"] = {"dtype": "F32", "shape": [ROWS, WIDTH], "data_offsets": [0, len(table)]}
    end = len(table)
    for name, shape in _shapes(size).items():
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + table)
        file.truncate(8 + len(text) + end)


def _write_pt(path: Path, size: int) -> None:
    """Storages are reserved, not written; then the table is put into its place."""
    import torch
    from torch.serialization import skip_data

    state = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in _shapes(size).items()}
    state["positions.weight"] = torch.empty(ROWS, WIDTH)
    with skip_data():
        torch.save(state, path)
    reader = torch._C.PyTorchFileReader(str(path))
    offset = reader.get_record_offset(f"data/{len(state) - 1}")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(_table())
