"""The 32 planted faults of a declaration and the two controls, on which transformers' own validator was measured.

``docs/config-faults.md`` is written from the same rows by
``python -m tests.rules.declaration.test_planted_config_faults``.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pediag
from pediag.rules.registry import all_rules

PAGE = Path(__file__).parents[3] / "docs" / "config-faults.md"
NAN, INF = float("nan"), float("inf")
RAISED, LOGGED, NOTHING = "raises", "logs a line", "nothing"

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
"""The model that all faults but one are planted in: heads of 16 channels, 8 pairs."""

DEFAULT = {"rope_type": "default", "rope_theta": 10000}
LINEAR = {"rope_type": "linear", "rope_theta": 10000, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
RISING = [1.0 + i / 2 for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": RISING,
}


@dataclass(frozen=True)
class Planted:
    """One fault: the config as it is written, the codes that it is, and what transformers 5.24 does about it.

    ``also`` are codes that may speak besides, of something else that is true of the config.
    """

    fault: str
    config: dict[str, Any]
    codes: tuple[str, ...]
    transformers: str
    seq_len: int = 256
    remark: str = ""
    also: tuple[str, ...] = ()

    @property
    def decidable(self) -> tuple[str, ...]:
        """The codes whose rules there are."""
        return tuple(code for code in self.codes if code in _existing())


@cache
def _existing() -> frozenset[str]:
    return frozenset(rule.code for rule in all_rules())


def tiny(rope: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The tiny Llama with ``rope_parameters``."""
    return {**TINY, "rope_parameters": DEFAULT if rope is None else rope, **more}


def less(scaling: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in scaling.items() if name != key}


