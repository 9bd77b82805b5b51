"""PE601: how many positions are left by counting in PyTorch's own formats, where they are lost, and silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pediag
from pediag.trace.lanes import to_tf32
from tests.rules._fixtures import load, marked_lines
from tests.rules._rotary import Turned, by_product, from_tables, plain, tables

FIXTURE = load("pe601_positions_in_low_precision")
FAMILY = ["PE601", "PE602", "PE603", "PE604", "PE606"]


def findings(model: Any, **options: Any) -> list[Any]:
    return pediag.check(model, select=FAMILY, **options).findings


def alone(model: Any, **options: Any) -> Any:
    """The one finding of the family, which must be PE601's."""
    (finding,) = findings(model, **options)
    assert (finding.code, finding.severity) == ("PE601", "error")
    return finding


def left(dtype: torch.dtype, length: int, first: int = 0) -> int:
    """Distinct numbers, by PyTorch's own rounding."""
    return int(torch.arange(first, first + length).to(dtype).unique().numel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_by_distance_from_rounded_positions(dtype: torch.dtype) -> None:
    model = nn.Sequential(FIXTURE.ByDistance(dtype).embed, *(Biased(dtype, heads) for heads in (2, 4)))
    for finding in (alone(model, seq_len=4096), alone(FIXTURE.ByDistance(dtype), seq_len=4096)):
        assert finding.evidence.measured == left(dtype, 4096)
        assert "subtract whole numbers" in finding.fix.summary
    assert not findings(Biased(torch.float32, 2), seq_len=4096)


class Biased(nn.Module):
    """Content (B, N, 32) in, and a linear bias by distance of ``heads`` slopes from positions in ``dtype``."""

    def __init__(self, dtype: torch.dtype, heads: int) -> None:
        super().__init__()
        self.dtype, self.heads = dtype, heads
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        m = torch.arange(x.shape[1], device=x.device, dtype=self.dtype)
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)
        bias = -slopes.view(-1, 1, 1) * (m.view(1, -1, 1) - m.view(1, 1, -1)).float().abs()
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Callable[[], nn.Module]) -> None:
    finding = alone(make(), seq_len=FIXTURE.SEQ_LEN)
    assert finding.where.line in marked_lines(FIXTURE, "PE601")
    if make is FIXTURE.faulty:
        assert finding.evidence.measured == FIXTURE.EXPECTED["measured"]


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Callable[[], nn.Module]) -> None:
    assert not findings(make(), seq_len=FIXTURE.SEQ_LEN)


def counted(dtype: torch.dtype, first: int = 0) -> Any:
    """Positions made in ``dtype``, all else in float32."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        m = torch.arange(first, first + n, dtype=dtype, device=x.device)
        angle = m.float()[:, None] * model.w
        return angle.cos(), angle.sin()

    return angles


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_the_first_length_at_which_positions_are_lost(dtype: torch.dtype, limit: int) -> None:
    model = Turned(counted(dtype), w=plain(1e4)).eval()
    assert not findings(model, seq_len=limit + 1)  # positions 0 .. limit
    finding = alone(model, seq_len=limit + 2)
    assert f"are one are {limit} and {limit + 1}" in finding.effect.replace(",", "")
    assert (finding.evidence.measured, finding.evidence.expected) == (left(dtype, limit + 2), limit + 2)
    assert finding.evidence.limit == limit


@pytest.mark.parametrize(("dtype", "published"), [(torch.bfloat16, 769), (torch.float16, 3073)])
def test_published_counts(dtype: torch.dtype, published: int) -> None:
    finding = alone(Turned(counted(dtype), w=plain(1e4)).eval(), seq_len=4096)
    assert finding.evidence.measured == published == left(dtype, 4096)


def in_the_dtype_of_x(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """B001, huggingface/transformers#25681: positions and frequencies in the dtype of the model, then the product."""
    angle = torch.arange(n, device=x.device).to(x.dtype)[:, None] * model.w.to(x.dtype)
    return angle.float().cos(), angle.float().sin()


def kept_in_float32(model: nn.Module) -> nn.Module:
    """bfloat16 weights, the frequencies put back."""
    model.to(torch.bfloat16)
    model.w = plain(1e4)
    return model.eval()


def test_positions_and_frequencies_in_half_are_one_fault() -> None:
    """B001; below 257 tokens only the frequencies are off."""
    assert alone(
        kept_in_float32(Turned(in_the_dtype_of_x, w=plain(1e4))), seq_len=2048
    ).evidence.measured == left(torch.bfloat16, 2048)
    (finding,) = findings(kept_in_float32(Turned(in_the_dtype_of_x, w=plain(1e4))), seq_len=200)
    assert finding.code == "PE602"


