"""PE210: two positions with one row, as reported, beside their corrected twins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.rules.state._member import Looked, corrected, encoder, reported, trained, turned


def rows_of(model: nn.Module, place: Tensor) -> tuple[Tensor, Tensor]:
    n = place.numel()
    return model.cos_cached[:n].float(), model.sin_cached[:n].float()


def cache(rows: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The cache of a Llama whose positions and frequencies are made in ``dtype``; the table is kept in bfloat16."""
    place, w = torch.arange(rows).to(dtype), 10000.0 ** (-torch.arange(0, d, 2).float() / d)
    angle = torch.outer(place.float(), w.to(dtype).float())
    return {"cos_cached": angle.cos(), "sin_cached": angle.sin()}


def test_b001_transformers_25681() -> None:
    """B001, huggingface/transformers#25681: integers above 256 are no longer distinct; rows 256 and 257 are one."""
    finding = reported(turned(rows_of, 32, **cache(512, 32, torch.bfloat16)), "PE210", 512)
    distinct = len(set(torch.arange(512).bfloat16().tolist()))
    assert finding.evidence.measured == 512 - distinct
    assert "Positions 256 and 257" in finding.message
    corrected(turned(rows_of, 32, **cache(512, 32, torch.float32)), 512, "PE210")


def test_b008_candle_3520() -> None:
    """B008, huggingface/candle#3520: 15962 is 15936 or 15968, and rows come in runs of 2, 4, ... 64."""
    assert torch.tensor(15962).bfloat16().item() in (15936.0, 15968.0)
    finding = reported(turned(rows_of, 16, **cache(16384, 16, torch.bfloat16)), "PE210", 16384)
    assert finding.evidence.measured == 16384 - len(set(torch.arange(16384).bfloat16().tolist()))
    corrected(turned(rows_of, 16, **cache(16384, 16, torch.float32)), 16384, "PE210")


def text_and_images(dtype: torch.dtype) -> dict[str, Tensor]:
    """A rotation of 16 text tokens from 0 on and 240 image tokens from 65536 on, with positions in ``dtype``."""
    place = torch.cat((torch.arange(16), torch.arange(65536, 65536 + 240))).to(dtype).double()
    angle = place[:, None] * 10000.0 ** (-torch.arange(0, 32, 2).double() / 32)
    return {"cos_cached": angle.cos().float(), "sin_cached": angle.sin().float()}


def test_b022_diffusers_13920() -> None:
    """B022, huggingface/diffusers#13920: the step of bfloat16 at 65536 is 512, so all patches have one place."""
    assert len(torch.arange(65536, 66048).bfloat16().unique()) == 2
    finding = reported(turned(rows_of, 32, **text_and_images(torch.bfloat16)), "PE210", 256)
    assert finding.evidence.measured == 239
    assert "Positions 16 and 17" in finding.message
    corrected(turned(rows_of, 32, **text_and_images(torch.float32)), 256, "PE210")


def test_presumm_14_and_71() -> None:
    """nlpyang/PreSumm#14 and #71: positions above 512 are all copies of the last row."""
    first = trained(512, 32)
    repeated = torch.cat((first, first[-1][None].repeat(288, 1)))
    finding = reported(
        encoder(Looked(nn.Embedding.from_pretrained(repeated, freeze=False)), 32), "PE210", 800
    )
    assert finding.evidence.measured == 288
    assert "Positions 511 and 512" in finding.message
    grown = torch.cat((first, trained(288, 32, seed=1)))
    corrected(encoder(Looked(nn.Embedding.from_pretrained(grown, freeze=False)), 32), 800, "PE210")


def test_b175_roberta2longformer_2() -> None:
    """B175, LennartKeller/roberta2longformer#2: 514 rows tiled from row 0, so row 512 + k repeats row k; a note."""
    first = trained(514, 32)
    tiled = first[:512].repeat(2, 1)
    finding = reported(encoder(Looked(nn.Embedding.from_pretrained(tiled, freeze=False)), 32), "PE210", 1000)
    assert (finding.severity, finding.evidence.measured) == ("note", 1000 - 512)
