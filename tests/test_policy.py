"""Every row of the table in docs/policy.md is true, ignores and severities do what the settings say, and the two pages
show what comes out.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pediag.cli import main
from pediag.policy import apply
from pediag.report import formats
from pediag.settings import keys
from tests.test_config_command import checked, codes
from tests.test_settings import ROPE, complaint

ROOT = Path(__file__).parents[1]
POLICY = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
TABLE = POLICY.partition("| what the check came to | options | exit status |\n|---|---|---|\n")[2].partition(
    "\n\n"
)[0]
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in TABLE.splitlines()]
COMMANDS = re.findall(r"^    pediag (.*)$", POLICY, re.MULTILINE)
GUIDE_COMMANDS = re.findall(r"^    pediag (.*)$", GUIDE, re.MULTILINE)

CLEAN = {**ROPE, "rope_theta": 10000}
NOTE = {**ROPE, "rope_theta": 10000.0}
WARNING = {**ROPE, "rope_theta": 99999.44}
ERROR = {**ROPE, "rope_theta": 0.5}
NO_SCHEME = {"model_type": "mamba", "hidden_size": 64}


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_WORKSPACE", "GITHUB_STEP_SUMMARY", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def target(values: dict[str, object], name: str = "a.json") -> str:
    Path(name).write_text(json.dumps(values))
    return name


def judged(values: dict[str, object], select: str = "PE101,PE102") -> list[str]:
    return [target(values), "--select", select]


def settings(text: str) -> None:
    Path("pediag.toml").write_text(text)


def known(then: dict[str, object], now: dict[str, object]) -> list[str]:
    assert main(["check", *judged(then), "--write-baseline", "--quiet"]) == 0
    return judged(now)


def ignored() -> list[str]:
    settings("[[ignores]]\ncode = 'PE102'\nmodule = '*'\nreason = 'so it is'\n")
    return judged(ERROR)


def graded(values: dict[str, object], code: str, severity: str) -> list[str]:
    settings(f"[severity]\n{code} = '{severity}'\n")
    return judged(values)


def unreadable() -> list[str]:
    settings("select = \n")
    return judged(CLEAN)


def several(*values: dict[str, object] | None, select: str) -> list[str]:
    specs = [target(one, f"{place}.json") if one else "absent.json" for place, one in enumerate(values)]
    return [*specs, "--select", select]


CASES: dict[str, Callable[[], list[str]]] = {
    "no finding": lambda: judged(CLEAN),
    "a note": lambda: judged(NOTE),
    "a warning": lambda: judged(WARNING),
    "an error": lambda: judged(ERROR),
    "an error that the settings ignore": ignored,
    "an error that the settings make a note": lambda: graded(ERROR, "PE102", "note"),
    "a note that the settings make an error": lambda: graded(NOTE, "float-rope-theta", "error"),
    "a rule that could not check": lambda: judged(CLEAN, "PE102,PE302"),
    "a rule that could not check, left out": lambda: judged(CLEAN, "PE102"),
    "an error that the baseline knows": lambda: known(ERROR, ERROR),
    "an error that the baseline knows, but worse": lambda: known(ERROR, {**ROPE, "rope_theta": -7}),
    "an error that the baseline does not know": lambda: known(CLEAN, ERROR),
    "an entry of the baseline that is stale": lambda: known(ERROR, CLEAN),
    "no rule that could run": lambda: judged(CLEAN, "PE302"),
    "no position encoding": lambda: judged(NO_SCHEME, "PE1"),
    "a target that cannot be opened": lambda: ["absent.json"],
    "settings or a baseline that cannot be read": unreadable,
    "two targets: no finding, and no rule that could run": lambda: several(CLEAN, NO_SCHEME, select="PE102"),
    "two targets: an error, and no rule that could run": lambda: several(ERROR, NO_SCHEME, select="PE102"),
    "two targets: an error, and one that cannot be opened": lambda: several(ERROR, None, select="PE102"),
}


@pytest.mark.parametrize(("case", "options", "status"), ROWS, ids=lambda cell: cell.strip("`") or "-")
def test_a_row_of_the_table(case, options, status, capsys):
    words = CASES[case]()
    capsys.readouterr()
    assert main(["check", *words, *shlex.split(options.strip("`"))]) == int(status)
    said = " ".join("".join(capsys.readouterr()).split())
    if "cannot be" not in case:
        assert f"exit status {status}" in said


def test_every_case_has_a_row_and_every_status_is_there():
    assert {case for case, _, _ in ROWS} == set(CASES)
    assert {status for _, _, status in ROWS} == {"0", "1", "2", "3"}


def test_no_position_encoding_is_what_its_row_says(capsys):
    assert main(["check", *CASES["no position encoding"]()]) == 3
    assert "no position encoding was found" in capsys.readouterr().out


def test_suppressed_findings_are_listed_with_their_reason():
    status, report = checked(*ignored())
    assert (status, codes(report), codes(report, "suppressed")) == (0, [], ["PE102"])
    assert report["suppressed"][0]["suppressed"] == {"reason": "so it is", "place": "pediag.toml:1"}
    assert report["summary"]["suppressed"] == 1
    assert "suppressed: PE102 invalid-rope-theta in rope_theta: so it is (pediag.toml:1)" in report["notes"]
    assert [rule["status"] for rule in report["rules"]] == ["pass", "pass"]


@pytest.mark.parametrize(
    ("module", "taken"),
    [
        ("*", True),
        ("rope_theta", True),
        ("rope*", True),
        ("*theta", True),
        ("rope_thet?", True),
        ("rope", False),
        ("ROPE_THETA", False),
        ("[r]ope_theta", False),
        ("", False),
    ],
)
def test_the_pattern_of_an_ignore(module, taken):
    settings(f"[[ignores]]\ncode = 'PE1'\nmodule = '{module}'\nreason = 'so it is'\n")
    report = checked(*judged(ERROR))[1]
    assert codes(report, "suppressed") == (["PE102"] if taken else [])


def test_an_ignore_that_matched_nothing_is_told(capsys):
    settings(
        "[[ignores]]\ncode = 'PE102'\nmodule = 'layers.*'\nreason = 'a'\n"
        "[[ignores]]\ncode = 'PE302'\nmodule = '*'\nreason = 'could not check'\n"
        "[[ignores]]\ncode = 'PE501'\nmodule = '*'\nreason = 'not selected'\n"
    )
    said = "pediag.toml:1: the ignore of PE102 in layers.* matched nothing"
    notes = checked(*judged(ERROR, "PE102,PE302"))[1]["notes"]
    assert [note for note in notes if "matched nothing" in note] == [said]
    report = checked(*several(ERROR, CLEAN, select="PE102"))[1]
    assert said in report["notes"]
    assert main(["check", *judged(ERROR)]) == 1
    assert said in capsys.readouterr().out


def test_an_ignore_of_everything_leaves_what_was_judged_to_see():
    settings("[[ignores]]\ncode = 'PE'\nmodule = '*'\nreason = 'all is well'\n")
    status, report = checked(target(ERROR))
    assert (status, report["verdict"], codes(report)) == (0, "pass", [])
    assert "PE102" in codes(report, "suppressed")


def test_the_longest_beginning_of_a_code_sets_the_severity():
    settings("[severity]\nPE1 = 'error'\nfloat-rope-theta = 'warning'\nPE10 = 'note'\n")
    assert [one["severity"] for one in checked(*judged(NOTE))[1]["findings"]] == ["warning"]
    assert [one["severity"] for one in checked(*judged(ERROR))[1]["findings"]] == ["note"]


def test_the_reason_of_strict_is_in_every_format(make_report, make_rule):
    from pediag.configuration import Configuration
    from pediag.rules.run import Outcome

    report = make_report()
    report.outcomes.append(Outcome(make_rule("PE902"), "could-not-check", "no trace"))
    apply([report], Configuration(strict=True))
    assert (report.exit_code(), report.verdict, report.ok("never")) == (1, "fail", False)
    for name in ("json", "sarif", "junit", "markdown"):
        assert "--strict fails this: could not check: PE902" in formats.render(name, report).replace("\\", "")


def test_what_strict_fails_is_red_where_machines_look(tree):
    words = [
        "check",
        *known(ERROR, CLEAN)[:1],
        "--select",
        "PE102,PE302",
        "--baseline",
        "pediag-baseline.json",
    ]
    for strict, failures in ((False, 0), (True, 2)):
        options = ["--strict"] if strict else []
        assert main([*words, *options, "--format", "junit", "--output", "junit.xml", "--quiet"]) == int(
            strict
        )
        assert main([*words, *options, "--format", "github", "--output", "github.txt", "--quiet"]) == int(
            strict
        )
        assert ElementTree.parse("junit.xml").getroot().get("failures") == str(failures)
        said = "::error file=a.json,line=1,title=pediag is strict::a.json: --strict: could not check: PE302; stale in"
        assert (said in Path("github.txt").read_text()) is strict


def test_an_incomplete_rule_did_not_check(make_report, make_finding):
    report = make_report(make_finding(severity="note"), strict=True)
    assert report.exit_code() == 0
    report.outcomes[0].reason = "the rest needs a trace"
    assert report.exit_code() == 1


@pytest.fixture
def project(tree):
    """What the guide speaks of: its settings, an encoder and a configuration."""
    (tree / "models").mkdir()
    (tree / "checkpoints/llama").mkdir(parents=True)
    shutil.copy(ROOT / "fixtures/rules/pe302_dropout_on_positions.py", tree / "models/encoder.py")
    target(CLEAN, "checkpoints/llama/config.json")
    settings(re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)[0])


def test_the_guide_runs(project, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for command in GUIDE_COMMANDS:
        assert main(shlex.split(command)) == 0, command
    out = capsys.readouterr().out
    shown = re.findall(r"pediag config\n\n((?:     .*\n)+)", GUIDE)[0]
    rows = [line.split() for line in out.splitlines()]
    assert [line for line in shown.splitlines() if "─" not in line and line.split() not in rows] == []
    assert "suppressed: PE302" in out


def test_the_commands_of_the_policy_run(capsys):
    target(ERROR, "model.json")
    assert [main(shlex.split(command)) for command in COMMANDS] == [0, 0, 0]
    assert Path("known.json").exists()


def test_the_guide_names_every_key():
    table = GUIDE.partition("## Keys")[2]
    for key in (*keys.KEYS, *keys.TARGET, *keys.IGNORE):
        assert re.search(rf"`\[*{key}\]*`", table), key


def test_settings_of_the_guide_without_a_target_listed(capsys):
    assert main(["check"]) == 2
    assert "no target" in complaint(capsys)
