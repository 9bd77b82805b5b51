"""The job for GitLab: by its published schema, and its script run in a shell."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import yaml

ROOT = Path(__file__).parents[2]
JOBS = yaml.safe_load((ROOT / "docs" / "ci" / "gitlab-ci.yml").read_text())
SCHEMA = json.loads((ROOT / "tests" / "data" / "gitlab-ci-schema.json").read_text())


def run(folder: Path, env: dict[str, str], targets: str) -> int:
    """The exit status of the script of the job, which stops at the first command that fails."""
    code = folder / "docs" / "ci"
    code.mkdir(parents=True)
    (code / "code_quality.py").write_bytes((ROOT / "docs" / "ci" / "code_quality.py").read_bytes())
    script = "\n".join(["set -e", *JOBS["pediag"]["script"]])
    return subprocess.run(
        ["sh", "-c", script], cwd=folder, env={**env, "TARGETS": targets}, check=False
    ).returncode


def test_it_is_a_pipeline_by_the_schema():
    validator = jsonschema.Draft7Validator(SCHEMA)
    validator.validate(JOBS)
    assert not validator.is_valid({"pediag": {"script": 1}})


def test_a_fault_is_in_both_reports(folder, shell):
    assert run(folder, shell, "right/config.json wrong/config.json") == 1
    reports = JOBS["pediag"]["artifacts"]["reports"]
    assert "PE102" in (folder / reports["junit"]).read_text()
    entries = json.loads((folder / reports["codequality"]).read_text())
    (entry,) = (entry for entry in entries if entry["check_name"] == "PE102")
    assert (entry["severity"], entry["location"]["path"]) == ("critical", "wrong/config.json")
    written = (folder / "wrong" / "config.json").read_text().splitlines()
    assert "rope_theta" in written[entry["location"]["lines"]["begin"] - 1]
    assert len({entry["fingerprint"] for entry in entries}) == len(entries)
    assert {"description", "check_name", "fingerprint", "severity", "location"} == set(entry)


def test_what_is_right_passes(folder, shell):
    assert run(folder, shell, "right/config.json") == 0
    assert json.loads((folder / "gl-code-quality-report.json").read_text()) == []
