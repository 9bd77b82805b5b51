"""Rules of installed packages: found by their entry point, read without an import, told apart, and never fatal."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pediag
from pediag.cli import main
from pediag.errors import PediagError, UsageError
from pediag.rules import packages, registry
from pediag.rules.rule import Facets
from pediag.rules.run import run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tests" / "data" / "example_rules" / "pediag_example_rules"
RULE = '''"""A made-up fault."""

from pediag.rules.rule import rule


@rule(code="{code}", name="{name}", severity="error", basis="theorem", needs=("config",))
def check(facets):
    """Find nothing."""
    return iter(())
'''


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path of Python, to install packages into; rules are looked for anew."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "gpt2", "n_positions": 1000, "n_embd": 64, "n_head": 2}'
    )
    registry.forget()
    yield folder
    registry.forget()
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("acme", "other", "pediag_example_rules")
    ]:
        del sys.modules[name]


def install(site: Path, distribution: str, names: str, rules: dict[str, str] | None = None) -> Path:
    """The files of a distribution that names a package, and of that package: rule files by their path."""
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pediag.rules]\nany = {names}\n")
    for path, text in (rules or {}).items():
        file = site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return info


def example(site: Path) -> None:
    install(site, "pediag-example-rules", "pediag_example_rules")
    shutil.copytree(EXAMPLE, site / "pediag_example_rules", ignore=shutil.ignore_patterns("__pycache__"))


def simple(code: str = "AC101", name: str = "made-up") -> str:
    return RULE.format(code=code, name=name)


def others() -> list[str]:
    return [rule.code for rule in registry.all_rules() if rule.package != "pediag"]


def test_its_rules_stand_beside_those_that_ship(site):
    example(site)
    rule = registry.find("table-not-shardable")
    assert (rule.code, rule.package, rule.severity) == ("EX101", "pediag-example-rules", "warning")
    assert (
        rule.summary == "The rows of a learned table cannot be dealt out evenly to the ranks that serve it."
    )
    assert [one.code for one in registry.select(["ex"])] == ["EX101"]
    assert registry.all_rules() == (*registry.shipped(), rule)
    assert {one.package for one in registry.shipped()} == {"pediag"}
    assert pickle.loads(pickle.dumps(rule)) is rule


def test_nothing_of_it_is_imported_to_list_it(site):
    install(
        site,
        "acme-rules",
        "acme.deep",
        {"acme/deep/house/ac101_made_up.py": f"{simple()}\nraise ImportError\n"},
    )
    (site / "acme" / "__init__.py").write_text("raise ImportError")
    assert others() == ["AC101"]
    assert "acme" not in sys.modules


def test_a_rule_that_cannot_be_imported_could_not_check(site):
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": f"import no_such_thing\n{simple()}"})
    (outcome,) = run(registry.select(["AC101"]), Facets(seq_len=8, config=object()))
    assert outcome.status == "could-not-check"
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in outcome.reason


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("yield 'a text'", "TypeError: what a rule yields are findings of a known severity; got 'a text'"),
        ("return None", "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_rule_that_does_what_none_should_could_not_check(site, body, told):
    text = simple().replace("return iter(())", body)
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": text})
    (outcome,) = run(registry.select(["AC101"]), Facets(seq_len=8, config=object()))
    assert (outcome.status, outcome.reason) == (
        "could-not-check",
        f"internal error in AC101 of the package acme-rules: {told}",
    )


def test_it_judges(site):
    example(site)
    report = pediag.check("config.json", select="EX101,PE502", seq_len=900)
    (finding,) = report.findings
    assert (finding.code, finding.evidence.measured, finding.severity) == ("EX101", 1000 % 64, "warning")
    assert finding.fix.summary == "Make the table 1,024 rows long."
    by_code = {rule["code"]: rule["package"] for rule in report.to_dict()["rules"]}
    assert by_code == {"PE502": "pediag", "EX101": "pediag-example-rules"}


def test_the_report_is_valid(site):
    jsonschema = pytest.importorskip("jsonschema")
    example(site)
    schema = json.loads(Path(pediag.report.__file__).with_name("schema_version_1.json").read_text())
    value = json.loads(json.dumps(pediag.check("config.json", select="EX101").to_dict()))
    jsonschema.Draft202012Validator(schema).validate(value)


def test_the_command_line_says_where_a_rule_comes_from(site, capsys):
    example(site)
    assert main(["rules"]) == 0
    table = "".join(capsys.readouterr().out.split())  # a narrow terminal folds names
    assert "frompediag-example-rules" in table
    assert main(["rules", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["rules"]
    assert [rule["code"] for rule in listed if rule["package"] == "pediag-example-rules"] == ["EX101"]
    assert main(["explain", "ex101"]) == 0
    page = capsys.readouterr().out
    assert "from the package pediag-example-rules" in page and "rows mod SHARDS = 0" in page
    assert main(["check", "config.json", "--select", "EX", "--fail-on", "warning", "--jobs", "1"]) == 1


def test_processes_know_it_too(site, monkeypatch, capfd):
    example(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")
    assert main(["check", "config.json", "--select", "EX", "--jobs", "2", "--fail-on", "warning"]) == 1
    assert "1,000 rows, 40 more than a multiple of 64" in capfd.readouterr().out


def test_two_packages_with_one_code_are_an_error_that_names_both(site, capsys):
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": simple()})
    install(site, "other-rules", "other", {"other/house/ac101_another.py": simple(name="another")})
    with pytest.raises(
        PediagError, match=r"code AC101 is declared by the packages acme-rules .* and other-rules"
    ):
        registry.all_rules()
    assert main(["rules"]) == 2
    err = capsys.readouterr().err
    assert "acme-rules" in err and "other-rules" in err and "uninstall one of the two" in err


@pytest.mark.parametrize(
    ("stem", "code", "name", "told"),
    [
        (
            "ac101_scale_mismatch",
            "AC101",
            "scale-mismatch",
            r"name scale-mismatch is declared by the packages pediag",
        ),
        (
            "pe301_mine",
            "PE301",
            "mine",
            r"acme-rules declares pe301_mine.py, and PE begins the codes .* package pediag",
        ),
        ("pe999_mine", "PE999", "mine", r"acme-rules declares pe999_mine.py, and PE begins the codes"),
        ("ac101_pe3", "AC101", "pe3", r"rule name pe3 of acme-rules is how the code PE301 of pediag begins"),
    ],
)
def test_what_is_pediags_own_is_not_taken(site, stem, code, name, told):
    install(site, "acme-rules", "acme", {f"acme/house/{stem}.py": simple(code, name)})
    with pytest.raises(packages.Clash, match=told):
        registry.all_rules()


BROKEN = {
    "syntax": ({"acme/house/ac101_made_up.py": "def ("}, "ac101_made_up.py is not valid Python"),
    "no-rule": ({"acme/house/ac101_made_up.py": ""}, "declares 0 rules"),
    "other-name": ({"acme/house/ac101_made_up.py": simple(name="other")}, "its file name says AC101 made-up"),
    "not-utf8": ({"acme/house/ac101_made_up.py": "x"}, "is not valid Python"),
    "capitals": ({"acme/house/AC101_made_up.py": simple()}, "AC101_made_up.py: a rule file is called like"),
    "two-digits": ({"acme/house/ac10_made_up.py": simple()}, "ac10_made_up.py: a rule file is called like"),
    "nothing": ({"acme/__init__.py": ""}, "acme holds no rule file"),
    "module": ({"acme.py": ""}, "no folder of that package is there"),
    "absent": ({}, "no folder of that package is there"),
    "severity": (
        {"acme/house/ac101_made_up.py": simple().replace('"error"', '"fatal"')},
        "severity is one of error, warning, note; got 'fatal'",
    ),
    "needs": (
        {"acme/house/ac101_made_up.py": simple().replace('("config",)', '("weights",)')},
        "needs are of config, tensors, .*; got 'weights'",
    ),
    "no-tuple": (
        {"acme/house/ac101_made_up.py": simple().replace('("config",)', '"config"')},
        "needs is a tuple of texts; got 'config'",
    ),
    "lacks": (
        {"acme/house/ac101_made_up.py": simple().replace('basis="theorem", ', "")},
        r"@rule\(...\) lacks basis",
    ),
    "more": (
        {"acme/house/ac101_made_up.py": simple().replace("basis=", "more=1, basis=")},
        "takes no more; it takes",
    ),
    "twice": (
        {"acme/a/ac101_made_up.py": simple(), "acme/b/ac101_another.py": simple(name="another")},
        "rule code AC101 is declared by",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_package_is_left_out_with_one_line(site, capsys, kind):
    files, told = BROKEN[kind]
    install(site, "acme-rules", "acme", files)
    if kind == "not-utf8":
        (site / "acme/house/ac101_made_up.py").write_bytes(b"\xff\xfe\x00")
    install(site, "other-rules", "other", {"other/house/ot101_fine.py": simple("OT101", "fine")})
    assert others() == ["OT101"]
    (said,) = registry.left_out()
    assert said.startswith("the rules of the package acme-rules are left out: ")
    assert re.search(told, said)


@pytest.mark.parametrize("value", ["acme:rules", "acme rules", "", "../acme"])
def test_an_entry_that_names_no_package(site, value):
    install(site, "acme-rules", value, {"acme/house/ac101_made_up.py": simple()})
    assert others() == []
    assert all("acme-rules" in said for said in registry.left_out())


def test_it_is_told_on_stderr_and_in_the_report_and_the_other_rules_run(site, capsys):
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": ""})
    assert (
        main(
            ["check", "config.json", "--select", "PE502", "--seq-len", "2000", "--format", "json", "--quiet"]
        )
        == 1
    )
    out, err = capsys.readouterr()
    line = (
        "pediag: note: the rules of the package acme-rules are left out: ac101_made_up.py declares 0 rules;"
    )
    assert err.startswith(line) and err.count("\n") == 1
    report = json.loads(out)
    assert report["notes"][0] == err.removeprefix("pediag: note: ").strip()
    assert [finding["code"] for finding in report["findings"]] == ["PE502"]


def test_strict_does_not_do_without_it(site, capsys):
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": ""})
    assert main(["check", "config.json", "--select", "PE502", "--strict"]) == 2
    assert "error: --strict: the rules of the package acme-rules are left out" in capsys.readouterr().err


def test_a_code_of_a_package_that_is_left_out_is_unknown(site):
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": ""})
    with pytest.raises(UsageError, match="unknown rule or prefix 'AC101'"):
        registry.select(["AC101"])


def test_metadata_that_cannot_be_read_is_told(site):
    info = install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": simple()})
    (info / "entry_points.txt").write_text("[pediag.rules]\nnonsense\n")
    assert others() == []
    (said,) = registry.left_out()
    assert said.startswith(
        "the rules of the package acme-rules are left out: its entry points cannot be read: "
    )


def test_metadata_of_others_that_nobody_can_read_do_no_harm(site):
    (install(site, "any", "any") / "entry_points.txt").write_bytes(b"\xff\xfe[pediag.rules]")
    (install(site, "more", "more") / "METADATA").unlink()
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": simple()})
    assert others() == ["AC101"]


def test_the_first_of_two_installations_counts(site, tmp_path, monkeypatch):
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": simple()})
    more = tmp_path / "more"
    more.mkdir()
    install(more, "acme-rules", "other", {"other/house/ac102_another.py": simple("AC102", "another")})
    monkeypatch.syspath_prepend(more)
    assert others() == ["AC102"]


def test_what_lies_in_the_current_folder_is_not_installed(site, monkeypatch):
    """A folder with a checkpoint may bring the files of a package; an interactive Python looks there."""
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": simple()})
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", ["", *(place for place in sys.path if place != str(site))])
    assert others() == []
    assert registry.left_out() == ()


def test_rules_of_one_package_may_lie_in_several_folders_of_its_path(site, tmp_path, monkeypatch):
    """A namespace package: two distributions that share a package each bring their part."""
    install(site, "acme-rules", "acme", {"acme/house/ac101_made_up.py": simple()})
    more = tmp_path / "more"
    (more / "acme" / "flat").mkdir(parents=True)
    (more / "acme" / "flat" / "ac201_more.py").write_text(simple("AC201", "more"))
    monkeypatch.syspath_prepend(more)
    assert others() == ["AC101", "AC201"]


def test_help_does_not_look_for_packages():
    code = (
        "import sys; from pediag.cli import main; main(['--help']); main(['check', '--help']);"
        "from pediag.rules import registry; assert not registry.installed.cache_info().currsize"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pages_are_written_of_those_that_ship_alone(site, tmp_path, capsys):
    from pediag.report import pages

    example(site)
    assert pages.main([str(tmp_path / "docs")]) == 0
    assert not list((tmp_path / "docs").glob("ex*"))
