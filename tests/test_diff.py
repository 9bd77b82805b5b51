"""``pediag diff`` and ``--reference``: kinds of targets beside each other, exit statuses, JSON, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

import pediag
from pediag.cli import main
from pediag.errors import LoadError, UsageError
from pediag.report import diff as drawing
from tests.encodings.comparing._models import plain, rope, table

ROOT = Path(__file__).parents[1]
FORMATS = ROOT / "fixtures" / "formats"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
}
SCHEMA = json.loads(Path(drawing.__file__).with_name("diff_schema_version_1.json").read_text())


def config(folder: Path, name: str = "config.json", **values: Any) -> str:
    path = folder / name
    path.write_text(json.dumps({**LLAMA, **values}))
    return str(path)


def as_json(capsys: Any, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["diff", *words, "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["exit_code"] == status
    return status, found


def differing(found: dict[str, Any]) -> set[str]:
    return {
        item["name"]
        for one in found["comparisons"]
        for item in one["aspects"]
        if item["verdict"] == "differs"
    }


# -- kinds of targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "aspects"),
    [
        ({}, set()),
        ({"rope_theta": 500000.0}, {"angles", "base"}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"angles", "scaling"}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"angles", "scaling", "attention factor"}),
        ({"head_dim": 32}, {"rotary width", "head width"}),
    ],
    ids=["same", "base", "linear", "yarn", "width"],
)
def test_two_configs(tmp_path, capsys, values, aspects):
    status, found = as_json(capsys, config(tmp_path, "a.json", **values), config(tmp_path, "b.json"))
    assert differing(found) == aspects
    assert status == (1 if aspects else 0)


def test_two_configs_need_no_torch(tmp_path):
    a, b = config(tmp_path, "a.json", rope_theta=5e5), config(tmp_path, "b.json")
    code = (
        f"import sys; from pediag.cli import main; assert main(['diff', {a!r}, {b!r}]) == 1; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_the_base_that_a_converter_lost(tmp_path, capsys):
    """B043 (google-deepmind/penzai#102): the source declares 500000, the destination nothing but its default."""
    status, found = as_json(
        capsys, config(tmp_path, "a.json", rope_theta=10000), config(tmp_path, "b.json", rope_theta=500000)
    )
    (one,) = found["comparisons"]
    angles = next(item for item in one["aspects"] if item["name"] == "angles")
    assert (status, angles["first"], angles["unit"]) == (1, 1, "rad")
    assert 3.0 < angles["measured"] <= 3.15


def test_scaling_on_layers_that_should_have_none(tmp_path, capsys):
    """B127 (antonellof/ferrox#39): local layers of a Gemma 3 see positions 8 times too small."""
    gemma = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
    plain_layers = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}
    right = {"sliding_attention": plain_layers, "full_attention": scaled}
    wrong = {
        "sliding_attention": {**plain_layers, "rope_type": "linear", "factor": 8.0},
        "full_attention": scaled,
    }
    paths = [
        config(tmp_path, name, **gemma, rope_theta=None, rope_parameters=said)
        for name, said in (("a.json", wrong), ("b.json", right))
    ]
    status, found = as_json(capsys, *paths)
    kinds = sorted(one["verdict"] for one in found["comparisons"])
    assert (status, kinds) == (1, ["differs", "same"])
    assert differing(found) == {"angles", "scaling"}


def test_a_folder_beside_its_config_and_its_weights(capsys):
    folder = FORMATS / "tiny_llama"
    status, found = as_json(capsys, str(folder), str(folder / "config.json"))
    assert status == 0
    assert any("pairing" in item["name"] for one in found["comparisons"] for item in one["aspects"])
    untold = [item for one in found["comparisons"] for item in one["aspects"] if item["verdict"] == "unknown"]
    assert {(item["name"], item["note"]) for item in untold} == {("pairing", "not known of B")}
    assert "B was not run" in " ".join(found["notes"])


def test_a_live_model_beside_a_file_of_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    rate = torch.tensor(plain(1e4)).float()
    weights = {f"layers.{i}.attn.q.weight": torch.randn(32, 32) for i in range(2)}
    save_file({**weights, "layers.0.attn.inv_freq": rate}, path)
    assert pediag.diff(rope(), path, seq_len=200).verdict == "same"
    found = pediag.diff(rope(plain(5e5)), path, seq_len=200)
    assert found.verdict == "different"
    assert "rotary pairing, rotary attention factor: not known of B" in str(found)


