"""Models that are called in unusual ways, or whose attention runs along other axes than the tokens fed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, schemes


def sinusoids(rows: int, width: int) -> Tensor:
    """[sin | cos], exponent i / (d/2 - 1)."""
    rates = torch.exp(-math.log(1e4) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(rows)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1)


class KeywordsOnly(nn.Module):
    """Rotary decoder; every argument goes by keyword, and a cache of keys and values comes back."""

    def __init__(self, required: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 256)
        self.inv_freq = nn.Buffer(1e4 ** (-torch.arange(0, 64, 2) / 64))
        self.qkv = nn.Linear(256, 768)
        self.forward = self.needs if required else self.offers  # type: ignore[method-assign]

    def needs(self, *, input_ids: Tensor, past: tuple[Tensor, Tensor] | None = None) -> dict[str, object]:
        return self.run(input_ids)

    def offers(self, *, input_ids: Tensor | None = None, past: Tensor | None = None) -> dict[str, object]:
        assert input_ids is not None
        return self.run(input_ids)

    def run(self, ids: Tensor) -> dict[str, object]:
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)

        def turn(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k = turn(q), turn(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return {"out": y.transpose(1, 2).flatten(2), "cache": (k, v)}


@pytest.mark.parametrize("required", [True, False])
def test_keyword_only_arguments(required: bool) -> None:
    report = look(KeywordsOnly(required))
    assert (schemes(report), codes(report)) == ({"rotary"}, set())


class Latents(nn.Module):
    """A fixed number of learned queries over a text, and the text's positions as queries of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(262, 64), nn.Embedding(2048, 64)
        self.latents = nn.Parameter(torch.randn(16, 64) * 0.02)
        self.read = nn.MultiheadAttention(64, 4, batch_first=True)
        self.think = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.write = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        n = inputs.shape[1]
        places = self.positions(torch.arange(n, device=inputs.device))
        x = self.embed(inputs) + places
        latents = self.latents.expand(len(x), -1, -1)
        latents = self.think(latents + self.read(latents, x, x)[0])
        return self.write(places.expand(len(x), -1, -1), latents, latents)[0]


def test_latent_queries_are_no_batch() -> None:
    report = look(Latents())
    assert "learned" in schemes(report)
    assert codes(report) == set()


class Patches(nn.Module):
    """An image in patches, a class token, one learned row a place; its size is nowhere but in the table."""

    def __init__(self, image: int, patch: int, positions: bool = True) -> None:
        super().__init__()
        places = (image // patch) ** 2 + 1
        self.patch = nn.Conv2d(3, 48, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, 48))
        self.places = nn.Parameter(torch.randn(1, places, 48) * 0.02) if positions else None
        layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1)
        x = x if self.places is None else x + self.places
        return self.encoder(x)[:, 0]


@pytest.mark.parametrize(("image", "patch"), [(64, 8), (224, 16), (84, 12)])
def test_patches_of_a_fixed_image(image: int, patch: int) -> None:
    report = look(Patches(image, patch))
    assert codes(report) == set()
    (learned,) = [encoding for encoding in report.encodings if encoding.scheme == "learned"]
    assert learned.parameters["rows"] == (image // patch) ** 2 + 1


def test_patches_without_positions_are_not_judged() -> None:
    report = look(Patches(64, 8, positions=False))
    assert (schemes(report), codes(report), report.exit_code()) == (set(), set(), 3)


class Frames(nn.Module):
    """A convolution of stride 2 in front: half as many places as frames."""

    def __init__(self, rows: int = 1500) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(80, 64, 3, padding=1), nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.table = nn.Buffer(sinusoids(rows, 64))
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.two(F.gelu(self.one(x)))).transpose(1, 2)
        return self.layer(x + self.table[: x.shape[1]])


def test_strided_frames() -> None:
    report = look(Frames(), 512, inputs=["x=float32[B,80,N]"])
    assert (schemes(report), codes(report)) == ({"sinusoidal"}, set())


class FilledUp(nn.Module):
    """Texts are filled up with padding to whole windows of 64; real tokens are counted from row 2."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(300, 48), nn.Embedding(rows, 48, padding_idx=1)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        ids = F.pad(ids, (0, -ids.shape[1] % 64), value=1)
        real = ids.ne(1).int()
        rows = (real.cumsum(1) * real).long() + 1
        return self.layer(self.embed(ids) + self.places(rows), src_key_padding_mask=ids.eq(1))


@pytest.mark.parametrize(
    ("rows", "tokens", "found"), [(514, 512, set()), (512, 510, set()), (512, 511, {"PE502"})]
)
def test_padding_takes_no_rows(rows: int, tokens: int, found: set[str]) -> None:
    report = look(FilledUp(rows), tokens)
    assert (schemes(report), codes(report)) == ({"learned"}, found)
    for finding in report.findings:
        assert finding.evidence.limit == 510
