"""The table: everything said, nothing cut off, nothing of the user's text obeyed."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from pediag.report import rich as table
from pediag.report.model import Stopped, TargetInfo
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


def rows(text: str) -> list[list[str]]:
    """The lines of a drawing, each as its words."""
    return [line.split() for line in text.splitlines()]


def test_several_targets_are_a_row_each_in_order_and_totals(report, make_report):
    stopped = Stopped("models/broken.pt", "models/broken.pt: damaged or cut short")
    clean, blind = make_report(spec="models/a.pt"), make_report(spec="models/sub/b.pt", encodings=[])
    text = drawn([clean, stopped, blind, clean], notes=["models: a folder"])
    assert ["in", "models/"] in rows(text)
    assert [row for row in rows(text) if row][-6:] == [
        ["a.pt", "PASS", "0", "0", "0", "rotary"],
        ["broken.pt", "STOPPED", "damaged", "or", "cut", "short"],
        ["sub/b.pt", "NOTHING", "CHECKED", "0", "0", "0", "no", "position", "encoding", "was", "found"],
        ["a.pt", "PASS", "0", "0", "0", "rotary"],
        ["note:", "models:", "a", "folder"],
        "4 targets: 1 stopped, 1 nothing-checked, 2 pass · no findings · exit status 2".split(),
    ]
    assert text.count("pediag check models/a.pt") == 2
    text = drawn([report, clean, blind])
    assert "3 targets: 1 fail, 1 nothing-checked, 1 pass · 1 error · exit status 1" in text
    assert ["model.py:net", "FAIL", "1", "0", "0", "rotary"] in rows(text)


def test_of_many_targets_the_clean_have_a_row_only_and_the_alike_are_named(make_report, make_finding):
    def faulty(number: int):
        return make_report(make_finding(message=f"It is {number} too short."), spec=f"runs/{number}.pt")

    clean = [make_report(spec=f"runs/clean-{number}.pt") for number in range(200)]
    text = drawn(clean)
    assert "pediag check" not in text
    assert text.rstrip().splitlines()[-1] == "200 targets: 200 pass · no findings · exit status 0"
    assert len(text.splitlines()) < 210
    blind = [make_report(spec=f"runs/blind-{number}.pt", encodings=[]) for number in range(2)]
    text = drawn([*clean[:5], *map(faulty, range(9)), *blind])
    assert text.count("pediag check") == 2
    assert "It is 0 too short." in text
    assert (
        "the same findings, with numbers of their own, in 1.pt, 2.pt, 3.pt, 4.pt, 5.pt, 6.pt and 2 more"
        in text
    )
    assert "the same holds for blind-1.pt" in text
    other = make_report(make_finding(where=Where("decoder.pos")), spec="runs/other.pt")
    assert drawn([*clean[:10], faulty(1), other]).count("pediag check") == 2


def test_one_of_several_that_is_left_has_no_table(report):
    text = drawn([report], notes=["runs: a folder"])
    assert "note: runs: a folder" in text
    assert "targets" not in text


def test_rows_keep_whole_names_at_any_width(make_report):
    deep = [f"runs/{'a_rather_long_name_' * 4}/{number}/model.pt" for number in range(2)]
    results = [make_report(spec=spec) for spec in deep]
    for width in (40, 80, 200):
        text = "".join("".join(line.split()) for line in drawn(results, width).splitlines())
        assert "0/model.pt" in text
        assert max(map(len, drawn(results, width).splitlines())) <= width
    apart = [make_report(spec="x/a.pt"), make_report(spec="package.module:build")]
    assert ["package.module:build", "PASS", "0", "0", "0", "rotary"] in rows(drawn(apart))


def test_statistics_count_per_rule(report, make_report):
    rows = [line.split() for line in drawn([report, report, make_report()], statistics=True).splitlines()]
    assert ["PE901", "made-up", "error", "2", "2"] in rows


def inspected(results) -> str:
    stream = StringIO()
    table.render_inspection(results, Console(file=stream, width=100, color_system=None))
    return stream.getvalue()


def test_inspections_of_many_are_a_table(make_report):
    few = inspected([make_report(), Stopped("broken.pt", "broken.pt: empty file"), make_report(encodings=[])])
    assert few.count("pediag inspect") == 2
    assert ["model.py:net", "rotary,", "half", "pairing"] in rows(few)
    assert ["broken.pt", "empty", "file"] in rows(few)
    assert ["model.py:net", "no", "position", "encoding", "was", "found"] in rows(few)
    assert "pediag inspect" not in inspected([make_report()] * 11)


def test_inspection_lists_parameters_and_sites(make_report):
    text = inspected([make_report()])
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
