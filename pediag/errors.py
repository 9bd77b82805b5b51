"""The errors a person may see: one line each, saying what was wrong, where, and what to do."""

from __future__ import annotations


class PediagError(Exception):
    """Base of every error raised on purpose. ``exit_status`` is what the command line returns."""

    exit_status = 2


class UsageError(PediagError):
    """An option, code or argument that cannot be meant as given."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, or was asked for beyond what can be counted; PyTorch tells it as a RuntimeError."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return said or isinstance(error, MemoryError)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")


class LoadError(PediagError):
    """A target that cannot be opened: wrong path, corrupt file, failing import, unsafe pickle."""


class NoModel(LoadError):
    """A file that was read and is no model but what goes with one, such as the state of an optimiser."""


class TraceError(PediagError):
    """A model that cannot be run abstractly: names the input tried, the place and the cause."""


class PediagWarning(UserWarning):
    """What pytest shows of a target without failing a test: findings below the threshold, and notes."""
