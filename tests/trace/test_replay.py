"""What a trace computes for positions is what the model itself computes, bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pediag.trace import Evaluator, Session
from pediag.trace.lanes import Float64
from tests.trace._sessions import WIDTH, Adds, content, equal, joined, session

D = WIDTH
Program = Callable[[Tensor, torch.dtype], Tensor]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """One position program: ``(x, real)`` to a value that is added to x (B, N, D); ``real`` is its dtype."""
    PROGRAMS[function.__name__] = function
    return function


def angles(n: int, real: torch.dtype, pairs: int = D // 2) -> Tensor:
    frequencies = 1.0 / (10000 ** (torch.arange(0, pairs, dtype=real) / pairs))
    return torch.outer(torch.arange(n, dtype=real), frequencies)


# -- written in place ---------------------------------------------------------------------------------------


@program
def strided_slices(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    a = angles(x.shape[1], real)
    pe[:, 0::2] = a.sin()
    pe[:, 1::2] = a.cos()
    return pe


@program
def halves(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    a = angles(x.shape[1], real)
    pe[:, : D // 2], pe[:, D // 2 :] = a.sin(), a.cos()
    return pe


@program
def a_loop_over_positions(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    for position in range(x.shape[1]):
        for pair in range(0, D, 2):
            pe[position, pair] = position * 2**-pair
            pe[position, pair + 1] = position / 4
    return pe


@program
def a_loop_over_rows(x, real):
    pe = torch.empty(x.shape[1], D, dtype=real)
    step = torch.arange(D, dtype=real)
    for position in range(x.shape[1]):
        pe[position] = (position * step).sin()
    return pe


@program
def rows_read_while_the_table_is_filled(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    pe[0] = torch.arange(D, dtype=real)
    kept, first = [], pe[:1]
    for position in range(1, x.shape[1]):
        pe[position] = pe[position - 1] + position
        kept.append(pe[position // 2] * 2)
        if position == 2:
            before = pe.clone()
    pe[1:] = pe[:-1].clone()
    return torch.stack([first[0], *kept]) + before + pe


@program
def a_loop_over_columns(x, real):
    pe = torch.empty(x.shape[1], D, dtype=real)
    place = torch.arange(x.shape[1], dtype=real)
    for column in range(D):
        pe.select(1, column).copy_(place / (column + 1))
    return pe


@program
def select_then_slice(x, real):
    pe = torch.zeros(2, x.shape[1], D, dtype=real)
    pe[1][:, 2:9][:, ::3].add_(torch.arange(x.shape[1], dtype=real)[:, None])
    return pe[1]


@program
def transposed_and_viewed(x, real):
    pe = torch.zeros(D, x.shape[1], dtype=real)
    pe.t()[:, 1] = torch.arange(x.shape[1], dtype=real)
    pe.view(2, D // 2, -1)[1, 2].fill_(3.0)
    return pe.t()


@program
def an_alias_made_before(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    alias = pe[:, ::2]
    whole = pe.view(-1)
    pe.add_(torch.arange(x.shape[1], dtype=real)[:, None])
    alias.mul_(2)
    whole[D:].neg_()
    return alias.repeat(1, 2) + pe


@program
def a_write_through_an_alias_of_an_alias(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    outer = pe[1:]
    inner = outer[:, 3:]
    pe[:, 4] = 5
    inner += torch.arange(x.shape[1] - 1, dtype=real)[:, None]
    outer[0] = 9
    return pe


@program
def a_copy_is_no_alias(x, real):
    pe = torch.arange(x.shape[1] * D, dtype=real).view(-1, D)
    copy = pe.clone()
    pe.zero_()
    return copy + pe


@program
def two_values_that_were_equal(x, real):
    first = torch.zeros(x.shape[1], D, dtype=real)
    second = torch.zeros(x.shape[1], D, dtype=real)
    first[:, 0] = torch.arange(x.shape[1], dtype=real)
    return first + 10 * second


@program
def writes_that_do_nothing(x, real):
    pe = torch.arange(x.shape[1] * D, dtype=real).view(-1, D)
    pe[:0] = 1
    pe[:] = pe
    return pe


@program
def index_put(x, real):
    n = x.shape[1]
    pe = torch.zeros(n, D, dtype=real)
    pe[torch.arange(n), torch.arange(n) % D] = torch.arange(n, dtype=real)
    pe.index_put_(
        (torch.tensor([0, 1]), torch.tensor([2, 2])), torch.tensor(4.0, dtype=real), accumulate=True
    )
    return pe


@program
def a_boolean_write(x, real):
    pe = torch.arange(x.shape[1], dtype=real)[:, None].repeat(1, D)
    pe[pe > 3] = -1
    pe[1:][pe[1:] < 0] *= 2
    return pe


@program
def scatter_and_index_copy(x, real):
    n = x.shape[1]
    pe = torch.zeros(n, D, dtype=real)
    pe.scatter_(1, torch.arange(n)[:, None] % D, 2.0)
    pe.index_add_(0, torch.arange(n).flip(0), torch.arange(n, dtype=real)[:, None].expand(n, D))
    pe.index_fill_(1, torch.tensor([1]), 8.0)
    pe.index_copy_(0, torch.tensor([2]), torch.full((1, D), 6, dtype=real))
    return pe


@program
def masked_fill_in_place(x, real):
    n = x.shape[1]
    pe = torch.arange(n, dtype=real)[:, None].repeat(1, D)
    pe.masked_fill_(torch.arange(n)[:, None] % 2 == 0, 0.5)
    return pe.masked_fill(pe > 7, 7)


@program
def out_arguments(x, real):
    n = x.shape[1]
    a = angles(n, real)
    pe = torch.empty(n, D, dtype=real)
    torch.sin(a, out=pe[:, : D // 2])
    torch.cos(a, out=pe[:, D // 2 :])
    total = torch.empty(0, dtype=real)
    torch.add(pe, 1, out=total)
    ranged = torch.empty(n, dtype=torch.int64)
    torch.arange(n, out=ranged)
    return total + ranged[:, None]


@program
def written_inside_a_helper(x, real):
    def fill(part, value):
        part.copy_(value)
        return part

    pe = torch.zeros(x.shape[1], D, dtype=real)
    fill(pe.narrow(1, 0, 3), torch.arange(x.shape[1], dtype=real)[:, None])
    fill(pe.unfold(1, 3, 3)[:, 1], 2.0)
    fill(pe.unbind(1)[-1], 7.0)
    fill(pe.chunk(2, 1)[1][:, 0], 9.0)
    return pe


@program
def a_diagonal_write(x, real):
    square = torch.zeros(x.shape[1], x.shape[1], dtype=real)
    square.diagonal(1).copy_(torch.arange(x.shape[1] - 1, dtype=real))
    square.fill_diagonal_(2)
    return square.sum(1, keepdim=True)


@program
def assigned_data(x, real):
    pe = torch.zeros(x.shape[1], D, dtype=real)
    pe.data[:, 2] = torch.arange(x.shape[1], dtype=real)
    pe.detach()[:, 3] = 4
    return pe


@program
def in_place_arithmetic(x, real):
    pe = torch.arange(x.shape[1], dtype=real)[:, None].repeat(1, D)
    pe += 1
    pe *= torch.arange(1, D + 1, dtype=real)
    pe /= 3
    pe -= pe[:1].clone()
    pe **= 2
    pe.clamp_(max=50).sqrt_()
    return pe.sin_()


@program
def shapes_changed_in_place(x, real):
    pe = torch.arange(x.shape[1], dtype=real)
    pe.unsqueeze_(1)
    wide = pe.repeat(1, D)
    wide.t_().transpose_(0, 1)
    return wide


# -- made from ranges ---------------------------------------------------------------------------------------


@program
def range_spellings(x, real):
    n = x.shape[1]
    total = torch.arange(n) + torch.arange(0, n) + torch.arange(0, 2 * n, 2)
    total = total + torch.arange(end=n, start=0) + torch.arange(start=n, end=0, step=-1)
    total = total + torch.arange(n, dtype=torch.int32) + torch.arange(0.0, n, dtype=real)
    return (total + torch.linspace(0, 1, n, dtype=real) + torch.logspace(0, 1, n, dtype=real))[:, None]


@program
def lists_and_numpy(x, real):
    n = x.shape[1]
    listed = torch.tensor([float(i) for i in range(n)], dtype=real)
    from_array = torch.from_numpy(np.arange(n, dtype=np.float64)).to(real)
    as_tensor = torch.as_tensor(np.arange(n), dtype=real)
    new = x.new_tensor(list(range(n)))
    return (listed + from_array + as_tensor + new)[:, None]


@program
def legacy_constructors(x, real):
    n = x.shape[1]
    return (torch.LongTensor(list(range(n))) + torch.Tensor(list(range(n))).to(real))[:, None]


@program
def filled_like(x, real):
    place = torch.arange(x.shape[1], dtype=real)
    made = torch.full_like(place, 2.5) + torch.zeros_like(place) + torch.ones_like(place)
    made = made + x.new_zeros(x.shape[1]) + x.new_ones(1) + x.new_full((1,), 3)
    return (made.cumsum(0) + torch.empty_like(place).fill_(1).cumsum(0))[:, None]


@program
def ones_of_content_summed(x, real):
    return torch.ones_like(x[..., 0]).to(real).cumsum(1)[..., None]


@program
def expanded_ids(x, real):
    ids = torch.arange(x.size(1)).unsqueeze(0).expand(x.size(0), -1)
    return ids.to(real).unsqueeze(-1)


@program
def triangles(x, real):
    n = x.shape[1]
    ones = torch.ones(n, n, dtype=real)
    return (ones.tril() + 2 * ones.triu(1)).sum(1, keepdim=True) + torch.tril_indices(n, n)[0, :n, None]


@program
def meshgrid_distance(x, real):
    n = x.shape[1]
    i, j = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    return (i - j).abs().to(real).mean(1, keepdim=True)


@program
def meshgrid_of_rows_and_columns(x, real):
    n = x.shape[1]
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(D), indexing="xy")
    return (rows * 2 + columns).T.to(real)


@program
def eye_and_roll(x, real):
    n = x.shape[1]
    shift = torch.eye(n, dtype=real).roll(1, 0)
    return shift @ torch.arange(n, dtype=real)[:, None]


@program
def combined_ranges(x, real):
    n = x.shape[1]
    both = torch.cartesian_prod(torch.arange(n), torch.arange(2))
    return torch.vander(both[::2, 0].to(real) / n, N=D)


# -- arithmetic ---------------------------------------------------------------------------------------------


@program
def complex_polar(x, real):
    a = angles(x.shape[1], real)
    return torch.view_as_real(torch.polar(torch.ones_like(a), a)).flatten(-2)


@program
def complex_exponential(x, real):
    turned = torch.exp(1j * angles(x.shape[1], real))
    return torch.cat([turned.real, turned.imag], -1) + turned.abs().repeat(1, 2) + turned.angle().repeat(1, 2)


@program
def complex_products(x, real):
    step = torch.view_as_complex(
        torch.stack([angles(x.shape[1], real).cos(), angles(x.shape[1], real).sin()], -1)
    )
    return torch.view_as_real(step * step.conj() * step).flatten(1)


@program
def complex_written(x, real):
    a = angles(x.shape[1], real)
    turned = torch.zeros_like(torch.complex(a, a))
    turned.real.copy_(a.cos())
    turned.imag[:] = a.sin()
    return torch.view_as_real(turned).reshape(x.shape[1], D)


@program
def einsum_outer(x, real):
    place, step = torch.arange(x.shape[1], dtype=real), torch.arange(D, dtype=real)
    return torch.einsum("n,d->nd", place, step).cos()


@program
def matrix_products(x, real):
    place, step = torch.arange(x.shape[1], dtype=real), torch.arange(D, dtype=real)
    total = (
        place[:, None] @ step[None]
        + torch.outer(place, step)
        + torch.matmul(place[:, None, None], step[None, None])[:, 0]
    )
    return (total / 100).sin() + torch.addmm(torch.ones(D, dtype=real), place[:, None], step[None]).cos()


@program
def integer_divisions(x, real):
    place = torch.arange(x.shape[1])
    divided = place / 3 + place // 3 + place % 3 + torch.div(place, 4, rounding_mode="trunc")
    return (divided + place.true_divide(7) + torch.remainder(place, 5) + (place >> 1)).to(real)[:, None]


@program
def a_number_of_the_default_dtype(x, real):
    place = torch.arange(x.shape[1])
    return (place * 0.1 + 0.5 ** place.float() + torch.pow(2, -place / 8))[:, None].to(real)


@program
def logarithmic_buckets(x, real):
    place = torch.arange(x.shape[1])
    distance = (place[None] - place[:, None]).abs()
    large = 8 + (torch.log(distance.clamp(min=1).to(real) / 8) / math.log(16) * 8).to(torch.long)
    return torch.where(distance < 8, distance, large.clamp(max=15)).to(real).mean(1, keepdim=True)


@program
def chosen(x, real):
    place = torch.arange(x.shape[1], dtype=real)
    chosen = torch.where(place > 3, place, -place) + torch.where(place > 5, 1.0, 0.0).to(real)
    return torch.maximum(chosen, torch.minimum(place, place.flip(0)))[:, None]


@program
def gathered(x, real):
    n = x.shape[1]
    table = angles(n, real)
    backwards = torch.arange(n).flip(0)
    total = (
        table[backwards]
        + table.index_select(0, backwards)
        + torch.take_along_dim(table, backwards[:, None], 0)
    )
    total = total + table.gather(0, backwards[:, None].expand(-1, D // 2))
    return (total + torch.nn.functional.embedding(backwards, table)).repeat(1, 2)


@program
def stacked(x, real):
    a = angles(x.shape[1], real)
    pairs = torch.stack((a.sin(), a.cos()), dim=-1).flatten(-2)
    return pairs + torch.cat([a, a], -1) + torch.hstack([a, a]) + a.repeat_interleave(2, -1) + a.tile(2)


@program
def pieces(x, real):
    a = angles(x.shape[1], real, D)
    left, right = a.chunk(2, -1)
    first, *_, last = a.split(3, -1)
    unbound = a.unbind(-1)
    third, rest = a.split([4, D - 4], -1)
    return (
        left.repeat(1, 2)
        - right.repeat(1, 2)
        + (first + last).repeat(1, 4)
        + unbound[5][:, None]
        + third.repeat(1, 3)
        + rest.sum(-1, keepdim=True)
    )


@program
def padded_and_unfolded(x, real):
    place = torch.arange(x.shape[1], dtype=real)
    padded = torch.nn.functional.pad(place[None], (D - 1, 0))[0]
    return padded.unfold(0, D, 1)


@program
def skewed(x, real):
    n = x.shape[1]
    relative = torch.arange(2 * n - 1, dtype=real).expand(n, 2 * n - 1)
    skewed = torch.nn.functional.pad(relative, (0, 1)).flatten()[:-n].view(n, 2 * n - 1)[:, n - 1 :]
    return skewed.sum(1, keepdim=True) / n


@program
def as_strided(x, real):
    place = torch.arange(2 * x.shape[1], dtype=real)
    return torch.as_strided(place, (x.shape[1], D // 2), (1, 0)).repeat(1, 2)


@program
def statistics(x, real):
    a = angles(x.shape[1], real, D)
    total = (
        (a - a.mean(0)) / (a.std(0) + 1)
        + a.softmax(-1)
        + a.cummax(0).values
        + a.sort(0, descending=True).values
    )
    return total + a.max(-1).values[:, None] + a.argmax(-1)[:, None] + a.topk(3, -1)[0].sum(-1, keepdim=True)


@program
def functional_forms(x, real):
    a = angles(x.shape[1], real, D)
    squared = torch.nn.functional.gelu(a) + torch.nn.functional.layer_norm(a, (D,)) + torch.sigmoid(a)
    return squared + torch.nn.functional.one_hot(torch.arange(x.shape[1]) % D, D)


@program
def interpolated(x, real):
    small = angles(4, real, D).T[None]
    return torch.nn.functional.interpolate(small, size=x.shape[1], mode="linear", align_corners=False)[0].T


@program
def convolved(x, real):
    place = torch.arange(x.shape[1], dtype=real)[None, None]
    return torch.nn.functional.conv1d(place, torch.tensor([[[1.0, 2.0, 1.0]]], dtype=real), padding=1)[
        0, 0, :, None
    ]


@program
def vmapped(x, real):
    return torch.func.vmap(lambda p: (p * torch.arange(D, dtype=real)).sin())(
        torch.arange(x.shape[1], dtype=real)
    )


# -- read as Python numbers ---------------------------------------------------------------------------------


@program
def read_as_items(x, real):
    place = torch.arange(x.shape[1], dtype=real)
    return torch.stack([torch.full((D,), place[i].item() ** 2, dtype=real) for i in range(x.shape[1])])


@program
def read_as_a_list(x, real):
    return torch.tensor([[v * 2.0] for v in torch.arange(x.shape[1]).tolist()], dtype=real)


@program
def read_as_an_array(x, real):
    array = torch.arange(x.shape[1], dtype=torch.float64).numpy()
    other = np.asarray(torch.arange(x.shape[1]))
    return torch.from_numpy(np.sin(array)[:, None] + other[:, None]).to(real)


@program
def control_flow(x, real):
    place = torch.arange(x.shape[1])
    if (place > 2).any() and place.max() >= int(place[-1]) and bool((place == place.sort()[0]).all()):
        place = place + 100
    if torch.equal(place, place.clone()) and torch.allclose(place.double(), place.double()):
        place = place * 2
    return place.to(real)[:, None]


@program
def sizes_from_positions(x, real):
    n = torch.arange(x.shape[1]).max() + 1
    return torch.arange(int(n), dtype=real)[:, None].expand(n, D)


@program
def nonzero_and_unique(x, real):
    place = torch.arange(x.shape[1])
    even = (place % 2 == 0).nonzero().squeeze(-1)
    values, counts = torch.unique(place // 2, return_counts=True)
    consecutive = torch.unique_consecutive(place // 2)
    total = even.to(real) + values + counts + consecutive + torch.where(place % 2 == 0)[0]
    return total.repeat_interleave(2)[: x.shape[1], None]


@program
def masked_selection(x, real):
    place = torch.arange(2 * x.shape[1])
    odd = place % 2 == 1
    return (place[odd] + torch.masked_select(place, odd) + torch.argwhere(odd)[:, 0]).to(real)[:, None]


@program
def repeats_of_segments(x, real):
    n = x.shape[1]
    lengths = torch.tensor([n // 2, n - n // 2])
    starts = torch.cumsum(lengths, 0) - lengths
    return (torch.arange(n) - torch.repeat_interleave(starts, lengths)).to(real)[:, None]


@program
def iterated(x, real):
    return torch.stack([row.sin() + i for i, row in enumerate(angles(x.shape[1], real, D))])


# -- dtypes -------------------------------------------------------------------------------------------------


@program
def casts_between_integers(x, real):
    place = torch.arange(x.shape[1]) * 40
    total = place.to(torch.int8).to(torch.int64) + place.byte() + place.short() + place.int() + place.bool()
    return total.to(real)[:, None]


@program
def comparisons_as_numbers(x, real):
    place = torch.arange(x.shape[1])
    return (
        (place[:, None] >= place[None]).to(real).sum(1)
        + (place > 2).logical_not()
        + (place > 2).long().cumsum(0)
    )[:, None]


@program
def type_as_content(x, real):
    return torch.arange(x.shape[1]).type_as(x)[:, None] + torch.arange(x.shape[1]).type(real)[:, None]


@program
def infinities(x, real):
    n = x.shape[1]
    mask = torch.full((n, n), float("-inf"), dtype=real).triu(1)
    return mask.softmax(-1).cumsum(0)[:, -1:] + torch.log(torch.arange(n, dtype=real))[:, None].clamp(min=-5)


@program
def not_numbers(x, real):
    place = torch.arange(x.shape[1], dtype=real)
    return torch.nan_to_num(place / place, nan=3.0)[:, None] + (place.sqrt() / place)[:, None]


# -- what the programs of this length are checked for -------------------------------------------------------


def as_float32(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: PROGRAMS[name](x, torch.float32)


@functools.cache
def observed(name: str) -> Session:
    return session(Adds(as_float32(name)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_position_program_is_replayed_bit_for_bit(name: str) -> None:
    made = observed(name).structural()
    assert made.failure is None, made.failure
    x = content((made.sizes.batch, made.sizes.tokens, D))
    assert equal(made.value(joined(made)), as_float32(name)(x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_at_the_lengths_asked_for(name: str) -> None:
    for tokens in (4, D, 64):
        made = observed(name).at(tokens)
        assert made.failure is None, made.failure
        assert equal(made.value(joined(made)), as_float32(name)(content((1, tokens, D)))), tokens


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_float64_lane_is_the_program_in_float64(name: str) -> None:
    made = observed(name).structural()
    x = content((made.sizes.batch, made.sizes.tokens, D), torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        expected = PROGRAMS[name](x, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    got = Evaluator(Float64())(joined(made))
    assert got.dtype == (torch.float64 if expected.is_floating_point() else expected.dtype)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
