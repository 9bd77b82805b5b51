"""Terms of content and distance, and masks of windows, as transformers has them; maps from the papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from pediag.encodings import Bucketed, ContentRelative, Encoding, Mask, RelativeTable, recognise
from pediag.targets import Target
from pediag.trace import Session

transformers = pytest.importorskip("transformers")
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
}


def found(architecture: str, **config: Any) -> list[Encoding]:
    made = getattr(transformers, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = made(made.config_class(**config)).eval()
    trace = Session(Target(spec="model", loader="live", module=model)).structural()
    assert trace.failure is None
    return recognise(trace)


def terms(encodings: list[Encoding]) -> list[ContentRelative]:
    return [item for item in encodings if isinstance(item, ContentRelative)]


def test_deberta_reads_rows_from_queries_and_from_keys() -> None:
    sides = terms(found("DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"], **SMALL))
    assert [item.side for item in sides] == ["query", "key"]
    for item in sides:
        assert item.parameters["kind"] == "trained"
        assert "encoder.rel_embeddings.weight" in item.leaves
        centre = item.buckets[0]
        assert all(row == centre - offset for offset, row in item.buckets.items())


def deberta_bucket(offset: int, buckets: int, longest: int) -> int:
    """He et al. 2021, the logarithmic map of version 2, in plain Python; query minus key."""
    half = buckets // 2
    if abs(offset) <= half:
        return offset
    steps = math.log(abs(offset) / half) / math.log((longest - 1) / half) * (half - 1)
    return int(math.copysign(math.ceil(steps) + half, offset))


def test_deberta_v2_has_logarithmic_buckets() -> None:
    sides = terms(
        found(
            "DebertaV2Model",
            relative_attention=True,
            position_buckets=16,
            max_relative_positions=256,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            position_biased_input=False,
            **SMALL,
        )
    )
    assert sorted(item.side for item in sides) == ["key", "query"]
    for item in sides:
        expected = {o: min(max(deberta_bucket(-o, 16, 256) + 16, 0), 31) for o in item.buckets}
        assert item.buckets == expected


def test_xlnet_shifts_sinusoids() -> None:
    (item,) = terms(found("XLNetModel", n_layer=1, d_model=32, n_head=2, d_inner=64, vocab_size=97))
    assert (item.side, item.parameters["kind"]) == ("query", "sinusoidal")
    assert not item.strayed.any()
    assert {row - offset for offset, row in item.buckets.items()} == {item.buckets[0]}


def test_swin_has_a_table_by_query_and_key_and_a_mask_of_its_regions() -> None:
    small = {
        "image_size": 56,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2],
        "num_heads": [2],
        "window_size": 7,
    }
    for architecture in ("SwinModel", "Swinv2Model"):
        encodings = found(architecture, **small)
        tables = [item for item in encodings if isinstance(item, RelativeTable)]
        assert {item.table.rows for item in tables} == {169}
        masks = [item for item in encodings if isinstance(item, Mask)]
        assert [(item.causal, item.parameters["fill"]) for item in masks] == [(False, -100.0)]
        assert len(tables) + len(masks) == len(encodings)


def test_layoutlmv3_has_t5_buckets_beside_its_two_dimensional_ones() -> None:
    encodings = found(
        "LayoutLMv3Model",
        visual_embed=False,
        rel_pos_bins=32,
        max_rel_pos=128,
        coordinate_size=4,
        shape_size=8,
        **SMALL,
    )
    (item,) = [item for item in encodings if isinstance(item, Bucketed)]
    assert item.parameters["published"] is True
    assert (item.parameters["num_buckets"], item.parameters["max_distance"]) == (32, 128)
    assert not [item for item in encodings if item.scheme == "unrecognised"]


def test_rows_of_a_term_are_kept_by_query_and_key() -> None:
    (item,) = terms(found("XLNetModel", n_layer=1, d_model=32, n_head=2, d_inner=64, vocab_size=97))
    n = item.rows.shape[0]
    offset = np.arange(n) - np.arange(n)[:, None]
    np.testing.assert_array_equal(item.rows, np.vectorize(item.buckets.get)(offset))


def test_inkling_mixes_a_profile_over_distances_for_each_query() -> None:
    """Its documentation: a bias for each distance back from 0 to ``rel_extent`` - 1, and none beyond."""
    if not hasattr(transformers, "InklingForCausalLM"):
        pytest.skip("this transformers has no Inkling")
    cls = transformers.InklingForCausalLM
    config = cls.config_class(
        **SMALL,
        head_dim=8,
        num_key_value_heads=1,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=1,
        swa_head_dim=8,
        d_rel=3,
        rel_extent=41,
        sliding_window_size=37,
        layer_types=["hybrid"],
        mlp_layer_types=["dense"],
    )
    with torch.random.fork_rng():
        model = cls(config).eval()
    trace = Session(Target(spec="model", loader="live", module=model)).structural()
    assert trace.failure is None
    (item,) = terms(recognise(trace))
    assert item.side == "query"
    assert item.leaves == ["model.layers.0.self_attn.rel_logits_proj.proj"]
    assert item.buckets == {-distance: distance for distance in range(41)}


def test_funnel_keeps_its_distances_in_pooled_blocks() -> None:
    """Dai et al. 2020: queries of a pooled block are every second token, and distances are counted in tokens."""
    encodings = found(
        "FunnelBaseModel",
        block_sizes=[1, 1],
        d_model=32,
        n_head=2,
        d_head=16,
        d_inner=40,
        vocab_size=97,
        hidden_size=32,
    )
    items = terms(encodings)
    assert [item.scheme for item in encodings if item.scheme != "mask"] == ["content-relative"] * len(items)
    plain, pooled = items
    assert plain.side == pooled.side == "query"
    assert plain.parameters["kind"] == pooled.parameters["kind"] == "sinusoidal"
    queries, keys = pooled.rows.shape
    assert (queries, keys) == ((plain.rows.shape[0] - 1) // 2 + 1, plain.rows.shape[1])
    # Behind the first token, which keeps its place, a step of the query is two tokens and one of the key is one.
    inner = pooled.rows[1:, 1:]
    assert set(np.diff(inner, axis=0).ravel()) == {-2 * int(np.diff(inner, axis=1)[0, 0])}
