"""PE208: stored position ids that merging, casting and converting damaged, as reported, beside corrected twins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.rules.state._member import corrected, encoder, reported, saved

KEY = "cond_stage_model.transformer.text_model.embeddings.position_ids"
TABLE = "cond_stage_model.transformer.text_model.embeddings.position_embedding.weight"


def merged(first: Tensor, second: Tensor, alpha: float) -> Tensor:
    """A weighted sum in half precision, as merging tools make of every tensor."""
    return (first.half() * (1 - alpha) + second.half() * alpha).half()


def lost(ids: Tensor) -> list[int]:
    """Ids of 0 .. n - 1 that nothing reads once the numbers are truncated: what the toolkit lists."""
    return sorted(set(range(ids.numel())) - {int(value) for value in ids.flatten().tolist()})


def stored(folder: Path, ids: Tensor) -> Path:
    """CLIP's text tower in outline: 77 rows and the ids beside them."""
    rows = torch.randn(77, 768, generator=torch.Generator().manual_seed(0)) * 0.02
    return saved(folder, {KEY: ids, TABLE: rows})


@pytest.mark.parametrize("alpha", [0.3, 0.45])
def test_b031_webui_7450_and_6728(tmp_path: Path, alpha: float) -> None:
    """B031, AUTOMATIC1111/stable-diffusion-webui#7450 and #6728: two int64 buffers averaged in half, then truncated."""
    sound = torch.arange(77)[None]
    ids = (merged(sound, sound, alpha) - 2e-3).long()
    finding = reported(stored(tmp_path, ids), "PE208", 77)
    wrong = sum(1 for place, value in enumerate(ids[0].tolist()) if value != place)
    assert (finding.severity, finding.evidence.measured) == ("error", wrong)
    assert f"{len(lost(ids)):,} ids are missing" in finding.message and KEY in finding.message
    corrected(stored(tmp_path, sound), 77, "PE208")


def test_b031_merge_without_distortion_29(tmp_path: Path) -> None:
    """B031, ogkalu2/Merge-Stable-Diffusion-models-without-distortion#29: the buffer stays in float16, a little off."""
    sound = torch.arange(77)[None]
    ids = merged(sound, sound, 1 / 3) - 0.03125
    assert ids.dtype == torch.float16 and lost(ids)
    assert reported(stored(tmp_path, ids), "PE208", 77).severity == "error"
    corrected(stored(tmp_path, sound.half()), 77, "PE208")


def test_b031_model_toolkit_6(tmp_path: Path) -> None:
    """B031, arenasys/stable-diffusion-webui-model-toolkit#6: dozens of positions missing, told by their numbers."""
    ids = torch.arange(77)
    ids[1:60:2] -= 1
    assert len(lost(ids)) == 30
    finding = reported(stored(tmp_path, ids[None]), "PE208", 77)
    assert "30 ids are missing, 30 doubled" in finding.message
    corrected(stored(tmp_path, torch.arange(77)[None]), 77, "PE208")


class Clip(nn.Module):
    """Rows by stored ids, cast on use."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("position_ids", ids)
        self.position_embedding = nn.Embedding(77, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.position_embedding(self.position_ids[:, : x.shape[1]].long())


def test_b031_in_a_running_model() -> None:
    """B031, AUTOMATIC1111/stable-diffusion-webui#7450: the same ids where a model reads them."""
    sound = torch.arange(77)[None]
    ids = (merged(sound, sound, 0.3) - 2e-3).half()
    finding = reported(encoder(Clip(ids), 32), "PE208", 77)
    assert f"{len(lost(ids)):,} ids are missing" in finding.message
    corrected(encoder(Clip(sound), 32), 77, "PE208")
