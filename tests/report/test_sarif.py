"""SARIF: valid by the published schema, what code scanning asks for, and a place for every result."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from pediag.cli import main
from pediag.report import sarif
from pediag.report.formats import render
from pediag.report.places import Spot
from pediag.report.sarif_fixes import changes
from pediag.rules.finding import Fix, Where
from pediag.targets.editing import diff

SCHEMA = Path(__file__).parents[1] / "data" / "sarif-schema-2.1.0.json"
# RFC 3986: the letters that may stand in a URI, a "%" only before two hexadecimal digits.
URI = re.compile(r"(?:[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2})+")


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    return jsonschema.Draft4Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def nodes(value):
    """Every object of a document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from nodes(item)


@pytest.fixture
def log(validator):
    """The run of a rendered report, once it has been held to the schema and to what code scanning needs."""

    def read(results, notes=()):
        text = render("sarif", results, notes)
        assert text.endswith("}\n") and "\x1b" not in text
        document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        validator.validate(document)
        (run,) = document["runs"]
        rules = run["tool"]["driver"]["rules"]
        assert len({rule["id"] for rule in rules}) == len(rules)
        for result in run["results"]:
            assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
            (location,) = result["locations"]
            region = location["physicalLocation"]["region"]
            assert 1 <= region["startLine"] <= region["endLine"]
            assert 1 <= region["startColumn"] <= region["endColumn"]
            assert result["partialFingerprints"]
        for node in nodes(document):
            assert None not in node.values()
            if "uri" in node:
                assert URI.fullmatch(node["uri"]), node["uri"]
                assert ("uriBaseId" in node) != bool(urlsplit(node["uri"]).scheme)
        return run

    return read


def physical(result):
    place = result["locations"][0]["physicalLocation"]
    return place["artifactLocation"], place["region"]


def test_a_result_in_full(log, full):
    first, second = log(full)["results"]
    assert (first["ruleId"], first["level"], second["level"]) == ("PE901", "error", "note")
    assert first["message"]["text"].split("\n\n") == [
        "The table has 512 rows and 1,024 are needed.",
        "Effect: IndexError at position 512. (at 1,024 tokens)",
        "Fix: Make the table longer.",
    ]
    artifact, region = physical(first)
    assert artifact == {"uri": "model.py", "uriBaseId": "SRCROOT"}
    # "    x = x + self.drop(é)  # sum": four blanks, then 27 letters.
    assert (region["startLine"], region["startColumn"], region["endColumn"]) == (2, 5, 32)
    assert region["snippet"] == {"text": "x = x + self.drop(é)  # sum"}
    assert first["locations"][0]["logicalLocations"] == [
        {"fullyQualifiedName": "encoder.pos", "name": "pos", "kind": "module"}
    ]
    assert first["partialFingerprints"] == {"pediag/v1": full.findings[0].fingerprint}
    assert first["properties"]["evidence"] == {
        "measured": 512,
        "expected": 1024,
        "unit": "rows",
        "seq_len": 1024,
    }
    assert second["properties"]["evidence"]["measured"] == "nan"


def test_the_rules_say_all_that_code_scanning_shows(log, full):
    run = log(full)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["PE901", "PE902", "PE903", "PE904", "PE905"]
    for rule in rules:
        assert rule["shortDescription"]["text"] == "Something is wrong."
        assert rule["help"]["text"].endswith("Make it right.")
        assert rule["help"]["markdown"].startswith(f"# {rule['id']} made-up")
        assert rule["defaultConfiguration"] == {"level": "error"}
        assert rule["properties"]["basis"] == "theorem"
        assert len(rule["properties"]["tags"]) <= 20
    assert rules[1]["properties"]["tags"] == ["positional-encoding", "reach", "theorem"]
    assert rules[1]["properties"]["page"] == "docs/rules/pe902_x.md"


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (["Repository, https://example.org/p/"], "https://example.org/p/blob/main/docs/rules/pe902_x.md"),
        (["Funding, https://example.org/money"], None),
        ([], None),
    ],
)
def test_help_has_an_address_where_the_project_has_one(log, full, monkeypatch, urls, expected):
    known = SimpleNamespace(get_all=lambda name: urls if name == "Project-URL" else None)
    monkeypatch.setattr(sarif.metadata, "metadata", lambda name: known)
    assert log(full)["tool"]["driver"]["rules"][1].get("helpUri") == expected


