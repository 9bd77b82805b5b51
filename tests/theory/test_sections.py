"""Pairs by axis, held to the code of the models that have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pediag.theory._checks import TheoryError
from pediag.theory.frequencies import inverse_frequencies
from pediag.theory.sections import angles, axes


def test_blocks() -> None:
    assert axes([2, 1, 3], 6).tolist() == [0, 0, 1, 2, 2, 2]


def test_equal_positions_are_an_ordinary_rotation() -> None:
    w = inverse_frequencies(1e4, 128)
    text = np.tile(np.arange(7.0), (3, 1))
    for interleaved in (False, True):
        np.testing.assert_allclose(angles(w, text, [16, 24, 24], interleaved), np.outer(np.arange(7.0), w))


@pytest.mark.parametrize(
    ("module", "name", "config", "sections", "interleaved"),
    [
        ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", [16, 24, 24], False),
        ("qwen3_vl.modeling_qwen3_vl", "Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", [24, 20, 20], True),
    ],
)
def test_the_models_that_have_them(
    module: str, name: str, config: str, sections: list[int], interleaved: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    code: Any = pytest.importorskip(f"transformers.models.{module}")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    made = getattr(transformers, config)(
        hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope
    )
    positions = torch.tensor([[0, 1, 2, 3, 9], [0, 5, 5, 6, 9], [0, 7, 8, 7, 9]])
    cos, sin = getattr(code, name)(made)(torch.zeros(1, 5, 512), positions[:, None])
    expected = angles(inverse_frequencies(1e4, 128), positions.numpy(), sections, interleaved)
    np.testing.assert_allclose(cos[0, :, :64].numpy(), np.cos(expected), atol=1e-5)
    np.testing.assert_allclose(sin[0, :, :64].numpy(), np.sin(expected), atol=1e-5)


def test_bad_arguments() -> None:
    with pytest.raises(TheoryError, match="sum to 3; they must sum to 8"):
        axes([1, 1, 1], 8)
    with pytest.raises(TheoryError, match="one row an axis"):
        angles(inverse_frequencies(1e4, 8), [[1.0, 2.0]], [2, 1, 1])
