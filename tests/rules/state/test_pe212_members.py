"""PE212: rows of padding that real positions read, as reported, beside their corrected twins."""

from __future__ import annotations

import torch
from torch import nn

from tests.rules.state._member import Looked, corrected, encoder, reported, sinusoid, trained

D = 32


def table(rows: int, padding_idx: int | None) -> nn.Embedding:
    """``nn.Embedding(rows, D, padding_idx)`` after training: every row but that of padding was written."""
    made = nn.Embedding(rows, D, padding_idx=padding_idx)
    with torch.no_grad():
        made.weight.copy_(trained(rows, D))
        if padding_idx is not None:
            made.weight[padding_idx] = 0
    return made


def test_b169_transformers_10200() -> None:
    """B169, huggingface/transformers#10200: BART's positions start at 2, and a padding_idx above 2 zeroes one."""
    finding = reported(encoder(Looked(table(130, 5), offset=2), D), "PE212", 128)
    assert "Position 3 reads row 5" in finding.message
    corrected(encoder(Looked(table(130, None), offset=2), D), 128, "PE212")
    corrected(encoder(Looked(table(130, 1), offset=2), D), 128, "PE212")


def test_b169_transformers_19265() -> None:
    """B169, huggingface/transformers#19265: padding_idx 1 on the table, and ids that start at 0."""
    finding = reported(encoder(Looked(table(128, 1)), D), "PE212", 128)
    assert "Position 1 reads row 1" in finding.message
    corrected(encoder(Looked(table(130, 1), offset=2), D), 128, "PE212")


def test_transformers_409() -> None:
    """huggingface/transformers#409: BERT's position 0 is treated as padding by padding_idx=0."""
    finding = reported(encoder(Looked(table(128, 0)), D), "PE212", 128)
    assert "Position 0 reads row 0" in finding.message
    corrected(encoder(Looked(table(128, None)), D), 128, "PE212")


def test_b175_roberta2longformer_2() -> None:
    """B175, LennartKeller/roberta2longformer#2: rows [0:512] are tiled, so the row for padding comes again inside."""
    source = trained(514, D)
    source[1] = 0
    wrong = torch.cat((source[:2], source[2:514], source[0:512]))
    right = torch.cat((source[:2], source[2:514], source[2:514]))
    model = encoder(Looked(nn.Embedding.from_pretrained(wrong, freeze=False), offset=2), D)
    finding = reported(model, "PE212", 1024)
    assert "Row 515" in finding.message
    corrected(encoder(Looked(nn.Embedding.from_pretrained(right, freeze=False), offset=2), D), 1024, "PE212")


def test_attention_is_all_you_need_99() -> None:
    """jadore801120/attention-is-all-you-need-pytorch#99: padding_idx zeroes row 0 of the sinusoid that texts read."""
    zeroed = sinusoid(200, D)
    zeroed[0] = 0
    for rows, first, faulty in ((zeroed, 0, True), (zeroed, 1, False), (sinusoid(200, D), 0, False)):
        padding = None if rows is not zeroed else 0
        model = encoder(Looked(nn.Embedding.from_pretrained(rows, padding_idx=padding), offset=first), D)
        if faulty:
            assert "Position 0 reads row 0" in reported(model, "PE212", 128).message
        else:
            corrected(model, 128, "PE212")