def test_schemes_that_a_file_can_not_show_are_not_said_to_be_missing(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"head.weight": torch.randn(64, 32), "body.weight": torch.randn(32, 32)}, path)
    found = pediag.diff(rope(), path, seq_len=100)
    assert (found.verdict, found.exit_code()) == ("nothing-compared", 3)
    assert all(one.kind == "not compared" for one in found.comparisons)


def test_one_target_twice(capsys):
    spec = f"{ROOT}/fixtures/healthy/llama.py:model"
    status, found = as_json(capsys, spec, spec, "--seq-len", "128")
    assert (status, found["verdict"]) == (0, "same")


def test_nothing_to_compare(capsys):
    spec = f"{ROOT}/fixtures/healthy/mlp.py:model"
    assert as_json(capsys, spec, spec)[0] == 3


def test_one_side_without_positions(capsys):
    specs = [f"{ROOT}/fixtures/healthy/{name}.py:model" for name in ("mlp", "complex_rotary")]
    status, found = as_json(capsys, *specs, "--seq-len", "64")
    assert status == 1
    assert "only-in-b" in {one["verdict"] for one in found["comparisons"]}


def test_lengths_that_differ_are_told(tmp_path, capsys):
    paths = config(tmp_path, "a.json"), config(tmp_path, "b.json", max_position_embeddings=131072)
    _, found = as_json(capsys, *paths)
    assert found["seq_len"] == 4096
    assert any("A is meant for 4,096 tokens and B for 131,072 tokens" in note for note in found["notes"])
    assert as_json(capsys, *paths, "--seq-len", "99")[1]["seq_len"] == 99


def test_dynamic_scaling_is_compared_at_the_length_asked_about(tmp_path, capsys):
    """Below the trained length dynamic NTK is the plain formula; above it is not."""
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    paths = config(tmp_path, "a.json", **dynamic), config(tmp_path, "b.json")
    assert "angles" not in differing(as_json(capsys, *paths, "--seq-len", "4096")[1])
    assert "angles" in differing(as_json(capsys, *paths, "--seq-len", "8192")[1])


def test_inputs_and_configs_of_each_side(tmp_path, capsys):
    model = rope()
    assert pediag.diff(model, rope(), seq_len=64, inputs_a="ids=int64[B,N]").verdict == "same"
    with pytest.raises(UsageError, match="--input-b other: forward"):
        pediag.diff(model, rope(), seq_len=64, inputs_b="other=int64[B,N]")
    with pytest.raises(UsageError, match="given twice"):
        pediag.diff(model, model, inputs_b=["ids=int64[B,N]", "ids=int64[B,N]"])
    path = tmp_path / "model.safetensors"
    save_file({"body.weight": torch.randn(32, 32)}, path)
    settings = config(tmp_path, "a.json", rope_theta=500000)
    right = config(tmp_path, "b.json")
    status, found = as_json(capsys, str(path), right, "--config-a", settings)
    assert (status, differing(found)) == (1, {"angles", "base"})
    assert as_json(capsys, settings, str(path), "--config-b", settings)[0] == 0


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), (b"{", "not valid JSON"), (b"[]", "a configuration is an object")],
    ids=["missing", "broken", "list"],
)
def test_a_side_that_can_not_be_opened(tmp_path, capsys, place, content, said):
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_bytes(content)
    pair = [config(tmp_path)] * 2
    pair[place] = str(bad)
    assert main(["diff", *pair]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_pickle_that_would_run_code_is_refused(tmp_path, capsys):
    path = tmp_path / "evil.pt"

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"x": Evil()}, path)
    assert main(["diff", config(tmp_path), str(path)]) == 2
    assert not (tmp_path / "ran").exists()
    assert "Traceback" not in capsys.readouterr().err


def test_one_target_is_not_enough(tmp_path, capsys):
    assert main(["diff", config(tmp_path)]) == 2
    assert main(["diff", config(tmp_path), config(tmp_path), "--seq-len", "0"]) == 2


def test_the_report_is_not_written_over_a_side(tmp_path, capsys):
    a = config(tmp_path)
    assert main(["diff", a, a, "--output", a]) == 2
    assert json.loads(Path(a).read_text()) == LLAMA
    out = tmp_path / "out.json"
    assert main(["diff", a, a, "--format", "json", "--output", str(out)]) == 0
    assert json.loads(out.read_text())["verdict"] == "same"


