"""PE211: rows that training never reached, as reported, beside their corrected twins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.rules.state._member import Looked, corrected, encoder, reported, trained

D = 96


def fresh(rows: int, std: float = 0.02, seed: int = 5) -> Tensor:
    """Rows as an initialiser leaves them."""
    return std * torch.randn(rows, D, generator=torch.Generator().manual_seed(seed))


def over(rows: Tensor) -> nn.Module:
    return encoder(Looked(nn.Embedding.from_pretrained(rows, freeze=False)), D)


def check(rows: Tensor, seq_len: int, first: int) -> None:
    """Found from ``first`` on; silent where the rows are trained, and where the text ends before them."""
    finding = reported(over(rows), "PE211", seq_len)
    assert (finding.severity, finding.evidence.measured) == ("warning", first)
    corrected(over(trained(len(rows), D)), seq_len, "PE211")
    corrected(over(rows), first, "PE211")


def test_mindall_e_18() -> None:
    """kakaobrain/mindall-e#18: 64 trained text positions and 64 more appended, to be trained from scratch."""
    check(torch.cat((trained(64, D), fresh(64))), 128, 64)


def test_pytorch_seq2seq_32() -> None:
    """bentrevett/pytorch-seq2seq#32: a table of 100 where training sentences end earlier; the rest stays random."""
    rows = torch.cat((trained(60, D), fresh(40, std=1.0)))
    check(rows, 100, 60)


def test_transformers_13559() -> None:
    """huggingface/transformers#13559: resize_position_embeddings puts newly initialised vectors at the end."""
    check(torch.cat((trained(512, D), fresh(512))), 1024, 512)


def test_bert_969() -> None:
    """google-research/bert#969: trained at 128 tokens only, so the positions up to 512 were never learned."""
    check(torch.cat((trained(128, D), fresh(384))), 512, 128)


def test_b178_a_table_of_random_numbers_throughout_is_not_told_from_one_before_training() -> None:
    """B178, huggingface/pytorch-image-models#1794: a position table that was not loaded equals its initialisation."""
    corrected(over(fresh(197)), 197, "PE211")
