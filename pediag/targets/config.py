"""A read-only view of what a model's configuration declares, with the line of every key. Imports no torch."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pediag.errors import LoadError
from pediag.targets._content import refuse_special
from pediag.targets._positions import Place, key_positions

SIZE_LIMIT = 8 * 2**20
"""Bytes above which a configuration file is refused."""

INDEX_LIMIT = 32 * 2**20
"""The same for the index of a sharded checkpoint; one of 100,000 tensors takes about 10 MiB."""

OBJECTS_LIMIT = 100_000
"""Objects in one configuration; some say for each matrix of each expert how it is quantised."""

SPOKEN_LIMIT = 2_000
"""Values that a configuration may have under keys of rotary positions; LongRoPE takes about 130."""

SPEAKING_LIMIT = 100
"""Objects that may have such keys, or be under them; models of several parts and types of layers have about ten."""

DEPTH_LIMIT = 32
"""Levels of nesting in a configuration; of an object, deeper values are left as they are."""

LONGEST = 2**31
"""Tokens above which a length means none: tokenizers write 1e30 for it."""

LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "model_max_length",
    "max_context_length",
    "context_length",
    "n_ctx",
    "seq_length",
    "max_target_positions",
    "max_source_positions",
    "block_size",
    "max_len",
)
"""Spellings of the longest input in tokens, the most specific first."""

TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "decoder", "text_encoder", "encoder")
SCALING_SECTIONS = ("rope_parameters", "rope_scaling")
INDEX = "weight_map"
ORIGINAL_LENGTH = "original_max_position_embeddings"

PADDED = {
    **dict.fromkeys(
        """altclip_text_model bridgetower_text_model camembert clap_text_model data2vec-text ibert layoutlmv3 longformer
        luke mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod""".split(),
        1,
    ),
    **dict.fromkeys(("lilt", "markuplm"), 0),
    "esm": None,
}
"""Type of model that keeps ``pad_token_id + 1`` rows of the declared length aside (fairseq's convention: positions
start behind the one of padding) -> the id of padding where the config says none; None where there is none then."""

_MISSING: Any = object()


@dataclass(frozen=True, eq=False)
class Config:
    """A declaration. ``values`` are its keys as written; ``source`` is its file, when it has one.

    ``typed``: the file's format fixes the type of each number, so that how one is written says nothing.
    """

    values: dict[str, Any]
    source: str | None = None
    text: str = field(default="", repr=False)
    typed: bool = False

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Read a JSON object. NaN and Infinity are kept; of a repeated key the last one stands.

        Raises LoadError for a file that cannot be read, is no JSON object, or is above the limits of this module.
        """
        text = _read_text(Path(path))
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise LoadError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from None
        except (RecursionError, ValueError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
            raise LoadError(f"{path}: not usable JSON: {why}") from None
        if not isinstance(values, dict):
            raise LoadError(f"{path}: holds a JSON {_json_kind(values)}; a configuration is an object")
        if len(text) > SIZE_LIMIT and INDEX not in values:
            raise LoadError(f"{path}: above {SIZE_LIMIT // 2**20} MiB, which no configuration is")
        refuse_endless(values, f"{path}")
        return cls(values, os.fspath(path), text)

    @classmethod
    def from_object(cls, obj: object) -> Config:
        """Copy a transformers config, dataclass, mapping, named tuple or argparse-like namespace.

        Raises LoadError for an object that has no named values.
        """
        values = _named_values(obj)
        if values is None:
            raise LoadError(
                f"a {type(obj).__name__} is no configuration: give a mapping, a dataclass, a namespace, "
                "or an object with to_dict()"
            )
        return cls({str(key): _plain(value, DEPTH_LIMIT) for key, value in values.items()})

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at a dotted path such as ``rope_parameters.rope_theta``; list elements by index."""
        found = _walk(self.values, dotted)
        return default if found is _MISSING else found

    def __contains__(self, dotted: str) -> bool:
        """Whether the path is declared, be it as null."""
        return _walk(self.values, dotted) is not _MISSING

    def line_of(self, dotted: str) -> int | None:
        """The 1-based line of a dotted key in ``source``; None when it is not written there."""
        place = self._positions[0].find(dotted)
        return place.line if place else None

    @property
    def repeated(self) -> tuple[str, ...]:
        """Dotted keys that stand more than once in one object; all but the last have no effect."""
        return tuple(self._positions[1])

    def sections(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every object of the declaration and its dotted path, outermost first; the whole has path ``""``."""
        return _sections("", self.values)

    @cached_property
    def _positions(self) -> tuple[Place, list[str]]:
        return key_positions(self.text)


def maximum_length(config: Config) -> int | None:
    """The longest input in tokens that the config declares, looking into text sections last; None if none.

    Where a model keeps rows aside (RoBERTa declares 514 for 512 tokens) this is the declared number.
    """
    for section in _text_values(config):
        for key in LENGTH_KEYS:
            if (length := _as_length(section.get(key))) is not None:
                return length
    return None


def trained_length(config: Config) -> int | None:
    """The length in tokens before any declared scaling; the maximum length where no scaling declares one.

    Rows that a model keeps aside are not counted: RoBERTa declares 514 and was trained with 512 tokens.
    """
    for section in _text_values(config):
        scalings = [part for key in SCALING_SECTIONS if isinstance(part := section.get(key), dict)]
        per_layer = [part for scaling in scalings for part in scaling.values() if isinstance(part, dict)]
        for part in (*scalings, *per_layer, section):
            if (length := _as_length(part.get(ORIGINAL_LENGTH))) is not None:
                return length
    longest = maximum_length(config)
    aside = max((kept_aside(section) for section in _text_values(config)), default=0)
    return longest - aside if longest is not None and longest > aside else longest


def kept_aside(values: Mapping[str, Any]) -> int:
    """Rows of a learned table that no token gets, for the object of one model; 0 for most types."""
    kind = str(values.get("model_type"))
    if kind not in PADDED or values.get("position_embedding_type", "absolute") != "absolute":
        return 0
    pad = values.get("pad_token_id")
    pad = PADDED[kind] if pad is None else pad
    return pad + 1 if isinstance(pad, int) and not isinstance(pad, bool) and pad >= 0 else 0


def looks_like_config(values: Mapping[Any, Any]) -> bool:
    """Whether a mapping reads as a model configuration: named values, at least one of them about a model."""
    if not values or not all(isinstance(key, str) for key in values):
        return False
    known = {*LENGTH_KEYS, *TEXT_SECTIONS, *SCALING_SECTIONS, *_MODEL_KEYS}
    return any(key in known for key in values)


def refuse_endless(values: dict[str, Any], what: str) -> None:
    """Raise LoadError for a declaration that is out of all proportion; rules look at every part of it.

    ``values`` came with a file and do not hold themselves; ``what`` names them.
    """
    count = spoken = speaking = 0
    left = [(1, False, values)]
    while left:
        depth, inside, section = left.pop()
        about = [inside or "rope" in key or "rotary" in key for key in section]
        spoken += sum(
            _size(value)
            for value, rotary in zip(section.values(), about, strict=True)
            if rotary and not inside
        )
        count, speaking = count + 1, speaking + any(about)
        left += [
            (depth + 1, rotary, value)
            for value, rotary in zip(section.values(), about, strict=True)
            if isinstance(value, dict)
        ]
        for number, limit, noun in (
            (count, OBJECTS_LIMIT, "objects"),
            (depth, DEPTH_LIMIT, "levels of objects"),
            (spoken, SPOKEN_LIMIT, "values about rotary positions"),
            (speaking, SPEAKING_LIMIT, "objects about rotary positions"),
        ):
            if number > limit:
                raise LoadError(f"{what}: has more than {limit:,} {noun}, which no model's configuration has")


_MODEL_KEYS = (
    "model_type",
    "architectures",
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "head_dim",
    "rope_theta",
)


def _read_text(path: Path) -> str:
    refuse_special(os.fspath(path), path)
    try:
        with path.open("rb") as file:
            data = file.read(INDEX_LIMIT + 1)
    except OSError as error:
        raise LoadError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if len(data) > INDEX_LIMIT:
        raise LoadError(f"{path}: above {INDEX_LIMIT // 2**20} MiB, which no configuration is")
    if not data.strip():
        raise LoadError(f"{path}: empty file, where a JSON object was expected")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path}: not UTF-8 text (byte {error.start}), so not a JSON configuration") from None


