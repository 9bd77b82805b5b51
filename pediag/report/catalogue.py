"""The rules themselves as a table, as pages and as JSON: what ``pediag rules`` and ``explain`` print."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pediag.report.wording import STYLES, printable
from pediag.rules.packages import OWN
from pediag.rules.rule import Rule


def render(rules: Iterable[Rule], console: Console) -> None:
    """Print one row per rule: code, name, severity, basis, what it needs, and its summary.

    Of a rule that another package brings also the name of that package.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("code", no_wrap=True)
    table.add_column("name", style="bold", overflow="fold")
    table.add_column("severity", no_wrap=True)
    table.add_column("basis", overflow="fold")
    table.add_column("needs", overflow="fold")
    table.add_column("fires when", ratio=1, overflow="fold")
    for rule in rules:
        severity = Text(rule.severity, style=STYLES[rule.severity])
        needs = ", ".join(rule.needs)
        summary = Text(printable(rule.summary))
        if rule.package != OWN:
            summary.append(f"\nfrom {printable(rule.package)}", style="dim")
        table.add_row(rule.code, rule.name, severity, rule.basis, needs, summary)
    console.print(table)


def as_json(rules: Iterable[Rule]) -> str:
    """The catalogue as ``{"schema_version": 1, "rules": [...]}``."""
    from pediag.report.json import SCHEMA_VERSION, dump

    entries = [
        {
            "code": rule.code,
            "name": rule.name,
            "severity": rule.severity,
            "basis": rule.basis,
            "package": rule.package,
            "needs": list(rule.needs),
            "summary": rule.summary,
            "references": list(rule.references),
        }
        for rule in rules
    ]
    return dump({"schema_version": SCHEMA_VERSION, "rules": entries})


def page(rule: Rule) -> str:
    """The rule's published page in Markdown: its facts, then its module's docstring, then references."""
    package = "" if rule.package == OWN else f" · from the package {rule.package}"
    facts = f"*{rule.severity} · basis: {rule.basis} · needs: {', '.join(rule.needs)}{package}*"
    parts = [f"# {rule.code} {rule.name}", facts, rule.page]
    if rule.references and "\n## References\n" not in rule.page:
        parts.append("## References\n\n" + "\n".join(f"- {reference}" for reference in rule.references))
    return "\n\n".join(part for part in parts if part) + "\n"


def explain(rule: Rule, console: Console) -> None:
    """Print the page: set as text on a terminal, as Markdown source elsewhere."""
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(page(rule)))
    else:
        console.print(page(rule), markup=False, highlight=False, soft_wrap=True, end="")
