"""The baseline: new findings fail, known ones do not, worse ones do again, stale ones are told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pediag import baseline as baselines
from pediag.baseline import Baseline, Measured
from pediag.cli import main
from pediag.errors import UsageError
from pediag.rules.finding import Evidence, Where
from pediag.rules.run import Outcome
from tests.test_config_command import PE102, WARNED, checked, codes
from tests.test_settings import ROPE, complaint

FILE = "pediag-baseline.json"


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m/bad.json").write_text(json.dumps(PE102))
    (tmp_path / "m/warned.json").write_text(json.dumps(WARNED))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(*words: str, status: int = 0) -> dict[str, Any]:
    """The baseline that a check wrote."""
    assert main(["check", *words, "--write-baseline", "--quiet", "--output", "x.txt"]) == status
    read: dict[str, Any] = json.loads(Path(FILE).read_text())
    return read


def test_what_is_written(tree):
    baseline = written("m/bad.json", "--select", "PE102")
    (entry,) = baseline["targets"]["m/bad.json"]
    fingerprint = entry.pop("fingerprint")
    assert fingerprint == checked("m/bad.json", "--no-settings")[1]["findings"][0]["fingerprint"]
    assert (baseline["kind"], baseline["version"]) == ("pediag-baseline", 1)
    assert entry == {
        "code": "PE102",
        "name": "invalid-rope-theta",
        "module": "rope_theta",
        "count": 1,
        "found": [{"severity": "error", "measured": 0.5, "expected": None, "limit": 1.0, "unit": ""}],
    }
    first = Path(FILE).read_bytes()
    written("m/bad.json", "--select", "PE102")
    assert Path(FILE).read_bytes() == first, "the same findings give the same bytes"
    assert sorted(os.listdir()) == [".git", "m", FILE, "x.txt"], "nothing else is left behind"


def test_known_findings_do_not_fail_and_are_shown(tree, capsys):
    assert checked("m/bad.json")[0] == 1
    written("m/bad.json")
    status, report = checked("m/bad.json", "--baseline", FILE)
    assert (status, report["verdict"], codes(report), codes(report, "known")) == (0, "pass", [], ["PE102"])
    assert report["summary"]["known"] == 1
    assert report["baseline"] == {"file": FILE, "reopened": [], "stale": []}
    assert f"known to {FILE}: PE102 invalid-rope-theta in rope_theta, error" in report["notes"]
    main(["check", "m/bad.json", "--baseline", FILE])
    assert f"known to {FILE}: PE102" in capsys.readouterr().out


def test_a_new_finding_fails(tree):
    written("m/bad.json")
    (tree / "m/bad.json").write_text(json.dumps({**PE102, "rope_scaling": {"type": "no-such"}}))
    status, report = checked("m/bad.json", "--baseline", FILE)
    assert status == 1
    assert "PE102" in codes(report, "known")
    assert "PE104" in codes(report)


@pytest.mark.parametrize(("theta", "status"), [(0.5, 0), (0.9, 0), (0.46, 0), (0.44, 1), (-3.0, 1)], ids=str)
def test_a_worse_magnitude_opens_it_again(tree, theta, status):
    """The base was 0.5 below its limit of 1; a tenth more is allowed for: down to 0.45."""
    written("m/bad.json")
    (tree / "m/bad.json").write_text(json.dumps({**PE102, "rope_theta": theta}))
    found, report = checked("m/bad.json", "--baseline", FILE)
    assert found == status
    assert codes(report) == (["PE102"] if status else [])
    if status:
        (worse,) = report["baseline"]["reopened"]
        assert worse["how"] == f"{theta} now, 0.5 then"
        assert worse["fingerprint"] == report["findings"][0]["fingerprint"]


def test_a_graver_severity_opens_it_again(tree):
    (tree / "m/warned.json").write_text(json.dumps({**ROPE, "rope_theta": 10000.0}))
    written("m/warned.json", "--select", "PE101")
    (tree / "m/warned.json").write_text(json.dumps(WARNED))
    status, report = checked("m/warned.json", "--select", "PE101", "--baseline", FILE, "--fail-on", "warning")
    assert (status, report["baseline"]["reopened"][0]["how"]) == (1, "warning now, note then")


def test_a_severity_of_the_settings_opens_nothing(tree):
    written("m/warned.json", "--select", "PE101")
    Path("pediag.toml").write_text("baseline = 'pediag-baseline.json'\n[severity]\nPE101 = 'error'\n")
    status, report = checked("m/warned.json", "--select", "PE101")
    assert (status, [one["severity"] for one in report["known"]]) == (0, ["error"])


def test_stale_entries_are_told_and_fail_when_strict(tree):
    written("m/bad.json", "--select", "PE102")
    (tree / "m/bad.json").write_text(json.dumps({**ROPE, "rope_theta": 10000}))
    words = ("m/bad.json", "--select", "PE102", "--baseline", FILE)
    status, report = checked(*words)
    (stale,) = report["baseline"]["stale"]
    assert (status, stale["code"], stale["module"], stale["count"]) == (0, "PE102", "rope_theta", 1)
    assert f"stale in {FILE}: PE102 invalid-rope-theta in rope_theta is not found any more" in report["notes"]
    status, report = checked(*words, "--strict")
    assert (status, report["verdict"]) == (1, "fail")
    assert "--strict fails this: stale in the baseline: 1 entry" in report["notes"]
    assert checked("m/bad.json", "--select", "PE101", "--baseline", FILE, "--strict")[0] == 0, (
        "its rule did not run"
    )
    written("m/bad.json", "--select", "PE102")
    assert checked(*words, "--strict")[1]["baseline"]["stale"] == []


def test_an_entry_of_a_rule_that_is_gone_is_stale(tree):
    baseline = written("m/bad.json", "--select", "PE102")
    baseline["targets"]["m/bad.json"][0]["code"] = "PE099"
    baseline["targets"]["m/bad.json"][0]["fingerprint"] = "0" * 16
    Path(FILE).write_text(json.dumps(baseline))
    status, report = checked("m/bad.json", "--select", "PE102", "--baseline", FILE)
    assert (status, [one["code"] for one in report["baseline"]["stale"]]) == (1, ["PE099"])


def test_several_targets_share_a_file(tree):
    baseline = written("m/bad.json", "m/warned.json", "--jobs", "2")
    assert list(baseline["targets"]) == ["m/bad.json", "m/warned.json"]
    status, report = checked(
        "m/warned.json", "m/bad.json", "--baseline", FILE, "--fail-on", "note", "--jobs", "2"
    )
    assert (status, report["summary"]["fail"]) == (0, 0)
    report = checked("m/warned.json", "--baseline", FILE)[1]
    assert f"{FILE} has entries of 1 target not checked here: m/bad.json" in report["notes"]


def test_writing_keeps_what_was_not_judged(tree):
    written("m/bad.json")
    written("m/warned.json", "--select", "PE1")
    targets = written("m/warned.json", "--select", "PE5")["targets"]
    assert list(targets) == ["m/bad.json", "m/warned.json"]
    assert [entry["code"] for entry in targets["m/warned.json"]] == ["PE101", "PE501"]


def test_keys_start_from_the_file(tree, monkeypatch):
    written("m/bad.json")
    monkeypatch.chdir(tree / "m")
    assert checked("bad.json", "--baseline", f"../{FILE}")[0] == 0
    assert checked(str(tree / "m/bad.json"), "--baseline", f"../{FILE}")[0] == 0
    (tree / "pediag.toml").write_text(f"baseline = '{FILE}'\n[[targets]]\npath = 'm/bad.json'\n")
    assert checked()[0] == 0, "as the settings name it, from their folder"


def test_suppressed_findings_are_not_written_and_not_stale(tree):
    written("m/bad.json", "--select", "PE102")
    Path("pediag.toml").write_text("[[ignores]]\ncode = 'PE102'\nmodule = 'rope_*'\nreason = 'so it is'\n")
    report = checked("m/bad.json", "--select", "PE102", "--baseline", FILE, "--strict")[1]
    assert (report["exit_code"], report["baseline"]["stale"], codes(report, "suppressed")) == (
        0,
        [],
        ["PE102"],
    )
    assert written("m/bad.json", "--select", "PE102")["targets"] == {}


@pytest.mark.parametrize("words", [["--write-baseline", "b.json"], ["--write-baseline=b.json"]])
def test_where_it_is_written(tree, words):
    assert main(["check", "m/bad.json", *words, "--quiet", "--output", "x.txt"]) == 0
    assert Path("b.json").exists()
    assert not Path(FILE).exists()
    assert main(["check", "m/bad.json", "--baseline", "b.json", "--write-baseline", "--output", "x.txt"]) == 0
    Path("pediag.toml").write_text("baseline = 'c.json'\n")
    assert main(["check", "--write-baseline", "--quiet", "--", "m/bad.json"]) == 0
    assert Path("c.json").read_bytes() == Path("b.json").read_bytes()


def test_a_target_after_the_option_stays_a_target(tree):
    assert main(["check", "--write-baseline", "m", "--quiet"]) == 0
    assert list(json.loads(Path(FILE).read_text())["targets"]) == ["m/bad.json", "m/warned.json"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}", 'its "kind" is not "pediag-baseline"'),
        ("[" * 100_000, "is no baseline of pediag"),
        ("no json", "is no baseline of pediag"),
        ("\x00\xff", "is no baseline of pediag"),
        ("", "is no baseline of pediag"),
        ("[1, 2]", 'its "kind" is not "pediag-baseline"'),
        (
            '{"kind": "pediag-baseline", "version": 2, "targets": {}}',
            "its version is 2; this pediag reads version 1",
        ),
        ('{"kind": "pediag-baseline", "version": true, "targets": {}}', "its version is True"),
        ('{"kind": "pediag-baseline", "version": 1}', "does not have the keys kind, version, targets"),
        ('{"kind": "pediag-baseline", "version": 1, "targets": []}', "a targets of the wrong kind"),
        ('{"kind": "pediag-baseline", "version": 1, "targets": {"a": {}}}', "'a' is no list of entries"),
        (
            '{"kind": "pediag-baseline", "version": 1, "targets": {"a": [1]}}',
            "an entry of 'a' does not have the keys",
        ),
        ('{"kind": "pediag-baseline", "version": 1, "targets": {}, "targets": {}}', "a key is given twice"),
        ('{"kind": "pediag-baseline", "version": NaN, "targets": {}}', "NaN is not JSON"),
        (
            '{"kind": "pediag-baseline", "version": 1, "targets": {"a": [{"code": "PE102", "name": "x", "module": "",'
            ' "fingerprint": "0", "count": 2, "found": []}]}}',
            "an entry of 'a' does not agree with itself",
        ),
        (
            '{"kind": "pediag-baseline", "version": 1, "targets": {"a": [{"code": "PE102", "name": "x", "module": "",'
            ' "fingerprint": "0", "count": 1, "found": [{"severity": "fatal", "measured": 1, "expected": 1,'
            ' "limit": 1, "unit": ""}]}]}}',
            "a severity that is not known",
        ),
    ],
)
def test_what_is_no_baseline_is_neither_read_nor_written_over(tree, capsys, content, says):
    data = content.encode("latin-1")
    Path(FILE).write_bytes(data)
    assert main(["check", "m/bad.json", "--baseline", FILE]) == 2
    assert says in complaint(capsys)
    assert main(["check", "m/bad.json", "--write-baseline"]) == 2
    assert "--write-baseline: not written over:" in complaint(capsys)
    assert Path(FILE).read_bytes() == data


def test_wrong_places(tree, capsys):
    for words, says in (
        (
            ["--baseline", "absent.json"],
            "absent.json: there is no such baseline; --write-baseline writes one",
        ),
        (["--baseline", "m"], "m: is no file"),
        (["--write-baseline", "absent/b.json"], "absent does not exist; create it first"),
        (["--write-baseline", "m/bad.json"], "not written over: m/bad.json: is no baseline"),
        (["--write-baseline", "a.json", "--baseline", "b.json"], "name two files; give one of them"),
        (["--write-baseline", "a.json", "--output", "a.json"], "--output a.json: is the baseline"),
    ):
        assert main(["check", "m/bad.json", *words]) == 2
        assert says in complaint(capsys)
    Path("pediag.toml").write_text("baseline = 'absent.json'\n")
    assert main(["check", "m/bad.json"]) == 2
    assert "absent.json: there is no such baseline" in complaint(capsys)


def test_a_link_is_written_through_and_a_pipe_is_refused(tree, capsys):
    os.symlink("real.json", "link.json")
    Path("real.json").write_text(Baseline(Path("real.json")).text())
    assert main(["check", "m/bad.json", "--write-baseline", "link.json", "--quiet"]) == 0
    assert os.path.islink("link.json")
    assert "PE102" in Path("real.json").read_text()
    os.mkfifo("pipe.json")
    capsys.readouterr()
    assert main(["check", "m/bad.json", "--write-baseline", "pipe.json"]) == 2
    assert "pipe.json: is no file" in complaint(capsys)


def test_a_target_that_stops_is_not_made_known(tree):
    baseline = written("m/bad.json", "absent.json", status=2)
    assert list(baseline["targets"]) == ["m/bad.json"]


def known(report, now, *then):
    """What comes of findings against a baseline that was written of a report with ``then``."""
    baseline = Baseline(Path("b.json")).updated([report(*then)])
    Path("b.json").write_text(baseline.text())
    return baselines.read(Path("b.json")).compare(report(*now))


@pytest.fixture
def report(make_report, make_finding):
    def made(*measured: Any, **changes: Any):
        return make_report(
            *(make_finding(evidence=Evidence(one, None, 1.0, "rad")) for one in measured), **changes
        )

    return made


@pytest.mark.parametrize(
    ("now", "then", "counts"),
    [
        ((2.0,), (2.0,), (1, 0, 0)),
        ((2.0, 2.0), (2.0,), (1, 0, 0)),
        ((2.0,), (2.0, 2.0), (1, 0, 1)),
        ((2.0, 3.0), (2.0,), (1, 0, 0)),
        ((5.0, 3.0), (4.0, 10.0), (2, 0, 0)),
        ((3.0, 9.0), (3.0, 4.0), (1, 1, 0)),
        ((float("inf"),), (2.0,), (0, 1, 0)),
        ((float("nan"),), (2.0,), (0, 1, 0)),
        ((float("nan"),), (float("nan"),), (1, 0, 0)),
        ((2.0,), (float("inf"),), (1, 0, 0)),
        (("a word",), (2.0,), (1, 0, 0)),
        ((0.0,), (2.0,), (1, 0, 0)),
        ((), (2.0,), (0, 0, 1)),
        ((10**400,), (2.0,), (0, 1, 0)),
    ],
)
def test_counts_of_known_worse_and_stale(report, now, then, counts):
    """Distances from the limit of 1 are compared; what is beyond the count is new."""
    made = known(report, now, *then)
    assert (len(made.known), len(made.reopened), sum(one.count for one in made.stale)) == counts


@pytest.mark.parametrize(
    ("now", "then", "worse"),
    [
        (Measured("error", 100, 120, None, "rows"), Measured("error", 100, 110, None, "rows"), True),
        (Measured("error", 100, 120, None, "rows"), Measured("error", 0.1, 0.11, None, "rad"), False),
        (Measured("error", 100), Measured("error", 1), False),
        (Measured("note", 1, None, 1.0), Measured("error", 1, None, 1.0), False),
        (Measured("error", 1.0 + 1e-12, None, 1.0), Measured("error", 1.0, None, 1.0), False),
        (Measured("error", 0.01, None, 0.1), Measured("error", 0.05, None, 0.1), True),
    ],
)
def test_what_is_worse(now, then, worse):
    assert bool(now.worse_than(then)) is worse


def test_an_unjudged_rule_leaves_its_entries_alone(report, make_rule):
    baseline = Baseline(Path("b.json")).updated([report(2.0)])
    unjudged = report(outcomes=[Outcome(make_rule(), "could-not-check", "no trace")])
    assert baseline.compare(unjudged).stale == []
    assert baseline.updated([unjudged]).text() == baseline.text()


def test_other_modules_and_odd_names(make_report, make_finding):
    odd = make_report(make_finding(where=Where('a"\n\x1b[31m\udcff')), spec="no such\n\udcff.pt")
    baseline = Baseline(Path("b.json")).updated([odd])
    baseline.write()
    assert len(baselines.read(Path("b.json")).compare(odd).known) == 1
    assert Path("b.json").read_bytes().isascii()


def test_a_file_that_cannot_be_replaced_is_one_line(tree, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match=r"b\.json: no space left on device"):
        Baseline(Path("b.json")).write()
    assert sorted(os.listdir()) == [".git", "m"]
