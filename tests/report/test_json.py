"""The JSON report: complete, valid, deterministic, and free of NaN."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pediag.report
from pediag.report.json import inspection, plain, render
from pediag.report.model import Stopped
from pediag.rules.finding import Evidence, Where
from pediag.rules.run import Outcome

SCHEMA = Path(pediag.report.__file__).with_name("schema_version_1.json")


def strict(text: str):
    """Parse as RFC 8259 does, which knows no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def full(make_report, make_finding, make_rule):
    finding = make_finding(
        where=Where("encoder.pos", "learned-1", "model.py", 3),
        evidence=Evidence(float("nan"), float("inf"), 0.5, "rad", 1024),
    )
    report = make_report(finding, notes=["--trust was used"])
    report.outcomes.append(Outcome(make_rule("PE902"), "could-not-check", "no trace"))
    return report


def test_a_finding_in_full(full):
    (finding,) = strict(render(full))["findings"]
    fingerprint = finding.pop("fingerprint")
    assert len(fingerprint) == 16
    assert finding == {
        "code": "PE901",
        "name": "made-up",
        "severity": "error",
        "message": "The table has 512 rows and 1,024 are needed.",
        "effect": "IndexError at position 512.",
        "where": {"module": "encoder.pos", "encoding": "learned-1", "file": "model.py", "line": 3},
        "evidence": {"measured": "nan", "expected": "inf", "limit": 0.5, "unit": "rad", "seq_len": 1024},
        "fix": {"summary": "Make the table longer.", "applicability": "manual", "patch": None},
        "basis": "theorem",
        "references": [],
    }


def test_the_rest_of_the_report(full):
    report = strict(render(full))
    assert report["schema_version"] == 1
    assert report["tool"] == {"name": "pediag", "version": pediag.__version__}
    assert report["target"] == {"spec": "model.py:net", "loader": "python file", "sha256": None}
    assert (report["verdict"], report["exit_code"], report["fail_on"]) == ("fail", 1, "error")
    assert [(rule["code"], rule["status"], rule["reason"]) for rule in report["rules"]] == [
        ("PE901", "fail", None),
        ("PE902", "could-not-check", "no trace"),
    ]
    (encoding,) = report["encodings"]
    assert (encoding["id"], encoding["scheme"], encoding["parameters"]["base"]) == (
        "rope-1",
        "rotary",
        500000.0,
    )
    assert len(encoding["modules"]) == 32
    assert encoding["sites"] == [
        {"kind": "rotary", "op": "mul", "file": "rotary.py", "line": 7, "count": 2},
        {"kind": "rotary", "op": "neg", "file": "rotary.py", "line": 7, "count": 1},
    ]
    assert report == full.to_dict()


def test_several_reports_and_failures(full, make_report):
    blind = make_report(encodings=[])
    results = [full, Stopped("gone.py:net", "no such file"), full, blind, make_report()]
    several = strict(render(results, ["runs: a folder"]))
    assert set(several) == {"schema_version", "reports", "failures", "notes", "summary"}
    assert len(several["reports"]) == 4
    assert several["failures"] == [{"target": "gone.py:net", "message": "no such file"}]
    assert several["notes"] == ["runs: a folder"]
    assert several["summary"] == {
        "targets": 5,
        "fail": 2,
        "stopped": 1,
        "nothing_checked": 1,
        "pass": 1,
        "errors": 2,
        "warnings": 0,
        "notes": 0,
        "exit_code": 2,
    }


def test_several_inspections_have_no_verdicts(full):
    several = strict(render([full, Stopped("gone", "no such file")], describe=inspection))
    assert set(several) == {"schema_version", "reports", "failures", "notes"}


def test_the_same_report_gives_the_same_bytes(full):
    assert render(full) == render(full)
    assert render(full).endswith("}\n")


def test_the_schema_accepts_what_is_rendered(full):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(strict(render(full)))
    validator.validate(strict(render([full, Stopped("gone", "no such file")], ["a note"])))
    validator.validate(strict(render([Stopped("gone", "no such file")])))


def test_the_schema_refuses_a_report_that_lacks_a_field(full):
    jsonschema = pytest.importorskip("jsonschema")
    report = strict(render(full))
    del report["summary"]["ran"]
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    assert not validator.is_valid(report)


def test_inspection_judges_nothing(full):
    assert set(inspection(full)) == {
        "schema_version",
        "tool",
        "target",
        "seq_len",
        "train_len",
        "encodings",
        "notes",
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([1.0, np.nan]), [1.0, "nan"]),
        (np.zeros((100, 100)), "array of shape (100, 100)"),
        ((1, {"b", "a"}), [1, ["a", "b"]]),
        ({1: -np.inf}, {"1": "-inf"}),
        (Path("x"), "x"),
        (True, True),
    ],
)
def test_plain_values(value, expected):
    result = plain(value)
    assert result == expected
    strict(json.dumps(result))
