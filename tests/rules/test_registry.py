"""Rules are found by being files, and chosen by code, name or prefix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pediag.errors import PediagError, UsageError
from pediag.rules import registry
from pediag.rules.rule import Rule

RULE_FILE = '''"""A made-up fault.

Fix: none.
"""

from pediag.rules.rule import rule


@rule(code="{code}", name="{name}", severity="error", basis="theorem", needs=("trace",))
def check(facets):
    """Find nothing."""
    return iter(())
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder that is importable as a package of a name no other test uses."""
    name = re.sub(r"\W", "_", f"rules_of_{tmp_path.parent.name}_{tmp_path.name}")
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def write(package: Path, family: str, stem: str, code: str, name: str) -> None:
    (package / family).mkdir(exist_ok=True)
    (package / family / f"{stem}.py").write_text(RULE_FILE.format(code=code, name=name))


@pytest.fixture
def three(monkeypatch, make_rule):
    """A catalogue of three rules in the place of the shipped one."""
    rules = (
        make_rule("PE301", "scale-mismatch"),
        make_rule("PE302", "dropout-on-positions"),
        make_rule("PE501", "theta-saturation"),
    )
    monkeypatch.setattr(registry, "all_rules", lambda: rules)
    return rules


def codes(rules) -> list[str]:
    return [rule.code for rule in rules]


def test_a_file_is_a_rule_and_its_docstring_the_page(package):
    write(package, "reach", "pe951_made_up", "PE951", "made-up")
    write(package, "entry", "pe952_another", "PE952", "another")
    (package / "entry" / "_shared.py").write_text("raise RuntimeError('not a rule')\n")
    first, second = registry.discover(package, package.name)
    assert (first.code, second.code) == ("PE951", "PE952")
    assert (first.summary, first.page) == ("A made-up fault.", "A made-up fault.\n\nFix: none.")
    assert Path(first.source).name == "pe951_made_up.py"


def test_a_code_claimed_twice_is_refused(package):
    write(package, "entry", "pe951_made_up", "PE951", "made-up")
    write(package, "reach", "pe951_another", "PE951", "another")
    with pytest.raises(
        PediagError, match=r"code PE951 is declared by .*pe951_made_up\.py and .*pe951_another"
    ):
        registry.discover(package, package.name)


def test_a_file_name_that_disagrees_is_refused(package):
    write(package, "entry", "pe951_made_up", "PE952", "made-up")
    with pytest.raises(PediagError, match="declares PE952 made-up; its file name says PE951 made-up"):
        registry.discover(package, package.name)


def test_a_file_without_a_rule_is_refused(package):
    (package / "entry").mkdir()
    (package / "entry" / "pe951_made_up.py").write_text("")
    with pytest.raises(PediagError, match="declares 0 rules"):
        registry.discover(package, package.name)


def test_every_rule_file_that_ships_is_found():
    folder = Path(registry.__file__).parent
    files = sorted(path.stem[:5].upper() for path in folder.glob("*/pe*_*.py"))
    assert codes(registry.all_rules()) == files


@pytest.mark.parametrize("given", ["PE302", "pe302", "dropout-on-positions", " Dropout-On-Positions "])
def test_find_takes_codes_and_names(three, given):
    assert registry.find(given).code == "PE302"


@pytest.mark.parametrize(
    ("given", "nearest"), [("dropout-on-position", "PE302 dropout-on-positions"), ("PE50", "PE501")]
)
def test_find_names_the_nearest(three, given, nearest):
    with pytest.raises(UsageError, match=f"unknown rule '{given}': did you mean {nearest}"):
        registry.find(given)


@pytest.mark.parametrize(
    ("select", "ignore", "left"),
    [
        ((), (), ["PE301", "PE302", "PE501"]),
        (("PE",), (), ["PE301", "PE302", "PE501"]),
        (("PE3",), (), ["PE301", "PE302"]),
        (("pe30",), ("PE301",), ["PE302"]),
        (("theta-saturation, PE301",), (), ["PE301", "PE501"]),
        (("PE302,,PE501,",), ("PE5",), ["PE302"]),
        ((), ("PE3",), ["PE501"]),
    ],
)
def test_select_and_ignore(three, select, ignore, left):
    assert codes(registry.select(select, ignore)) == left


@pytest.mark.parametrize(("select", "ignore"), [(("PE9",), ()), ((), ("nonsense",)), (("P",), ())])
def test_an_unknown_entry_is_refused(three, select, ignore):
    with pytest.raises(UsageError, match="unknown rule or prefix"):
        registry.select(select, ignore)


@pytest.mark.parametrize("blank", ["", "  ", ",", " , "])
@pytest.mark.parametrize("option", ["select", "ignore"])
def test_an_entry_without_a_code_is_refused(three, option, blank):
    with pytest.raises(UsageError, match=f"^{option}: {blank!r} names no rule; give a code"):
        registry.select(**{option: [blank]})
    with pytest.raises(UsageError, match="names no rule"):
        registry.select(**{option: ("PE3", blank)})


def test_a_selection_that_leaves_nothing_is_refused(three):
    with pytest.raises(UsageError, match="nothing is left to run"):
        registry.select(("PE3",), ("PE301", "PE302"))


def test_what_is_read_is_what_is_declared():
    """Reading a rule file and importing it give the same facts."""
    import dataclasses
    import importlib

    for rule in registry.all_rules():
        path = Path(rule.source)
        module = importlib.import_module(f"pediag.rules.{path.parent.name}.{path.stem}")
        (declared,) = (value for value in vars(module).values() if isinstance(value, Rule))
        for field in dataclasses.fields(Rule):
            if field.name not in ("check", "source"):
                assert getattr(rule, field.name) == getattr(declared, field.name), (rule.code, field.name)


def test_a_declaration_of_computed_values_is_refused(package):
    write(package, "entry", "pe951_made_up", "PE951", "made-up")
    path = package / "entry" / "pe951_made_up.py"
    path.write_text(path.read_text().replace('"error"', "str(1)"))
    with pytest.raises(PediagError, match="must be plain values"):
        registry.discover(package, package.name)
