"""Where the time of one check goes: by stage of the pipeline, and by rule.

``python -m benchmarks.rules TARGET LENGTH`` prints it as JSON, in processor seconds past the imports.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import shapes
from benchmarks.measure import Row, complaint, process

LEAST = 0.02
"""Seconds below which a rule has no row of its own."""


def rows() -> Iterator[Row]:
    """A row for each stage and for each rule that takes more than ``LEAST``, beside the whole check."""
    with tempfile.TemporaryDirectory() as folder:
        path = shapes.directory(Path(folder), shapes.LAYERS)
        usage = process([sys.executable, "-m", "benchmarks.rules", str(path), str(shapes.LENGTH)])
    wrong = complaint([usage])
    if wrong:
        yield Row("time by stage and rule", None, None, "the check", "s", None, wrong)
        return
    taken: dict[str, dict[str, float]] = json.loads(usage.out)
    whole = sum(sum(part.values()) for part in taken.values())
    for kind, part in taken.items():
        for name, seconds in sorted(part.items(), key=lambda item: -item[1]):
            if seconds >= LEAST:
                yield Row(f"{kind}: {name}", seconds, whole, "the check", "s", None)


class Stages:
    """Takes the time between what the pipeline says that it does."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self._doing, self._since = "", 0.0

    def step(self, text: str) -> None:
        """The next stage begins."""
        now = time.process_time()
        if self._doing:
            self.taken[self._doing] = self.taken.get(self._doing, 0.0) + now - self._since
        self._doing, self._since = text, now


def measure(target: str, length: int) -> dict[str, dict[str, float]]:
    """Seconds by stage and by rule, in the order of their codes: a value that rules share counts for the first."""
    import torch  # noqa: F401
    from transformers import AutoConfig, LlamaForCausalLM  # noqa: F401

    from pediag.check import alone, look
    from pediag.process import lean, settled
    from pediag.rules.registry import all_rules
    from pediag.rules.run import run

    stages, spent = Stages(), {}
    known = look(target, seq_len=length, progress=stages)
    stages.step("")
    with alone(target), lean():
        settled()
        for rule in all_rules():
            start = time.process_time()
            run([rule], known.facets)
            spent[f"{rule.code} {rule.name}"] = time.process_time() - start
    return {"stage": stages.taken, "rule": spent}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
