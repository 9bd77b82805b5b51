"""The table of classes agrees with the installed transformers and with what moved between releases; read late."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pediag.targets import class_defaults, families
from pediag.targets.class_defaults import assumed, hands_down, known, may_read, releases, sections, turns

TABLE = json.loads(class_defaults.FILE.read_text())


@pytest.fixture(scope="module")
def installed() -> Any:
    """transformers, if it is the release that the table speaks of."""
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ != TABLE["transformers"]:
        pytest.skip(f"the table is of {TABLE['transformers']}")
    return transformers


def rope(config: Any) -> dict[str, Any]:
    """Base by type of layers, read off a built config in this test's own way."""
    found = config.rope_parameters
    if "rope_theta" in found:
        return {"": found["rope_theta"]}
    return {layer: part["rope_theta"] for layer, part in found.items() if part}


def test_bases_are_those_of_the_classes(installed: Any) -> None:
    mapping = installed.models.auto.configuration_auto.CONFIG_MAPPING
    wrong = {
        kind: (entry["base"], rope(mapping[kind]()))
        for kind, entry in TABLE["rotary"].items()
        if dict(assumed(kind).bases) != rope(mapping[kind]())  # type: ignore[union-attr]
    }
    assert wrong == {}
    assert len(TABLE["rotary"]) > 150


def test_the_script_makes_the_same_table(installed: Any) -> None:
    tool = pytest.importorskip("tools.class_defaults")
    made = json.loads(json.dumps(tool.table(None)))
    now = {
        kind: {key: value for key, value in entry.items() if key != "before"}
        for kind, entry in TABLE["rotary"].items()
    }
    assert {**made, "before": TABLE["before"]} == {**TABLE, "rotary": now}


@pytest.mark.parametrize(
    ("kind", "now", "before"),
    [
        ("cohere", 500000.0, 10000.0),
        ("persimmon", 10000.0, 25000.0),
        ("qwen3_vl_text", 500000.0, 5000000.0),
        ("olmo3", 500000.0, 10000.0),
    ],
)
def test_defaults_that_moved_between_releases(kind: str, now: float, before: float) -> None:
    """4.57.6 -> 5.24.0, as measured on both releases."""
    entry = assumed(kind)
    assert entry is not None
    assert set(entry.bases.values()) == {now}
    assert set(entry.before.values()) == {before}
    assert releases() == ("5.24.0", "4.57.6")


def test_bases_by_type_of_layers() -> None:
    """Gemma 3 report (2503.19786): 10k local, 1M global; ModernBERT (2412.13663): 10k and 160k."""
    gemma, bert = assumed("gemma3_text"), assumed("modernbert")
    assert gemma is not None and bert is not None
    assert gemma.layered and bert.layered
    assert gemma.bases == {"sliding_attention": 1e4, "full_attention": 1e6}
    assert bert.bases == {"sliding_attention": 1e4, "full_attention": 16e4}
    assert gemma.reads["rope_local_base_freq"] == ("sliding_attention",)
    assert gemma.reads["rope_scaling"] == ("full_attention",)
    assert "rope_theta" not in bert.reads


def test_what_is_rotated() -> None:
    for kind in ("gpt2", "bert", "bloom", "t5", "opt", "gptj", "baichuan", "", "qwen2_5_vl_vision"):
        assert assumed(kind) is None, kind
    assert turns("falcon", {}) and not turns("falcon", {"alibi": True})
    assert turns("granitemoehybrid", {"position_embedding_type": "rope"}) and not turns(
        "granitemoehybrid", {}
    )
    assert turns("zamba2", {"use_mem_rope": True}) and not turns("zamba2", {})


def test_sections_and_what_is_handed_down() -> None:
    assert sections("gemma3")["text_config"] == "gemma3_text"
    assert sections("llama") == {}
    assert "rope_scaling" in hands_down("qwen2_vl")
    assert hands_down("llava") == ()


def test_keys_that_may_be_read() -> None:
    assert may_read("falcon", "alibi") and not may_read("gpt_neox", "use_alibi")
    assert may_read("unheard_of", "alibi") and may_read("llama", "a key of no list")
    assert known("bert") and not known("baichuan")


def test_nothing_is_read_before_it_is_asked_for() -> None:
    code = (
        "import sys\n"
        "from pediag.rules.registry import all_rules\n"
        "from pediag.rules.declaration.pe103_rope_theta_defaulted import check\n"
        "from pediag.targets import class_defaults\n"
        "[rule.check for rule in all_rules()]\n"
        "print(class_defaults._table.cache_info().currsize, {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "set()"]


def test_published_bases_are_those_of_the_published_configs() -> None:
    """Some of tests/data/model_configs.json, by hand."""
    assert set(families.published("mixtral")) == {1e6}
    assert set(families.published("olmo2")) == {5e5}
    assert 1e4 in families.published("qwen2") and 1e4 not in families.published("qwen3")
    assert families.published("gemma3_text", "sliding_attention").keys() == {1e4}
    assert families.published("unheard_of") == {}
    assert families.count(families.published("qwen3_vl_text")) == 1
    assert families.count({1.0: "a 1B, 2B", 2.0: "b"}) == 3
