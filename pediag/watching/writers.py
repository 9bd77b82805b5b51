"""Where records go: a file of JSON lines, and TensorBoard."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any, Protocol

from pediag.errors import UsageError

SCHEMA_VERSION = 1
"""Of the records; ``pediag/watching/schema_version_1.json`` is the schema."""

_BEGINNING = b'{"kind": "'
"""What every record begins with."""


class Writer(Protocol):
    """Takes records as they are made."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep one record."""

    def close(self) -> None:
        """No more will come."""


class JsonLines:
    """One record a line, each flushed; a log that is there is continued, on a line of its own.

    Raises UsageError where it cannot be opened, and for a file that holds something else: it is left as it is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            cut = _ends_within_a_line(path)
            self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115
            if cut:
                self._file.write("\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"log: {os.fspath(path)!r} cannot be written: {reason}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line. Numbers that are not finite become strings, as in the JSON report."""
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars of step records under ``pediag/``, into a folder or a SummaryWriter that is there.

    Raises UsageError where tensorboard is not installed, and for what is neither.
    """

    def __init__(self, where: Any) -> None:
        self._own = isinstance(where, (str, os.PathLike))
        if not self._own:
            if not hasattr(where, "add_scalar"):
                raise UsageError(
                    f"tensorboard must be a folder or a SummaryWriter; got a {type(where).__name__}"
                )
            self._writer = where
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "tensorboard is not installed: pip install tensorboard, or leave tensorboard= out"
            ) from error
        try:
            self._writer = SummaryWriter(os.fspath(where))
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"tensorboard: {os.fspath(where)!r} cannot be used as a folder: {reason}"
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step; of a finding its message."""
        if record["kind"] == "step":
            for name, value in scalars(record):
                self._writer.add_scalar(f"pediag/{name}", value, record["step"])
        elif record["kind"] == "finding":
            self._writer.add_text(f"pediag/{record['code']}", record["message"], record["step"])

    def close(self) -> None:
        """Flush, and close what was opened here."""
        self._writer.flush()
        if self._own:
            self._writer.close()


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of every number of a step record."""
    for group in ("scale", "gradient"):
        for name, value in record.get(group, {}).items():
            if value is not None:
                yield f"{group}/{name}", value
    for group in ("tables", "attention"):
        for name, numbers in record.get(group, {}).items():
            for what, value in numbers.items():
                if isinstance(value, float):
                    yield f"{group}/{name}/{what}", value
    yield "cost_s", record["cost_s"]


def _ends_within_a_line(path: str | os.PathLike[str]) -> bool:
    """Whether a log that is there stops within a record. Raises UsageError for a file that is no log."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return False
    with open(path, "rb") as file:
        if not file.read(len(_BEGINNING)).startswith(_BEGINNING):
            raise UsageError(f"log: {os.fspath(path)!r} holds something else than a log; give another name")
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _plain(item: Any) -> Any:
    """``item`` as JSON has it."""
    if isinstance(item, float) and not math.isfinite(item):
        return "nan" if math.isnan(item) else "inf" if item > 0 else "-inf"
    if isinstance(item, Mapping):
        return {str(name): _plain(value) for name, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(value) for value in item]
    return item