def _size(value: object) -> int:
    """Values in ``value``, itself among them."""
    count, left = 0, [value]
    while left:
        item = left.pop()
        count += 1
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, (list, tuple)):
            left += item
    return count


def _json_kind(value: object) -> str:
    kinds = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _walk(node: Any, dotted: str) -> Any:
    if isinstance(node, Mapping) and dotted in node:
        return node[dotted]
    head, dot, rest = dotted.partition(".")
    if isinstance(node, list) and head.isdecimal() and int(head) < len(node):
        return _walk(node[int(head)], rest) if dot else node[int(head)]
    if dot and isinstance(node, Mapping) and head in node:
        return _walk(node[head], rest)
    return _MISSING


def _sections(path: str, values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, values
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _sections(f"{path}.{key}" if path else key, value)


def _text_values(config: Config) -> Iterator[dict[str, Any]]:
    yield config.values
    for key in TEXT_SECTIONS:
        if isinstance(section := config.values.get(key), dict):
            yield section


def _as_length(value: object) -> int | None:
    return value if type(value) is int and 0 < value <= LONGEST else None


def _named_values(obj: object) -> Mapping[Any, Any] | None:
    """The names and values that ``obj`` declares, or None."""
    if isinstance(obj, Mapping):
        return obj
    if isinstance(obj, type):
        return None
    if callable(to_dict := getattr(obj, "to_dict", None)) and isinstance(made := to_dict(), Mapping):
        return made
    if dataclasses.is_dataclass(obj):
        names = [item.name for item in dataclasses.fields(obj)]
        return {name: getattr(obj, name) for name in names if hasattr(obj, name)}
    if callable(as_dict := getattr(obj, "_asdict", None)) and isinstance(made := as_dict(), Mapping):
        return made
    return _attributes(obj) or None


def _attributes(obj: object) -> dict[str, Any]:
    """Public values of an object, and those that its class gives where it has none of its own."""
    found: dict[str, Any] = {}
    for level in (*reversed(type(obj).__mro__[:-1]), obj):
        found.update(getattr(level, "__dict__", {}))
    kept = {name: value for name, value in found.items() if not name.startswith("_")}
    return {name: value for name, value in kept.items() if not _is_code(value)}


def _is_code(value: object) -> bool:
    """Whether an attribute of a class is a method, a property or a slot, not a value."""
    return isinstance(value, types.FunctionType) or hasattr(type(value), "__get__")


def _plain(value: Any, depth: int) -> Any:
    """A copy in dicts and lists; leaves that are neither (a dtype, a tensor) are kept as they are."""
    if depth == 0 or value is None or isinstance(value, (bool, int, float, str, bytes, type)):
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [_plain(item, depth - 1) for item in value]
    spaces = (Mapping, argparse.Namespace, types.SimpleNamespace)
    if isinstance(value, spaces) or dataclasses.is_dataclass(value) or hasattr(value, "to_dict"):
        named = _named_values(value)
        if named is not None:
            return {str(key): _plain(item, depth - 1) for key, item in named.items()}
    return copy.copy(value) if isinstance(value, (set, frozenset)) else value
