"""Plans: numbers by formulas written here, published configurations, patches that transformers reads, usage errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pediag import cli
from pediag.errors import UsageError
from pediag.plan import plan
from pediag.report.plan import Option, Plan

DATA = Path(__file__).parent / "data" / "model_configs.json"
PUBLISHED = {entry["model"]: entry["config"] for entry in json.loads(DATA.read_text())}
LLAMA2 = {"scheme": "rope", "base": 10000.0, "width": 128, "train_len": 4096}
PAIRS = np.arange(64)
W = 10000.0 ** (-2 * PAIRS / 128)


def option(made: Plan, name: str) -> Option:
    (found,) = [one for one in made.options if one.name == name]
    return found


def first_below(w: np.ndarray, limit: int) -> int | None:
    """The first distance with a negative sum of cosines, term by term."""
    m = np.arange(limit, dtype=np.float64)
    below = np.flatnonzero(sum(np.cos(m * one) for one in w) < 0)
    return int(below[0]) if below.size else None


def yarn(s: float, trained: int) -> np.ndarray:
    """Peng et al., section 3.2, with the bounds rounded outward."""
    low, high = (128 * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(10000)) for turns in (32, 1))
    ramp = np.clip((PAIRS - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0, 1)
    return W / s * ramp + W * (1 - ramp)


def llama3(w: np.ndarray, s: float, trained: int) -> np.ndarray:
    """Meta's model code, pair by pair."""
    out = []
    for one in w:
        wave = 2 * math.pi / one
        smooth = (trained / wave - 1) / 3
        if wave > trained:
            out.append(one / s)
        elif wave < trained / 4:
            out.append(one)
        else:
            out.append((1 - smooth) * one / s + smooth * one)
    return np.array(out)


SCALED = {
    "keep": W,
    "linear": W / 8,
    "ntk": (10000 * 8 ** (128 / 126)) ** (-2 * PAIRS / 128),
    "dynamic-ntk": (10000 * 8 ** (128 / 126)) ** (-2 * PAIRS / 128),
    "yarn": yarn(8, 4096),
    "llama3": llama3(W, 8, 4096),
    # Liu et al.: base ** log_{L/2pi}(T/2pi).
    "larger-base": (10000 ** (math.log(32768 / (2 * math.pi)) / math.log(4096 / (2 * math.pi))))
    ** (-2 * PAIRS / 128),
}


@pytest.fixture(scope="module")
def llama2() -> Plan:
    return plan(seq_len=32768, **LLAMA2)


@pytest.mark.parametrize("name", SCALED)
def test_numbers_by_independent_formulas(llama2: Plan, name: str) -> None:
    w, found = SCALED[name], option(llama2, name)
    assert found.first_failing == first_below(w, 32768)
    assert found.lost == pytest.approx(max(0.0, (W - w).max()), rel=1e-9, abs=1e-15)
    new = (2 * math.pi > W * 4096) & (w * 32768 > W * 4096 * (1 + 1e-9))
    assert found.unseen == new.sum()


def test_published_numbers_of_llama_2(llama2: Plan) -> None:
    """m0 of base 10,000; YaRN's factor at 8; linear at 8 as tuned by Chen et al., neighbours 1/8 rad apart."""
    assert option(llama2, "keep").first_failing == 1707
    assert option(llama2, "yarn").attention_factor == pytest.approx(1.2079, abs=5e-5)
    linear = option(llama2, "linear")
    assert (linear.lost, linear.unseen, linear.tuning) == (pytest.approx(0.875), 0, "needed")
    assert linear.patch is not None
    assert linear.patch["rope_parameters"]["factor"] == 8.0
    assert "32,768" in linear.evidence


def test_options_without_a_formula_give_no_numbers(llama2: Plan) -> None:
    for name in ("longrope", "alibi", "nope"):
        found = option(llama2, name)
        assert not found.computed
        assert found.first_failing is found.unseen is found.lost is found.patch is None


def test_every_option_names_a_source(llama2: Plan) -> None:
    assert all(one.sources and one.evidence for one in llama2.options)


