"""Live models of transformers with random weights: one pediag.check against one real forward, in one process.

Each model has a process of its own, ``python -m benchmarks.live MODEL LENGTH...``, which prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Limit, Row, complaint, process

if TYPE_CHECKING:
    import torch
    from torch import nn

ROUNDS = 5
LONG_FORWARD = 20.0
"""Seconds; a forward that takes longer is run once."""
PEER = "one real forward"
LIMITS = {("gpt2", 1024): Limit("ratio", 2.0), ("llama", 8192): Limit("speedup", 50.0)}
NAMES = {"gpt2": "live GPT-2 small", "llama": "live Llama of 1B"}


def rows(model: str, *lengths: int) -> Iterator[Row]:
    """One row per length in tokens, out of a process of its own."""
    usage = process([sys.executable, "-m", "benchmarks.live", model, *map(str, lengths)])
    wrong = complaint([usage])
    taken: list[dict[str, Any]] = [] if wrong else json.loads(usage.out)
    for place, length in enumerate(lengths):
        got: dict[str, Any] = taken[place] if taken else {"check": None, "forward": None, "note": wrong}
        name, limit = f"{NAMES[model]}, {length:,} tokens", LIMITS.get((model, length))
        yield Row(name, got["check"], got["forward"], PEER, "s", limit, got["note"])


def gpt2() -> nn.Module:
    """GPT-2 small in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config())
    return model.eval()


def llama() -> nn.Module:
    """A Llama of 1.1 billion parameters, in the dtype that this processor multiplies faster."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=32000,
        max_position_embeddings=131072,
        dtype=faster_dtype(),
    )
    model: nn.Module = LlamaForCausalLM._from_config(config)
    return model.eval()


def faster_dtype() -> torch.dtype:
    """float32 or bfloat16, whichever gives the real forward its better chance here."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        left, right = torch.randn(1024, 2048, dtype=dtype), torch.randn(2048, 8192, dtype=dtype)
        return min(_seconds(lambda: left @ right) for _ in range(3))

    return min((torch.float32, torch.bfloat16), key=seconds)


def compare(model: nn.Module, length: int) -> dict[str, Any]:
    """Median seconds of a check and of a forward at ``length`` tokens, taken in turn."""
    import torch

    import pediag

    ids = torch.randint(0, 1000, (1, length))

    def check() -> None:
        report = pediag.check(model, seq_len=length)
        if not (report.has_encoding and report.summary["ran"]):
            raise SystemExit("nothing was judged, so nothing was measured")

    first = _seconds(check)
    with torch.inference_mode():
        forward = [_seconds(lambda: model(input_ids=ids, use_cache=False))]
        rounds = ROUNDS if forward[0] < LONG_FORWARD else 1
        checks = []
        for turn in range(ROUNDS):
            with torch.inference_mode(mode=False):
                checks.append(_seconds(check))
            if turn < rounds - 1:
                forward.append(_seconds(lambda: model(input_ids=ids, use_cache=False)))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    note = f"{dtype}; first check of the process {first:.2f} s; forwards: {len(forward)}"
    return {"check": median(checks), "forward": median(forward), "note": note}


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(name: str, *lengths: str) -> None:
    """Print a list with one comparison per length."""
    model = {"gpt2": gpt2, "llama": llama}[name]()
    print(json.dumps([compare(model, int(length)) for length in lengths]))


if __name__ == "__main__":
    main(*sys.argv[1:])
