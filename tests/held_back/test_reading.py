"""Values that are easily read for what they are not, and rounded ones that are still what they are."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.held_back._report import codes, look, marked, schemes


class Causal(nn.Module):
    """One causal attention of four heads; subclasses say what is done to q, k and the input."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def before(self, x: Tensor) -> Tensor:
        return x

    def turn(self, t: Tensor, query: bool) -> Tensor:
        return t

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.embed(ids))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q, True), self.turn(k, False)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class QueryGrowth(Causal):
    """Queries scaled by 1 + 0.1 log(position), as for long texts, beside learned positions."""

    def before(self, x: Tensor) -> Tensor:
        self.places = getattr(self, "places", None) or nn.Embedding(2048, x.shape[-1])
        return x

    def turn(self, t: Tensor, query: bool) -> Tensor:
        n = t.shape[-2]
        grown = 1 + 0.1 * torch.log(torch.floor((torch.arange(n, device=t.device) + 1.0) / 64) + 1)
        return t * grown[:, None] if query else t


def test_a_factor_that_grows_turns_nothing() -> None:
    report = look(QueryGrowth())
    assert "rotary" not in schemes(report)
    assert "PE201" not in {finding.code for finding in report.findings}


class Rotated(Causal):
    """Half pairs by frequencies that are given."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def turn(self, t: Tensor, query: bool) -> Tensor:
        angles = torch.arange(t.shape[-2], device=t.device)[:, None] * self.inv_freq  # <- PE201
        cos, sin = angles.cos(), angles.sin()
        a, b = t.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


PLAIN = 1e4 ** (-torch.arange(0, 64, 2) / 64)


@pytest.mark.parametrize(
    ("frequencies", "said"),
    [
        (torch.full((32,), math.nan), "not finite"),
        (torch.where(torch.arange(32) == 5, math.inf, PLAIN), "not finite"),
        (torch.zeros(32), "nothing turns"),
        (torch.full((32,), 4.6e-41), "smaller than any base"),
        (torch.cat((torch.tensor([-65309.75, 4.6e-41, 1.2e11, 0.0]), PLAIN[4:])), "outside"),
    ],
)
def test_left_over_memory(frequencies: Tensor, said: str) -> None:
    report = look(Rotated(frequencies))
    (finding,) = [finding for finding in report.findings if finding.code == "PE201"]
    assert codes(report) == {"PE201"}
    assert said in finding.message
    assert finding.where.line in marked(__file__, "PE201")
    assert ("rotation is the identity" in finding.effect) == ("nothing turns" in said)
    assert "(0, 64, 2" in finding.fix.summary


@pytest.mark.parametrize("base", [10000.0, 500000.0, 999999.4420358813, 1000042.0])
@pytest.mark.parametrize("width", [16, 64])
def test_the_base_is_the_one_that_was_written(base: float, width: int) -> None:
    model = Rotated(base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width).float())
    model.qkv, model.embed = nn.Linear(4 * width, 12 * width), nn.Embedding(300, 4 * width)
    model.out = nn.Linear(4 * width, 4 * width)
    (rotary,) = [encoding for encoding in look(model, 256).encodings if encoding.scheme == "rotary"]
    assert rotary.parameters["base"] == pytest.approx(base, rel=1e-12 if base == round(base, -2) else 1e-6)


class HalfAngles(nn.Module):
    """A sinusoid of which positions, or frequencies, or neither, are made in bfloat16."""

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self.rounded = rounded
        self.embed = nn.Embedding(211, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        dtype = x.dtype if self.rounded else torch.float32
        places = torch.arange(ids.shape[1], device=x.device, dtype=dtype)[:, None]  # <- PE601
        rates = torch.exp(torch.arange(0, 64, 2, device=x.device) * (-math.log(1e4) / 64)).to(dtype)
        angles = places * rates
        return self.layer(x + torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype))


def test_angles_in_half_precision_are_a_sinusoid_still() -> None:
    report = look(HalfAngles(True), 2048)
    assert schemes(report) == {"sinusoidal"}
    assert "PE601" in codes(report) and not codes(report) & {"PE602", "PE603"}
    lines = {finding.where.line for finding in report.findings if finding.code == "PE601"}
    assert lines <= marked(__file__, "PE601")
    clean = look(HalfAngles(False), 2048)
    assert (schemes(clean), codes(clean)) == ({"sinusoidal"}, set())


class Inference(Causal):
    """Whole operations, not their parts, are seen in inference mode; a mask takes its dtype from content."""

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n = ids.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(n, device=x.device)[:, None] * 1e5 ** (-torch.arange(32, device=x.device) / 32)
        mask = torch.full((n, n), -math.inf, device=x.device).triu(1).type_as(x)
        cos, sin = angles.cos()[None, None].expand_as(q[..., :32]), angles.sin().type_as(x)

        def turn(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        weights = (turn(q) @ turn(k).mT / 8 + mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_inference_mode() -> None:
    report = look(Inference())
    assert (schemes(report), codes(report)) == ({"rotary"}, set())
    assert any(encoding.scheme == "mask" and encoding.parameters["causal"] for encoding in report.encodings)


class Windowed(Rotated):
    """A window, and packed documents told apart by their position ids, as index arithmetic on positions."""

    def __init__(self, window: int) -> None:
        super().__init__(PLAIN)
        self.window = window

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        n = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(n, device=x.device)[None]
        start = position_ids[:, :1] - 1
        document = (torch.diff(position_ids, prepend=start, dim=-1) != 1).cumsum(-1)
        row, column = torch.arange(n, device=x.device)[:, None], torch.arange(n, device=x.device)[None]
        m, j = position_ids[0, row], position_ids[0, column]
        seen = (j <= m) & (j > m - self.window) & (document[0, row] == document[0, column])
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.turn(q, True), self.turn(k, False)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("window", "found"), [(600, set()), (10**9, {"PE501"})])
def test_a_window_is_found_in_the_masks_own_program(window: int, found: set[str]) -> None:
    assert codes(look(Windowed(window), 16384)) == found


class NothingYet(nn.Module):
    """Zeros where a kernel is missing, laid out as the queries are: no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(300, 64), nn.Embedding(1024, 64)
        self.q, self.out, self.drop = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout(0.1)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        for table in (self.embed, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        b, n = ids.shape
        x = self.embed(ids) + self.places(torch.arange(n, device=ids.device))
        q = self.q(x).view(b, n, 4, 16).transpose(1, 2)
        y = torch.zeros_like(q).transpose(1, 2).contiguous().view(b, n, 64)
        return self.layer(x + self.drop(self.out(y)))


def test_zeros_are_no_positions() -> None:
    report = look(NothingYet())
    assert (schemes(report), codes(report)) == ({"learned"}, set())