def test_models_are_left_as_they_were():
    model = rope()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pediag.diff(model, model, seq_len=64)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# -- as a reference -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> Any:
    return rope(layers=2)


@pytest.mark.parametrize(
    ("made", "code", "said"),
    [
        ({"rate": plain(5e5)}, "PE202", "base (500000, the reference has 10000)"),
        ({"rate": plain() / 4}, "PE203", "scaling (linear, the reference has default)"),
        ({"factor": 1.2}, "PE204", "attention factor (1.2, the reference has 1)"),
        ({"shift": (3.0, 3.0)}, "PE402", "offset (3, the reference has 0)"),
        ({"sense": (-1.0, -1.0)}, "PE402", "sense (backwards, the reference has forwards)"),
        ({"rate": plain(1e4, 8)}, "PE407", "rotary width (8, the reference has 16)"),
        ({"roles": ""}, "PE308", "lacks what"),
    ],
    ids=["base", "scaling", "factor", "offset", "sense", "width", "none"],
)
def test_what_no_rule_can_know_is_an_error_of_its_rule(right, made, code, said):
    """None of these models declares anything, and each is a rotation: alone it is right."""
    model = rope(layers=2, **made)
    report = pediag.check(model, reference=right, seq_len=90, select=[code, "PE403"])
    (finding,) = [one for one in report.findings if one.severity == "error"]
    assert (finding.code, report.exit_code()) == (code, 1)
    assert said in finding.message
    assert finding.effect
    assert finding.fix.summary
    alone = pediag.check(model, seq_len=90, select=[code])
    assert not [one for one in alone.findings if one.severity == "error"]


def test_the_reference_itself_passes(right):
    report = pediag.check(rope(layers=2), reference=right, seq_len=90, select=["PE2", "PE403"])
    assert report.summary["errors"] == 0
    assert any("compared with Decoder" in note for note in report.notes)


def test_rows_that_were_replaced():
    m = torch.arange(100)[:, None]
    numbers = 0.1 * torch.sin(0.05 * m + torch.arange(32))
    report = pediag.check(
        table(torch.zeros(100, 32)), reference=table(numbers), seq_len=80, select=["PE211", "PE403"]
    )
    (finding,) = [one for one in report.findings if one.severity == "error"]
    assert (finding.code, report.exit_code()) == ("PE211", 1)


def test_a_rule_that_was_left_out_stays_out(right):
    model = rope(plain(5e5), layers=2)
    assert pediag.check(model, reference=right, seq_len=64, select=["PE403"]).exit_code() == 0


def test_a_reference_without_positions_is_refused(right):
    with pytest.raises(UsageError, match="no position encoding was found in it"):
        pediag.check(right, reference=f"{ROOT}/fixtures/healthy/mlp.py:model", seq_len=64)
    with pytest.raises(LoadError, match="no such file"):
        pediag.check(right, reference="nowhere.pt", seq_len=64)


def test_the_command_line_takes_a_reference(tmp_path, capsys):
    a, b = config(tmp_path, "a.json", rope_theta=500000.0), config(tmp_path, "b.json")
    assert main(["check", a, "--reference", a, "--select", "PE2,PE403"]) in (0, 3)
    assert main(["check", a, "--reference", b, "--select", "PE2,PE403"]) == 1
    assert "differs from" in " ".join(capsys.readouterr().out.split())


class _Embedded(torch.nn.Module):
    """Runs on embeddings of a width that nothing but the input tells."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.rows = torch.nn.Parameter(torch.randn(300, 24, generator=torch.Generator().manual_seed(1)))

    def forward(self, features: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x = features[..., :24] * scale + self.rows[self.first : self.first + features.shape[1]]
        return torch.nn.functional.scaled_dot_product_attention(
            x[:, None], x[:, None], x[:, None], is_causal=True
        )


def test_a_live_reference_is_given_the_inputs_of_the_target() -> None:
    specs = ["features=float32[B,N,37]", "scale=float32[24]"]
    found = pediag.check(_Embedded(0), reference=_Embedded(3), inputs=specs, seq_len=64).findings
    assert "PE208" in {finding.code for finding in found}
    same = pediag.check(_Embedded(3), reference=_Embedded(3), inputs=specs, seq_len=64).findings
    assert not [finding for finding in same if finding.severity == "error"]
