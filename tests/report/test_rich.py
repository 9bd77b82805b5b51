"""The table: everything said, nothing cut off, nothing of the user's text obeyed."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from pediag.report import rich as table
from pediag.report.model import TargetInfo
from pediag.rules.finding import Evidence, Fix, Where
from pediag.rules.run import Outcome

SOURCE = "import torch\n    x = x + self.drop(self.pe[:, :n])  # [bold]w[/bold]\n"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def report(make_report, make_finding, make_rule, source):
    finding = make_finding(where=Where("encoder.pos", "learned-1", str(source), 2), fix=Fix("Enlarge it."))
    made = make_report(finding, notes=["--trust was used"])
    made.outcomes += [
        Outcome(make_rule("PE902"), "could-not-check", "the forward raised"),
        Outcome(make_rule("PE903"), "could-not-check", "the forward raised"),
        Outcome(make_rule("PE904"), "not-applicable", "no config"),
    ]
    return made


def drawn(reports, width: int = 100, **options) -> str:
    stream = StringIO()
    table.render(reports, Console(file=stream, width=width, color_system=None), **options)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_every_fact_is_there_at_any_width(report, width):
    text = drawn(report, width)
    for fact in (
        "error",
        "PE901",
        "made-up",
        "The table has 512 rows and 1,024 are needed.",
        "learned-1 in encoder.pos",
        "model.py:2",
        "x = x + self.drop(self.pe[:, :n])  # [bold]w[/bold]",
        "512 rows",
        "1,024 rows",
        "IndexError at position 512. (at 1,024 tokens)",
        "Enlarge it.",
        "rotary, half pairing",
        "layers 0-31",
        "1 rule ran · 1 not applicable · 2 could not check",
        "PE902, PE903: the forward raised",
        "PE904: no config",
        "--trust was used",
        "FAIL · 1 error · exit status 1",
    ):
        assert fact in text, fact
    assert max(map(len, text.splitlines())) <= width


def test_plain_text_has_no_colour_and_breaks_no_path(report, make_finding, make_report):
    deep = "/".join(["a_rather_long_folder_name"] * 8) + "/model.py"
    module = ".".join(["a_rather_long_module_name"] * 6)
    found = make_report(make_finding(where=Where(module, "learned-1", deep, 123456)))
    text = table.to_text([found])
    assert f"{deep}:123456" in text
    assert module in text
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_numbers_that_differ_are_written_so_that_they_differ(make_report, make_finding):
    finding = make_finding(evidence=Evidence(0.12345678901, 0.12345678902, 999999.44, "rad", 1024))
    text = drawn(make_report(finding))
    assert "0.12345678901 rad" in text
    assert "0.12345678902 rad" in text
    assert "999,999.44 rad" in text


def test_user_text_cannot_steer_the_terminal(make_report, make_finding):
    finding = make_finding(message="red \x1b[31m [red]ink[/red]", where=Where("a\x1b]0;title\x07b"))
    text = drawn(make_report(finding, spec="m[0].py:\x1b[2J"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]ink[/red]" in text


@pytest.mark.parametrize("content", [b"\x00\xff\xfe\x01", b"# coding: nonsense\nx = 1\n", b"one line\n"])
def test_a_source_line_that_cannot_be_read_is_left_out(make_report, make_finding, tmp_path, content):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    text = drawn(make_report(make_finding(where=Where("m", "", str(path), 2))), 160)
    assert "model.bin:2" in text
    assert "> " not in text


def test_a_clean_report_is_short(make_report):
    text = drawn(make_report())
    assert "PASS · no findings · exit status 0" in text
    assert "explain" not in text
    assert len(text.splitlines()) <= 6


def test_nothing_checked_says_why(make_report):
    text = drawn(make_report(encodings=[]))
    assert "NOTHING CHECKED: no position encoding was found" in text
    assert "exit status 3" in text


def test_a_rule_that_failed_halfway_is_told(make_report, make_finding):
    report = make_report(make_finding())
    report.outcomes[0].reason = "internal error in PE901: KeyError: 'x'"
    assert "incomplete" in drawn(report)


def test_several_targets_are_totalled(report, make_report):
    text = drawn([report, make_report(), make_report(encodings=[])])
    assert "3 targets: 1 fail, 1 nothing-checked, 1 pass" in text


def test_statistics_count_per_rule(report, make_report):
    rows = [line.split() for line in drawn([report, report, make_report()], statistics=True).splitlines()]
    assert ["PE901", "made-up", "error", "2", "2"] in rows


def test_inspection_lists_parameters_and_sites(make_report):
    stream = StringIO()
    table.render_inspection([make_report()], Console(file=stream, width=100, color_system=None))
    text = stream.getvalue()
    for fact in (
        "rope-1",
        "500,000.0",
        "64 values, 1.0 to",
        "layers 0-31",
        "model.layers.{0-31}.self_attn",
        "rotary (mul) × 2",
        "rotary.py:7",
    ):
        assert fact in text


@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        ("Rows repeat.", "Rows repeat. (at 1,024 tokens)"),
        ("At 1,024 tokens rows repeat.", "At 1,024 tokens rows repeat. "),
    ],
)
def test_the_length_is_said_once(make_report, make_finding, effect, expected):
    text = drawn(make_report(make_finding(effect=effect)))
    assert f"effect    {expected}" in text
    assert text.count("1,024 tokens") == 2


def test_what_was_checked_is_named_once(make_report):
    report = make_report()
    report.target = TargetInfo("model.py:net", "python factory model.py:net")
    title = drawn(report, 100).partition("\n")[0]
    assert title.strip() == "pediag check model.py:net · python factory · 1,024 tokens"
