"""Finds the rules. A rule exists by being a file ``FAMILY/xx###_name.py`` that declares one :class:`Rule`."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pediag.errors import PediagError, UsageError
from pediag.rules import packages
from pediag.rules.finding import SEVERITIES, Finding
from pediag.rules.rule import Basis, Check, Facet, Facets, Rule, described

PATTERN = "*/pe[0-9][0-9][0-9]_*.py"

_left_out: list[str] = []
"""A sentence for each package whose rules could not be read."""


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule there is: those that ship, then those of installed packages, each sorted by code.

    Reads the rule files without importing them. A package whose rules cannot be read is left out, see
    :func:`left_out`. Raises PediagError when two packages claim one code or one name.
    """
    rules = (*shipped(), *installed())
    for attribute in ("code", "name"):
        _refuse_duplicates(rules, attribute)
    _refuse_prefixes(rules)
    return rules


@cache
def shipped() -> tuple[Rule, ...]:
    """Every rule that ships with pediag, sorted by code."""
    return discover(Path(__file__).parent, "pediag.rules")


@cache
def installed() -> tuple[Rule, ...]:
    """The rules of packages that name themselves under the entry points ``pediag.rules``, sorted by code."""
    _left_out.clear()
    found = [rule for entry in packages.named() for rule in _of_package(entry)]
    return tuple(sorted(found, key=lambda rule: rule.code))


def left_out() -> tuple[str, ...]:
    """A sentence for each package whose rules could not be read, of those looked for so far."""
    return tuple(_left_out)


def forget() -> None:
    """Look for the rules of installed packages anew when rules are next asked for."""
    for function in (all_rules, installed):
        function.cache_clear()
    _left_out.clear()


def discover(folder: Path, package: str) -> tuple[Rule, ...]:
    """The rules in ``folder``, whose dotted name is ``package``, sorted by code.

    Raises PediagError for a file that does not declare exactly one rule of its own code and name, and
    for a code or a name that two files claim.
    """
    return _read(sorted(folder.glob(PATTERN)), package)


def find(code_or_name: str) -> Rule:
    """The rule of this code or name, in any case. Raises UsageError that names the nearest one."""
    wanted = code_or_name.strip().lower()
    for rule in all_rules():
        if wanted in (rule.code.lower(), rule.name):
            return rule
    raise UsageError(f"unknown rule {code_or_name!r}{_nearest(wanted)}; `pediag rules` lists all")