def test_what_was_not_judged_is_told(log, full):
    (invocation,) = log(full, ["runs: a folder"])["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (True, 1)
    told = [
        (
            item["descriptor"]["id"],
            item["level"],
            item.get("associatedRule", {}).get("id"),
            item["message"]["text"],
        )
        for item in invocation["toolExecutionNotifications"]
    ]
    assert told == [
        ("could-not-check", "note", "PE901", "PE901 made-up: the decoder was not run"),
        ("could-not-check", "note", "PE902", "PE902 made-up: no trace: give a model"),
        ("internal-error", "error", "PE903", "PE903 made-up: internal error in PE903: KeyError: 'x'"),
        ("note", "note", None, "--trust was used"),
        ("note", "note", None, "runs: a folder"),
    ]


def test_several_targets_are_one_run(log, several):
    run = log(several)
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 2)
    kinds = [item["descriptor"]["id"] for item in invocation["toolExecutionNotifications"]]
    assert kinds.count("target-stopped") == 1 and kinds.count("nothing-checked") == 1
    assert [result["properties"]["target"] for result in run["results"]] == ["model.py:net"] * 4
    assert "Target: model.py:net" in run["results"][0]["message"]["text"]
    assert [item["description"]["text"] for item in run["artifacts"]] == [
        "model.py:net",
        "gone.pt",
        "blind.py:net",
    ]
    assert [report["verdict"] for report in run["properties"]["reports"]] == [
        "fail",
        "pass",
        "nothing-checked",
        "fail",
    ]


def test_a_single_target_that_stopped(log, several):
    run = log([several[1]])
    (notification,) = run["invocations"][0]["toolExecutionNotifications"]
    assert (notification["level"], notification["message"]["text"]) == ("error", "gone.pt: no such file")
    assert run["results"] == []


def test_nothing_found_and_nothing_checked(log, clean, blind):
    assert log(clean)["results"] == []
    assert log(clean)["invocations"][0]["exitCode"] == 0
    assert log(blind)["invocations"][0]["exitCode"] == 3


def test_the_place_is_the_line_else_the_encoding_else_the_config_else_the_target(
    log, make_report, make_finding, source
):
    folder = source.parent / "run 1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (source.parent / "pack").mkdir()
    (source.parent / "pack" / "net.py").write_text("net = 1\n")
    encoding = SimpleNamespace(
        **{**vars(make_report().encodings[0]), "source_file": str(source), "source_line": 2}
    )

    def at(spec, where, **changes):
        (result,) = log(make_report(make_finding(where=where), spec=spec, **changes))["results"]
        artifact, region = physical(result)
        return artifact["uri"], region["startLine"]

    assert at("x.py:net", Where("a", "rope-1", str(source), 1)) == ("model.py", 1)
    assert at("x.py:net", Where("a", "rope-1"), encodings=[encoding]) == ("model.py", 2)
    assert at("run 1", Where("a", "rope-1")) == ("run%201/config.json", 1)
    assert at("model.py:net", Where("a")) == ("model.py", 1)
    assert at("pack.net:net", Where("a")) == ("pack/net.py", 1)
    assert at("elsewhere:net", Where("a")) == ("elsewhere%3Anet", 1)


def test_a_line_of_an_installed_package_is_a_related_place(log, make_report, make_finding, source, tmp_path):
    library = tmp_path / "lib" / "site-packages" / "transformers"
    library.mkdir(parents=True)
    (library / "llama.py").write_text("first\nsecond\n")
    where = Where("model", "rope-1", str(library / "llama.py"), 2)
    (result,) = log(make_report(make_finding(where=where)))["results"]
    assert physical(result)[0]["uri"] == "model.py"
    (related,) = result["relatedLocations"]
    assert related["physicalLocation"]["artifactLocation"]["uri"] == "lib/site-packages/transformers/llama.py"
    assert related["physicalLocation"]["region"]["startLine"] == 2


@pytest.mark.parametrize("name", ["a b.py", "ünï#?%41.py", "x&y;z=1.py", "a:b.py"])
def test_a_path_survives_its_uri(log, make_report, make_finding, source, tmp_path_factory, name):
    inside, outside = source.parent / name, tmp_path_factory.mktemp("outside") / name
    for path in (inside, outside):
        path.write_text("x\n", encoding="utf-8")
    found = [make_finding(where=Where("a", "", str(path), 1)) for path in (inside, outside)]
    results = log(make_report(*found))["results"]
    by_base = {physical(result)[0].get("uriBaseId"): physical(result)[0]["uri"] for result in results}
    assert unquote(by_base["SRCROOT"]) == name
    assert unquote(urlsplit(by_base[None]).path) == str(outside)
    assert by_base[None].startswith("file:///")


def test_the_machine_is_not_told(full, several):
    for results in (full, several):
        assert os.getcwd() not in render("sarif", results)


def test_the_same_report_gives_the_same_bytes(several):
    assert render("sarif", several) == render("sarif", several)


def test_hostile_text_breaks_nothing(log, nasty):
    run = log(nasty)
    (result,) = run["results"]
    text = result["message"]["text"]
    assert "](" not in text, "SARIF viewers make links of this"
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "<script>" in text, "nothing is lost"


def applied(text: str, replacements) -> str:
    """The text after replacements, by the rules of SARIF 2.1.0, 3.30 and 3.57."""
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    spans = []
    for replacement in replacements:
        region = replacement["deletedRegion"]
        start = offsets[region["startLine"] - 1] + region["startColumn"] - 1
        end = offsets[region["endLine"] - 1] + region["endColumn"] - 1
        spans.append((start, end, replacement["insertedContent"]["text"]))
    for start, end, new in sorted(spans, reverse=True):
        text = text[:start] + new + text[end:]
    return text


