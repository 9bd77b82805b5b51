"""Bad input gives one line that says what to do, exit status 2, no traceback, and harms nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pediag.check import check
from pediag.cli import main
from pediag.command import terminal
from pediag.errors import TraceError, UsageError

MODELS = """
import os, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rows = nn.Embedding(50, 32), nn.Embedding(512, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)
    def forward(self, ids):
        return self.layer(self.tokens(ids) + self.rows(torch.arange(ids.shape[1])))

class Exits(Net):
    def forward(self, ids): sys.exit(0)

class Skips(Net):
    def forward(self, ids): raise GeneratorExit("odd")

class Raises(Net):
    def forward(self, ids): raise RuntimeError("boom")

class Interrupts(Net):
    def forward(self, ids): raise KeyboardInterrupt

class Reads(Net):
    def forward(self, ids): return super().forward(ids)[:, : int(ids.max())]

class Writes(Net):
    def forward(self, ids):
        os.write(1, b"RAW")
        print("PAST", file=sys.__stdout__)
        return super().forward(ids)

class Holder(nn.Module):
    pass

class Unhashable(Net):
    __hash__ = None

def needs(width, *, depth): return Net()
def nothing(): pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("net.py:Exits", ["running the model raised SystemExit: 0 (at net.py:", "a forward should return"]),
        ("net.py:Skips", ["running the model raised GeneratorExit: odd"]),
        ("net.py:Raises", ["raised RuntimeError: boom at net.py:", "give its inputs with --input"]),
        ("net.py:Raises --input ids=int64[B,N]", ["boom at net.py:", "change its --input"]),
        ("net.py:Reads", ["max of content is read as a Python number at net.py:", "check the part of"]),
        ("net.py:Holder", ["Holder has no forward"]),
        ("net.py:Unhashable", ["unhashable type: 'Unhashable'; give Unhashable a __hash__"]),
        ("net.py:needs", ["needs width, depth"]),
        ("net.py:nothing", ["does the factory return its model?"]),
        ("net.py:Net --input ids=int64[B,N] --input ids=int64[B]", ["--input ids: is given twice"]),
        ("net.py:Net --config missing.json", ["'missing.json' does not exist"]),
        ("net.py:Net --config net.py", ["net.py:", "not valid JSON"]),
        ("net.py:Net --output net.py", ["--output net.py: is what a model is made of"]),
        ("", ["no target: name one (pediag check TARGET), or list some in [[tool.pediag.targets]]"]),
        ("net.py:Net --format nonsense", ["'--format': 'nonsense' is not one of 'rich', 'json', 'sarif'"]),
    ],
)
def test_one_line_and_status_2(folder, capsys, words, says):
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(["check", *words.split()]) == 2
    line = complaint(capsys)
    for part in says:
        assert part in line
    assert "internal error" not in line
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_what_is_imported_may_raise_anything(folder, capsys):
    (folder / "skips.py").write_text("import pytest\npytest.importorskip('there_is_no_such_module')\n")
    assert main(["check", "skips.py:net"]) == 2
    assert "importing skips.py raised Skipped: could not import 'there_is_no_such_module'" in complaint(
        capsys
    )


def test_an_interrupt_is_said(folder, capsys):
    assert main(["check", "net.py:Interrupts"]) == 130
    assert complaint(capsys) == "pediag: interrupted\n"


def test_what_is_named_cannot_steer_the_terminal(folder, capsys):
    assert main(["check", "no\nsuch\x1b[31m.pt"]) == 2
    assert "\x1b" not in complaint(capsys)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("tokenizer.json", '{"version": "1.0"}'),
        ("list.json", " [1, 2]"),
        ("a10.json", '{"kind": "pediag-drift-fingerprint", "version": 1}'),
        ("pyproject.toml", "[project]"),
        ("recipe.yaml", "model: llama"),
        ("run.jsonl", '{"kind": "start"}'),
    ],
)
def test_a_report_replaces_no_file_of_another_kind(folder, capsys, output, text):
    (folder / output).write_text(text)
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 10000}')
    assert main(["check", "config.json", "--format", "json", "--output", output]) == 2
    assert "is there and is no report of pediag; name another file" in complaint(capsys)
    assert (folder / output).read_text() == text


