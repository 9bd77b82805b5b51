"""``python -m benchmarks [--slow] [--only WORD] [--json FILE]``: measure and show the table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import checkpoints, commands, live, many, peers, rules, shapes, training, zoo
from benchmarks.measure import Row

Work = Callable[[], Iterator[Row]]
SIGNS = {"ratio": "≤ {}x", "speedup": "≥ {}x faster", "measured": "≤ {} {unit}"}
LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
"""Processes at work before the measuring began; above the number of cores, times come out too long."""
VERDICTS = {True: ("met", "green"), False: ("NOT MET", "bold red"), None: ("-", "dim")}


def main() -> int:
    """Measure, show, and write; exit status 1 when a row could not be measured at all."""
    options = _options()
    rows = list(_measured(_work(options.slow, options.only)))
    render(rows, Console(width=None if sys.stdout.isatty() else 160))
    if options.json is not None:
        options.json.write_text(json.dumps(as_dict(rows), indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.measured is None for row in rows) else 0


def render(rows: Iterable[Row], console: Console) -> None:
    """Print one line per row: measured, peer, ratio, reach, and whether it is met."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_conditions(), title_justify="left")
    for name in ("row", "measured", "peer", "ratio", "reach", "", "note"):
        table.add_column(name, justify="right" if name in ("measured", "ratio", "reach") else "left")
    for row in rows:
        word, style = VERDICTS[row.met]
        peer = f"{_number(row.peer, row.unit)} {row.peer_name}"
        cells = (row.name, _number(row.measured, row.unit), peer, _ratio(row), _reach(row), Text(word, style))
        table.add_row(*cells, row.note)
    console.print(table)


def as_dict(rows: Iterable[Row]) -> dict[str, Any]:
    """The rows as JSON values, with the machine and the versions they hold for."""
    listed = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in rows]
    return {"schema_version": 1, "date": time.strftime("%Y-%m-%d"), **_machine(), "rows": listed}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What pediag costs.")
    parser.add_argument("--slow", action="store_true", help="also the rows whose real forward takes minutes")
    groups = sorted(_work(False, None))
    parser.add_argument("--only", choices=groups, help="one group of rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as well")
    return parser.parse_args()


def _work(slow: bool, only: str | None) -> dict[str, Work]:
    lengths = (2048, 8192) if slow else (2048,)
    work: dict[str, Work] = {
        "commands": commands.rows,
        "peers": peers.rows,
        "gpt2": lambda: live.rows("gpt2", 1024),
        "llama": lambda: live.rows("llama", *lengths),
        "shapes": shapes.rows,
        "rules": rules.rows,
        "zoo": zoo.rows,
        "checkpoints": checkpoints.rows,
        "many": many.rows,
        "training": training.rows,
    }
    return {name: job for name, job in work.items() if only in (None, name)}


def _measured(work: dict[str, Work]) -> Iterator[Row]:
    for name, job in work.items():
        start = time.perf_counter()
        print(f"measuring {name} ...", end=" ", file=sys.stderr, flush=True)
        try:
            yield from job()
        except Exception as error:  # one group that cannot be measured costs none of the others
            yield Row(name, None, None, "", "s", None, f"{type(error).__name__}: {error}")
        print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)


def _machine() -> dict[str, Any]:
    packages = {name: _version(name) for name in ("pediag", "torch", "transformers")}
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": count,
        "load_before": round(LOAD, 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **packages,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _conditions() -> str:
    machine = _machine()
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "transformers"))
    return f"{time.strftime('%Y-%m-%d')}, {machine['cores']} cores (load before {LOAD:.1f}), {versions}"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}"


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    faster = row.limit is not None and row.limit.of == "speedup"
    return f"{1 / row.ratio:.3g}x faster" if faster else f"{row.ratio:.3g}x"


def _reach(row: Row) -> str:
    if row.limit is None:
        return "-"
    value = row.limit.value
    return SIGNS[row.limit.of].format(f"{value:g}" if value < 100 else f"{value:,.0f}", unit=row.unit)


if __name__ == "__main__":
    sys.exit(main())
