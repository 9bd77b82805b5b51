"""What positions do to q, k and v as maps on channels: against R(m) written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import turns
from pediag.encodings.resized import fit
from tests.fixture_files import files, load
from tests.rules._turns import Attending, angles, frequencies, halves, matrix, neighbours
from tests.trace._sessions import trace

W = frequencies()


def both(turn):
    return lambda layer, q, k, v: (turn(q), turn(k), v)


def by_matrices(x: Tensor) -> Tensor:
    a = angles(x)
    m = torch.stack((a.cos(), -a.sin(), a.sin(), a.cos()), -1).unflatten(-1, (2, 2))
    return torch.einsum("npij,bhnpj->bhnpi", m, x.unflatten(-1, (-1, 2))).flatten(-2)


def by_complex(x: Tensor) -> Tensor:
    a = angles(x)
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(a), a)).flatten(-2)


def in_place(x: Tensor) -> Tensor:
    a, out = angles(x), torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * a.cos() - x[..., 1::2] * a.sin()
    out[..., 1::2] = x[..., 1::2] * a.cos() + x[..., ::2] * a.sin()
    return out


def normalised_after(x: Tensor) -> Tensor:
    turned = halves(x, angles(x))
    return turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + 1e-6)


STYLES = {
    "halves": (lambda x: halves(x, angles(x)), "half"),
    "neighbours": (lambda x: neighbours(x, angles(x)), "interleaved"),
    "matrices": (by_matrices, "interleaved"),
    "complex": (by_complex, "interleaved"),
    "in place": (in_place, "interleaved"),
    "norm behind": (normalised_after, "half"),
}


@pytest.mark.parametrize("name", STYLES)
def test_a_rotation_is_solved_for(name: str) -> None:
    turn, pairing = STYLES[name]
    (found,) = turns(trace(Attending(both(turn)).eval()))
    for side in (found.q, found.k):
        assert side is not None
        assert side.map is not None, side.reason
        assert side.applications == 1
        for place in side.map.places:
            np.testing.assert_allclose(side.map.at(place), matrix(place, W, pairing), atol=2e-5)
    assert found.v is None


def test_what_is_no_rotation_is_solved_for_too() -> None:
    def wrong(x: Tensor) -> Tensor:
        a = angles(x).repeat_interleave(2, -1)
        left, right = x.chunk(2, -1)
        return x * a.cos() + torch.cat((-right, left), -1) * a.sin()

    (found,) = turns(trace(Attending(both(wrong)).eval()))
    assert found.q is not None
    assert found.q.map is not None
    assert found.q.turn is None
    told = np.zeros((16, 16))
    laid = np.repeat(5 * W, 2)
    for i in range(8):
        told[i, i], told[i, i + 8] = np.cos(laid[i]), -np.sin(laid[i])
        told[i + 8, i + 8], told[i + 8, i] = np.cos(laid[i + 8]), np.sin(laid[i + 8])
    np.testing.assert_allclose(found.q.map.at(5), told, atol=2e-6)


def test_part_of_q_and_k_in_another_order() -> None:
    """As DeepSeek has it: the last channels turn as neighbours and leave as halves, behind those that do not turn."""
    w = frequencies(8)

    def style(layer, q, k, v):
        def turn(x):
            pairs = x[..., 8:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
            return torch.cat((x[..., :8], halves(pairs, angles(x, 8))), -1)

        return turn(q), turn(k), v

    (found,) = turns(trace(Attending(style).eval()))
    assert found.q is not None
    assert found.k is not None
    assert found.q.map is not None
    assert found.k.map is not None
    product = found.q.map.at(6).T @ found.k.map.at(1)
    turned = np.abs(product - found.q.map.at(0).T @ found.k.map.at(0)).max(0) > 1e-3
    wanted = np.linalg.svd(matrix(5, w) - np.eye(8), compute_uv=False)
    seen = np.linalg.svd(product - found.q.map.at(0).T @ found.k.map.at(0), compute_uv=False)
    np.testing.assert_allclose(seen[:8], wanted, atol=1e-5)
    assert turned.sum() <= 8


def test_grouped_keys_and_weights_behind() -> None:
    norm = nn.RMSNorm(16)

    def style(layer, q, k, v):
        k, v = (t[:, :1].repeat_interleave(3, 1) for t in (k, v))
        return layer.norm(halves(q, angles(q))), halves(k, angles(k)), v

    (found,) = turns(trace(Attending(style, norm=norm).eval()))
    assert found.q is not None
    assert found.k is not None
    assert [node.names for node in found.q.weights] == [["layers.0.norm.weight"]]
    assert found.k.weights == []
    for side in (found.q, found.k):
        assert side.map is not None
        np.testing.assert_allclose(side.map.at(7), matrix(7, W), atol=2e-6)


def test_two_applications_and_the_first_of_them() -> None:
    def style(layer, q, k, v):
        return halves(halves(q, angles(q)), angles(q)), halves(k, angles(k)), v

    (found,) = turns(trace(Attending(style).eval()))
    assert found.q is not None
    assert found.k is not None
    assert (found.q.applications, found.k.applications) == (2, 1)
    assert found.q.map is not None
    assert found.q.first is not None
    np.testing.assert_allclose(found.q.map.at(3), matrix(6, W), atol=2e-6)
    np.testing.assert_allclose(found.q.first.at(3), matrix(3, W), atol=2e-6)


def test_what_bends_behind_the_rotation_is_left_out() -> None:
    (found,) = turns(trace(Attending(both(lambda x: torch.tanh(halves(x, angles(x))))).eval()))
    assert found.q is not None
    assert found.q.map is not None
    np.testing.assert_allclose(found.q.map.at(4), matrix(4, W), atol=2e-6)


def test_what_bends_between_two_rotations_is_not_linear() -> None:
    def bent(x: Tensor) -> Tensor:
        return halves(torch.tanh(halves(x, angles(x))), angles(x))

    (found,) = turns(trace(Attending(both(bent)).eval()))
    assert found.q is not None
    assert found.q.map is None
    assert found.q.reason == "what becomes of the channels is not linear in them"


@pytest.mark.parametrize(
    ("recorded", "result", "actual", "wanted"),
    [
        ((5, 151, 256), (5, 151, 4, 64), (40, 151, 256), [40, 151, 4, 64]),
        ((5, 8, 8, 151, 128), (5, 64, 151, 128), (40, 1, 1, 151, 128), [40, 1, 151, 128]),
        ((5, 4, 151, 64), (20, 151, 64), (40, 1, 151, 64), [40, 151, 64]),
        ((5, 4, 151, 32, 2), (5, 4, 151, 64), (40, 1, 151, 32, 2), [40, 1, 151, 64]),
        ((5, 151, 1, 64), (5, 151, 64), (40, 151, 1, 64), [40, 151, 64]),
    ],
)
def test_views_fit_other_sizes(recorded, result, actual, wanted) -> None:
    assert fit(recorded, result, actual) == wanted


# -- the identities that the rules rest on, on fixtures that are healthy ------------------------------------

KEEPING = ("pe401_not_a_rotation", "pe402_rotation_senses_differ", "pe307_applied_twice")


@pytest.mark.parametrize("stem", KEEPING)
def test_healthy_fixtures_depend_on_the_distance_alone(stem: str) -> None:
    """R_q(m)'R_k(n) of the models' own rotations is a function of n - m, and lengths are kept; xPos keeps none."""
    (path,) = [item for item in files("rules") if item.stem == stem]
    module = load(path)
    for factory in module.HEALTHY[:3]:
        layer = factory().layers[0]
        turn_q, turn_k = (
            (layer.turn_q, layer.turn_k) if hasattr(layer, "turn_q") else (layer.rotation, layer.rotation)
        )
        unit = torch.eye(module.WIDTH)[:, None, None].expand(-1, 1, 108, -1).contiguous()
        with torch.no_grad():
            q, k = (turn(unit)[:, 0].permute(1, 2, 0).double().numpy() for turn in (turn_q, turn_k))
        np.testing.assert_allclose(q[5].T @ k[2], q[105].T @ k[102], atol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(q, axis=1), 1.0, atol=1e-5)


# -- out of the ordinary ------------------------------------------------------------------------------------


@torch.library.custom_op("pediag_tests::turned", mutates_args=())
def turned_by_an_own_operation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@turned_by_an_own_operation.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_own_operation_that_can_be_run() -> None:
    def turn(x: Tensor) -> Tensor:
        return turned_by_an_own_operation(x, angles(x).cos(), angles(x).sin())

    (found,) = turns(trace(Attending(both(turn)).eval()))
    assert found.q is not None
    assert found.q.map is not None, found.q.reason
    np.testing.assert_allclose(found.q.map.at(6), matrix(6, W), atol=2e-6)


class Cache(nn.Module):
    """Room for the keys of more texts than are given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(12, 700, 3, 16), persistent=False)


