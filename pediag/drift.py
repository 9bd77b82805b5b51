"""From which position on precision breaks the encodings of a target, lane by lane, and the same on another machine.

A target goes through the pipeline of :mod:`pediag.check` up to its rules; what is known of it is then replayed in other
precisions. Nothing of the model is run again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pediag.check import Known, Progress, alone, look
from pediag.drifting import fingerprint
from pediag.drifting.measure import measure
from pediag.drifting.model import Made
from pediag.errors import UsageError
from pediag.process import lean
from pediag.report.drift import Drift
from pediag.version import __version__

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pediag.settings import Allowed
    from pediag.targets import Inputs

LANES = (
    "as written",
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "autocast bfloat16",
    "autocast float16",
    "default bfloat16",
    "default float16",
    "tf32",
    "cuda",
    "cuda with TF32",
    "xpu",
    "xpu with TF32",
    "mps",
)
"""The lanes that can be asked for. Which of them a program and a machine have shows when it is measured."""


def drift(
    target: str | os.PathLike[str] | nn.Module,
    *,
    seq_len: int | None = None,
    lanes: str | Iterable[str] = (),
    dtype: str | torch.dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    inputs: Inputs = (),
    against: str | os.PathLike[str] | None = None,
    trust: Allowed = False,
    progress: Progress | None = None,
) -> Drift:
    """How far the positions of a target are off in other precisions, up to ``seq_len`` tokens.

    ``lanes`` are names such as "as written", "bfloat16", "tf32", "cuda"; without them all that may give other numbers
    for its program, and the accelerators of this machine. ``dtype`` is the serving dtype: a cast to it is a lane too.
    ``against`` is a file that :meth:`Drift.save` or ``pediag drift --save`` wrote: its numbers are compared with those
    of this machine, at its length unless ``seq_len`` is given. The rest is as in :func:`pediag.check`.

    Raises what :func:`pediag.inspect` raises, UsageError for an unknown lane, LoadError where ``against`` is no
    fingerprint. The model is left as it was.
    """
    wanted = _lanes(lanes)
    there = fingerprint.read(against) if against is not None else None
    length = seq_len if seq_len is not None else there.seq_len if there is not None else None
    known = look(
        target, seq_len=length, dtype=dtype, config=config, inputs=inputs, trust=trust, progress=progress
    )
    with alone(target), lean():
        found = measure(known.facets, wanted, progress.step if progress is not None else None)
    made = Drift(known.info, known.facets.seq_len, found, made_with(known.facets.dtype or ""), _notes(known))
    if there is not None:
        made.there = there.made
        made.compared = fingerprint.compare(found, there)
    return made


def _lanes(lanes: str | Iterable[str]) -> tuple[str, ...]:
    wanted = (lanes,) if isinstance(lanes, str) else tuple(lanes)
    unknown = next((name for name in wanted if name not in LANES), None)
    if unknown is not None:
        raise UsageError(f"lane {unknown!r} is unknown; the known ones are {', '.join(LANES)}")
    return wanted


def _notes(known: Known) -> list[str]:
    facets = known.facets
    notes = list(known.notes)
    if facets.structural is None and (gap := facets.gaps.get("trace")):
        notes.append(f"nothing was run: {gap}")
    if facets.target is not None and (failure := facets.target.failure) is not None:
        stopped = f"the pass at {facets.seq_len:,} tokens stopped: {failure.message}"
        notes.append(
            f"{stopped}; what counts its own positions was replayed that far, the rest as far as it ran"
        )
    return notes


def made_with(dtype: str = "") -> Made:
    """What numbers of this process are made with."""
    import torch

    from pediag.trace.devices import tf32_allowed

    return Made(
        pediag=__version__,
        torch=str(torch.__version__),
        transformers=_version("transformers"),
        device=_device(),
        default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        matmul_precision=_matmul_precision(),
        tf32=tf32_allowed(),
        dtype=dtype.removeprefix("torch."),
    )


def _matmul_precision() -> str:
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # old and new switches are mixed
        return "mixed"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _device() -> str:
    """The accelerator, or else the instructions of the processor; never the name of the machine."""
    import platform

    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return str(torch.xpu.get_device_name())
    if torch.backends.mps.is_available():
        return "Apple MPS"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}".strip()