FAULTS = (
    Planted("linear without a factor", tiny(less(LINEAR, "factor")), ("PE105",), RAISED),
    Planted("odd head_dim (15)", tiny(head_dim=15), ("PE111",), RAISED),
    Planted(
        "LongRoPE list null",
        tiny({**LONGROPE, "short_factor": None}),
        ("PE105",),
        RAISED,
        remark="an accidental TypeError",
    ),
    Planted("linear factor 0.5", tiny({**LINEAR, "factor": 0.5}), ("PE107",), LOGGED),
    Planted(
        "YaRN factor against the lengths (8, and 256 / 64 = 4)",
        tiny({**YARN, "factor": 8.0}),
        ("PE108",),
        LOGGED,
    ),
    Planted("YaRN key misspelt (beta_fst)", tiny({**YARN, "beta_fst": 16}), ("PE106",), LOGGED),
    Planted("YaRN betas reversed", tiny({**YARN, "beta_fast": 1, "beta_slow": 32}), ("PE107",), LOGGED),
    Planted(
        "llama3 low above high",
        tiny({**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        ("PE107",),
        LOGGED,
    ),
    Planted(
        "llama3 original length at the maximum",
        tiny({**LLAMA3, "original_max_position_embeddings": 256}),
        ("PE108",),
        LOGGED,
    ),
    Planted(
        "LongRoPE list of 7 for 8 pairs",
        tiny({**LONGROPE, "short_factor": [1.0] * 7}),
        ("PE107",),
        LOGGED,
        remark="stops when the table is built",
    ),
    Planted(
        "rope_type misspelt (lllama3)",
        tiny({**LLAMA3, "rope_type": "lllama3"}),
        ("PE104",),
        LOGGED,
        remark="KeyError when the model is built",
    ),
    Planted(
        "rope_theta 50 times what was trained",
        tiny({**DEFAULT, "rope_theta": 500000}),
        (),
        NOTHING,
        remark="500000 is Llama 3's base: only the weights' training tells",
    ),
    Planted("rope_theta 0", tiny({**DEFAULT, "rope_theta": 0}), ("PE102",), NOTHING, remark="logits are NaN"),
    Planted(
        "rope_theta negative",
        tiny({**DEFAULT, "rope_theta": -10000.0}),
        ("PE102",),
        NOTHING,
        remark="logits are NaN",
    ),
    Planted("rope_theta 1.0", tiny({**DEFAULT, "rope_theta": 1.0}), ("PE102",), NOTHING),
    Planted("rope_theta a string", tiny({**DEFAULT, "rope_theta": "10000"}), ("PE102",), NOTHING),
    Planted(
        "rope_theta missing",
        tiny(less(LINEAR, "rope_theta")),
        ("PE103",),
        NOTHING,
        remark="10000 is assumed",
    ),
    Planted(
        "rope_theta NaN", tiny({**DEFAULT, "rope_theta": NAN}), ("PE102",), NOTHING, remark="logits are NaN"
    ),
    Planted(
        "linear factor NaN", tiny({**LINEAR, "factor": NAN}), ("PE107",), NOTHING, remark="logits are NaN"
    ),
    Planted(
        "linear factor infinite",
        tiny({**LINEAR, "factor": INF}),
        ("PE107",),
        NOTHING,
        remark="frequencies are 0, logits finite",
    ),
    Planted(
        "YaRN factor 4 with the original length at the maximum",
        tiny({**YARN, "original_max_position_embeddings": 256}),
        (),
        NOTHING,
        remark="no fault: Qwen2.5's published recipe",
    ),
    Planted("YaRN attention_factor 10", tiny({**YARN, "attention_factor": 10.0}), ("PE107",), NOTHING),
    Planted(
        "YaRN betas equal",
        tiny({**YARN, "beta_fast": 1.0, "beta_slow": 1.0}),
        (),
        NOTHING,
        remark="no fault: Kimi-K2 ships it",
    ),
    Planted("LongRoPE factor 0.5", tiny({**LONGROPE, "factor": 0.5}), ("PE107",), LOGGED),
    Planted(
        "LongRoPE lists swapped",
        tiny({**LONGROPE, "short_factor": RISING, "long_factor": [1.0] * 8}),
        ("PE107",),
        NOTHING,
    ),
    Planted(
        "partial_rotary_factor 1.5",
        tiny({**DEFAULT, "partial_rotary_factor": 1.5}),
        ("PE107",),
        NOTHING,
        remark="Llama does not read it",
        also=("PE110",),
    ),
    Planted(
        "partial_rotary_factor 0.0",
        tiny({**DEFAULT, "partial_rotary_factor": 0.0}),
        ("PE107",),
        NOTHING,
        remark="Llama does not read it",
        also=("PE110",),
    ),
    Planted(
        "200 tokens where the maximum is 16",
        tiny(max_position_embeddings=16),
        ("PE503",),
        NOTHING,
        seq_len=200,
        remark="nothing is wrong in the config; --seq-len 200 asks",
    ),
    Planted("max_position_embeddings 0", tiny(max_position_embeddings=0), ("PE107",), NOTHING),
    Planted(
        "config.rope_theta set after construction",
        tiny(rope_theta=500000),
        ("PE109",),
        NOTHING,
        remark="it is ignored; told while both values stand: on the live object, and in a file that it saves",
    ),
    Planted(
        "config.rope_scaling set after construction",
        tiny({"rope_type": "linear", "factor": 4.0, "rope_theta": None}),
        ("PE102",),
        NOTHING,
        remark="it replaces the base by null; TypeError when the model is built",
    ),
    Planted(
        "mrope sections that sum to 3 of 8 (Qwen2-VL's text)",
        tiny(
            {**DEFAULT, "mrope_section": [1, 1, 1]},
            model_type="qwen2_vl_text",
            architectures=["Qwen2VLTextModel"],
        ),
        ("PE107",),
        NOTHING,
    ),
)

CONTROLS = (
    Planted("control: linear factor 4, the maximum left as it was", tiny(LINEAR), (), NOTHING),
    Planted(
        "control: llama3 factor 8, maximum / original length = 2",
        tiny({**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 128}),
        (),
        NOTHING,
    ),
)


def found(planted: Planted) -> dict[str, str]:
    """Code -> severity of every warning and error of the whole catalogue on the config as a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(planted.config, indent=1))
        report = pediag.check(path, seq_len=planted.seq_len)
    return {f.code: f.severity for f in report.findings if f.severity != "note"}


def told(planted: Planted) -> str:
    """The cell of the table that says what pediag does."""
    if not planted.codes:
        return "silent" if "control" in planted.fault or "no fault" in planted.remark else "not decidable"
    if not planted.decidable:
        return f"not yet ({', '.join(planted.codes)})"
    severities = found(planted)
    return (
        ", ".join(f"{code} ({severities[code]})" for code in planted.decidable if code in severities)
        or "missed"
    )


def table() -> str:
    """The rows as Markdown."""
    lines = ["| planted | transformers 5.24 | pediag | remark |", "|---|---|---|---|"]
    rows = [(one.fault, one.transformers, told(one), one.remark) for one in (*FAULTS, *CONTROLS)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def page() -> str:
    """The text of ``docs/config-faults.md``."""
    decided = [one for one in FAULTS if one.decidable]
    faults = [one for one in FAULTS if one.codes]
    signalled = [one for one in FAULTS if one.transformers != NOTHING]
    return f"""# Planted faults of a declaration

{len(FAULTS)} faults were planted, one at a time, in the config of a tiny Llama (hidden 64, 4 heads, 2 layers, 256
tokens; the last of them in Qwen2-VL's text config), and beside them two controls that look like faults and are none.
transformers 5.24 signalled {len(signalled)} of {len(FAULTS)} when the config was read: its exceptions and its log
were watched.

Two of the {len(FAULTS)} are no faults, since published models ship them, and one cannot be told from a config. Of the
other {len(faults)} pediag decides {len(decided)}; the table names the rules and how severe each is.

{table()}

This page is written by `python -m tests.rules.declaration.test_planted_config_faults`, from the rows of that test.
"""


def test_there_are_all_of_them() -> None:
    """32 faults, of which transformers signalled 12: 3 exceptions and 9 log lines; and two controls."""
    reactions = [one.transformers for one in FAULTS]
    assert (reactions.count(RAISED), reactions.count(LOGGED), reactions.count(NOTHING)) == (3, 9, 20)
    assert len(CONTROLS) == 2
    assert len({one.fault for one in FAULTS}) == 32


@pytest.mark.parametrize("planted", FAULTS, ids=lambda one: one.fault)
def test_planted(planted: Planted) -> None:
    """Every decidable fault is found under its code, and under no other of the family of declarations."""
    severities = found(planted)
    if planted.codes and not planted.decidable:
        pytest.skip(f"{', '.join(planted.codes)} is not there yet")
    assert set(planted.decidable) <= set(severities)
    assert {code for code in severities if code.startswith("PE1")} <= {*planted.codes, *planted.also}


@pytest.mark.parametrize("planted", CONTROLS, ids=lambda one: one.fault)
def test_controls_are_silent(planted: Planted) -> None:
    assert found(planted) == {}


def test_the_page_is_the_table() -> None:
    print("\n" + table())
    advice = (
        "run python -m tests.rules.declaration.test_planted_config_faults and commit docs/config-faults.md"
    )
    assert PAGE.read_text(encoding="utf-8") == page(), advice


def test_what_setting_an_attribute_leaves() -> None:
    """The two faults after construction are the configs that transformers then has."""
    transformers = pytest.importorskip("transformers", "5.0")
    for name, value in (("rope_theta", 500000), ("rope_scaling", {"rope_type": "linear", "factor": 4.0})):
        config = transformers.LlamaConfig(**{key: tiny()[key] for key in TINY if key != "model_type"})
        setattr(config, name, value)
        left = {key: item for key, item in config.to_dict().items() if key.startswith("rope_")}
        (row,) = [one for one in FAULTS if one.fault.startswith(f"config.{name} ")]
        assert left == {key: item for key, item in row.config.items() if key.startswith("rope_")}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(table())
