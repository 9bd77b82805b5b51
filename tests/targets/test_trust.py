"""No code that came with a file runs unless it is trusted; a report says what was trusted, and by what."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pediag
from pediag import settings
from pediag.cli import main
from pediag.errors import LoadError, PediagError, UsageError
from pediag.targets import open_target
from tests.targets.files._pickles import archived, config, hostile, legacy

NAMES = sorted(hostile(Path("x")))


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", NAMES)
def test_no_way_to_apply_a_function_does(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    pickled = hostile(mark)[name]
    for write in (archived, legacy):
        write(pickled, Path("m.pt"))
        with pytest.raises(LoadError) as caught:
            open_target("m.pt")
        assert "\n" not in str(caught.value)
        assert not mark.exists()


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("as a name", "nested", "as a storage", "EXT")]
)
def test_the_function_is_named(tmp_path: Path, name: str) -> None:
    archived(hostile(tmp_path / "ran")[name], Path("m.pt"))
    with pytest.raises(
        LoadError, match=r"would run code when unpickled, so it was not: it asks for .*(mkdir|eval|getattr)"
    ):
        open_target("m.pt")


def test_what_the_pickles_do_when_they_are_trusted(tmp_path: Path) -> None:
    """The tests above can fail: the same pickles do run under Python's own unpickler."""
    ran = []
    for name, pickled in hostile(tmp_path / "ran").items():
        with contextlib.suppress(Exception):
            pickle.loads(pickled)
        if (tmp_path / "ran").exists():
            ran.append(name)
            (tmp_path / "ran").rmdir()
    assert {
        "REDUCE",
        "STACK_GLOBAL",
        "STACK_GLOBAL from the memo",
        "INST",
        "OBJ",
        "eval",
        "partial",
        "of type",
    } <= set(ran)


