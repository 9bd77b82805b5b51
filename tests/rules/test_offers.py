"""A fix that is offered is one: its finding goes away, nothing new comes, and safe ones leave the numbers alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pediag
from pediag.report.model import Report
from pediag.rules.finding import Finding
from pediag.targets.editing import edited
from tests.fixture_files import files, load, setting, variants
from tests.rules.declaration.test_planted_config_faults import FAULTS, LLAMA3, YARN, less, tiny

DECLARED = [path for path in files("rules") if path.stem.startswith("pe1")]
GRAVE = ("error", "warning")

# Code, applicability, a config, and the same as the fix should leave it.
CASES = {
    "list of bases": (
        "PE101",
        "safe",
        tiny(rope_parameters={"rope_type": "default", "rope_theta": [10000.0, 2e4]}),
        tiny(rope_parameters={"rope_type": "default", "rope_theta": [10000, 20000]}),
    ),
    "string base": (
        "PE102",
        "safe",
        tiny(rope_theta="1e4", rope_parameters={}),
        tiny(rope_theta=10000, rope_parameters={}),
    ),
    "misspelt key that is needed": (
        "PE105",
        "safe",
        tiny({**less(LLAMA3, "low_freq_factor"), "low_freqfactor": 1.0}),
        tiny(LLAMA3),
    ),
    "factor null": ("PE105", "safe", tiny({**YARN, "factor": None}), tiny({**YARN, "factor": 4.0})),
    "bands of Llama 3.1": (
        "PE105",
        "unsafe",
        tiny(less(less(LLAMA3, "low_freq_factor"), "high_freq_factor")),
        tiny(LLAMA3),
    ),
    "factor by the lengths": ("PE105", "unsafe", tiny(less(LLAMA3, "factor")), tiny(LLAMA3)),
    "misspelt default": ("PE106", "safe", tiny({**YARN, "beta_fst": 32}), tiny({**YARN, "beta_fast": 32})),
    "misspelt value": ("PE106", "unsafe", tiny({**YARN, "beta_fst": 16}), tiny({**YARN, "beta_fast": 16})),
    "factor of vLLM that changes nothing": ("PE106", "safe", tiny({**YARN, "attn_factor": 1.0}), tiny(YARN)),
    "factor of vLLM": (
        "PE106",
        "unsafe",
        tiny({**YARN, "attn_factor": 0.9}),
        tiny({**YARN, "attention_factor": round(0.9 * (0.1 * math.log(4.0) + 1.0), 6)}),
    ),
    "string factor": ("PE107", "safe", tiny({**YARN, "factor": "4.0"}), tiny({**YARN, "factor": 4})),
    "lengths exchanged": (
        "PE108",
        "unsafe",
        tiny({**YARN, "original_max_position_embeddings": 256}, max_position_embeddings=64),
        tiny(YARN),
    ),
}

BY_HAND = {
    "string beyond its range": ("PE107", tiny({**YARN, "factor": "0.5"})),
    "string that is no number": ("PE102", tiny({"rope_type": "default", "rope_theta": "10k"})),
    "string of another spelling": ("PE102", tiny({"rope_type": "default", "rope_theta": "1_0000"})),
    "base beyond exact floats": ("PE101", tiny({"rope_type": "default", "rope_theta": 1e19})),
    "factor against the lengths": ("PE108", tiny({**YARN, "factor": 8.0})),
    "two bases": ("PE109", tiny(rope_theta=500000)),
}


def test_a_type_is_not_written_where_its_keys_are_missing(tmp_path: Path) -> None:
    """It would be PE105's error instead."""
    config = tiny(less({**LLAMA3, "rope_type": "lllama3"}, "low_freq_factor"))
    (finding,) = [one for one in judged(tmp_path, json.dumps(config), 256).findings if one.code == "PE104"]
    assert finding.fix.edits == ()
    whole = tiny({**LLAMA3, "rope_type": "lllama3"})
    assert [one.code for one in each_offer(tmp_path, whole, 256)] == ["PE104"]


