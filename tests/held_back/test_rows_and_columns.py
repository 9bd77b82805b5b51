"""A rotation by row and column of patches: its angles do not grow with the place in the sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes


class Patches(nn.Module):
    """Patches (B, 1 + H W, D) behind a class token; half of the pairs turn by row, half by column."""

    def __init__(self, token: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.token, self.scale = token, scale
        self.patch, self.qkv = nn.Conv2d(3, 64, 16, 16), nn.Linear(64, 192)
        self.first = nn.Parameter(torch.randn(1, 1, 64))

    def angles(self, height: int, width: int, x: Tensor) -> Tensor:
        rates = self.scale * 100.0 ** (-torch.arange(0, 8, 2, device=x.device) / 8)
        place = torch.cartesian_prod(
            torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        )
        angle = (place[:, :, None] * rates).flatten(1)
        return torch.cat((angle.new_zeros(1, 8), angle)) if self.token else angle

    def forward(self, pixels: Tensor) -> Tensor:
        grid = self.patch(pixels)
        x = grid.flatten(2).mT
        if self.token:
            x = torch.cat((self.first.expand(len(x), -1, -1), x), 1)
        angle = self.angles(grid.shape[-2], grid.shape[-1], x)
        c, s = angle.cos(), angle.sin()
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        q, k = (
            torch.cat((t[..., :8] * c - t[..., 8:] * s, t[..., :8] * s + t[..., 8:] * c), -1) for t in (q, k)
        )
        mixed: Tensor = F.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("token", [True, False])
def test_rows_and_columns_are_no_garbage(token: bool) -> None:
    report = look(Patches(token))
    assert (schemes(report), codes(report)) == ({"rotary"}, set())
    assert "PE501" not in {finding.code for finding in report.findings}
