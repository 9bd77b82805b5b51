"""Equal encodings of equal layers are described once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pediag.encodings import Bucketed, Encoding, Learned, Rotary, Table, Unrecognised
from pediag.encodings.grouping import layers, merge
from pediag.trace import Node, Provenance, Site


def node(index: int) -> Node:
    return Node(index, "leaf", (), {}, Provenance.POSITION, (3,), torch.float32, "cpu")


def site(module: str, index: int = 0) -> Site:
    return Site("rotary", "mul", node(index), (), (), module, None)


def rope(module: str, index: int = 0, base: float = 10_000.0, sides: tuple[str, ...] = ("q",)) -> Rotary:
    return Rotary(
        frequencies=np.ones(4),
        width=8,
        head_width=8,
        pairing="half",
        applied_to=sides,
        parameters={"base": base, "scaling": {"rope_type": "default"}},
        sites=[site(module, index)],
        leaves=[f"{module}.inv_freq"],
    )


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], ""),
        (["attention", "model.embed"], ""),
        (["layers.0.attn"], "layer 0"),
        (["layers.0.attn", "layers.1.attn"], "layers 0-1"),
        ([f"model.layers.{i}.self_attn" for i in range(80)], "layers 0-79"),
        ([f"h.{i}" for i in (5, 0, 1, 2, 4, 6)], "layers 0-2, 4-6"),
        ([f"h.{i}" for i in (0, 2, 4)], "layers 0, 2, 4"),
        (["h.3.attn.q", "h.3.attn.k", "h.3"], "layer 3"),
        (["0", "1.attn"], "layers 0-1"),
        (["layer10.attn", "rope2d"], ""),
        (["blocks.0.experts.7"], "layer 0"),
    ],
)
def test_layers_in_words(paths: list[str], expected: str) -> None:
    assert layers(paths) == expected


def test_equal_layers_are_one() -> None:
    (one,) = merge(rope(f"model.layers.{i}.attn", i) for i in range(80))
    assert one.layers == "layers 0-79"
    assert one.id == "rope-1"
    assert len(one.sites) == 80
    assert one.modules == [f"model.layers.{i}.attn" for i in range(80)]
    assert len(one.leaves) == 80


def test_sides_are_joined_in_order() -> None:
    (one,) = merge([rope("h.0", sides=("k",)), rope("h.1", sides=("q",)), rope("h.2", sides=("v",))])
    assert isinstance(one, Rotary)
    assert one.applied_to == ("q", "k", "v")


def test_the_title_says_what_it_is() -> None:
    (one,) = merge([rope("h.0", base=500_000.0, sides=("q", "k"))])
    assert one.title == "rotary, base 500000, width 8 of 8, half pairing, on q and k"
    assert one.parameters["applied_to"] == ["q", "k"]


def test_other_numbers_are_another_encoding() -> None:
    first, second = merge([rope("h.0"), rope("h.1", 1, base=1e6), rope("h.2", 2)])
    assert (first.layers, second.layers) == ("layers 0, 2", "layer 1")
    assert (first.id, second.id) == ("rope-1", "rope-2")


def test_other_parts_of_the_model_are_other_encodings() -> None:
    first, second = merge([rope("encoder.layers.0.attn"), rope("decoder.layers.0.attn", 1)])
    assert (first.modules, second.modules) == (["encoder.layers.0.attn"], ["decoder.layers.0.attn"])


def test_other_schemes_are_other_encodings_with_their_own_numbers() -> None:
    table = Table(leaf=node(0), rows=4)
    learned = Learned(table=table, width=3, sites=[site("embed", 0)])
    made = merge([rope("h.0", 5), Unrecognised(kind="bias", sites=[site("h.0", 9)]), learned])
    assert [item.id for item in made] == ["learned-1", "rope-1", "signal-1"]


def test_maps_that_differ_are_other_encodings() -> None:
    def bucketed(module: str, buckets: dict[int, int]) -> Bucketed:
        return Bucketed(buckets=buckets, table=Table(leaf=node(0), rows=4), sites=[site(module)])

    same = merge([bucketed("h.0", {0: 0, 1: 1}), bucketed("h.1", {1: 1, 0: 0})])
    other = merge([bucketed("h.0", {0: 0, 1: 1}), bucketed("h.1", {0: 0, 1: 2})])
    assert [item.layers for item in same] == ["layers 0-1"]
    assert [item.layers for item in other] == ["layer 0", "layer 1"]
    assert [item.id for item in other] == ["t5-1", "t5-2"]


def test_the_order_is_that_of_the_forward_pass() -> None:
    made = merge([rope("h.1", 20, base=1e6), rope("h.0", 10)])
    assert [item.layers for item in made] == ["layer 0", "layer 1"]


def test_a_site_is_listed_once() -> None:
    shared = site("h.0")
    first, second = rope("h.0"), rope("h.0")
    first.sites, second.sites = [shared], [shared]
    (one,) = merge([first, second])
    assert one.sites == [shared]


def test_nothing_stays_nothing() -> None:
    assert merge([]) == []


def test_an_encoding_without_sites_keeps_its_modules() -> None:
    (one,) = merge([Encoding(modules=["layers.2.attn"])])
    assert one.layers == "layer 2"
