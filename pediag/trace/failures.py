"""Why a pass stopped: what is known of the error that ended it, or of the one behind it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pediag.targets import shown
from pediag.trace.frames import Frame, _is_glue
from pediag.trace.graph import Node, Site
from pediag.trace.place import DependsOnContent, Laborious, Overrun, explain
from pediag.trace.recorder import Recorder

_START = (
    "start a process group (torchrun, torch.distributed.init_process_group), or check the model outside of it"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a forward pass stopped: the model's own error, and where.

    ``table`` and ``largest`` name a table that ended and the row it was asked for, ``site`` a join of positions and
    content that do not fit, ``fixed`` one of content and a stored value. ``abstract`` says that the model's code
    reads content, which has no numbers here. ``advice`` is what to do, where the error itself tells.
    """

    message: str
    module: str
    frame: Frame | None
    site: Site | None = None
    table: Node | None = None
    largest: int | None = None
    abstract: bool = False
    fixed: bool = False
    advice: str = ""


def stopped(recorder: Recorder, error: Exception) -> Failure:
    """What is known of an error that ended a pass, or of the one behind it."""
    chain = list(_chain(error))
    known = recorder.failed_error in chain
    raised = recorder.place.raised
    module = raised[1] if raised is not None and raised[0] is error else recorder.place.module
    module = recorder.failed_module if known else module
    frame = _last_user_frame(error) or (recorder.failed_frame if known else None)
    overrun = next((item for item in chain if isinstance(item, Overrun)), None)
    if overrun is not None:
        return Failure(str(overrun), module, frame, None, overrun.table, overrun.largest)
    site, fixed = (recorder.failed_site, recorder.failed_fixed) if known else (None, False)
    abstract = any(map(_abstract, chain))
    advice = _START if any(map(_wants_ranks, chain)) else ""
    return Failure(explain(error), module, frame, site, abstract=abstract, fixed=fixed, advice=advice)


def laborious(recorder: Recorder, error: Laborious) -> Failure:
    """What is said of a pass that was ended because the model's code loops over its tokens."""
    return Failure(str(error), recorder.place.module, _last_user_frame(error), abstract=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _abstract(error: BaseException) -> bool:
    """Whether an error says that a number or shape depends on content."""
    name = type(error).__name__
    return isinstance(error, DependsOnContent) or "DataDependent" in name or "DynamicOutputShape" in name


def _wants_ranks(error: BaseException) -> bool:
    """Whether an error is that of torch.distributed where no process group was started."""
    where = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("torch.distributed") for name in where[-2:]) and not _has_ranks()


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _last_user_frame(error: BaseException) -> Frame | None:
    frames = [
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_glue(frame.f_code)
    ]
    return frames[-1] if frames else None


def too_long(failure: Failure) -> bool:
    """Whether a shorter input might run: a table ended, sizes do not fit, or the model's own check refused."""
    refused = failure.message.startswith(("AssertionError", "IndexError", "ValueError"))
    return failure.table is not None or failure.site is not None or failure.fixed or refused


def distance(failure: Failure | None) -> int:
    """How little a failed attempt tells: least for one that failed where positions meet content."""
    if failure is None:
        return 0
    if failure.site is not None:
        return 1
    if failure.table is not None:
        return 2
    return 3 if failure.abstract else 4


GIVE_INPUTS = "give its inputs with --input"


def why(failure: Failure, *, given: bool) -> str:
    """Why the pass at the structural length stopped, and what to do."""
    if failure.advice:
        return f"raised {told(failure)}; {failure.advice}"
    if failure.abstract:
        return (
            f"needs the values of tokens or activations, which have none here: {told(failure)}; "
            "check the part of the model that comes before or after that line"
        )
    spec = "'name=dtype[B,N]'"
    advice = "change its --input" if given else f"{GIVE_INPUTS} {spec} (in Python inputs=[{spec}])"
    return f"raised {told(failure)}; {advice} or an example_inputs(seq_len) beside the model"


def told(failure: Failure) -> str:
    """The error of a pass in words, and the line it came from."""
    place = f" at {shown(failure.frame.file)}:{failure.frame.line}" if failure.frame else ""
    return f"{failure.message.removeprefix('DependsOnContent: ')}{place}"
