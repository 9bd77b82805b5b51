"""JUnit: valid by the schema that Jenkins publishes, and read back by another reader."""

from __future__ import annotations

import os
from pathlib import Path
from xml.dom import minidom

import pytest

from pediag.report.formats import render

SCHEMA = Path(__file__).parents[1] / "data" / "junit-10.xsd"


@pytest.fixture(scope="module")
def schema():
    return pytest.importorskip("xmlschema").XMLSchema(str(SCHEMA))


@pytest.fixture
def document(schema, tmp_path):
    """The root of a rendered report, held to the schema and to its own counts."""

    def read(results, notes=()):
        text = render("junit", results, notes)
        assert text.endswith("</testsuites>\n") and "\x1b" not in text
        path = tmp_path / "report.xml"
        path.write_text(text, encoding="utf-8")
        schema.validate(str(path))
        root = minidom.parse(str(path)).documentElement
        for suite in root.getElementsByTagName("testsuite"):
            cases = suite.getElementsByTagName("testcase")
            counts = {"tests": len(cases)}
            for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
                counts[attribute] = sum(bool(case.getElementsByTagName(tag)) for case in cases)
            assert {name: int(suite.getAttribute(name)) for name in counts} == counts
        for name in ("tests", "failures", "errors"):
            total = sum(int(suite.getAttribute(name)) for suite in root.getElementsByTagName("testsuite"))
            assert int(root.getAttribute(name)) == total
        return root

    return read


def cases(root) -> dict[str, dict[str, tuple[str, str]]]:
    """By the name of a case, its parts: the tag with its message and its text."""
    return {
        case.getAttribute("name"): {
            part.tagName: (part.getAttribute("message"), part.firstChild.data if part.firstChild else "")
            for part in case.childNodes
            if part.nodeType == part.ELEMENT_NODE
        }
        for case in root.getElementsByTagName("testcase")
    }


def test_a_case_per_rule(document, full):
    root = document(full)
    (suite,) = root.getElementsByTagName("testsuite")
    assert suite.getAttribute("name") == "model.py:net"
    found = cases(root)
    assert list(found) == [f"PE90{number} made-up" for number in range(1, 6)]
    message, text = found["PE901 made-up"]["failure"]
    assert message == "The table has 512 rows and 1,024 are needed."
    for line in (
        "error: The table has 512 rows and 1,024 are needed.",
        "where: learned-1 in encoder.pos",
        "at: model.py:2",
        "measured: 512 rows",
        "expected: 1,024 rows",
        "effect: IndexError at position 512. (at 1,024 tokens)",
        "fix (manual): Make the table longer.",
        f"fingerprint: {full.findings[0].fingerprint}",
    ):
        assert line in text.splitlines()
    output = found["PE901 made-up"]["system-out"][1].splitlines()
    assert output[0] == "note: A minor thing."
    assert '    "rope_theta": 10000' in output
    assert output[-1] == "incomplete: the decoder was not run"
    assert found["PE902 made-up"] == {"skipped": ("could not check: no trace: give a model", "")}
    assert set(found["PE903 made-up"]) == {"error"}
    assert found["PE904 made-up"] == {"skipped": ("not applicable: no config", "")}
    assert found["PE905 made-up"] == {}


def test_the_class_is_the_family(document, full):
    names = [case.getAttribute("classname") for case in document(full).getElementsByTagName("testcase")]
    assert names[:2] == ["pediag.rules", "pediag.reach"]


@pytest.mark.parametrize(
    ("fail_on", "failing"), [("error", 1), ("warning", 1), ("note", 2), ("never", 0)], ids=str
)
def test_what_is_below_the_threshold_is_output(document, full, fail_on, failing):
    full.fail_on = fail_on
    case = cases(document(full))["PE901 made-up"]
    texts = {tag: case[tag][1] if tag in case else "" for tag in ("failure", "system-out")}
    assert texts["failure"].count("fingerprint: ") == failing
    assert texts["system-out"].count("fingerprint: ") == 2 - failing
    assert ("(and 1 more finding)" in case.get("failure", ("",))[0]) == (failing == 2)


def test_the_facts_of_the_report_are_properties(document, full):
    given = {
        item.getAttribute("name"): item.getAttribute("value")
        for item in document(full).getElementsByTagName("property")
    }
    assert given["loader"] == "python file"
    assert (given["seq_len"], given["fail_on"], given["verdict"], given["exit_code"]) == (
        "1024",
        "error",
        "fail",
        "1",
    )
    assert given["encoding rope-1"] == "rotary, half pairing · layers 0-31"
    assert given["note"] == "--trust was used"


def test_a_suite_per_target(document, several):
    root = document(several, ["runs: a folder"])
    suites = root.getElementsByTagName("testsuite")
    names = [suite.getAttribute("name") for suite in suites]
    assert names == ["model.py:net", "gone.pt", "model.py:net", "blind.py:net", "model.py:net", "pediag"]
    assert [suite.getAttribute("errors") for suite in suites] == ["1", "1", "0", "1", "1", "0"]
    assert cases(suites[1])["the target opens and runs"]["error"] == ("no such file", "no such file")
    assert suites[5].getElementsByTagName("system-out")[0].firstChild.data == "runs: a folder"


def test_a_clean_report_has_no_failure_and_one_that_saw_nothing_an_error(document, clean, blind):
    root = document(clean)
    assert (root.getAttribute("failures"), root.getAttribute("errors")) == ("0", "0")
    root = document(blind)
    assert root.getAttribute("errors") == "1"
    assert cases(root)["something was checked"]["error"][0] == (
        "nothing was checked: no position encoding was found"
    )


def test_hostile_text_is_text(document, nasty):
    root = document(nasty)
    first, second = root.getElementsByTagName("testsuite")
    message, text = cases(first)["PE901 made-up"]["failure"]
    for part in ("<script>alert('1')</script>", "]]>", "\ufffd", "::error::x"):
        assert part in message
        assert part in text
    for letter in "\x00\x1b\u202e\ud800\r":
        assert letter not in render("junit", nasty)
    assert second.getAttribute("errors") == "1"


def test_the_same_report_gives_the_same_bytes_and_tells_no_folder(several):
    text = render("junit", several)
    assert text == render("junit", several)
    assert os.getcwd() not in text
    assert text.isprintable() or "\n" in text
