"""Fixes of a config: which edits of a report's findings go together, and the file that they make. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pediag.errors import UsageError
from pediag.report.model import Report
from pediag.report.wording import printable
from pediag.rules.finding import Edit, Finding
from pediag.targets.editing import CannotEdit
from pediag.targets.editing import edited as fixed

__all__ = ["MOST_NAMES", "Fixes", "Left", "Step", "fixed", "planned", "written"]

MOST_NAMES = 99
"""Names that are tried for the new file before it is refused."""

UNSAFE = "unsafe: give --unsafe-fixes"


@dataclass(frozen=True, slots=True)
class Step:
    """One finding whose edits are made, and the text before and after them."""

    finding: Finding
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Left:
    """A finding that is left as it is, and why."""

    finding: Finding
    reason: str


@dataclass(slots=True)
class Fixes:
    """What is done about the findings of one report; ``file`` is None where none of them is of a config file."""

    file: Path | None = None
    old: str = ""
    new: str = ""
    steps: list[Step] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def planned(report: Report, *, unsafe: bool = False) -> Fixes:
    """The edits of the report's findings put together, the unsafe ones where they are wanted.

    Findings come in the order of their codes; of two that want different things of one key the first wins. Raises
    UsageError where the file of the config cannot be read.
    """
    findings = sorted(report.findings, key=lambda one: (one.code, one.where.module))
    files = [one.where.file for one in findings if one.fix.edits and one.where.file]
    fixes = Fixes()
    if files:
        fixes.file = Path(files[0])
        fixes.old = fixes.new = _read(fixes.file)
    taken: list[tuple[str, Edit]] = []
    for finding in findings:
        reason = _refused(finding, taken, unsafe=unsafe) or _apply(fixes, finding, taken)
        if reason:
            fixes.left.append(Left(finding, reason))
    return fixes


def _refused(finding: Finding, taken: Sequence[tuple[str, Edit]], *, unsafe: bool) -> str:
    fix = finding.fix
    if not fix.edits:
        return f"by hand: {fix.summary}"
    if fix.applicability != "safe" and not unsafe:
        return UNSAFE
    other = next((code for code, one in taken for edit in fix.edits if _conflict(one, edit)), "")
    return f"contradicts {other}, which comes first: fix again" if other else ""


def _conflict(one: Edit, other: Edit) -> bool:
    if one.path == other.path:
        return one != other
    return one.path.startswith(f"{other.path}.") or other.path.startswith(f"{one.path}.")


def _apply(fixes: Fixes, finding: Finding, taken: list[tuple[str, Edit]]) -> str:
    """Make the edits of a finding; why they cannot be made, or an empty string."""
    made = [edit for _, edit in taken]
    before = fixes.new
    try:
        fixes.new = fixed(before, [edit for edit in finding.fix.edits if edit not in made])
    except CannotEdit as error:
        return str(error)
    fixes.steps.append(Step(finding, before, fixes.new))
    taken += [(finding.code, edit) for edit in finding.fix.edits]
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no UTF-8 text, so it cannot be fixed") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None


# -- writing ------------------------------------------------------------------------------------------------


def written(fixes: Fixes, *, in_place: bool = False) -> Path:
    """Write the fixed text to a new file beside the old one; ``in_place`` over it, which then stays as ``.orig``.

    Nothing that is there is written over, no link is written through. Raises UsageError where that cannot be.
    """
    path = fixes.file
    if path is None:
        raise UsageError("there is no config file to fix")
    if path.is_symlink():
        told = f"{path}: is a link to {printable(os.readlink(path))}, which others may share"
        raise UsageError(f"{told}: fix a copy of the file, and give it with --config")
    try:
        return _over(path, fixes) if in_place else _beside(path, fixes.new)
    except OSError as error:
        raise UsageError(
            f"{path.parent or '.'}: no fixed file can be written there: {error.strerror or error}"
        ) from None


def _beside(path: Path, text: str) -> Path:
    for name in _names(path):
        with contextlib.suppress(FileExistsError):
            _create(name, text, path)
            return name
    raise UsageError(
        f"{path}: all names up to {name.name} are taken: remove the fixed files that are not needed"
    )


def _names(path: Path) -> Iterator[Path]:
    yield path.with_name(f"{path.stem}.fixed{path.suffix}")
    for number in range(2, MOST_NAMES + 1):
        yield path.with_name(f"{path.stem}.fixed-{number}{path.suffix}")


def _over(path: Path, fixes: Fixes) -> Path:
    kept = path.with_name(f"{path.name}.orig")
    if _read(path) != fixes.old:
        raise UsageError(f"{path}: has changed since it was checked: check it again")
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _create(partial, fixes.new, path)
        try:
            _create(kept, fixes.old, path)
        except FileExistsError:
            if _read(kept) != fixes.old:
                raise UsageError(f"{kept}: is there already, and would be lost: move it away") from None
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _create(path: Path, text: str, like: Path) -> None:
    """Make a new file with the permissions of another; one that cannot be completed is taken away."""
    with path.open("xb") as stream:
        try:
            stream.write(text.encode())
            stream.flush()
            path.chmod(like.stat().st_mode & 0o777)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
