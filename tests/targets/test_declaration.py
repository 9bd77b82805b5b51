"""The reader of declarations: precedence as in transformers, every value with its key, and what is said twice."""

from __future__ import annotations

from typing import Any

import pytest

from pediag.targets import Config
from pediag.targets.declaration import RopeDeclaration, Said, declarations

HERE = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}


def read(**values: Any) -> list[RopeDeclaration]:
    return declarations(Config({**HERE, **values}))


def test_a_flat_declaration_of_each_generation() -> None:
    (old,) = read(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0})
    assert old.base == Said(1e4, "rope_theta")
    assert old.type == Said("linear", "rope_scaling.type")
    assert old.scaling == {"factor": Said(2.0, "rope_scaling.factor")}
    (new,) = read(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0})
    assert new.base == Said(1e4, "rope_parameters.rope_theta")
    assert new.get("factor") == Said(2.0, "rope_parameters.factor")
    assert new.get("hidden_size") == Said(64, "hidden_size")
    assert new.get("head_dim") is None
    assert (old.model_type, old.layer_type, old.section, old.again) == ("llama", "", "", ())


def test_what_is_said_twice_is_kept() -> None:
    (one,) = read(rope_theta=1e4, rope_parameters={"rope_theta": 5e5, "rope_type": "yarn", "type": "linear"})
    assert one.base == Said(5e5, "rope_parameters.rope_theta")
    assert one.type == Said("yarn", "rope_parameters.rope_type")
    assert one.again == (
        ("base", Said(1e4, "rope_theta")),
        ("type", Said("linear", "rope_parameters.type")),
    )


@pytest.mark.parametrize("types", [("yarn", "linear"), ("linear", "yarn")])
def test_which_object_transformers_reads_first(types: tuple[str, str]) -> None:
    transformers = pytest.importorskip("transformers")
    both = {
        "rope_scaling": {"rope_type": types[0], "factor": 2.0, "rope_theta": 1e4},
        "rope_parameters": {"rope_type": types[1], "factor": 4.0, "rope_theta": 2e4},
    }
    (said,) = read(**both)
    built = transformers.LlamaConfig(
        **HERE, **{key: dict(value) for key, value in both.items()}
    ).rope_parameters
    assert said.type is not None and said.base is not None
    assert (said.type.value, said.base.value) == (built["rope_type"], built["rope_theta"])


def test_layers_of_two_types() -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    full, local = read(rope_parameters=nested)
    assert full.base == Said(1e6, "rope_parameters.full_attention.rope_theta")
    assert (local.layer_type, local.base) == (
        "sliding_attention",
        Said(1e4, "rope_parameters.sliding_attention.rope_theta"),
    )
    apart = read(global_rope_theta=16e4, local_rope_theta=1e4)
    assert {one.layer_type: one.base.value for one in apart if one.base} == {
        "full_attention": 16e4,
        "sliding_attention": 1e4,
    }


def test_a_scaling_without_a_base_is_a_declaration() -> None:
    (one,) = read(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert one.base is None
    assert read() == []
    assert read(rope_scaling=None, rope_parameters={}) == []


def test_a_section_takes_lengths_from_the_top() -> None:
    text = {"rope_theta": 1e4, "hidden_size": 32, "num_attention_heads": 2}
    values = {
        "model_type": "outer",
        "max_position_embeddings": 99,
        "text_config": text,
        "vision_config": text,
    }
    (one,) = declarations(Config(values))
    assert (one.section, one.model_type) == ("text_config", "outer")
    assert one.base == Said(1e4, "text_config.rope_theta")
    assert one.get("max_position_embeddings") == Said(99, "max_position_embeddings")
    assert one.get("hidden_size") == Said(32, "text_config.hidden_size")
