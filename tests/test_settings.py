"""Settings as they are written in files: what is known, where it stands, and what cannot be meant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pediag import settings
from pediag.cli import main
from pediag.errors import UsageError
from pediag.settings import keys
from pediag.settings.lines import lines
from pediag.targets.config import LONGEST

ROPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    """A working tree with a faulty configuration in a folder of its own, ``m``; the current folder is its root."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text(json.dumps({**ROPE, "rope_theta": 0.5}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("pediag: error: ")
    return err


EVERY_FORM = '''# a comment with [brackets] and "quotes"
a = 1
b."c d".e = """x = 3
[no]
\\""" y"""
l = [ # ]
  "x]", 'y#', { z = "}" },
]
[t] # [hi]
x = \'\'\'
[[no]]
y = 1 \'\'\'
w = """"quoted""""
  [[ targets ]]
path = "a = [b"
	seq_len=3
[[targets]]

'path' = 'c'
[[targets.sub]]
q=1
[targets.sub.r]
s=1
z = ""
'''


def test_lines_of_every_form_of_key():
    assert lines(EVERY_FORM, settings._loads) == {
        ("a",): 2,
        ("b", "c d", "e"): 3,
        ("l",): 6,
        ("t",): 9,
        ("t", "x"): 10,
        ("t", "w"): 13,
        ("targets", 0): 14,
        ("targets", 0, "path"): 15,
        ("targets", 0, "seq_len"): 16,
        ("targets", 1): 17,
        ("targets", 1, "path"): 19,
        ("targets", 1, "sub", 0): 20,
        ("targets", 1, "sub", 0, "q"): 21,
        ("targets", 1, "sub", 0, "r"): 22,
        ("targets", 1, "sub", 0, "r", "s"): 23,
        ("targets", 1, "sub", 0, "r", "z"): 24,
    }


def test_the_greatest_length_is_that_of_targets():
    assert keys.LONGEST == LONGEST


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("\nfail_on = 'error'", "pediag.toml:2: unknown setting 'fail_on'; did you mean fail-on?"),
        (
            "fail-on = 'eror'",
            "pediag.toml:1: fail-on must be one of error, warning, note, never; got 'eror'; did you",
        ),
        ("fail-on = true", "fail-on must be one of error, warning, note, never; got true"),
        (f"{'a' * 500} = 1", f"unknown setting '{'a' * 78}…; known: trust, targets,"),
        ("strict = 'yes'", "pediag.toml:1: strict must be true or false; got 'yes'"),
        ("select = 3", "select must be a list of texts; got 3"),
        ("select = ['PE1', 4]", "select[2] must be a text that is not empty; got 4"),
        ("select = ['PE999']", "pediag.toml:1: unknown rule or prefix 'PE999'"),
        ("ignore = ['dropout-on-position']", "did you mean PE302 dropout-on-positions?"),
        ("ignore = ''", "ignore must be a text that is not empty"),
        ("ignore = ['PE']", "pediag.toml:1: nothing is left to run"),
        ("baseline = 1", "baseline must be a text that is not empty; got 1"),
        ("[severity]\nPE501 = 'fatal'", "pediag.toml:2: severity.PE501 must be one of error, warning, note"),
        ("[severity]\nPE999 = 'note'", "pediag.toml:2: unknown rule or prefix 'PE999'"),
        ("[severity]\nPE302 = 'note'\ndropout-on-positions = 'error'", "PE302 is given twice"),
        ("severity = 3", "severity must be a table; got 3"),
        ("targets = 'm'", "targets must be an array of tables; got 'm'"),
        ("targets = ['m']", "targets[1] must be a table; got 'm'"),
        ("[[targets]]\nseq_len = 3", "pediag.toml:1: targets[1] lacks path; name the target"),
        (
            "[[targets]]\npath='m'\nseq_len = -5",
            "pediag.toml:3: targets[1].seq_len must be a whole number of tokens",
        ),
        ("[[targets]]\npath='m'\nseq_len = 0", "from 1 to 2147483648; got 0"),
        ("[[targets]]\npath='m'\nseq_len = 2147483649", "from 1 to 2147483648; got 2147483649"),
        (
            "[[targets]]\npath='m'\ntrain_len = 4096.0",
            "targets[1].train_len must be a whole number of tokens",
        ),
        ("[[targets]]\npath='m'\nseq-len = 5", "unknown key 'targets[1].seq-len'; did you mean seq_len?"),
        ("[[targets]]\npath='m'\ndtype = 'int8'", "pediag.toml:3: unknown dtype 'int8'"),
        ("[[targets]]\npath='m'\ninputs = ['x=float99[B]']", "pediag.toml:3: "),
        ("[[targets]]\npath='m'\ncache = 'past'", "pediag.toml:3: "),
        ("[[targets]]\npath='m'\nconfig = 'none.json'", "pediag.toml:3: config: no such file: none.json"),
        (
            "[[targets]]\npath='m'\n[[targets]]\npath='./m'",
            "pediag.toml:4: ./m is a target already, at pediag.toml:1",
        ),
        (
            "[[ignores]]\ncode='PE1'\nmodule='*'",
            "pediag.toml:1: ignores[1] lacks reason; say why this is no fault",
        ),
        (
            "[[ignores]]\ncode='PE1'\nmodule='*'\nreason=' '",
            "pediag.toml:4: ignores[1].reason must be a text",
        ),
        ("[[ignores]]\ncode='PE1'\nmodule=1\nreason='x'", "ignores[1].module must be a module path; got 1"),
        (
            "[[ignores]]\ncode='PE999'\nmodule='*'\nreason='x'",
            "pediag.toml:2: unknown rule or prefix 'PE999'",
        ),
        ("a = 1\na = 2", "not valid TOML"),
        ("a = \n", "pediag.toml:1: not valid TOML"),
        ("trust = [[[[", "not valid TOML"),
        ("a" * (2**20 + 1), "above 1048576 bytes"),
        (".".join(["a"] * 50_000) + " = 1", "a line of more than 500 dots"),
        ("[" + ".".join(["a"] * 50_000) + "]", "a line of more than 500 dots"),
        ("a = { 'b' = 1, " + " . ".join(["'a'"] * 50_000) + " = 1 }", "a line of more than 500 dots"),
        ("a = '" + "x" * 100 + "'\n[a.b]", "not valid TOML"),
    ],
)
def test_what_cannot_be_meant_is_one_line(tree, capsys, content, says):
    Path("pediag.toml").write_text(content)
    for words in (["check", "m"], ["check"], ["config"]):
        assert main(words) == 2
        assert says in complaint(capsys)