def judged(folder: Path, text: str, seq_len: int) -> Report:
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8")
    return pediag.check(path, seq_len=seq_len)


def places(report: Report) -> set[tuple[str, str]]:
    return {(one.code, one.where.module) for one in report.findings if one.severity in GRAVE}


def numbers(report: Report) -> list[tuple[Any, ...]]:
    """What the recognised rotary encodings turn by."""
    return [
        (np.asarray(one.frequencies).tolist(), one.attention_factor)  # type: ignore[attr-defined]
        for one in report.encodings
        if one.scheme == "rotary"
    ]


def each_offer(folder: Path, config: dict[str, Any], seq_len: int) -> list[Finding]:
    """The findings with edits, after each has kept its word."""
    text = json.dumps(config, indent=2)
    before = judged(folder, text, seq_len)
    offers = [finding for finding in before.findings if finding.fix.edits]
    for finding in offers:
        after = judged(folder, edited(text, finding.fix.edits), seq_len)
        same = [one for one in after.findings if one.code == finding.code]
        assert finding.where.module not in {one.where.module for one in same}
        assert places(after) <= places(before)
        if finding.fix.applicability == "safe":
            # What could not be recognised before may be now.
            assert [one for one in numbers(before) if one not in numbers(after)] == []
    return offers


@pytest.mark.parametrize("path", DECLARED, ids=lambda path: path.stem[:5])
def test_the_fixtures(path: Path, tmp_path: Path) -> None:
    for name in variants(path, "FAULTY"):
        for finding in each_offer(tmp_path, getattr(load(path), name)(), setting(path, "SEQ_LEN")):
            assert finding.fix.applicability in ("safe", "unsafe")
            assert finding.fix.patch is not None and finding.fix.patch.startswith("--- a/config.json\n")


def test_the_planted_faults(tmp_path: Path) -> None:
    offered = {one.fault for one in FAULTS if each_offer(tmp_path, one.config, one.seq_len)}
    assert offered == {
        "YaRN key misspelt (beta_fst)",
        "YaRN betas reversed",
        "llama3 low above high",
        "rope_type misspelt (lllama3)",
        "rope_theta a string",
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_offered(case: str, tmp_path: Path) -> None:
    code, applicability, config, expected = CASES[case]
    (finding,) = [one for one in each_offer(tmp_path, config, 256) if one.code == code]
    assert finding.fix.applicability == applicability
    assert json.loads(edited(json.dumps(config), finding.fix.edits)) == expected


@pytest.mark.parametrize("case", BY_HAND)
def test_what_is_left_to_the_user(case: str, tmp_path: Path) -> None:
    code, config = BY_HAND[case]
    found = [one for one in judged(tmp_path, json.dumps(config), 256).findings if one.code == code]
    assert [(one.fix.applicability, one.fix.edits, one.fix.patch) for one in found] == [("manual", (), None)]


def test_a_safe_fix_leaves_the_frequencies_of_the_formula(tmp_path: Path) -> None:
    """w_i = b^(-2i/r) of the base as it stands in the new text, with r = 16."""
    text = json.dumps(tiny(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}))
    (finding,) = judged(tmp_path, text, 256).findings[-1:]
    after = judged(tmp_path, edited(text, finding.fix.edits), 256)
    ((w, factor),) = numbers(after)
    assert w == pytest.approx([500000 ** (-2 * i / 16) for i in range(8)], rel=1e-12)
    assert factor == 1


def test_a_text_that_cannot_be_edited_says_why(tmp_path: Path) -> None:
    text = '{"rope_theta": 500000.0, "x": 1, "x": 1, "model_type": "llama"}'
    (finding,) = [one for one in judged(tmp_path, text, 256).findings if one.code == "PE101"]
    assert (finding.fix.edits, finding.fix.patch) == ((), None)
    assert 'No patch: the key "x" stands twice' in finding.fix.summary