@pytest.mark.parametrize("format", ["json", "sarif", "markdown"])
def test_a_report_replaces_one_before_it(folder, format):
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 10000}')
    for before in ("json", "sarif", "markdown"):
        main(["check", "config.json", "--quiet", "--format", before, "--output", "report.json"])
        assert main(["check", "config.json", "--quiet", "--format", format, "--output", "report.json"]) in (
            0,
            1,
        )
    (folder / "report.json").write_text("")
    assert main(["check", "config.json", "--quiet", "--format", format, "--output", "report.json"]) in (0, 1)


@pytest.mark.parametrize("output", ["config.json", "out.pt", "vocab.txt", "spiece.model"])
def test_a_report_replaces_no_part_of_a_model(folder, capsys, output):
    path = folder / output
    path.write_text("{}")
    assert main(["check", ".", "--output", output]) == 2
    assert "name another file" in complaint(capsys)
    assert path.read_text() == "{}"


@pytest.fixture(scope="module")
def model():
    from torch import nn

    return nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "nonsense"}, "unknown dtype 'nonsense'; known: float64"),
        ({"seq_len": True}, "seq_len must be a whole number"),
        ({"seq_len": 0}, "got 0"),
        ({"train_len": "12"}, "train_len must be a whole number"),
        ({"select": ""}, "select: '' names no rule"),
        ({"ignore": ["PE101", " "]}, "ignore: ' ' names no rule"),
        ({"select": "PE999"}, "unknown rule or prefix 'PE999'"),
        ({"inputs": "nonsense"}, "--input 'nonsense' cannot be read"),
        ({"config": {}}, "config must be the path of a config.json; got a dict"),
    ],
)
def test_options_from_python(model, options, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        check(model, **options)


def test_options_from_python_that_are_one(model):
    import torch

    report = check(model, select="PE302,PE305", dtype=torch.bfloat16, inputs="input=float32[B,N,3]")
    assert [outcome.rule.code for outcome in report.outcomes] == ["PE302", "PE305"]


def pediag(folder: Path, shell: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = f"'{sys.executable}' -m pediag {shell}"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, cwd=folder, env=environment, check=False
    )


def test_the_report_alone_is_on_stdout(folder):
    done = pediag(folder, "check net.py:Writes --format json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
    assert b"RAW" in done.stderr
    assert b"PAST" in done.stderr


@pytest.mark.parametrize(
    ("shell", "status", "says"),
    [
        ("rules >&-", 2, b"stdout is closed"),
        ("rules > /dev/full", 2, b"stdout cannot be written: No space left on device"),
        ("rules 2>&-", 0, b""),
        ("check nothing.pt 2>&-", 2, b""),
        ("rules <&-", 0, b""),
    ],
)
def test_streams_that_are_closed_or_full(folder, shell, status, says):
    if "/dev/full" in shell and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = pediag(folder, shell)
    assert (done.returncode, done.stderr.count(b"\n")) == (status, bool(says))
    assert says in done.stderr


def test_a_name_outside_the_locale(folder):
    (folder / "ünï.py").write_text(MODELS)
    done = pediag(folder, "check ünï.py:Net", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr


def test_a_pass_that_stops_at_the_length_asked_for_is_no_clean_bill(tmp_path):
    """The model runs when short and fails when long, for a reason that is no rule's."""
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(9000, 16)\n"
        "    def forward(self, ids):\n"
        "        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))\n"
        "        return x if ids.shape[1] < 1000 else x @ x.new_ones(3, 3)\n"
    )
    with pytest.raises(TraceError, match=r"runs at N=\d+ and at N=4096 raised RuntimeError.*net\.py:9"):
        check(f"{tmp_path / 'net.py'}:Net", seq_len=4096)
    assert check(f"{tmp_path / 'net.py'}:Net", seq_len=512).exit_code() == 0


def test_memory_that_does_not_suffice_is_no_internal_error() -> None:
    with pytest.raises(RuntimeError) as uncountable:
        torch.empty(2**62)
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50, dtype=torch.uint8)
    for error in (MemoryError(), uncountable.value, refused.value):
        told = terminal.told(error, "model.py:net")
        assert (
            told
            == "error: model.py:net: memory did not suffice: give a shorter --seq-len, or a smaller model"
        )
