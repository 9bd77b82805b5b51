"""What one model of the zoo takes: `pediag check` of folders without weights, at the length that each declares."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.measure import Row, Usage, complaint, interleaved, middle, process, python

MODELS = ("llama", "gpt2", "t5", "bert")
IMPORTS = "import torch, transformers; from transformers import AutoConfig, LlamaForCausalLM"
PEER = "importing torch and transformers' Llama"
WRITE = "import sys; from fixtures.zoo import building; print(building.folder(sys.argv[1], sys.argv[2]))"
ROUNDS = 2
CLEAN_OR_NOT = (0, 1)


def rows() -> Iterator[Row]:
    """One row per model."""
    with tempfile.TemporaryDirectory() as folder:
        made = {name: process([*python(WRITE), name, folder]) for name in MODELS}
        jobs: dict[str, Sequence[str]] = {"imports": python(IMPORTS)}
        jobs |= {name: _check(usage.out.strip()) for name, usage in made.items() if not usage.status}
        taken = interleaved(jobs, ROUNDS)
    imports = middle(taken["imports"])
    for name, usage in made.items():
        wrong = complaint([usage]) or _wrong(taken[name])
        past = None if wrong else middle(taken[name]) - imports
        note = wrong or f"wall {middle(taken[name], 'wall'):.1f} s with imports"
        yield Row(f"zoo, {name}: past imports", past, imports, PEER, "s", None, note)


def _check(path: str) -> list[str]:
    return [sys.executable, "-m", "pediag", "check", path, "--format", "json", "--quiet"]


def _wrong(usages: Sequence[Usage]) -> str:
    wrong = complaint(usages, CLEAN_OR_NOT)
    if wrong:
        return wrong
    report = json.loads(usages[0].out)
    return "" if report["encodings"] and report["summary"]["ran"] else "nothing was judged"
