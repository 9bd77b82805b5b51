"""Effects speak of patches where images alone are read, and of tokens elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

import pediag


class Patches(nn.Module):
    """An image of 32 x 32 in 16 patches, with a row of zeros for each, which PE311 tells of."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=32, patch_size=8, num_channels=3)
        self.patches, self.project = nn.Conv2d(3, 24, 8, stride=8), nn.Linear(24, 72)
        self.places = nn.Parameter(torch.zeros(1, 16, 24))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.mixed(self.patches(pixel_values).flatten(2).transpose(1, 2) + self.places)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v)


class Words(Patches):
    """The same for a text of 16 words."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Embedding(99, 24)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mixed(self.patches(input_ids) + self.places[:, : input_ids.shape[1]])


def effect(model: nn.Module) -> str:
    """What PE311 says that the rows of zeros do."""
    report = pediag.check(model.eval(), select=["PE311"])
    (found,) = report.findings
    assert report.seq_len == 16
    return found.effect


def test_an_image_has_patches() -> None:
    assert "16 patches stand at one place" in effect(Patches())


def test_a_text_has_tokens() -> None:
    assert "16 tokens stand at one place" in effect(Words())
