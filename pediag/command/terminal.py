"""What the command line does with streams: writing, complaining, and showing that work goes on."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pediag.errors import PediagError, UsageError, out_of_memory
from pediag.report.wording import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

SECONDS_UNTIL_SHOWN = 1.0
PLAIN_WIDTH = 100
WIDEST = 10_000
MODEL_FILES = (".py", ".pt", ".pt2", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".model")
VOCABULARIES = ("vocab.txt", "merges.txt")
_REPORTS = (b'"schema_version"', b'"$schema"')
"""What reports in JSON and in SARIF begin with."""


def drawn(
    draw: Callable[[Console], None],
    plain_width: int = PLAIN_WIDTH,
    *,
    plain: bool = False,
    stderr: bool = False,
) -> str:
    """What ``draw`` prints: for the terminal on stdout (or ``stderr``), or plain, ``plain_width`` columns wide.

    The COLUMNS variable, when set, overrides the width of plain text.
    """
    from rich.console import Console

    console = Console(stderr=stderr)
    if console.is_terminal and not plain:
        with console.capture() as captured:
            draw(console)
        return captured.get()
    stream = StringIO()
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() and len(columns) < len(str(WIDEST)) else 0
    width = asked or plain_width
    draw(Console(file=stream, width=width, color_system=None, force_terminal=False))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def write(text: str, output: Path | None = None) -> None:
    """Write to ``output``, or to stdout when None. A reader that has gone away is no error.

    Raises UsageError when the text cannot be written.
    """
    if output is not None:
        _replace(output, text)
        return
    if sys.stdout is None:
        raise UsageError("stdout is closed: nothing can be shown; open it, or give --output FILE")
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"stdout cannot be written: {error.strerror or error}") from None


def show(text: str) -> None:
    """Write to stderr, which may be closed or have no reader: what goes there is said beside the report."""
    with contextlib.suppress(AttributeError, ValueError):
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def unicode() -> bool:
    """Whether stdout takes more than ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return encoding.lower().replace("-", "").startswith("utf")


def refuse_unwritable(output: Path, read: Iterable[Path] = ()) -> None:
    """Raise UsageError when ``output`` cannot become a file, before any work is done.

    Files that the check itself reads, and files of code, weights or vocabularies, are not written over.
    """
    folder = output.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"--output {output}: the folder {folder} does not exist; create it first")
    try:
        is_folder = stat.S_ISDIR(output.stat().st_mode)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise UsageError(f"--output {output}: {getattr(error, 'strerror', None) or error}") from None
    if is_folder:
        raise UsageError(f"--output {output}: is a folder; name a file")
    made_of = output.suffix.lower() in MODEL_FILES or output.name.lower() in VOCABULARIES
    if made_of or any(path.exists() and output.samefile(path) for path in read):
        raise UsageError(
            f"--output {output}: is what a model is made of, and would be lost; name another file"
        )
    if _is_foreign(output):
        raise UsageError(f"--output {output}: is there and is no report of pediag; name another file")


def _is_foreign(output: Path) -> bool:
    """Whether a file holds data that are no report: a tokenizer, a baseline, a project file, the log of a training."""
    suffix = output.suffix.lower()
    if suffix not in (".json", ".jsonl", ".ipynb", ".toml", ".yaml", ".yml") or not output.is_file():
        return False
    try:
        with output.open("rb") as file:
            head = file.read(200).lstrip()
    except OSError:
        return False
    starts = (b"{", b"[") if suffix in (".json", ".jsonl", ".ipynb") else (b"",)
    return bool(head) and head.startswith(starts) and not any(mark in head for mark in _REPORTS)


def refuse_page(output: Path | None) -> None:
    """Raise UsageError when a page for a browser would be written to a terminal."""
    if output is None and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("--format html writes a page for a browser: name a file with --output report.html")


def _replace(output: Path, text: str) -> None:
    special = output.exists() and not output.is_file()  # a pipe, a terminal: its link leads to no path
    path = output if special else output.resolve()
    partial = path if special else path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        if not special:
            partial.replace(path)
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror or error}") from error
    finally:
        if not special:
            partial.unlink(missing_ok=True)


