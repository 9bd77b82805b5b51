"""The action: by its published schema, and its shell steps run as a runner runs them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.ci.conftest import script

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
INPUTS = {
    f"INPUT_{name.upper().replace('-', '_')}": given.get("default", "")
    for name, given in ACTION["inputs"].items()
}
WORKFLOW = ROOT / "docs" / "ci" / "github.yml"


def validate(document, schema: str) -> None:
    jsonschema.Draft7Validator(json.loads((DATA / schema).read_text())).validate(document)


def workflow():
    """The example, whose key ``on`` YAML 1.1 reads as true."""
    document = yaml.safe_load(WORKFLOW.read_text())
    document["on"] = document.pop(True)
    return document


@pytest.fixture
def run(folder, shell):
    """Runs a step of the action; gives what was written to stdout, stderr and to the outputs of the step."""

    def started(name: str, **changes: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        outputs = folder / "outputs"
        outputs.write_text("")
        github = {
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_ACTION_PATH": "/the action",
            "GITHUB_WORKSPACE": str(folder),
            "RUNNER_TEMP": str(folder),
        }
        env = {**shell, **INPUTS, **github, "INPUT_SARIF": "false", **changes}
        words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", STEPS[name]["run"]]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
        return done, dict(line.split("=", 1) for line in outputs.read_text().splitlines())

    return started


def test_it_is_an_action_by_the_schema():
    validate(ACTION, "github-action-schema.json")


def test_the_example_is_a_workflow_by_the_schema():
    validate(workflow(), "github-workflow-schema.json")


def test_the_schemas_refuse_what_is_wrong():
    with pytest.raises(jsonschema.ValidationError):
        validate({**ACTION, "inputs": {"a": {"describe": ""}}}, "github-action-schema.json")
    with pytest.raises(jsonschema.ValidationError):
        validate({**workflow(), "jobs": {"a": {"steps": []}}}, "github-workflow-schema.json")


def test_no_script_holds_an_expression():
    scripts = [step["run"] for step in STEPS.values() if "run" in step]
    assert len(scripts) == 2
    assert [text for text in scripts if "${{" in text] == []


def test_every_input_reaches_a_step():
    text = (ROOT / "action.yml").read_text()
    assert [name for name in ACTION["inputs"] if f"${{{{ inputs.{name} }}}}" not in text] == []


def test_every_variable_of_a_script_is_given():
    for step in (step for step in STEPS.values() if "run" in step):
        assert set(re.findall(r"INPUT_\w+", step["run"])) == set(step["env"])


def test_the_example_gives_inputs_that_there_are():
    (step,) = (step for step in workflow()["jobs"]["pediag"]["steps"] if "pediag" in step.get("uses", ""))
    assert set(step["with"]) <= set(ACTION["inputs"])


@pytest.mark.parametrize(("target", "status"), [("right/config.json", 0), ("wrong/config.json", 1)])
def test_the_status_is_the_one_of_the_check(run, target, status):
    done, outputs = run("Check", INPUT_TARGET=target)
    assert (done.returncode, outputs) == (status, {"exit-status": str(status)})
    assert f"exit status {status}" in done.stderr


def test_a_fault_is_annotated_at_its_line(run, folder):
    done, _ = run("Check", INPUT_TARGET="\n right/config.json\n\twrong/config.json\r\n")
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("::error") and "PE102" in line)
    written = (folder / "wrong" / "config.json").read_text().splitlines()
    assert "file=wrong/config.json" in line
    assert "rope_theta" in written[int(re.findall(r"line=(\d+)", line)[0]) - 1]


def test_without_a_target_those_of_the_settings_are_checked(run, folder):
    assert run("Check")[0].returncode == 2
    (folder / "pediag.toml").write_text('[[targets]]\npath = "wrong/config.json"\n')
    done, outputs = run("Check")
    assert (done.returncode, outputs) == (1, {"exit-status": "1"})
    assert "PE102" in done.stdout


def test_options_reach_the_check(run):
    done, _ = run("Check", INPUT_TARGET="wrong/config.json", INPUT_FAIL_ON="never", INPUT_SEQ_LEN="777")
    assert done.returncode == 0
    assert "777 tokens" in done.stderr
    assert "PE102" in done.stdout
    done, _ = run("Check", INPUT_TARGET="wrong/config.json", INPUT_SELECT="PE1", INPUT_IGNORE="PE102")
    assert "PE102" not in done.stdout


def test_sarif_is_written_only_if_asked(run, folder):
    done, outputs = run("Check", INPUT_TARGET="wrong/config.json", INPUT_SARIF="true")
    assert (done.returncode, outputs["exit-status"]) == (1, "1")
    results = json.loads(Path(outputs["sarif-file"]).read_text())["runs"][0]["results"]
    assert "PE102" in {result["ruleId"] for result in results}
    assert "sarif-file" in STEPS["Upload to code scanning"]["if"]


@pytest.mark.parametrize(
    "text",
    ["$(touch made)", "`touch made`", "; touch made", "a\ntouch made", '"; touch made; "', "--output=made"],
)
def test_nothing_in_an_input_is_run(run, folder, text):
    done, _ = run("Check", INPUT_TARGET=text)
    assert done.returncode == 2
    assert "no such file" in done.stderr
    done, _ = run("Check", INPUT_TARGET="right/config.json", INPUT_SELECT=text)
    assert done.returncode == 2
    assert not (folder / "made").exists()


@pytest.mark.parametrize(
    ("inputs", "torch", "expected"),
    [
        ({}, True, ["-m pip install --quiet /the action[transformers]"]),
        ({"INPUT_VERSION": "0.1.0", "INPUT_EXTRAS": ""}, True, ["-m pip install --quiet pediag==0.1.0"]),
        (
            {"INPUT_EXTRAS": "transformers,gguf"},
            False,
            [
                "-m pip install --quiet --index-url https://download.pytorch.org/whl/cpu torch",
                "-m pip install --quiet /the action[transformers,gguf]",
            ],
        ),
    ],
    ids=["own", "published", "without-torch"],
)
def test_what_is_installed(run, folder, shell, inputs, torch, expected):
    """A recorder stands in for python: it has PyTorch or has not, and installs nothing."""
    log, bin = folder / "log", folder / "recorder"
    script(bin / "python", f'[ "$1" = -c ] && exit {int(not torch)}\necho "$*" >> "{log}"')
    done, _ = run("Install pediag", PATH=f"{bin}:{shell['PATH']}", **inputs)
    assert (done.returncode, done.stderr) == (0, "")
    assert log.read_text().splitlines() == expected
