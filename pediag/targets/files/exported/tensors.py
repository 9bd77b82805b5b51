"""The parameters, buffers and constants of an exported program, mapped from its archive."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pediag.errors import LoadError
from pediag.targets._trust import Trust
from pediag.targets.code.usercode import told_as_theirs
from pediag.targets.files.exported.archive import Archive, strided
from pediag.targets.files.exported.graph import dtype_of, script_object

PICKLE_LIMIT = 512 * 2**20
"""Bytes of one pickled tensor above which it is refused."""

_STRIDED = 7
_NAME_LIMIT = 512


class Payload:
    """Reads what the two tables of an archive name. ``ran`` says that a pickle was trusted."""

    def __init__(self, archive: Archive, *, trust: Trust) -> None:
        self.archive = archive
        self.trust = trust
        self.ran = False
        self.without_numbers: list[str] = []

    def read(self, table: Mapping[str, Any], folder: str) -> dict[str, torch.Tensor]:
        """The tensors of one table by dotted name. Raises LoadError for what is damaged or would run code."""
        config = table.get("config")
        if not isinstance(config, dict):
            raise self.archive.damaged(f"the table of {folder} is malformed")
        return {self._name(name): self._tensor(name, item, folder) for name, item in config.items()}

    def _name(self, name: str) -> str:
        if not name or len(name) > _NAME_LIMIT or not name.isprintable() or not all(name.split(".")):
            raise self.archive.damaged("the name of a tensor is malformed")
        return name

    def _tensor(self, name: str, item: object, folder: str) -> torch.Tensor:
        file = item.get("path_name") if isinstance(item, dict) else None
        if not isinstance(item, dict) or not isinstance(file, str) or "/" in file or "\\" in file:
            raise self.archive.damaged(f"the entry of {name!r} is malformed")
        meta = item.get("tensor_meta")
        if item.get("use_pickle"):
            if not isinstance(meta, dict):
                raise script_object(self.archive.spec, name)
            tensor = self._pickled(name, f"{folder}{file}")
        else:
            tensor = self._mapped(name, meta, f"{folder}{file}")
        return nn.Parameter(tensor, requires_grad=False) if item.get("is_param") is True else tensor

    def _mapped(self, name: str, meta: object, entry: str) -> torch.Tensor:
        sizes, strides, offset, dtype = self._described(name, meta)
        begin, end, _ = self.archive.entry(entry)
        if begin == end and 0 not in sizes:
            self.without_numbers.append(name)
            return torch.empty(sizes, dtype=dtype, device="meta")
        return strided(self.archive, name, self.archive.storage(entry, dtype), sizes, strides, offset)

    def _described(self, name: str, meta: object) -> tuple[Any, Any, Any, torch.dtype]:
        if not isinstance(meta, dict):
            raise self.archive.damaged(f"{name!r} is not described")
        if meta.get("layout") != _STRIDED:
            raise LoadError(f"{self.archive.spec}: {name!r} is not laid out by strides, which is not read")
        sizes, strides = (_numbers(meta.get(key)) for key in ("sizes", "strides"))
        offset = _number(meta.get("storage_offset"))
        if any(type(number) is not int or not 0 <= number < 2**48 for number in (*sizes, *strides, offset)):
            raise self.archive.damaged(f"the shape of {name!r} is malformed")
        return sizes, strides, offset, dtype_of(self.archive.spec, meta.get("dtype"))

    def _pickled(self, name: str, entry: str) -> torch.Tensor:
        """A tensor subclass, which is stored as a pickle."""
        if not self.trust:
            raise LoadError(
                f"{self.archive.spec}: would run code to read {name!r}, which is pickled: add --trust if you trust its "
                "origin"
            )
        self.ran = True
        data = io.BytesIO(self.archive.read(entry, PICKLE_LIMIT))
        with told_as_theirs(f"{self.archive.spec}: unpickling {name}"):
            held: object = torch.load(data, map_location="cpu", weights_only=False)
        if not isinstance(held, torch.Tensor):
            raise self.archive.damaged(f"{name!r} is no tensor")
        return held


def _number(value: object) -> Any:
    return value.get("as_int") if isinstance(value, dict) else value


def _numbers(value: object) -> list[Any]:
    return [_number(item) for item in value] if isinstance(value, list) else [None]