def test_the_dtype_that_is_asked_for_reaches_the_positions() -> None:
    """The same code in a float32 model that will be cast: B007, Modalities/modalities#462, and B001."""
    model = Turned(in_the_dtype_of_x, w=plain(1e4)).eval()
    assert not findings(model, seq_len=2048)
    found = {finding.code: finding for finding in findings(model, seq_len=2048, dtype="bfloat16")}
    assert found["PE601"].evidence.measured == left(torch.bfloat16, 2048)
    assert "after .to(bfloat16)" in found["PE601"].message
    assert model.w.dtype is torch.float32 and model.embed.weight.dtype is torch.float32


def like_the_frequencies(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """As older Llama code counts: in the dtype of the buffer."""
    m = torch.arange(n, device=x.device, dtype=model.w.dtype)
    angle = torch.outer(m, model.w)
    return angle.float().cos(), angle.float().sin()


def test_positions_that_follow_stored_frequencies_are_theirs() -> None:
    """B016: the cast of the buffer is the one cause; kept in float32, positions are too."""
    (finding,) = findings(Turned(like_the_frequencies, w=plain(1e4)).bfloat16().eval(), seq_len=2048)
    assert finding.code == "PE602"
    both = Turned(counted(torch.bfloat16), w=plain(1e4)).bfloat16().eval()
    assert {item.code for item in findings(both, seq_len=2048)} == {"PE601", "PE602"}


def test_a_stored_run_of_positions() -> None:
    """A buffer of positions that went along with the module."""

    def angles(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
        angle = model.places[:n].float()[:, None] * plain(1e4)
        return angle.cos(), angle.sin()

    def model() -> nn.Module:
        return Turned(angles, places=torch.arange(2048.0)).eval()

    assert not findings(model(), seq_len=2048)
    for cast in (model().bfloat16(), model().bfloat16().float()):
        finding = alone(cast, seq_len=2048)
        assert finding.evidence.measured == left(torch.bfloat16, 2048)
        assert "places" in finding.fix.summary


def by_matmul(model: nn.Module, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """B005: casts before a matrix product do not help under autocast."""
    m = torch.arange(n, device=x.device).float()
    angle = m[:, None] @ model.w[None, :].float()
    return angle.float().cos(), angle.float().sin()


def test_autocast_of_the_caller() -> None:
    """B005, huggingface/transformers#29285."""
    model = Turned(by_matmul, w=plain(1e4)).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        finding = alone(model, seq_len=2048)
    assert finding.where.line == by_matmul.__code__.co_firstlineno + 3
    assert finding.evidence.measured == left(torch.bfloat16, 2048)


@pytest.fixture
def products_of_11_bits() -> Iterator[None]:
    """B020, thinking-machines-lab/batch_invariant_ops#23: an override of mm rounds its factors, the flags say no."""
    library = torch.library.Library("aten", "IMPL")

    def rounded(a: Tensor, b: Tensor) -> Tensor:
        return (to_tf32(a)[:, :, None] * to_tf32(b)[None]).sum(1)

    library.impl("mm", rounded, "CPU")
    yield
    library._destroy()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_device_that_loses_whole_numbers(products_of_11_bits: None) -> None:
    """B019, huggingface/transformers#48428: float32 to look at, 11 bits in the product."""
    assert not torch.backends.cuda.matmul.allow_tf32
    model = Turned(by_matmul, w=plain(1e4)).eval()
    finding = alone(model, seq_len=4096)
    assert finding.evidence.measured == 2049
    assert "1 x 2,049 is not 2,049" in finding.message
    assert not [item for item in findings(model, seq_len=2000) if item.code == "PE601"]
    assert not findings(Turned(by_product, w=plain(1e4)).eval(), seq_len=4096)


class Looked(nn.Module):
    """Learned rows, looked up by positions that were counted in the dtype of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(61, 32), nn.Embedding(1024, 32)
        self.layer = nn.Linear(32, 96)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.places(torch.arange(ids.shape[1], dtype=x.dtype, device=x.device).long())
        q, k, v = self.layer(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_ids_that_went_through_a_half_format() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Looked().eval()
    assert not findings(model, seq_len=1024)
    assert alone(model.bfloat16(), seq_len=1024).evidence.measured == left(torch.bfloat16, 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finished_tables_lose_no_positions(dtype: torch.dtype) -> None:
    """L9, KellerJordan/modded-nanogpt#39: cosines cast when they are finished."""
    held = {
        name: table.to(dtype) for name, table in tables(torch.outer(torch.arange(8192.0), plain(1e7))).items()
    }
    assert not findings(Turned(from_tables, **held).eval(), seq_len=8192)