def test_keys_that_are_read_back_from_a_cache() -> None:
    def style(layer, q, k, v):
        batch, n = k.shape[0], k.shape[2]
        layer.cache.rows[:batch, :n] = halves(k, angles(k)).transpose(1, 2)
        return halves(q, angles(q)), layer.cache.rows[:batch, :n].transpose(1, 2), v

    (found,) = turns(trace(Attending(style, cache=Cache()).eval()))
    assert found.k is not None
    assert found.k.map is not None, found.k.reason
    np.testing.assert_allclose(found.k.map.at(6), matrix(6, W), atol=2e-6)


class Frames(nn.Module):
    """Turns the tokens of a video of a known size, and keeps those behind them, of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 96)

    def turned(self, x: Tensor, count: int) -> Tensor:
        a = torch.outer(torch.arange(count).double(), torch.from_numpy(W)).unflatten(1, (1, -1))
        z = torch.view_as_complex(x[:, :count].double().reshape(len(x), count, 2, -1, 2))
        turned = torch.view_as_real(z * torch.polar(torch.ones_like(a), a)).flatten(3)
        return torch.cat((turned, x[:, count:]), 1).float()

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images)
        count = x.shape[2] * x.shape[3]
        q, k, v = self.qkv(x.flatten(2).mT).unflatten(-1, (3, 2, 16)).unbind(2)
        q, k = (self.turned(part, count).transpose(1, 2) for part in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2))


def test_a_rotation_that_is_joined_with_no_tokens() -> None:
    (found,) = turns(trace(Frames().eval(), example=lambda n: torch.zeros(1, 3, 4 * 12, 4 * 6)))
    assert found.q is not None and found.q.map is not None
    assert max(found.q.map.places) == 12 * 6 - 1
    for place in found.q.map.places:
        np.testing.assert_allclose(found.q.map.at(place), matrix(place, W, "interleaved"), atol=2e-5)