def complain(message: str) -> None:
    """One line on stderr, without what steers a terminal."""
    print(f"pediag: {printable(' '.join(message.split()))}", file=sys.stderr)


def told(error: BaseException, target: str = "") -> str:
    """One line for a person: what a known error says, or a request to report an unknown one.

    Before it goes the traceback, to stderr, when it was asked for.
    """
    if tracebacks():
        import traceback

        traceback.print_exception(error)
    said = getattr(error, "format_message", None)  # typer's errors: their base class moved between versions
    known = isinstance(error, PediagError) or said is not None
    text = said() if said else str(error) if known else f"{type(error).__name__}: {error}"
    line = printable(" ".join(text.replace("Value error, ", "").split()))
    if said and (context := getattr(error, "ctx", None)) is not None and "Invalid value" not in line:
        line = f"{line.rstrip('.')}; see `{context.command_path} --help`"
    line = line if target in line else f"{target}: {line}"
    if known:
        return f"error: {line}"
    if out_of_memory(error):
        where = f"{target}: " if target else ""
        return f"error: {where}memory did not suffice: give a shorter --seq-len, or a smaller model"
    return f"internal error: {line}; please report it (PEDIAG_TRACEBACK=1 shows the traceback)"


def tracebacks() -> bool:
    """Whether PEDIAG_TRACEBACK asks for tracebacks."""
    return os.environ.get("PEDIAG_TRACEBACK", "") not in ("", "0")


def log_to_stderr() -> None:
    """Show what pediag logs: the tracebacks of rules that failed inside."""
    import logging

    logger = logging.getLogger("pediag")
    logger.setLevel(logging.DEBUG)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends what the user's own code prints to stderr, so that the report alone is on stdout.

    Also what it writes past ``sys.stdout``: to file descriptor 1, or to ``sys.__stdout__``.
    """
    with contextlib.redirect_stdout(sys.stderr), _descriptor_to_stderr():
        yield


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing can be written there
        yield
        return
    try:
        _flush()
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def stdout_is_stderr() -> None:
    """From now on what is printed goes to stderr, or nowhere where that is closed."""
    sys.stdout = sys.stderr
    try:
        os.dup2(2, 1)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.__stdout__.flush()  # type: ignore[union-attr]


def settle() -> None:
    """Give what is written to a closed stderr somewhere to go; forget a size of the terminal that is no number."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name, "")
        if not (value.isascii() and value.isdecimal()):
            os.environ.pop(name, None)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


class Progress:
    """A spinner on stderr while work lasts over a second and stderr is a terminal; else nothing."""

    def __init__(self) -> None:
        self._target = ""
        self._text = "starting"
        self._done = ""
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()

    def for_target(self, target: str) -> Progress:
        """This progress, showing that ``target`` is at work."""
        self._target = target
        if self._timer is None:
            self._wait()
        return self

    def count(self, done: int, total: int) -> None:
        """Say how many of several targets are done."""
        self._done = f"{done} of {total} done" if total > 1 else ""
        if self._timer is None:
            self._wait()
        self._update()

    def step(self, text: str) -> None:
        """Say what is being done now."""
        self._text = text
        self._update()

    def _update(self) -> None:
        with self._lock:
            if self._live is not None:
                self._live.update(self._spinner())

    def pause(self) -> None:
        """Take the spinner away until the next target."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _wait(self) -> None:
        if sys.stderr.isatty():
            self._timer = threading.Timer(SECONDS_UNTIL_SHOWN, self._show)
            self._timer.daemon = True
            self._timer.start()

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live

        with self._lock:
            if self._timer is not None:
                # The streams stay as they are: the pipeline has its own redirection in force.
                self._live = Live(
                    self._spinner(),
                    console=Console(stderr=True),
                    refresh_per_second=10,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()

    def _spinner(self) -> Spinner:
        from rich.spinner import Spinner
        from rich.text import Text

        return Spinner("dots", Text(": ".join(filter(None, (self._done, self._target, self._text)))))
