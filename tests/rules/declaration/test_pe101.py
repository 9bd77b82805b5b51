"""PE101: which spellings and values of a rotary base are found, how severe, where, and which are left."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pediag
from pediag.rules.declaration.pe101_float_rope_theta import check, truncation_error
from pediag.rules.rule import Facets, NotApplicable
from pediag.targets import Config
from tests.rules._fixtures import load

FIXTURE = load("pe101_float_rope_theta")


def found(config: Any, seq_len: int = 512) -> list[Any]:
    """The findings on a config given as an object."""
    return list(check.check(Facets(seq_len=seq_len, config=Config.from_object(config))))


@pytest.mark.parametrize("make", FIXTURE.FAULTY)
def test_faulty_fixture(make: Any) -> None:
    (finding,) = found(make(), FIXTURE.SEQ_LEN)
    assert finding.severity == ("note" if float(finding.evidence.measured).is_integer() else "warning")
    assert finding.evidence.expected == math.floor(finding.evidence.measured)


@pytest.mark.parametrize("make", FIXTURE.HEALTHY)
def test_healthy_fixture(make: Any) -> None:
    with suppress(NotApplicable):
        assert not found(make(), FIXTURE.SEQ_LEN)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        ({"rope_theta": 1e6}, ["rope_theta"]),
        ({"rotary_emb_base": 10000.5}, ["rotary_emb_base"]),
        ({"rope_theta": 1000000, "rope_local_base_freq": 10000.0}, ["rope_local_base_freq"]),
        ({"global_rope_theta": 160000.0, "local_rope_theta": 1e4}, ["global_rope_theta", "local_rope_theta"]),
        ({"rope_parameters": {"rope_theta": 5e5}}, ["rope_parameters.rope_theta"]),
        (
            {"text_config": {"rope_parameters": {"full": {"rope_theta": 5e5}}}},
            ["text_config.rope_parameters.full.rope_theta"],
        ),
        ({"vision_config": {"rope_theta": 100.5}, "rope_theta": 7}, ["vision_config.rope_theta"]),
        ({"layer_rope_theta": [10000, 1e6, 2.5]}, ["layer_rope_theta"]),
        ({"rope": {"theta": 3e4}, "relation_bias_theta": 1.5}, ["rope.theta"]),
        ({"ropeTheta": 3e4}, ["ropeTheta"]),
        ({"llama.rope.freq_base": 3e4}, ["llama.rope.freq_base"]),
        (
            {"towers": [{"rope_theta": 1e4}, {"rope_theta": 1e4}]},
            ["towers.0.rope_theta", "towers.1.rope_theta"],
        ),
        (SimpleNamespace(dim=64, rope_base=np.float32(1e4)), ["rope_base"]),
    ],
)
def test_spellings(config: Any, paths: list[str]) -> None:
    assert [finding.where.module for finding in found(config)] == paths


@pytest.mark.parametrize(
    "theta", [10000, "10000.0", True, math.nan, math.inf, 0.0, -1e4, 1.0, np.int64(10000), [10000, 500]]
)
def test_left_to_others(theta: Any) -> None:
    assert not found({"rope_theta": theta})


def test_no_base_is_not_applicable() -> None:
    with pytest.raises(NotApplicable):
        found({"rope_theta": None, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0}, "theta": 0.5})


def test_a_list_is_as_bad_as_its_worst() -> None:
    (finding,) = found({"layer_rope_theta": [1e6, 2.5e4 + 0.25, 1e4]})
    assert (finding.severity, finding.evidence.measured) == ("warning", 25000.25)


def test_effect_bounds_every_pair() -> None:
    base = 999999.4420358813
    x = np.arange(64) / 64.0
    moved = np.abs(base**-x - 999999.0**-x).max()
    assert 0.9 * truncation_error(base) <= moved <= truncation_error(base) * (1 + 1e-6)
    assert f"{16384 * truncation_error(base):.2g} rad" in found({"rope_theta": base}, 16384)[0].effect


def test_published_configs_are_at_most_notes() -> None:
    models = json.loads((Path(__file__).parents[2] / "data" / "model_configs.json").read_text())
    worst = {}
    for model in models:
        with suppress(NotApplicable):
            worst[model["model"]] = {finding.severity for finding in found(model["config"])}
    assert len(worst) > 40
    assert [name for name, levels in worst.items() if "warning" in levels] == ["bigcode/starcoder2-3b"]


def test_the_rule_imports_no_torch() -> None:
    code = (
        "import sys, importlib\n"
        "from pediag.rules.rule import Facets\n"
        "from pediag.targets import Config\n"
        "pe101 = importlib.import_module('pediag.rules.declaration.pe101_float_rope_theta')\n"
        "facets = Facets(seq_len=9, config=Config.from_object({'rope_theta': 2.5}))\n"
        "print(len(list(pe101.check.check(facets))), 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["1", "False"]


def test_line_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n "model_type": "llama",\n "rope_parameters": {\n  "rope_theta": 10000.25\n }\n}\n')
    (finding,) = check.check(Facets(seq_len=9, config=Config.from_file(path)))
    assert (finding.where.file, finding.where.line, finding.severity) == (str(path), 4, "warning")


def test_whole_config_through_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FIXTURE.faulty_integral()))
    (finding,) = pediag.check(path, select=["PE101"]).findings
    assert (finding.code, finding.severity, finding.fix.applicability) == ("PE101", "note", "safe")
    assert finding.fix.patch is not None and finding.fix.patch.startswith(
        "--- a/config.json\n+++ b/config.json\n@@"
    )


# -- reports of runtimes that take the base as a whole number ----------------------------------------------


def ntk(base: float, factor: float, width: int) -> float:
    """NTK-aware base: ``base * factor ** (d / (d - 2))``."""
    return float(base * factor ** (width / (width - 2)))


def test_an_option_of_type_int() -> None:
    """oobabooga/textgen#3083: ``--rope-freq-base`` with ``type=int``, for NTK bases such as that of alpha 2."""
    base = ntk(10000.0, 2.0, 128)
    assert not base.is_integer()
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": base}
    (finding,) = found(config, 4096)
    assert (finding.severity, finding.evidence.expected) == ("warning", math.floor(base))
    assert found({**config, "rope_theta": math.floor(base)}) == []


def test_an_argument_annotated_as_int() -> None:
    """NVIDIA/TransformerEngine#944: ``rotary_base: int = 10000``; the review asks for 10000.0."""
    config = {"model_type": "gpt_neox", "rotary_emb_base": 10000.0, "rotary_pct": 0.25}
    (finding,) = found(config)
    assert (finding.severity, finding.where.module) == ("note", "rotary_emb_base")
    assert found({**config, "rotary_emb_base": 10000}) == []


def test_a_base_that_each_model_annotates_otherwise() -> None:
    """vllm-project/vllm#18914: ``base: int`` in get_rope while models hand on floats such as Starcoder2's."""
    config = {"model_type": "starcoder2", "rope_theta": 999999.4420358813, "max_position_embeddings": 16384}
    (finding,) = found(config)
    assert (finding.severity, finding.evidence.expected) == ("warning", 999999)
    assert found({**config, "rope_theta": 999999}) == []


def test_a_base_for_a_wished_length() -> None:
    """theroyallab/tabbyAPI#90: rope_alpha 3.4321 is a base of 35,000, and no whole number in config.json."""
    base = ntk(10000.0, 3.4321, 128)
    assert base == pytest.approx(35000, rel=1e-4)
    (finding,) = found({"model_type": "mixtral", "rope_theta": base})
    assert finding.severity == "warning"
    assert found({"model_type": "mixtral", "rope_theta": 35000}) == []
