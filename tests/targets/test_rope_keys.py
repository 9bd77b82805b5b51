"""The table of keys: transformers' part against the installed release, vLLM's against what is published of it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from pediag.targets import rope_keys
from pediag.targets.rope_keys import keys_of, meant, nearest_key, nearest_type, needed, read_by, readers

LENGTH = "original_max_position_embeddings"


def validated(kind: str) -> tuple[set[str], set[str]]:
    """The keys that the installed transformers demands and accepts under a type, as its own check is called."""
    rope = importlib.import_module("transformers.modeling_rope_utils")
    told: list[tuple[set[str], set[str]]] = []

    class Recorder(rope.RotaryEmbeddingConfigMixin):  # type: ignore[misc, name-defined]
        head_dim, hidden_size, num_attention_heads, max_position_embeddings = 2, 4, 2, 8

        @staticmethod
        def _check_received_keys(
            kind: str, received: Any, required: Any, optional_keys: Any = None, ignore_keys: Any = None
        ) -> None:
            told.append((set(required), set(optional_keys or ())))

    sound = {
        "rope_type": kind,
        "factor": 2.0,
        LENGTH: 4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "short_factor": [1.0],
        "long_factor": [1.0],
        "partial_rotary_factor": 1.0,
    }
    getattr(Recorder(), f"_validate_{kind}_rope_parameters")(sound)
    return told[0]


@pytest.mark.parametrize("kind", rope_keys.TRANSFORMERS)
def test_keys_are_those_of_transformers(kind: str) -> None:
    pytest.importorskip("transformers", "5.0")
    demanded, accepted = validated(kind)
    ours = rope_keys.TRANSFORMERS[kind]
    # A base is filled in by the class; the factor of "proportional" is read and not validated.
    assert set(ours.needs) == demanded - {"rope_type", "rope_theta"}
    assert set(ours.reads) - ({"factor"} if kind == "proportional" else set()) == accepted - {
        "rope_theta",
        "partial_rotary_factor",
    }


def test_types_are_those_of_transformers() -> None:
    pytest.importorskip("transformers", "5.0")
    rope = importlib.import_module("transformers.modeling_rope_utils")
    prefix, suffix = "_validate_", "_rope_parameters"
    named = {
        name[len(prefix) : -len(suffix)]
        for name in dir(rope.RotaryEmbeddingConfigMixin)
        if name.endswith(suffix)
    }
    named = {
        name for name in named if name and hasattr(rope.RotaryEmbeddingConfigMixin, f"{prefix}{name}{suffix}")
    }
    assert named == set(rope_keys.TRANSFORMERS)
    assert set(rope.ROPE_INIT_FUNCTIONS) == set(rope_keys.TRANSFORMERS) - {"default", "axial"}


def rotary_classes() -> dict[str, Any]:
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    rope = importlib.import_module("transformers.modeling_rope_utils")
    found = {}
    for kind in auto.CONFIG_MAPPING_NAMES:
        cls = auto.CONFIG_MAPPING[kind]
        if issubclass(cls, rope.RotaryEmbeddingConfigMixin):
            found[kind] = cls
    return found


def test_what_classes_leave_aside_is_harmless() -> None:
    pytest.importorskip("transformers", "5.0")
    for kind, cls in rotary_classes().items():
        ignored = set(cls.ignore_keys_at_rope_validation or ())
        ours = rope_keys.EXTRAS | rope_keys.EXTRAS_OF_TYPE.get(kind, frozenset()) | rope_keys.ANY_TYPE
        assert ignored <= ours, kind


def test_head_widths_and_shares_of_classes() -> None:
    pytest.importorskip("transformers", "5.0")
    classes = rotary_classes()
    for kind, width in rope_keys.OWN_HEAD_WIDTH.items():
        assert getattr(classes[kind](), "head_dim", None) == width, kind
    for kind, share in rope_keys.OWN_SHARE.items():
        rope = getattr(classes[kind](), "rope_parameters", None) or {}
        if share is not None and "partial_rotary_factor" in rope:
            assert rope["partial_rotary_factor"] == share, kind


@pytest.mark.parametrize("kind", sorted(rope_keys.REFUSES))
def test_classes_that_refuse_an_uneven_division(kind: str) -> None:
    pytest.importorskip("transformers", "5.0")
    cls = rotary_classes()[kind]
    heads = cls().num_attention_heads
    with pytest.raises(Exception, match=r"multiple|divisible"):
        cls(hidden_size=16 * heads + 2)


# get_rope of vLLM: what it takes out of its dictionary, branch by branch.
VLLM = {
    "linear": ({"factor"}, set()),
    "ntk": ({"factor"}, {"mixed_b"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", LENGTH}, set()),
    "longrope": ({"short_factor", "long_factor", LENGTH}, {"short_mscale", "long_mscale"}),
    "xdrope": ({"alpha", "xdrope_section"}, set()),
    "mllama4": (set(), set()),
}


@pytest.mark.parametrize("kind", VLLM)
def test_keys_of_vllm(kind: str) -> None:
    ours = rope_keys.VLLM[kind]
    assert (set(ours.needs), set(ours.reads)) == VLLM[kind]


def test_the_two_attention_factors() -> None:
    assert read_by("attention_factor", "yarn") == ("transformers",)
    assert read_by("attn_factor", "yarn") == ("vLLM",)
    assert read_by("alpha", "dynamic") == ("vLLM",)
    assert read_by("beta_fast", "linear") == ()
    assert read_by("partial_rotary_factor", "linear") == ("transformers", "vLLM")


def test_who_knows_which_type() -> None:
    assert readers("yarn") == ("transformers", "vLLM")
    assert readers("axial") == ("transformers",)
    assert readers("ntk") == ("vLLM",)
    assert readers("su") == ("vLLM",)
    assert readers("nothing") == ()
    assert keys_of("transformers", "ntk") == frozenset()
    assert needed("ntk") == ("factor",)
    assert needed("nothing") == ()


def test_what_a_name_means() -> None:
    assert (meant("su"), meant("mrope"), meant("yarn")) == ("longrope", "default", "yarn")
    assert meant("yarn", "phi3") == "longrope"


def test_nearest() -> None:
    assert [nearest_type(name) for name in ("lllama3", "Long RoPE", "llama3.1", "xyz")] == [
        "llama3",
        "longrope",
        "llama3",
        "",
    ]
    yarn = keys_of("transformers", "yarn")
    assert [nearest_key(name, yarn) for name in ("attn_factor", "beta_fst", "Factor", "zeta")] == [
        "attention_factor",
        "beta_fast",
        "factor",
        "",
    ]
