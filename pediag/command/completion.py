"""What the shell is told when a word of a command line is to be completed. Imports no torch."""

from __future__ import annotations

from pediag.errors import PediagError


def rules(incomplete: str) -> list[tuple[str, str]]:
    """Codes, and names once a letter of one is typed, each with the other one beside it; of a comma list the last part.

    Where nothing is offered the shell completes file names, as it does for targets.
    """
    from pediag.rules import registry

    before, comma, begun = incomplete.rpartition(",")
    try:
        known = registry.all_rules()
    except PediagError:
        return []
    found = [(rule.code, rule.name) for rule in known if rule.code.startswith(begun)]
    if begun:
        found += [(rule.name, rule.code) for rule in known if rule.name.startswith(begun)]
    return [(f"{before}{comma}{word}", beside) for word, beside in found]
