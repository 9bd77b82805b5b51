"""The commands that need no model, against importing typer and rich alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.measure import Limit, Row, complaint, interleaved, middle, process, python

PEER = "import typer, rich"
SMALLEST = """
import typer
app = typer.Typer()
@app.command()
def say(word: str): print(word)
app(["word"])
"""
COMMANDS = (("--help",), ("rules",), ("rules", "--format", "json"), ("explain", "PE302"))
ROUNDS = 9
LIMIT = Limit("ratio", 3.0)


def rows() -> Iterator[Row]:
    """One row per command."""
    jobs = {" ".join(words): [sys.executable, "-m", "pediag", *words] for words in COMMANDS}
    taken = interleaved({PEER: python(PEER), SMALLEST: python(SMALLEST), **jobs}, ROUNDS)
    peer, smallest = middle(taken[PEER]), middle(taken[SMALLEST])
    for words in COMMANDS:
        name = " ".join(words)
        wrong = complaint(taken[name])
        measured = None if wrong else middle(taken[name])
        note = f"{torch_in(words)}; the smallest typer command takes {smallest / peer:.1f}x"
        yield Row(f"pediag {name}", measured, peer, PEER, "s", LIMIT, wrong or note)


def torch_in(words: tuple[str, ...]) -> str:
    """Whether the command imported torch, asked of the interpreter that ran it."""
    code = f"import sys; from pediag.cli import main; main({list(words)!r}); sys.exit('torch' in sys.modules)"
    return "TORCH WAS IMPORTED" if process(python(code)).status else "torch not imported"