def test_partial_rotation_keeps_its_factor_and_never_fails() -> None:
    made = plan(seq_len=8192, scheme="rope", base=10000.0, width=24, head_width=96, train_len=2048)
    assert all(one.first_failing is None for one in made.options if one.computed)
    patch = option(made, "yarn").patch
    assert patch is not None
    assert patch["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("kind", ["linear", "dynamic-ntk", "yarn", "llama3"])
def test_transformers_builds_from_the_patch_what_was_planned(llama2: Plan, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    patch = option(llama2, kind).patch
    assert patch is not None
    config = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32, **patch)
    w, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu", seq_len=32768)
    np.testing.assert_allclose(w.numpy(), SCALED[kind], rtol=1e-5)
    assert factor == pytest.approx(option(llama2, kind).attention_factor)


def test_the_spelling_of_transformers_4(llama2: Plan) -> None:
    for name in ("linear", "ntk", "yarn", "llama3", "larger-base"):
        found = option(llama2, name)
        assert found.patch is not None and found.patch_v4 is not None
        new = dict(found.patch["rope_parameters"])
        assert found.patch_v4["rope_theta"] == (base := new.pop("rope_theta"))
        assert isinstance(base, int) or base % 1
        assert (found.patch_v4["rope_scaling"] or {"rope_type": "default"}) == new


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


CASES = [
    ("meta-llama/Llama-3.1-8B", 131072, "keep", 131072),
    ("Qwen/Qwen2.5-7B-Instruct + README YaRN", 131072, "keep", 131072),
    ("meta-llama/Llama-2-7b-hf", 4096, "keep", 0),
    ("meta-llama/Llama-2-7b-hf", 16384, "yarn", 0),
]


@pytest.mark.parametrize(("name", "length", "recommended", "reach"), CASES)
def test_published_configs(name: str, length: int, recommended: str, reach: int, tmp_path: Path) -> None:
    made = plan(written(tmp_path, PUBLISHED[name]), seq_len=length)
    assert made.recommended == recommended
    if reach:
        assert f"{reach:,}" in made.reason
        assert option(made, "keep").tuning == "none"


def test_llama_3_1_as_it_is_has_the_frequencies_of_its_own_scaling(tmp_path: Path) -> None:
    made = plan(written(tmp_path, PUBLISHED["meta-llama/Llama-3.1-8B"]), seq_len=131072)
    w = llama3(500000.0 ** (-2 * PAIRS / 128), 8, 8192)
    assert made.train_len == 8192
    assert option(made, "keep").first_failing == first_below(w, 131072)


def test_qwen_with_yarn_as_it_is_is_its_own_yarn_option(tmp_path: Path) -> None:
    made = plan(written(tmp_path, PUBLISHED["Qwen/Qwen2.5-7B-Instruct + README YaRN"]), seq_len=131072)
    keep, scaled = option(made, "keep"), option(made, "yarn")
    assert keep.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (keep.first_failing, keep.lost, keep.unseen) == (scaled.first_failing, scaled.lost, scaled.unseen)


@pytest.mark.parametrize(
    ("scheme", "recommended"),
    [("learned", "windows"), ("sinusoidal", "windows"), ("t5", "tune"), ("alibi", "keep")],
)
def test_other_schemes(scheme: str, recommended: str) -> None:
    made = plan(scheme=scheme, train_len=512, seq_len=2048)
    assert made.recommended == recommended
    assert recommended in [one.name for one in made.options]
    assert plan(scheme=scheme, train_len=512, seq_len=512).recommended == "keep"


def test_a_learned_table_in_a_config(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_head": 12}
    made = plan(written(tmp_path, config), seq_len=4096)
    assert (made.scheme, made.train_len) == ("learned", 1024)
    assert "IndexError" in option(made, "keep").effect


USAGE = [
    ({}, "--seq-len"),
    ({"seq_len": 9}, "TARGET"),
    ({"seq_len": 9, "scheme": "rope"}, "--train-len and --base and --width"),
    ({"seq_len": 9, "scheme": "spline", "train_len": 4}, "unknown"),
    ({"seq_len": 9, "scheme": "alibi", "train_len": 4, "base": 1e4}, "describe rotary"),
    ({"seq_len": 9, "target": "config.json", "base": 1e4}, "one of the two"),
    ({"seq_len": 9, **LLAMA2, "width": 127}, "even"),
    ({"seq_len": 9, **LLAMA2, "base": 0.5}, "base"),
    ({"seq_len": 9, **LLAMA2, "head_width": 64}, "--head-width"),
]


@pytest.mark.parametrize(("options", "told"), USAGE)
def test_what_can_not_be_meant(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        plan(**options)
    assert "\n" not in str(caught.value)


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = cli.main(["plan", *words])
    told = capsys.readouterr()
    return status, told.out, told.err


FLAGS = ["--scheme", "rope", "--base", "10000", "--width", "128", "--train-len", "4096"]


def test_the_command_shows_options_caution_and_patch(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(*FLAGS, "--seq-len", "32768", capsys=capsys)
    assert status == 0
    assert "recommended  yarn" in out
    assert "Nothing was measured" in out
    (line,) = [line for line in out.splitlines() if line.startswith("transformers 5")]
    assert json.loads(line.partition("  ")[2])["rope_parameters"]["factor"] == 8.0


def test_the_command_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(*FLAGS, "--seq-len", "32768", "--format", "json", capsys=capsys)
    made = json.loads(out)
    assert (status, made["schema_version"], made["plan"]["recommended"]) == (0, 1, "yarn")
    keep = made["plan"]["options"][0]
    assert (keep["name"], keep["first_failing_distance"], keep["patch"]) == ("keep", 1707, None)


def test_the_command_without_a_length_is_a_usage_error_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(*FLAGS, capsys=capsys)
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1


def test_no_torch_for_flags_and_configs(tmp_path: Path) -> None:
    target = written(tmp_path, PUBLISHED["meta-llama/Llama-2-7b-hf"])
    code = (
        "import sys; from pediag.plan import plan\n"
        f"plan({target!r}, seq_len=8192); plan(seq_len=8192, **{LLAMA2!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
