"""Many small targets in one call: time per target, memory against their number, and what a second process gains."""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Limit, Row, Usage, complaint, interleaved, middle

ROUNDS = 1
WIDTH, LENGTH, VOCABULARY = 64, 256, 1000
FLAT = Limit("ratio", 1.1)
CLEAN_OR_NOT = (0, 1)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}

Write = Callable[[Path], None]


def rows() -> Iterator[Row]:
    """For each kind of target its rows, out of a series of its own."""
    for what, count, write in (("checkpoints", 200, _checkpoint), ("model folders", 12, _folder)):
        with tempfile.TemporaryDirectory() as folder:
            for number in range(count):
                write(Path(folder) / f"step-{number}")
            yield from _rows(Path(folder), what, count)


def _rows(folder: Path, what: str, count: int) -> Iterator[Row]:
    few = count // 4
    names = sorted(map(str, folder.iterdir()))
    taken = interleaved(
        {
            "one": _check(names[:1], 1),
            "few": _check(names[:few], 1),
            "all": _check(names, 1),
            "two": _check(names, 2),
        },
        ROUNDS,
    )
    counts = {"one": 1, "few": few, "all": count, "two": count}
    wrong = {name: _wrong(usages, counts[name]) for name, usages in taken.items()}
    wall = {name: None if wrong[name] else middle(taken[name], "wall") for name in taken}
    each = wall["all"] and wall["one"] and 1000 * (wall["all"] - wall["one"]) / (count - 1)
    note = wrong["all"] or f"{each:.0f} ms for each further one"
    yield Row(f"{count} {what}: time", wall["all"], wall["one"], "one of them", "s", None, note)
    note = wrong["two"] or "wall time on the cores that are free"
    yield Row(f"{count} {what}, --jobs 2: time", wall["two"], wall["all"], "--jobs 1", "s", None, note)
    peaks = {name: None if wrong[name] else middle(taken[name], "peak") for name in ("few", "all")}
    name = f"{count} {what}: peak memory"
    yield Row(name, peaks["all"], peaks["few"], f"{few} of them", "MiB", FLAT, wrong["all"])


def _checkpoint(path: Path) -> None:
    """Two tables and two matrices in float32; each checkpoint has numbers of its own."""
    import numpy as np

    random = np.random.default_rng(int(path.name.partition("-")[2]))
    m = np.arange(LENGTH)[:, None] / LENGTH
    waves = np.concatenate([np.cos(np.pi * k * m) for k in range(24)], axis=1)
    tensors = {
        "embed.weight": random.normal(size=(VOCABULARY, WIDTH)),
        "positions.weight": waves @ random.normal(size=(24, WIDTH))
        + 0.3 * random.normal(size=(LENGTH, WIDTH)),
        "blocks.0.mlp.weight": random.normal(size=(4 * WIDTH, WIDTH)),
        "blocks.1.mlp.weight": random.normal(size=(4 * WIDTH, WIDTH)),
    }
    header, data = {}, b""
    for name, values in tensors.items():
        begin, data = len(data), data + (0.02 * values).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.with_suffix(".safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))


def _check(names: Sequence[str], jobs: int) -> list[str]:
    words = ["check", *names, "--jobs", str(jobs), "--format", "json", "--quiet"]
    return [sys.executable, "-m", "pediag", *words]


def _wrong(usages: Sequence[Usage], count: int) -> str:
    """Why a run is no measurement: it stopped, or did not see a position encoding in every target."""
    wrong = complaint(usages, CLEAN_OR_NOT)
    if wrong:
        return wrong
    said = json.loads(usages[0].out)
    reports = said["reports"] if count > 1 else [said]
    seen = sum(bool(report["encodings"]) and bool(report["summary"]["ran"]) for report in reports)
    return "" if seen == count else f"{seen} of {count} targets were judged"