OLD = [f"line {number}\n" for number in range(30)]


@pytest.mark.parametrize(
    "new",
    [
        [*OLD[:4], "new 4\n", *OLD[5:20], *OLD[22:]],
        [*OLD[:10], "added\n", *OLD[10:]],
        ["first\n", *OLD],
        OLD[3:],
        [*OLD, "-- last\n"],
        ["-- a\n", *OLD[1:]],
    ],
    ids=["changed", "added", "at the start", "cut", "at the end", "dashes"],
)
@pytest.mark.parametrize("context", [0, 3])
def test_a_unified_diff_becomes_replacements(make_finding, new, context):
    old = ["-- b\n", *OLD[1:]] if new[0].startswith("--") else OLD
    patch = "".join(difflib.unified_diff(old, new, "a/net.py", "b/net.py", n=context))
    (made,) = changes(patch, Spot("net.py", 1), make_finding()).items()
    assert made[0] == "net.py"
    assert applied("".join(old), made[1]) == "".join(new)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize(("closed", "still"), [(True, True), (True, False), (False, True), (False, False)])
def test_line_ends_stay_and_a_file_may_end_without_one(make_finding, tmp_path, end, closed, still):
    old = end.join(["{", ' "a": 1,', ' "b": 2', "}"]) + (end if closed else "")
    new = end.join(["{", ' "a": 1,', ' "c": "\u2028"', "}"]) + (end if still else "")
    config = str(tmp_path / "config.json")
    finding = make_finding(where=Where("b", "", config, 3))
    made = changes(diff(old, new), Spot(config, 3), finding)
    assert list(made) == [config], "the whole path of the config that is pointed at"
    assert replaced(old, made[config]) == new


def replaced(text, replacements):
    """As :func:`applied`, with lines that end at line feeds alone."""
    lines = text.split("\n")
    for made in reversed(replacements):
        region = made["deletedRegion"]
        first, last = (
            sum(len(line) + 1 for line in lines[: region[line] - 1]) + region[column] - 1
            for line, column in (("startLine", "startColumn"), ("endLine", "endColumn"))
        )
        text = text[:first] + made["insertedContent"]["text"] + text[last:]
    return text


@pytest.mark.parametrize(
    ("line", "patch", "expected"),
    [
        ('  "rope_theta": 10000.0,', '"rope_theta": 10000', '  "rope_theta": 10000,'),
        ('{"a": 1, "type" : "yarm", "b": 2}', '"type": "yarn"', '{"a": 1, "type" : "yarn", "b": 2}'),
        ('  "rope_theta": 1e4}', '"rope_theta": 10000', '  "rope_theta": 10000}'),
        ('{"x": {"t": 1}, "y": {"t": 2}}', '"t": 3', None),
        ('"t": {', '"t": 3', None),
        ('"other": 1', '"t": 3', None),
        ('"t": 1', '{"t": {"u": 3}}', None),
    ],
)
def test_a_fragment_of_a_config_becomes_a_replacement(make_finding, source, line, patch, expected):
    config = source.parent / "config.json"
    config.write_text(f"{{\n{line}\n")
    finding = make_finding(where=Where("t", "", str(config), 2), fix=Fix("Write it.", "safe", patch))
    made = changes(patch, Spot(str(config), 2), finding)
    if expected is None:
        assert made == {}
    else:
        assert applied(config.read_text(), made[str(config)]) == f"{{\n{expected}\n"


def test_the_fix_of_a_real_config_makes_it_right(log, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "config.json"
    declared = {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "max_position_embeddings": 4096,
        "hidden_size": 64,
    }
    config.write_text(json.dumps({**declared, "num_attention_heads": 4}, indent=2))
    words = ["check", "config.json", "--select", "PE101", "--format", "sarif", "--quiet"]
    assert main(words) == 0
    (result,) = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    (change,) = result["fixes"][0]["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "config.json", "uriBaseId": "SRCROOT"}
    config.write_text(applied(config.read_text(), change["replacements"]))
    assert '"rope_theta": 500000,' in config.read_text()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["results"] == []


def test_every_rule_that_ships_fits_what_code_scanning_takes(log, clean):
    from pediag.rules.registry import all_rules
    from pediag.rules.run import Outcome

    clean.outcomes = [Outcome(rule, "pass") for rule in all_rules()]
    rules = log(clean)["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == sorted(rule.code for rule in all_rules())
    for rule in rules:
        assert 0 < len(rule["shortDescription"]["text"]) <= 1024
        assert 0 < len(rule["fullDescription"]["text"]) <= 1024
        assert rule["fullDescription"]["text"] != rule["shortDescription"]["text"]
        assert (Path(__file__).parents[2] / rule["properties"]["page"]).is_file()