def select(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The rules named by ``select`` (all when empty) less those named by ``ignore``, sorted by code.

    An entry is a code, a name or the beginning of a code (``PE``, ``PE3``, ``PE30``), in any case.
    Raises UsageError for an entry that names no rule, and when the two lists leave no rule.
    """
    chosen, dropped = split(select), split(ignore, "ignore")
    kept = {code for entry in chosen for code in _matches(entry)}
    kept = kept or {rule.code for rule in all_rules()}
    left = kept - {code for entry in dropped for code in _matches(entry)}
    if kept and not left:
        raise UsageError(f"nothing is left to run: ignoring {', '.join(dropped)} drops every selected rule")
    return tuple(rule for rule in all_rules() if rule.code in left)


def split(entries: Iterable[str] | str, option: str = "select") -> list[str]:
    """Entries as given, with comma lists taken apart and what is blank between two commas dropped.

    Raises UsageError for an entry without any code: nothing is not all. ``option`` is whose entries they are.
    """
    listed = [entries] if isinstance(entries, str) else list(entries)
    for entry in listed:
        if not entry.replace(",", "").strip():
            advice = "give a code, a name or the beginning of a code (PE1), or leave it out"
            raise UsageError(f"{option}: {entry!r} names no rule; {advice}")
    return [part.strip() for entry in listed for part in entry.split(",") if part.strip()]


def _matches(entry: str) -> set[str]:
    wanted = entry.lower()
    exact = {rule.code for rule in all_rules() if wanted in (rule.code.lower(), rule.name)}
    if exact:
        return exact
    family = {rule.code for rule in all_rules() if _is_prefix(wanted, rule.code.lower())}
    if not family:
        raise UsageError(f"unknown rule or prefix {entry!r}{_nearest(wanted)}; `pediag rules` lists all")
    return family


def _is_prefix(wanted: str, code: str) -> bool:
    return len(wanted) >= 2 and code.startswith(wanted)


def _nearest(wanted: str) -> str:
    import difflib

    by_spelling = {key: rule for rule in all_rules() for key in (rule.code.lower(), rule.name)}
    close = difflib.get_close_matches(wanted, by_spelling, n=1, cutoff=0.5)
    if not close:
        return ""
    rule = by_spelling[close[0]]
    return f": did you mean {rule.code} {rule.name}?"


def _of_package(entry: packages.Named | packages.Unread) -> tuple[Rule, ...]:
    """The rules of one entry; none, and a sentence why, where it or one of its files is at fault."""
    try:
        if isinstance(entry, packages.Unread):
            raise PediagError(entry.why)
        return _read(packages.rule_files(entry), entry.module, entry.package)
    except packages.Clash:
        raise
    except PediagError as error:
        _left_out.append(f"the rules of the package {entry.package} are left out: {error}")
        return ()


def _read(paths: Iterable[Path], module: str, package: str = packages.OWN) -> tuple[Rule, ...]:
    rules = [_load(path, module, package) for path in paths]
    for attribute in ("code", "name"):
        _refuse_duplicates(rules, attribute)
    return tuple(sorted(rules, key=lambda rule: rule.code))


def _load(path: Path, parent: str, package: str) -> Rule:
    """The rule a file declares, read from its source: the file is imported when the rule is first run."""
    tree = _parsed(path)
    declared = [(node, call) for node in tree.body if (call := _declaration(node)) is not None]
    if len(declared) != 1:
        raise PediagError(f"{path.name} declares {len(declared)} rules; a rule file declares exactly one")
    function, call = declared[0]
    assert isinstance(function, ast.FunctionDef)
    try:
        given = {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg}
    except (ValueError, TypeError, RecursionError) as error:
        raise PediagError(f"{path.name}: what is said in @rule(...) must be plain values") from error
    code, _, name = path.stem.partition("_")
    expected = (code.upper(), name.replace("_", "-"))
    if (given.get("code"), given.get("name")) != expected:
        said = f"{given.get('code')} {given.get('name')}"
        raise PediagError(f"{path.name} declares {said}; its file name says {' '.join(expected)}")
    _refuse_unknown(path.name, given)
    module = f"{parent}.{path.parent.name}.{path.stem}"
    page = ast.get_docstring(tree) or ""
    return described(page, str(path), _imported(module, function.name), package=package, **given)


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(_head(path.read_text(encoding="utf-8")), str(path))
    except OSError as error:
        raise PediagError(f"{path.name}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, SyntaxError, RecursionError) as error:
        raise PediagError(f"{path.name} is not valid Python: {' '.join(str(error).split())[:200]}") from error


def _refuse_unknown(file: str, given: dict[str, Any]) -> None:
    """Raise PediagError for a declaration that lacks something or says what no rule can."""
    allowed = {"severity": SEVERITIES, "basis": get_args(Basis)}
    for key in ("severity", "basis", "needs"):
        if key not in given:
            raise PediagError(f"{file}: @rule(...) lacks {key}")
    for key, values in allowed.items():
        if given[key] not in values:
            raise PediagError(f"{file}: {key} is one of {', '.join(values)}; got {given[key]!r}")
    for key in ("needs", "instead", "references"):
        listed = given.get(key, ())
        if not isinstance(listed, tuple) or not all(isinstance(item, str) for item in listed):
            raise PediagError(f"{file}: {key} is a tuple of texts; got {listed!r}")
    for key in ("needs", "instead"):
        if strange := [item for item in given.get(key, ()) if item not in get_args(Facet)]:
            raise PediagError(f"{file}: {key} are of {', '.join(get_args(Facet))}; got {strange[0]!r}")
    if other := set(given) - _KEYS:
        raise PediagError(f"{file}: @rule(...) takes no {min(other)}; it takes {', '.join(sorted(_KEYS))}")


_KEYS = {"code", "name", "severity", "basis", "needs", "instead", "references"}


def _head(text: str) -> str:
    """A rule file up to its one declared function, whose body is left out: most of the file need not be parsed."""
    start = text.find("\n@rule(")
    signature = text.find("\ndef ", start)
    end = text.find(":\n", signature)
    if text.count("\n@rule(") != 1 or -1 in (start, signature, end):
        return text
    return text[: end + 1] + " ...\n"


def _declaration(node: ast.stmt) -> ast.Call | None:
    """The ``@rule(...)`` above a function, if it has one."""
    for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
        if isinstance(decorator, ast.Call):
            named = decorator.func
            if isinstance(named, ast.Name) and named.id == "rule":
                return decorator
    return None


def _imported(module: str, function: str) -> Check:
    def check(facets: Facets) -> Iterator[Finding]:
        declared: Rule = getattr(importlib.import_module(module), function)
        return declared.check(facets)

    return check


def _refuse_duplicates(rules: Sequence[Rule], attribute: str) -> None:
    seen: dict[str, Rule] = {}
    for rule in rules:
        value = getattr(rule, attribute)
        if value in seen:
            raise _twice(f"rule {attribute} {value}", seen[value], rule)
        seen[value] = rule


def _refuse_prefixes(rules: Sequence[Rule]) -> None:
    """Raise PediagError for a name that is the beginning of a code, which would select other rules than before."""
    for one in rules:
        taken = next((rule for rule in rules if rule.code.lower().startswith(one.name)), None)
        if taken is not None:
            told = f"the rule name {one.name} of {one.package} is how the code {taken.code} of {taken.package} begins"
            raise packages.Clash(f"{told}: {packages.REMEDY}")


def _twice(what: str, one: Rule, other: Rule) -> PediagError:
    if one.package == other.package:
        return PediagError(f"{what} is declared by {one.source} and {other.source}")
    where = f"{one.package} ({one.source}) and {other.package} ({other.source})"
    return packages.Clash(f"{what} is declared by the packages {where}: {packages.REMEDY}")
