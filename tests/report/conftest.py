"""Reports with everything in them, for the tests of the formats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pediag.cli import main
from pediag.report.model import Stopped
from pediag.rules.finding import Evidence, Fix, Where
from pediag.rules.run import Outcome

HOSTILE = (
    "a\x00b\x1b[31m <script>alert('1')</script> & \"q\" | `t` ]]> \u202eevil\u202c \r\n::error::x %0A,: "
    "[link](http://bad.example) ![i](x) @someone #12 **bold** _it_ $x$ ~~s~~ {0} \\ \ud800 <!-- -- --> ##[error]y\n# h"
)
"""What a name or a message may hold: markup of every format, control characters, half a surrogate pair."""


@pytest.fixture
def hostile():
    return HOSTILE


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A model file in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    path = tmp_path / "model.py"
    path.write_text("import torch\n    x = x + self.drop(é)  # sum\n", encoding="utf-8")
    return path


@pytest.fixture
def full(make_report, make_finding, make_rule, source):
    """An error and a note with every field, and rules of every status."""
    faults = (
        make_finding(where=Where("encoder.pos", "learned-1", str(source), 2)),
        make_finding(
            severity="note",
            message="A minor thing.",
            where=Where("decoder.pos", "rope-1", str(source), 1),
            evidence=Evidence(float("nan"), float("inf"), 0.5, "rad", 1024),
            fix=Fix("Write it.", "safe", '"rope_theta": 10000'),
        ),
    )
    report = make_report(*faults, notes=["--trust was used"])
    report.outcomes[0].reason = "the decoder was not run"
    report.outcomes += [
        Outcome(make_rule("PE902", source="reach/pe902_x.py"), "could-not-check", "no trace: give a model"),
        Outcome(make_rule("PE903"), "could-not-check", "internal error in PE903: KeyError: 'x'"),
        Outcome(make_rule("PE904"), "not-applicable", "no config"),
        Outcome(make_rule("PE905"), "pass"),
    ]
    return report


@pytest.fixture
def clean(make_report, source):
    return make_report()


@pytest.fixture
def blind(make_report, source):
    return make_report(encodings=[], spec="blind.py:net")


@pytest.fixture
def several(full, clean, blind):
    """What came of five targets, two of which are the same file."""
    return [full, Stopped("gone.pt", "gone.pt: no such file"), clean, blind, full]


@pytest.fixture
def nasty(make_report, make_finding, make_rule, source):
    """A report in which every text of the user's, and every reason, is hostile."""
    finding = make_finding(
        message=HOSTILE,
        effect=HOSTILE,
        where=Where(HOSTILE, HOSTILE, str(source), 2),
        evidence=Evidence(HOSTILE, HOSTILE, None, HOSTILE, 7),
        fix=Fix(HOSTILE, "manual", f"--- {HOSTILE}\n```\n"),
    )
    encoding = SimpleNamespace(
        id=HOSTILE,
        scheme="rotary",
        origin="trace",
        doubt=HOSTILE,
        leaves=[HOSTILE],
        title=HOSTILE,
        parameters={HOSTILE: HOSTILE},
        modules=[HOSTILE],
        layers=HOSTILE,
        source_file=HOSTILE,
        source_line=1,
        sites=[],
    )
    report = make_report(finding, encodings=[encoding], spec=HOSTILE.replace("\x00", ""), notes=[HOSTILE])
    report.outcomes.append(Outcome(make_rule("PE902"), "could-not-check", HOSTILE))
    report.outcomes.append(Outcome(make_rule("PE903"), "not-applicable", HOSTILE))
    return [report, Stopped(HOSTILE, f"{HOSTILE}: {HOSTILE}")]


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


@pytest.fixture(scope="session")
def checked(tmp_path_factory):
    """A page of two targets, made by the command line."""
    folder = tmp_path_factory.mktemp("html")
    (folder / "model.py").write_text(MODEL)
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 10000.0, "head_dim": 64}')
    words = [str(folder / "model.py:net"), str(folder / "config.json"), "--seq-len", "512", "--quiet"]
    status = main(["check", *words, "--format", "html", "--output", str(folder / "report.html")])
    return SimpleNamespace(status=status, path=folder / "report.html")