def _write(pickled: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    archived(pickled, path)


def _folder(pickled: bytes, **files: str) -> None:
    for name, content in files.items():
        Path("f", name.replace("__", ".")).parent.mkdir(exist_ok=True)
        Path("f", name.replace("__", ".")).write_text(content)


def way(name: str) -> Callable[[bytes], str]:
    """How a pickle gets in: writes the files and returns the spec to name."""

    def single(pickled: bytes) -> str:
        _write(pickled, Path(name))
        return name

    def pretrained(pickled: bytes) -> str:
        _folder(pickled, config__json=config())
        _write(pickled, Path("f/pytorch_model.bin"))
        return "f"

    def shard(pickled: bytes) -> str:
        _folder(pickled, config__json=config())
        Path("f/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "s-1.bin"}}))
        _write(pickled, Path("f/s-1.bin"))
        return "f"

    def index(pickled: bytes) -> str:
        shard(pickled)
        return "f/pytorch_model.bin.index.json"

    def index_of_safetensors(pickled: bytes) -> str:
        Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
        _write(pickled, Path("a.safetensors"))
        return "model.safetensors.index.json"

    def adapter(pickled: bytes) -> str:
        _folder(pickled, adapter_config__json='{"peft_type": "LORA", "base_model_name_or_path": "none"}')
        _write(pickled, Path("f/adapter_model.bin"))
        return "f"

    def base(pickled: bytes) -> str:
        pretrained(pickled)
        Path("a").mkdir()
        Path("a/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "f"}')
        return "a"

    def original(pickled: bytes) -> str:
        _folder(pickled, params__json='{"dim": 16, "n_heads": 2, "n_layers": 1, "rope_theta": 10000.0}')
        _write(pickled, Path("f/consolidated.00.pth"))
        return "f"

    def unlisted(pickled: bytes) -> str:
        _folder(pickled, config__json=config())
        _write(pickled, Path("f/pytorch_model-00001-of-00001.bin"))
        return "f"

    ways = {
        "folder": pretrained,
        "shard": shard,
        "index": index,
        "index of safetensors": index_of_safetensors,
        "adapter": adapter,
        "base of an adapter": base,
        "params.json": original,
        "shards without an index": unlisted,
    }
    return ways.get(name, single)


SUFFIXES = [
    "pt",
    "pth",
    "bin",
    "ckpt",
    "safetensors",
    "json",
    "gguf",
    "pt2",
    "onnx",
    "pkl",
    "tar",
    "npz",
    "PT",
]
WAYS = [
    *(f"m.{suffix}" for suffix in SUFFIXES),
    "m",
    *("folder", "shard", "index", "index of safetensors", "adapter", "base of an adapter", "params.json"),
    "shards without an index",
]


@pytest.mark.parametrize("name", WAYS)
def test_no_way_in_runs_code(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    spec = way(name)(hostile(mark)["REDUCE"])
    Path("config.json").write_text(config())
    for call in (
        lambda: pediag.check(spec),
        lambda: pediag.inspect(spec),
        lambda: pediag.check(spec, config="config.json"),
        lambda: pediag.check(f"{spec}:model"),
    ):
        with pytest.raises(PediagError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert not mark.exists()
    for words in (["check", spec], ["inspect", spec], ["check", spec, "--config", "config.json"]):
        assert main(words) == 2
        assert not mark.exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_config_that_is_a_pickle(tmp_path: Path) -> None:
    archived(hostile(tmp_path / "ran")["REDUCE"], Path("config.json"))
    torch.save({"a": torch.ones(2)}, "m.pt")
    with pytest.raises(LoadError, match=r"not UTF-8 text|not valid JSON"):
        pediag.check("m.pt", config="config.json")
    assert not (tmp_path / "ran").exists()


def test_every_class_is_listed_and_the_list_is_cut() -> None:
    many = {f"k{n}": nn.Sequential(nn.Linear(1, 1), nn.GELU(), nn.Dropout()) for n in range(2)}
    torch.save(many, "m.pt")
    with pytest.raises(LoadError) as caught:
        open_target("m.pt")
    for name in ("container.Sequential", "linear.Linear", "activation.GELU", "dropout.Dropout"):
        assert f"torch.nn.modules.{name}" in str(caught.value)
    pickled = b"\x80\x02](" + b"".join(b"cmodule%d\nName\n" % n for n in range(40)) + b"e."
    archived(pickled, Path("n.pt"))
    with pytest.raises(LoadError, match=r"it asks for module0\.Name, .* and 28 more;"):
        open_target("n.pt")


# -- trust --------------------------------------------------------------------------------------------------


def _trusting_report(tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    assert main(["check", *words, "--format", "json", "--output", str(out), "--fail-on", "never"]) in (0, 3)
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_the_option_trusts_and_the_report_says_so(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, 2), "evil": Runs(tmp_path / "ran")}, "m.pt")
    report = _trusting_report(tmp_path, "m.pt", "--trust")
    assert "--trust was used: code in m.pt ran" in report["notes"]
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pyproject.toml", "pediag.toml"])
def test_settings_trust_and_the_report_says_which(tmp_path: Path, name: str) -> None:
    table = "[tool.pediag]\n" if name == "pyproject.toml" else ""
    Path(name).write_text(f"{table}trust = true\n")
    Path("runs").mkdir()
    torch.save({"a": torch.ones(2, 2), "evil": Runs(tmp_path / "ran")}, "runs/m.pt")
    report = _trusting_report(tmp_path, "runs/m.pt")
    assert f"trust in {name} was used: code in runs/m.pt ran" in report["notes"]
    assert (tmp_path / "ran").exists()


def test_settings_that_may_have_come_with_the_target_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("repo/inner").mkdir(parents=True)
    torch.save({"a": torch.ones(2, 2), "evil": Runs(tmp_path / "ran")}, "repo/m.pt")
    torch.save({"a": torch.ones(2, 2)}, "repo/plain.pt")
    for place, start, spec in (
        ("repo", "repo", "m.pt"),
        ("repo/inner", "repo/inner", "../m.pt"),
        ("repo", "repo", "."),
    ):
        file = tmp_path / place / "pediag.toml"
        file.write_text("trust = true\n")
        monkeypatch.chdir(tmp_path / start)
        assert main(["check", spec]) == 2
        assert "would run code" in capsys.readouterr().err
        assert not (tmp_path / "ran").exists()
        file.unlink()
    (tmp_path / "repo/pediag.toml").write_text("trust = true\n")
    monkeypatch.chdir(tmp_path / "repo")
    report = _trusting_report(tmp_path, "plain.pt")
    assert any(note.startswith("trust in pediag.toml does not count:") for note in report["notes"])


def test_settings_are_for_the_command_line_only(tmp_path: Path) -> None:
    Path("pediag.toml").write_text("trust = true\n")
    Path("runs").mkdir()
    torch.save({"evil": Runs(tmp_path / "ran")}, "runs/m.pt")
    with pytest.raises(LoadError, match="would run code"):
        pediag.check("runs/m.pt")
    assert not (tmp_path / "ran").exists()


def test_where_settings_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert not settings.load(inner).trust
    (tmp_path / "pediag.toml").write_text("trust = true\n")
    assert settings.load(inner).source == tmp_path / "pediag.toml"
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert settings.load(inner).trust, "a project file without our table is passed by"
    (tmp_path / "a" / ".git").mkdir()
    assert not settings.load(inner).trust, "the repository's root is the end"
    (tmp_path / "a" / ".git").rmdir()
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    assert not settings.load(inner).trust, "the home folder is the end"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.pediag]\ntrust = false\n")
    monkeypatch.setenv("HOME", "/nowhere")
    assert not settings.load(inner).trust, "the nearest file counts"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("trsut = true", r"unknown setting 'trsut'; did you mean trust\?"),
        ("colour = 1", "unknown setting 'colour'; known: trust"),
        ("trust = 'yes'", "trust must be true or false; got 'yes'"),
        ("trust = 1", "trust must be true or false; got 1"),
        ("trust = ", "not valid TOML"),
        ("\udcff", "not valid TOML"),
        ("a = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_settings_that_cannot_be_meant(
    tmp_path: Path, content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pediag.toml").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=says):
        settings.load(tmp_path)
    torch.save({"a": torch.ones(2)}, "m.pt")
    assert main(["check", "m.pt"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_table_of_another_kind(tmp_path: Path) -> None:
    Path("pyproject.toml").write_text("[tool]\npediag = 3\n")
    with pytest.raises(UsageError, match=r"\[tool\.pediag\] must be a table"):
        settings.load(tmp_path)
    os.remove("pyproject.toml")
    os.mkfifo("pediag.toml")
    assert not settings.load(tmp_path).trust


# -- code in a folder ---------------------------------------------------------------------------------------

CONFIGURATION = """
from transformers import PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own-type"
    def __init__(self, width=16, rows=32, **kwargs):
        self.width, self.rows = width, rows
        super().__init__(**kwargs)
"""
MODEL = """
import os
import torch
from torch import nn
from transformers import PreTrainedModel
from .configuration_own import OwnConfig
os.mkdir({mark!r})
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(50, config.width)
        self.places = nn.Embedding(config.rows, config.width)
        self.post_init()
    def forward(self, input_ids):
        return self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODEL.format(mark=str(tmp_path / "ran")))
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    values = {
        "model_type": "own-type",
        "auto_map": auto_map,
        "architectures": ["OwnModel"],
        "width": 16,
        "rows": 32,
    }
    (folder / "config.json").write_text(json.dumps(values))
    torch.save(
        {"words.weight": torch.randn(50, 16), "places.weight": torch.randn(32, 16)},
        folder / "pytorch_model.bin",
    )
    return folder


def test_code_in_a_folder_is_not_run(own_code: Path, tmp_path: Path) -> None:
    report = pediag.check("own")
    assert not (tmp_path / "ran").exists()
    reasons = [outcome.reason for outcome in report.outcomes if outcome.status == "could-not-check"]
    assert any(
        "comes with the checkpoint (configuration_own.py, modeling_own.py) and was not run" in one
        for one in reasons
    )


def test_trusted_code_in_a_folder_is_run_where_it_lies(own_code: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in own_code.rglob("*"))
    report = pediag.check("own", trust=True)
    assert (tmp_path / "ran").exists()
    assert "--trust was used: code in own/modeling_own.py ran" in report.notes
    assert [encoding.scheme for encoding in report.encodings] == ["learned"]
    assert report.encodings[0].source_file == str(own_code / "modeling_own.py")
    assert "trusted" in report.target.loader
    assert sorted(path.name for path in own_code.rglob("*")) == before
    assert not any("not found" in note or "WARNING" in note for note in report.notes)


def test_a_type_that_transformers_has_is_built_by_its_class(own_code: Path, tmp_path: Path) -> None:
    values = json.loads((own_code / "config.json").read_text())
    known = json.loads(config()) | {"auto_map": values["auto_map"]}
    (own_code / "config.json").write_text(json.dumps(known))
    report = pediag.check("own", trust=True)
    assert not (tmp_path / "ran").exists()
    assert any(
        "its own code (configuration_own.py, modeling_own.py) was not used" in note for note in report.notes
    )
    assert "rotary" in [encoding.scheme for encoding in report.encodings]
    assert any(note.startswith("WARNING: none of the") for note in report.notes)


@pytest.mark.parametrize(
    ("auto_map", "says"),
    [
        (
            {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_absent.M"},
            "there is no modeling_absent.py",
        ),
        (
            {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "modeling_own.Absent"},
            "has no class Absent",
        ),
        (
            {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "org/repo--m.M"},
            "another repository (org/repo)",
        ),
        (
            {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "../own/modeling_own.M"},
            "auto_map names",
        ),
        ({"AutoModel": "modeling_own.OwnModel"}, "none of a configuration"),
        ({"AutoConfig": "configuration_own.OwnConfig", "AutoModel": ["a.b", "c.d"]}, "no class of a model"),
    ],
)
def test_code_that_is_not_there(own_code: Path, auto_map: dict[str, Any], says: str) -> None:
    values = json.loads((own_code / "config.json").read_text())
    (own_code / "config.json").write_text(json.dumps(values | {"auto_map": auto_map, "architectures": []}))
    report = pediag.check("own", trust=True)
    told = [*report.notes, *(outcome.reason for outcome in report.outcomes)]
    assert any(says in one for one in told), told


def test_code_that_fails(own_code: Path) -> None:
    shutil.rmtree(own_code / "__pycache__", ignore_errors=True)
    (own_code / "modeling_own.py").write_text("raise RuntimeError('no')\n")
    report = pediag.check("own", trust=True)
    assert any("running its own code raised RuntimeError: no" in note for note in report.notes)
