"""Two rotations side by side, against angles that are computed here in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.encodings.comparing._models import aspect, beside, only, plain, rope, wrapped

N = 300
M = np.arange(N, dtype=np.float64)


@pytest.fixture(scope="module")
def right():
    return rope()


def test_a_model_is_like_itself_at_every_position(right):
    one = only(right, right)
    assert (one.kind, one.where) == ("same", "layer 0, q and k")
    assert aspect(one, "angles").measured == pytest.approx(0.0, abs=1e-15)
    assert {item.name for item in one.aspects} == {"pairing", "rotary width", "angles", "attention factor"}


def test_another_base_differs_by_the_angles_of_the_formula(right):
    one = only(rope(plain(5e5)), right)
    found = aspect(one, "angles")
    apart = wrapped(M[:, None] * plain(5e5), M[:, None] * plain(1e4))
    assert one.kind == "differs"
    assert found.first == 1
    assert found.measured == pytest.approx(apart.max(), rel=0.02)
    assert found.measured <= apart.max() + 1e-4
    base = aspect(one, "base")
    assert (base.verdict, base.a, base.b) == ("differs", pytest.approx(5e5), pytest.approx(1e4))
    assert [item.name for item in one.differing] == ["angles", "base"]


def test_the_greatest_difference_of_slow_pairs_is_at_the_last_position(right):
    """The last pair alone turns half as fast again: 0.5 m w, far below half a turn."""
    slow = plain(1e4).copy()
    slow[-1] *= 1.5
    one = only(rope(slow), right)
    found = aspect(one, "angles")
    assert found.measured == pytest.approx((N - 1) * 0.5 * plain()[-1], rel=1e-3)
    assert f"pair 7 at position {N - 1}" in found.note
    assert [item.name for item in one.differing] == ["angles", "frequencies"]


def test_linear_scaling_is_named(right):
    one = only(rope(plain() / 4), right)
    assert [item.name for item in one.differing] == ["angles", "scaling"]
    assert (aspect(one, "scaling").a, aspect(one, "scaling").b) == ("linear", "default")


@pytest.mark.parametrize("shift", [1.0, 3.0, -2.0])
def test_an_offset_is_told_in_tokens(right, shift):
    one = only(rope(shift=(shift, shift)), right)
    found = aspect(one, "offset")
    assert found.verdict == "differs"
    assert (found.a, found.b) == (shift, 0.0)
    assert found.measured == pytest.approx(abs(shift))
    assert aspect(one, "angles").first == 0
    assert aspect(one, "angles").measured == pytest.approx(abs(shift), abs=1e-3)


def test_an_offset_on_k_alone_leaves_q_the_same(right):
    found = {one.where: one for one in beside(rope(shift=(0.0, 5.0)), right)}
    assert found["layer 0, q"].kind == "same"
    assert aspect(found["layer 0, k"], "offset").measured == pytest.approx(5.0)


def test_a_sense_is_no_other_base(right):
    both = only(rope(sense=(-1.0, -1.0)), right)
    assert [item.name for item in both.differing] == ["angles", "sense"]
    assert (aspect(both, "sense").a, aspect(both, "sense").b) == ("backwards", "forwards")
    apart = wrapped(-M[:, None] * plain(), M[:, None] * plain())
    assert aspect(both, "angles").measured == pytest.approx(apart.max(), abs=0.02)


def test_a_sense_on_k_alone_is_told(right):
    found = beside(rope(sense=(1.0, -1.0)), right)
    assert "differs" in {one.kind for one in found}
    differing = [one for one in found if one.kind == "differs"]
    assert all("k" in one.where for one in differing)
    assert any(item.name == "sense" for one in differing for item in one.differing)


def test_pairing_width_and_factor(right):
    one = only(rope(interleaved=True), right)
    assert [(item.name, item.a, item.b) for item in one.differing] == [("pairing", "interleaved", "half")]
    assert aspect(one, "angles").verdict == "same"
    narrow = only(rope(plain(1e4, 8)), right)
    assert [(item.name, item.a, item.b) for item in narrow.differing] == [("rotary width", 8, 16)]
    assert aspect(narrow, "angles").verdict == "unknown"
    scaled = only(rope(factor=1.1386), right)
    (factor,) = scaled.differing
    assert (factor.name, factor.a, factor.b) == ("attention factor", pytest.approx(1.1386, rel=1e-5), 1.0)


def test_a_factor_on_the_softmax_is_the_square_of_one_on_cosines(right):
    """YaRN's factor may stand in either place (DeepSeek has it on the scale, transformers' Llama on cos and sin)."""
    moved = rope(scale=16**-0.5 * 1.1386**2)
    one = only(rope(factor=1.1386), moved)
    assert one.kind == "same"
    assert "makes up for it" in aspect(one, "attention factor").note
    assert only(rope(factor=1.1386), rope(scale=16**-0.5 * 1.1386)).kind == "differs"
    lost = only(right, moved)
    (scale,) = lost.differing
    assert (scale.name, scale.a, scale.b) == ("softmax scale", 0.25, pytest.approx(0.25 * 1.1386**2))


def test_rounding_is_no_difference(right):
    """Frequencies by exp instead of pow, finished tables in half precision."""
    by_exp = np.exp(np.float32(-np.log(1e4)) * np.arange(0, 16, 2, dtype=np.float32) / np.float32(16))
    assert only(rope(by_exp), right).kind == "same"
    assert only(rope(cast=torch.bfloat16), right).kind == "same"
    assert only(rope(cast=torch.float16), right).kind == "same"


def test_frequencies_in_bfloat16_are_a_difference(right):
    rounded = torch.tensor(plain()).bfloat16().double().numpy()
    one = only(rope(rounded), right)
    apart = wrapped(M[:, None] * rounded, M[:, None] * plain())
    assert aspect(one, "angles").measured == pytest.approx(apart.max(), rel=0.02)
    assert aspect(one, "frequencies").verdict == "differs"


@pytest.mark.parametrize(("dtype", "first"), [(torch.bfloat16, 257), (torch.float16, 2049)])
def test_positions_in_half_precision_differ_from_the_first_that_has_no_number(right, dtype, first):
    """Whole numbers are exact to 256 and to 2048; the next one is rounded to it."""
    one = only(rope(positions=dtype), right, first + 40)
    found = aspect(one, "angles")
    assert found.first == first
    m = torch.arange(first + 40, dtype=torch.float64)
    apart = wrapped(m.to(dtype).double().numpy()[:, None] * plain(), m.numpy()[:, None] * plain())
    assert found.measured == pytest.approx(apart.max(), rel=1e-3)


def test_layers_are_compared_by_their_numbers(right):
    mixed = rope([plain(), plain(5e5), plain()])
    found = beside(mixed, rope(layers=3))
    assert {one.where: one.kind for one in found} == {
        "layers 0, 2, q and k": "same",
        "layer 1, q and k": "differs",
    }


def test_layers_that_one_side_does_not_turn(right):
    unturned = rope(layers=3)
    unturned.layers[1].roles = ""
    found = {one.where: one for one in beside(unturned, rope(layers=3))}
    assert found["layers 0, 2, q and k"].kind == "same"
    assert found["layer 1, q and k"].kind == "only in b"
    assert found["layer 1, q and k"].a is None


def test_one_side_rotated(right):
    found = {one.where: one.kind for one in beside(rope(roles="q"), right)}
    assert found == {"layer 0, q": "same", "layer 0, k": "only in b"}


def test_weights_decide_between_pairings():
    """Rows of q and k at the places that neighbours ask for; the fused rows of v stay."""
    half, near = rope(), rope(interleaved=True)
    aspects = only(near, half).aspects
    assert next(item for item in aspects if item.name == "pairing").note.startswith(
        "the q and k weights are equal"
    )
    with torch.no_grad():
        parameters = [near.layers[0].qkv.weight, near.layers[0].qkv.bias]
        for tensor in parameters:
            rows = tensor.view(3, 2, 16, -1)
            rows[:2] = rows[:2].clone().view(2, 2, 2, 8, -1).transpose(2, 3).reshape(rows[:2].shape)
    ids = torch.arange(12)[None]
    assert torch.allclose(near(ids), half(ids), atol=1e-6)
    one = only(near, half)
    assert one.kind == "same"
    assert "permuted to match" in aspect(one, "pairing").note
    with torch.no_grad():
        near.layers[0].qkv.weight[0, 0] += 1.0
    assert only(near, half).kind == "differs"
