"""The rules as a folder of Markdown pages: ``python -m pediag.report.pages docs/rules``. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pediag.report import catalogue
from pediag.rules.registry import shipped
from pediag.rules.rule import Rule

INDEX = "README.md"
HEAD = """\
# The rules

Written by `make docs` from the rules themselves; `pediag explain CODE` shows the same pages."""
STALE = "pe[0-9][0-9][0-9]_*.md"


def file_name(rule: Rule) -> str:
    """Name of the rule's page, which is that of its source file: ``pe302_dropout_on_positions.md``."""
    return f"{Path(rule.source).stem}.md"


def page(rule: Rule) -> str:
    """The page that ``pediag explain`` shows."""
    return catalogue.page(rule)


def index(rules: Iterable[Rule]) -> str:
    """The table of all rules in Markdown, one section per family."""
    families: dict[str, list[Rule]] = {}
    for rule in rules:
        families.setdefault(Path(rule.source).parent.name, []).append(rule)
    return "\n\n".join([HEAD, *(_section(family, members) for family, members in families.items())]) + "\n"


def pages(rules: Iterable[Rule]) -> dict[str, str]:
    """Every page and the index, by file name."""
    listed = list(rules)
    return {INDEX: index(listed), **{file_name(rule): page(rule) for rule in listed}}


def write(rules: Iterable[Rule], folder: Path) -> list[Path]:
    """Write all pages into ``folder``, drop those of rules that are gone, and return the paths written."""
    texts = pages(rules)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(STALE):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]


def main(arguments: Sequence[str]) -> int:
    """Write the pages into the one folder given; exit status 2 when it is not exactly one."""
    if len(arguments) != 1:
        print("usage: python -m pediag.report.pages FOLDER", file=sys.stderr)
        return 2
    try:
        written = write(shipped(), Path(arguments[0]))
    except OSError as error:
        print(f"cannot write the pages: {error}", file=sys.stderr)
        return 2
    print(f"{len(written) - 1} rules in {arguments[0]}")
    return 0


def _section(family: str, rules: Iterable[Rule]) -> str:
    rows = ["| code | name | severity | basis | fires when |", "|---|---|---|---|---|"]
    for rule in rules:
        link, summary = f"[{rule.code}]({file_name(rule)})", rule.summary.replace("|", "\\|")
        cells = (link, rule.name, rule.severity, rule.basis, summary)
        rows.append(f"| {' | '.join(cells)} |")
    return f"## {family.capitalize()}\n\n" + "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
