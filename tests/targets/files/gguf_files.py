"""Writing GGUF files for tests, by the gguf package, and reading them to the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pediag.errors import LoadError
from pediag.targets import Target, open_target

gguf: Any = pytest.importorskip("gguf")

KINDS = gguf.GGMLQuantizationType
FIXTURE = Path(__file__).parents[3] / "fixtures" / "formats" / "tiny.gguf"

Arrays = dict[str, np.ndarray]


def written(
    path: Path,
    tensors: Arrays,
    say: Callable[[Any], None] = lambda writer: None,
    arch: str = "llama",
    **options: Any,
) -> Path:
    """A file by the package's own writer."""
    writer = gguf.GGUFWriter(path, arch, **options)
    say(writer)
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_kind(path: Path, kind: Any, raw: np.ndarray) -> Path:
    """A file with one tensor "x" of a quantised type, its bytes (rows, bytes of a row) as given."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        read_all(open_target(path))
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


def read_all(target: Target) -> None:
    for tensor in target.tensors.values():
        assert tuple(tensor.load().shape) == tensor.shape
