"""PE502 on files: a sure table is an error, a doubtful one or one that a formula gives is a note."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pediag
from tests.rules._stored import judged


def around() -> dict[str, Tensor]:
    """A vocabulary and layers."""
    generator = torch.Generator().manual_seed(3)
    state = {"embed": torch.randn(1000, 64, generator=generator)}
    for layer in range(3):
        state |= {f"l.{layer}.w": torch.randn(64, 64, generator=generator), f"l.{layer}.n": torch.ones(64)}
    return state


def walk(rows: int) -> Tensor:
    """Rows that follow each other."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(64, generator=generator)]
    for _ in range(rows - 1):
        made.append(0.9 * made[-1] + 0.436 * torch.randn(64, generator=generator))
    return torch.stack(made)


def test_a_learned_table_is_an_error(tmp_path: Path) -> None:
    report = judged(tmp_path, {"positions.weight": walk(128), **around()}, "PE502", seq_len=200)
    (finding,) = report.findings
    assert finding.severity == "error"
    assert (finding.evidence.measured, finding.evidence.expected, finding.evidence.limit) == (128, 200, 128)
    assert "72 tokens stand beyond its last row: IndexError" in finding.effect
    assert finding.where.module == "positions"


def test_rows_for_padding_shorten_it(tmp_path: Path) -> None:
    """RoBERTa's layout: 130 rows, row 1 of zeros, 128 tokens."""
    table = walk(130)
    table[1] = 0
    state = {"positions": table, **around()}
    assert not judged(tmp_path, state, "PE502", seq_len=128).findings
    (finding,) = judged(tmp_path, state, "PE502", seq_len=129).findings
    assert (finding.evidence.measured, finding.evidence.expected, finding.evidence.limit) == (130, 131, 128)
    assert "the first 2 are for padding" in finding.message


def test_a_doubtful_table_is_a_note(tmp_path: Path) -> None:
    table = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
    (finding,) = judged(tmp_path, {"t": table, **around()}, "PE502", seq_len=200).findings
    assert finding.severity == "note"
    assert finding.effect.startswith("If this is the table of positions") and "Uncertain" in finding.effect


def formulas() -> dict[str, dict[str, Tensor]]:
    angle = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
    return {
        "rotary": {"c": angle.cos(), "s": angle.sin()},
        "sinusoidal": {"t": torch.stack([angle.sin(), angle.cos()], -1).flatten(1), **around()},
        "position-ids": {"ids": torch.arange(64)[None]},
        "mask": {"mask": torch.ones(1, 1, 64, 64).tril().bool()},
    }


@pytest.mark.parametrize("scheme", formulas())
def test_what_a_formula_gives_is_a_note(tmp_path: Path, scheme: str) -> None:
    report = judged(tmp_path, formulas()[scheme], "PE502", seq_len=100)
    (finding,) = report.findings
    assert (finding.severity, finding.scheme) == ("note", scheme)
    assert "36 tokens stand beyond its last row, unless the code" in finding.effect
    assert not judged(tmp_path, formulas()[scheme], "PE502", seq_len=64).findings


@pytest.mark.parametrize("form", ["key", "distance", "past"])
def test_a_stored_bias_ends_with_its_last_key(tmp_path: Path, form: str) -> None:
    """Eight heads with slopes 1/2 .. 1/256 (Press et al.), for 64 keys: at the default length of 2,048 it has ended."""
    slope = 0.5 ** torch.arange(1.0, 9.0)
    offset = torch.arange(64.0)[None] - torch.arange(64.0)[:, None]
    biases = {
        "key": slope[:, None] * torch.arange(64.0),
        "distance": -slope[:, None, None] * offset.abs(),
        "past": slope[:, None, None] * offset.clamp(max=0),
    }
    state = {"bias": biases[form], **around()}
    report = judged(tmp_path, state, "PE502")
    (finding,) = report.findings
    assert (finding.severity, finding.scheme, report.seq_len) == ("note", "alibi", 2048)
    assert (finding.evidence.measured, finding.evidence.expected, finding.evidence.limit) == (64, 2048, 64)
    assert "has 64 keys" in finding.message and "1,984 tokens stand beyond its last key" in finding.effect
    assert not judged(tmp_path, state, "PE502", seq_len=64).findings


def test_by_default_a_file_is_judged_at_its_own_length(tmp_path: Path) -> None:
    doubtful = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    report = judged(tmp_path, {"a": doubtful, "b": walk(128), **around()}, "PE502")
    assert report.seq_len == 128
    assert [finding.severity for finding in report.findings] == ["note"]


def test_no_table_could_not_be_checked(tmp_path: Path) -> None:
    report = judged(tmp_path, {"w": torch.full((32,), math.nan), **around()}, "PE502")
    assert [outcome.status for outcome in report.outcomes] == ["could-not-check"]


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
    ],
)
def test_a_declared_table(values: dict[str, Any], rows: int, tmp_path: Path) -> None:
    """Documented lengths: BERT 512, RoBERTa 512 of 514 (fairseq keeps padding_idx + 1 rows aside), GPT-2 1024."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values, indent=1))
    by_default = pediag.check(path, select="PE502")
    assert (by_default.seq_len, by_default.findings) == (rows, [])
    assert not pediag.check(path, seq_len=rows, select="PE502").findings
    (finding,) = pediag.check(path, seq_len=rows + 1, select="PE502").findings
    assert (finding.severity, finding.evidence.measured, finding.where.line) == ("error", rows, 3)


def test_a_config_of_rotations_has_no_table(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000}'
    )
    (outcome,) = pediag.check(path, seq_len=10**6, select="PE502").outcomes
    assert outcome.status == "could-not-check"


def test_ids_that_were_not_extended_with_their_table_are_a_warning(tmp_path: Path) -> None:
    state = {"e.position_ids": torch.arange(128)[None], "e.places.weight": walk(400), **around()}
    (finding,) = judged(tmp_path, state, "PE502", seq_len=200).findings
    assert finding.severity == "warning"
    assert "`e.places.weight` beside it has 400" in finding.message
    elsewhere = {"other.position_ids" if name == "e.position_ids" else name: t for name, t in state.items()}
    (finding,) = judged(tmp_path, elsewhere, "PE502", seq_len=200).findings
    assert finding.severity == "note"