def test_the_lines_are_those_of_a_project_file_too(capsys):
    Path("pyproject.toml").write_text("[project]\nname = 'x'\n\n[tool.pediag]\nselct = ['PE1']\n")
    assert main(["config"]) == 2
    assert "pyproject.toml:5: unknown setting 'selct'; did you mean select?" in complaint(capsys)


def test_a_file_that_may_not_be_read(monkeypatch, capsys):
    Path("pediag.toml").write_text("strict = true")
    opened = Path.open

    def denied(self, *words, **options):
        if self.name == "pediag.toml":
            raise PermissionError(13, "Permission denied")
        return opened(self, *words, **options)

    monkeypatch.setattr(Path, "open", denied)
    assert main(["check", "m"]) == 2
    assert "pediag.toml: permission denied" in complaint(capsys)


@pytest.mark.parametrize("goal", ["pediag.toml", "nowhere.toml"])
def test_a_link_that_leads_nowhere(capsys, goal):
    os.symlink(goal, "pediag.toml")
    assert main(["config"]) == 2
    assert "pediag.toml: is a link that leads nowhere; mend or remove it" in complaint(capsys)


def test_what_is_no_file_is_passed_by(tree):
    os.mkdir("pediag.toml")
    assert settings.load(tree).source is None


def test_windows_line_ends_and_a_byte_order_mark(tree):
    text = "strict = true\r\n\r\n[[targets]]\r\npath = 'm'\r\nseq_len = 7\r\n"
    Path("pediag.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    own = settings.load(tree)
    assert own.values == {"strict": True, "targets": [{"path": "m", "seq_len": 7}]}
    assert (own.line("strict"), own.line("targets", 0), own.line("targets", 0, "seq_len")) == (1, 3, 5)


def test_a_key_in_an_inline_table_has_the_line_of_its_key(tree):
    Path("pediag.toml").write_text("\ntargets = [\n  {path = 'm', seq_len = -1}\n]\n")
    with pytest.raises(UsageError, match=r"pediag\.toml:2: targets\[1\]\.seq_len must be"):
        settings.load(tree)


def test_a_link_out_of_the_targets_folder_gives_no_trust(tree):
    """What was unpacked beside the target may be linked to from its folder."""
    (tree / "evil.toml").write_text("trust = true")
    os.symlink("../evil.toml", "m/pediag.toml")
    allowed, notes = settings.decided(tree / "m/pediag.toml", "m")
    assert allowed is False
    assert "may have come with it" in notes[0]
    assert settings.decided(tree / "evil.toml", "m")[0] == "trust in evil.toml", "further up it counts"


def test_reading_settings_takes_no_torch(tree):
    Path("pediag.toml").write_text("[[targets]]\npath = 'm/config.json'\n")
    code = (
        "import sys, pediag.cli\n"
        "assert 'tomllib' not in sys.modules and 'tomli' not in sys.modules\n"
        "assert pediag.cli.main(['config']) == 0 and pediag.cli.main(['check', '--fail-on', 'never']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
