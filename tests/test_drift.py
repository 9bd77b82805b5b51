"""``pediag drift``: kinds of targets, exit statuses, JSON, plots that any terminal shows, and the guide."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from rich.console import Console

import pediag
from pediag.cli import main
from pediag.drifting.model import EncodingDrift, LaneDrift, Made, Point
from pediag.errors import UsageError
from pediag.report import TargetInfo
from pediag.report import drift as drawing
from pediag.report._plot import Curve, plot

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "drift.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    pediag (drift .+)$", GUIDE, re.MULTILINE)
SCHEMA = json.loads(Path(drawing.__file__).with_name("drift_schema_version_1.json").read_text())
W32 = 1.0 / 10000.0 ** (torch.arange(0, 128, 2).float() / 128)
PRODUCT = f"{ROOT}/fixtures/rules/pe604_angle_by_matmul.py:healthy"


def as_json(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["drift", *words, "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["exit_code"] == status
    return status, found


def saved(folder: Path, name: str, **tensors: torch.Tensor) -> str:
    torch.save(tensors, folder / name)
    return str(folder / name)


# -- targets without code -------------------------------------------------------------------------------------


def test_stored_frequencies_are_compared_with_their_formula(tmp_path, capsys):
    path = saved(tmp_path, "model.pt", **{"rotary.inv_freq": W32.to(torch.bfloat16)})
    status, found = as_json(capsys, path, "--seq-len", "8192")
    (one,) = found["encodings"]
    lane = one["lanes"][0]
    assert (status, lane["lane"], one["against"]) == (0, "as stored", "its formula in float64")
    # numerics.txt: bfloat16 frequencies, base 10000, width 128: 1.25 rad at 1023 and 10.0 rad at 8191.
    totals = {point["position"]: point["total"] for point in lane["points"]}
    assert [totals[1023], totals[8191]] == pytest.approx([1.25, 10.0], rel=6e-3)
    assert lane["cause"]["operation"] == "stored rotary.inv_freq"


@pytest.mark.parametrize("half", [False, True])
def test_stored_tables_are_compared_with_their_formula(half, tmp_path, capsys):
    m = torch.arange(1024.0)[:, None]
    angle = (m.to(torch.bfloat16) * W32.to(torch.bfloat16)).float() if half else m * W32
    _, found = as_json(capsys, saved(tmp_path, "model.pt", cos=angle.cos(), sin=angle.sin()))
    (one,) = found["encodings"]
    lane = one["lanes"][0]
    # Positions in bfloat16: every second one of 256 .. 511 and three of four of 512 .. 1023 fall on the one before.
    alike = (128 + 384 - 1, 257) if half else (0, None)
    assert (lane["alike"], lane["alike_from"]) == alike
    assert (lane["first_beyond_bound"] is not None) == half


def test_a_config_alone_is_nothing_to_measure_and_says_what_to_give(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "max_position_embeddings": 512,
                "rope_theta": 1e4,
            }
        )
    )
    out = tmp_path / "a10.json"
    assert main(["drift", str(path), "--save", str(out)]) == 3
    told = capsys.readouterr().out
    assert "give its folder" in told
    assert "was not written" in told
    assert not out.exists()


def test_an_exported_program_is_replayed(capsys):
    status, found = as_json(capsys, str(ROOT / "fixtures" / "formats" / "tiny.pt2"), "--seq-len", "64")
    assert status == 0
    assert [one["scheme"] for one in found["encodings"] if any(not lane["reason"] for lane in one["lanes"])]


# -- the command ----------------------------------------------------------------------------------------------


def test_a_model_of_transformers_that_was_cast(capsys):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=64, intermediate_size=8, max_position_embeddings=8192, **sizes
    )
    model = transformers.LlamaModel(config).to(torch.bfloat16)
    (one,) = pediag.drift(model, lanes="as written").encodings
    (lane,) = one.lanes
    totals = {point.position: point.total for point in lane.points}
    # numerics.txt, bf16/inv at base 10000 and width 128.
    assert [totals[1023], totals[8191]] == pytest.approx([1.25, 10.0], rel=6e-3)
    assert lane.cause is not None
    assert lane.cause.operation == "stored rotary_emb.inv_freq"
    assert one.layers == "layers 0-1"


def test_bad_words_are_one_line(tmp_path, capsys):
    wrong = [
        [PRODUCT, "--lane", "fp8"],
        [PRODUCT, "--against", str(tmp_path / "none.json")],
        [PRODUCT, "--save", str(tmp_path / "no" / "a.json")],
        [PRODUCT, "--dtype", "int9"],
        [PRODUCT, "--save", str(tmp_path / "a.json"), "--output", str(tmp_path / "a.json")],
        [str(tmp_path / "none.pt")],
        [],
    ]
    for words in wrong:
        assert main(["drift", *words]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with pytest.raises(UsageError, match="as written, bfloat16"):
        pediag.drift(PRODUCT, lanes="fp8")


def test_every_lane_can_be_asked_for():
    from pediag.drift import LANES
    from pediag.trace.lanes import HALF, TF32, Autocast, Cast, DefaultDtype, OnDevice

    made = [kind(dtype) for kind in (Cast, Autocast, DefaultDtype) for dtype in HALF]
    made += [
        TF32(),
        *(OnDevice(kind, tf32=on) for kind in ("cuda", "xpu") for on in (False, True)),
        OnDevice("mps"),
    ]
    assert {lane.name for lane in made} <= set(LANES)
    listed = GUIDE.partition("| lane |")[2].partition("A lane that cannot")[0]
    assert [name for name in LANES if name not in listed and name not in ("float32", "float64")] == []


def test_the_table_fits_80_columns_and_ascii(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["drift", PRODUCT.replace("healthy", "faulty"), "--seq-len", "2048"]) == 0
    out = capsys.readouterr().out
    drawn = [line for line in out.splitlines() if "│" in line or "e-0" in line]
    assert len(drawn) >= 20
    assert max(len(line) for line in drawn) <= 80
    assert drawing.plain_ascii(out).isascii()


def test_ascii_is_written_where_stdout_knows_no_more(tmp_path):
    words = [sys.executable, "-m", "pediag", "drift", PRODUCT, "--seq-len", "256", "--lane", "as written"]
    env = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert "?" not in text.partition("rope-1")[2]


def test_a_length_that_the_model_does_not_take_is_noted(capsys):
    limited = f"{ROOT}/fixtures/healthy/alibi_symmetric_encoder.py:model"
    status, found = as_json(capsys, limited, "--seq-len", "2048")
    (one,) = found["encodings"]
    assert (status, one["positions"] < 600) == (0, True)
    assert any("2,048 tokens stopped" in note for note in found["notes"])
    _, whole = as_json(capsys, limited, "--seq-len", "600")
    assert whole["encodings"][0]["positions"] == 600


@pytest.mark.parametrize("length", ["1", "2", "3"])
def test_the_shortest_lengths(length, capsys):
    status, found = as_json(capsys, PRODUCT, "--seq-len", length, "--lane", "as written")
    (lane,) = found["encodings"][0]["lanes"]
    assert (status, lane["first_beyond_bound"], lane["alike"]) == (0, None, 0)
    assert lane["points"][-1]["position"] == int(length) - 1


def test_the_model_is_left_as_it_was():
    from tests.drifting.test_angles import SPEC, Turns, stage

    model = Turns(stage("fp32"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pediag.drift(model, seq_len=64, inputs=SPEC)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.is_leaf and not value.is_meta for value in model.parameters())


# -- the drawing ----------------------------------------------------------------------------------------------


def made(*errors: float) -> drawing.Drift:
    where = [2**k for k in range(len(errors))]
    points = [Point(m, e, 1e-3, e, beyond=e > 1e-3) for m, e in zip(where, errors, strict=True)]
    one = EncodingDrift("rope-1", "rotary", "rotary", lanes=[LaneDrift("tf32", points, max(errors))])
    says = Made("1", "2", "", "cpu", "float32", "highest", False)
    return drawing.Drift(TargetInfo("m", "live module", None), 8, [one], says)


def test_an_error_beyond_the_bound_has_a_mark_without_colour():
    text = str(made(1e-4, 1e-2, 1.0))
    marked = [line.split() for line in text.splitlines() if re.match(r"\s+[124] ", line) and "e-03" in line]
    assert [cells[-1] == "!" for cells in marked] == [False, True, True]


def test_numbers_that_are_not_finite_are_shown_and_written():
    found = made(1e-4, float("inf"), float("nan"))
    assert "inf" in str(found)
    text = json.dumps(found.to_dict(), allow_nan=False)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_a_curve_rises_with_its_errors():
    lines = plot(
        [Curve("a", [(1, 1e-6), (32, 1e-3), (1024, 1.0)])], [(1, 1e-5), (1024, 1e-5)], 60, "rad", "position"
    )
    heights = {}
    for row, line in enumerate(lines):
        for column in (match.start() for match in re.finditer("a", line.partition("│")[2])):
            heights.setdefault(column, row)
    columns = sorted(heights)
    assert len(columns) > 40
    assert all(heights[b] <= heights[a] for a, b in pairwise(columns))
    assert heights[columns[0]] - heights[columns[-1]] >= 8
    middle = heights[columns[len(columns) // 2]]
    assert abs(middle - (heights[columns[0]] + heights[columns[-1]]) / 2) <= 1


def test_nothing_to_draw_is_no_fault():
    console = Console(file=io.StringIO(), width=80)
    drawing.render(made(0.0, 0.0), console)
    assert plot([], [], 80, "rad", "position")
    assert np.isfinite(made(0.0).encodings[0].lanes[0].worst)


# -- the guide ------------------------------------------------------------------------------------------------


def test_every_command_of_the_guide_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) >= 5
    outs = []
    for command in COMMANDS:
        assert main(shlex.split(command)) == 0, command
        outs.append(capsys.readouterr().out)
    shown = GUIDE.partition("what it comes to:")[2].partition("TARGET is whatever")[0]
    told = re.sub(r"\S*/?fixtures/", "fixtures/", outs[0])
    wrong = [line for line in (line.strip() for line in shown.splitlines()) if line and line not in told]
    assert wrong == []
    assert "same bits" in outs[-1]
    assert (tmp_path / "a10.json").stat().st_size < 100_000


def test_the_guide_lists_every_option():
    import typer

    from pediag import cli

    params = typer.main.get_command(cli.app).commands["drift"].params
    options = {name for param in params for name in param.opts if name.startswith("--")} - {"--help"}
    table = GUIDE.partition("| option |")[2].partition("## The lanes")[0]
    assert options == set(re.findall(r"`(--[a-z-]+)", table))


@pytest.mark.parametrize("name", ["", "nonsense", "cuda "])
def test_a_lane_that_is_none_is_told(name: str) -> None:
    with pytest.raises(UsageError, match="is unknown; the known ones are as written"):
        pediag.drift(torch.nn.Linear(2, 2), lanes=[name])
