"""Opens damaged copies of a file and says how each ended. Run in a process of its own: a crash must be seen.

    python -m tests.targets.files._corruption FILE SEED COUNT FOLDER

Prints one JSON object: how many copies opened, how many were refused, and what else was raised.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from pediag.errors import LoadError
from pediag.targets import open_target

COUNT = 1500


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A copy that is cut short, has bytes changed, a stretch lost, or a stretch repeated."""
    kind = rng.randrange(10)
    at = rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + rng.randrange(1, 64) :]
    if kind == 2:
        return data[:at] + data[at : at + rng.randrange(1, 64)] + data[at:]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(data))
        changed[place] = rng.choice((rng.randrange(256), changed[place] ^ 1 << rng.randrange(8), 0, 255))
    return bytes(changed)


def main(file: str, seed: int, count: int, folder: str) -> dict[str, object]:
    """Open ``count`` damaged copies, and read every tensor of those that open."""
    data, rng = Path(file).read_bytes(), random.Random(seed)
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(count):
        path = Path(folder) / f"m{number % 7}{Path(file).suffix}"
        path.write_bytes(damaged(data, rng))
        try:
            target = open_target(path)
            for tensor in target.tensors.values():
                tensor.load().isnan().sum()
            if target.module is not None:
                for held in (*target.module.parameters(), *target.module.buffers()):
                    held.is_meta or held.isnan().sum()
            ends["opened"] += 1
        except LoadError as error:
            ends["refused"] += 1
            if "\n" in str(error) or not str(error).startswith(str(path)):
                wrong.append(f"{number}: {error}")
        except BaseException as error:
            wrong.append(f"{number}: {type(error).__name__}: {error}")
    return {**ends, "wrong": wrong, "left": sorted(item.name for item in Path(folder).iterdir())}


def ends(name: str, seed: int, folder: Path) -> dict[str, int]:
    """How ``COUNT`` damaged copies of a fixture end, opened in a process of their own, after a check of the process."""
    here = Path(__file__)
    work = folder / "work"
    work.mkdir()
    fixture = here.parents[3] / "fixtures" / "formats" / name
    command = [
        sys.executable,
        "-m",
        "tests.targets.files._corruption",
        str(fixture),
        str(seed),
        str(COUNT),
        str(work),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here.parents[3], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["wrong"] == []
    assert told["left"] == [f"m{number}{fixture.suffix}" for number in range(7)]
    assert told["opened"] + told["refused"] == COUNT
    return {"opened": told["opened"], "refused": told["refused"]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
