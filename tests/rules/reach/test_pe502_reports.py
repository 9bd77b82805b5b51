"""PE502 on public reports of tables that end too soon, each in the shape that was reported, and on its repair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rules.reach._members import Attention, rotate
from tests.rules.reach._reach import findings

CODE = "PE502"


def test_b167_transformers_14243_two_rows_of_514_are_reserved() -> None:
    """B167 huggingface/transformers#14243: RoBERTa's 514 rows stop at 512 tokens, with an index error."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    made = {
        rows: transformers.RobertaModel(
            transformers.RobertaConfig(
                **sizes, vocab_size=99, max_position_embeddings=rows, type_vocab_size=1
            )
        ).eval()
        for rows in (514, 516)
    }
    (finding,) = findings(made[514], CODE, seq_len=514)
    assert (finding.severity, finding.evidence.measured, finding.evidence.limit) == ("error", 514, 512)
    assert not findings(made[514], CODE, seq_len=512)
    assert not findings(made[516], CODE, seq_len=514)


class CachedAngles(Attention):
    """Cosines and sines computed once for so many positions."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(rows).float(), 1e4 ** (-torch.arange(0, 32, 2) / 32))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = q.shape[2]
        cos, sin = self.cos[:n], self.sin[:n]
        return rotate(q, cos, sin), rotate(k, cos, sin)


class GatheredAngles(CachedAngles):
    """The same cache read by ids, as kernels of servers do."""

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.arange(q.shape[2])
        return (
            rotate(q, self.cos[ids], self.sin[ids]),
            rotate(k, self.cos[ids], self.sin[ids]),
        )


class Reader(nn.Module):
    """The table's rows by ids that lie in a buffer, as BERT and Longformer keep them."""

    def __init__(self, rows: int, ids: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(97, 32), nn.Embedding(rows, 32)
        self.position_ids = nn.Buffer(torch.arange(ids)[None])
        self.mix = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.embed(ids) + self.place(self.position_ids[:, : ids.shape[1]]))


class Clamped(Attention):
    """Rows beyond the last read the last, as XLA gathers and GPU kernels do."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.place = nn.Embedding(rows, 64)

    def added(self, n: int) -> Tensor:
        return self.place(torch.arange(n).clamp(max=self.place.num_embeddings - 1))


class Shaw(Attention):
    """A learned vector for each distance, read by distance + rows - 1, clipped or not."""

    def __init__(self, longest: int, clip: bool) -> None:
        super().__init__(heads=2, width=16)
        self.longest, self.clip = longest, clip
        self.distance = nn.Embedding(2 * longest - 1, 16)

    def forward(self, ids: Tensor) -> Tensor:
        i = torch.arange(ids.shape[1])
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        offset = i[:, None] - i[None]
        if self.clip:
            offset = offset.clamp(1 - self.longest, self.longest - 1)
        rows = self.distance(offset + self.longest - 1)
        scores = q @ k.mT + torch.einsum("bhld,lrd->bhlr", q, rows)
        return (scores / 4).softmax(-1) @ v


REPORTS: dict[str, tuple[Any, Any, int, int]] = {
    "B224 mit-han-lab/llm-awq#332: a literal 2,048 sizes the rotary cache": (
        lambda: CachedAngles(2048),
        lambda: CachedAngles(4096),
        4096,
        2048,
    ),
    "B074 vllm-project/vllm#56446: requests are let in past the cache of cosines": (
        lambda: GatheredAngles(1024),
        lambda: GatheredAngles(4096),
        4096,
        1024,
    ),
    "B176 allenai/longformer#129: the table was extended to 4,096 and its ids were not": (
        lambda: Reader(4096, 512),
        lambda: Reader(4096, 4096),
        4096,
        512,
    ),
    "B172 huggingface/transformers#33903: the accelerator reads the last row": (
        lambda: Clamped(256),
        lambda: Clamped(1024),
        1024,
        256,
    ),
    "B214 huggingface/transformers#9164 (and #17026): distances are not clipped": (
        lambda: Shaw(256, clip=False),
        lambda: Shaw(256, clip=True),
        300,
        256,
    ),
}


@pytest.mark.parametrize("report", REPORTS)
def test_reports(report: str) -> None:
    """B224 llm-awq#332, B074 vllm#56446, B176 longformer#129, B172 transformers#33903, B214 transformers#9164."""
    faulty, right, length, limit = REPORTS[report]
    (finding,) = findings(faulty().eval(), CODE, seq_len=length)
    assert finding.severity == "error"
    assert finding.where.file is not None and Path(finding.where.file).parent == Path(__file__).parent
    assert finding.evidence.measured == (2 * limit - 1 if "#9164" in report else limit)
    assert not findings(faulty().eval(), CODE, seq_len=limit)
    assert not findings(right().eval(), CODE, seq_len=length)
