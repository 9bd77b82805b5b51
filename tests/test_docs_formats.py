"""The commands of docs/formats.md do what it says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from xml.dom import minidom

import pytest

from pediag import cli
from pediag.cli import main
from pediag.report import formats

PAGE = (Path(__file__).parents[1] / "docs" / "formats.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    pediag (.+)$", PAGE, re.MULTILINE)
MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rows = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, batch_first=True)

    def forward(self, ids):
        return self.layer(self.tokens(ids) + self.rows(torch.arange(ids.shape[1])))


net = Net()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model whose table has 64 rows, and a config with a base that cannot be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_theta": -1}')
    return tmp_path


def test_it_lists_every_format():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert listed == ["rich", *formats.NAMES] == [format.value for format in cli.CheckFormat]


def test_its_commands_are_all_tried():
    tried = [shlex.split(command)[shlex.split(command).index("--format") + 1] for command in COMMANDS]
    assert sorted(tried) == sorted(formats.NAMES)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run(folder, capsys, command):
    words = shlex.split(command)
    status = 0 if "model.py:net" in words and "--seq-len" not in words and "config.json" not in words else 1
    assert main(words) == status
    out, err = capsys.readouterr()
    assert ("exit status" in err) == ("--quiet" not in words)
    if "--output" in words:
        assert out == ""
        out = (folder / words[words.index("--output") + 1]).read_text(encoding="utf-8")
    READERS[words[words.index("--format") + 1]](out)


def read_sarif(text: str) -> None:
    results = json.loads(text)["runs"][0]["results"]
    table = next(result for result in results if result["ruleId"] == "PE502")
    region = table["locations"][0]["physicalLocation"]["region"]
    assert "self.rows(" in MODEL.splitlines()[region["startLine"] - 1]


def read_junit(text: str) -> None:
    root = minidom.parseString(text).documentElement
    assert [suite.getAttribute("name") for suite in root.childNodes if suite.nodeName == "testsuite"] == [
        "model.py:net",
        "config.json",
    ]


def read_json(text: str) -> None:
    assert {finding["code"] for finding in json.loads(text)["findings"]} >= {"PE102"}


READERS = {
    "sarif": read_sarif,
    "junit": read_junit,
    "json": read_json,
    "github": lambda text: None if "PASS" in text else pytest.fail(text),
    "html": lambda text: None if "<title>pediag: FAIL" in text else pytest.fail(text[:500]),
    "markdown": lambda text: None if text.startswith("## pediag: FAIL") else pytest.fail(text),
}
