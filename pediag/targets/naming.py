"""From the words of a command line to targets: patterns, folders of checkpoints, shards of one model. No torch."""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pediag.errors import LoadError
from pediag.targets._paths import shortened
from pediag.targets.code.spec import split_spec
from pediag.targets.config import Config, looks_like_config
from pediag.targets.files.zip import read_archive
from pediag.targets.opening import OPENERS

MOST = 10_000
"""Targets in one call; a pattern that stands for more was hardly meant."""

DECLARATIONS = ("config.json", "adapter_config.json", "params.json")
"""Files that make a folder one model."""

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
PICKLE_LIMIT = 64 * 2**20
"""Bytes of an archive's pickle up to which it is looked at here."""

_MAGIC = re.compile(r"[*?[]")
_SPLIT_GGUF = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_STORAGE = re.compile(rb"(\w+)Storage\b")
_WHOLE_NUMBERS = {b"Byte", b"Char", b"Short", b"Int", b"Long", b"Bool"}


@dataclass(frozen=True, slots=True)
class Named:
    """One target, and the word that stands for it. ``error`` is set where the word stands for none."""

    spec: str
    word: str
    error: LoadError | None = None

    @property
    def found(self) -> bool:
        """Whether it was not typed but found: in a folder, by a pattern, by its shards."""
        return self.spec != self.word


@dataclass(slots=True)
class Listing:
    """The targets of one call in their order, each once.

    ``notes`` say how words were read that are no target themselves. ``several`` tells whether the user asked for
    more than one: by several words, by a pattern, or by a folder of models, whatever the number of targets.
    """

    targets: list[Named] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    several: bool = False


@dataclass(slots=True)
class _Read:
    """Paths of models in a folder or among matches, and those left out because they hold none."""

    models: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def told(self) -> str:
        """What was left out, for a note."""
        names = shortened(map(os.path.basename, self.left), 6)
        return f"left out, as they hold no model: {names}" if self.left else ""


def named(words: Sequence[str]) -> Listing:
    """The targets that ``words`` stand for.

    A word that exists, or names Python code, is a target as it is. A pattern (``*``, ``?``, ``[...]``, and ``**``
    for any depth) stands for the models that it matches. A folder that is no model stands for the checkpoints and
    model folders in it. The shards of one model are one target, their index. Raises nothing: a word that stands for
    no target keeps its place with an error.
    """
    listing = Listing(several=len(words) > 1)
    for word in words:
        try:
            _add(listing, word)
        except LoadError as error:
            listing.targets.append(Named(word, word, error))
    _join_shards(listing)
    _drop_repeats(listing)
    return listing


def _add(listing: Listing, word: str) -> None:
    """Put what ``word`` stands for at the end of the listing."""
    pattern, name = _pattern(word)
    if os.path.isdir(word) and not _declares(word):
        read = _inside(word)
        how = f"{word}: a folder without config.json, read as the models in it"
    elif pattern:
        matches = _matches(word, pattern)
        read = _named_in(matches, name) if name else _openable(matches)
        how = f"{word}: a pattern" if read.left else ""
        if not read.models:
            raise _nothing(word, matches, name)
    else:
        read = _Read()
    if not read.models:
        listing.targets.append(Named(word, word))
        return
    listing.several = True
    if len(listing.targets) + len(read.models) > MOST:
        raise LoadError(f"{word}: more than {MOST:,} targets in one call: name fewer")
    listing.targets += [Named(spec, word) for spec in read.models]
    if how:
        listing.notes.append("; ".join(filter(None, (how, read.told()))))


def _pattern(word: str) -> tuple[str, str]:
    """The pattern of paths in a word, and the name after it as in ``models/*.py:build``; else an empty pattern."""
    if os.path.exists(word) or not _MAGIC.search(word):
        return "", ""
    path, name = split_spec(word) or (word, "")
    return ("", "") if os.path.exists(path) or not _MAGIC.search(path) else (path, name)


def _nothing(word: str, matches: Sequence[str], name: str) -> LoadError:
    if not matches:
        return LoadError(f"no such file: {word} (as a pattern it matches nothing)")
    wanted = "a .py file" if name else "a model"
    named = "" if name or not any(path.endswith(".py") for path in matches) else "; name code as file.py:name"
    return LoadError(f"{word}: matches {shortened(matches, 4)}, none of which is {wanted}{named}")


def _named_in(matches: Iterable[str], name: str) -> _Read:
    return _Read([f"{path}:{name}" for path in matches if path.endswith(".py") and os.path.isfile(path)])


def _openable(paths: Sequence[str]) -> _Read:
    """The models among ``paths``; what lies in a model folder belongs to it."""
    read = _Read()
    folders = {path for path in paths if os.path.isdir(path)}
    models = {path for path in folders if _is_model_folder(path)}
    for path in paths:
        if path in models:
            read.models.append(path)
        elif path in folders:
            inner = _inside(path)
            read.models += inner.models
            read.left += inner.left
        elif models.isdisjoint(map(str, Path(path).parents)):
            _sort_in(read, path)
    read.models = sorted(set(_whole(read.models)), key=_natural)
    return read


def _inside(folder: str) -> _Read:
    """The models in a folder that is none itself; folders below it are looked into for a declaration only."""
    read = _Read()
    for name in sorted(_names(folder), key=_natural):
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            _sort_in(read, path)
        elif _is_model_folder(path):
            read.models.append(path)
    read.models = sorted(set(_whole(read.models)), key=_natural)
    return read


def _sort_in(read: _Read, path: str) -> None:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in OPENERS or not os.path.isfile(path):
        return
    empty = suffix == ".json" and not _may_declare(path) or suffix in PICKLED and _stores_no_weights(path)
    (read.left if empty else read.models).append(path)


def _declares(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in DECLARATIONS)


def _is_model_folder(folder: str) -> bool:
    """Whether a folder that was found is one model: it declares one, in words that a model's declaration uses."""
    if os.path.isfile(declared := os.path.join(folder, "config.json")):
        return _may_declare(declared)
    return _declares(folder)


def _may_declare(path: str) -> bool:
    """Whether a JSON file is a configuration or an index, or cannot be told because it is damaged."""
    if os.path.getsize(path) == 0:
        return True
    try:
        values = Config.from_file(path).values
    except LoadError as error:
        return "not valid JSON" in str(error) or "denied" in str(error)
    # A tokenizer's configuration shares one key with a model's.
    return (
        "weight_map" in values
        or "peft_type" in values
        or looks_like_config({key: item for key, item in values.items() if key != "model_max_length"})
    )


def _stores_no_weights(path: str) -> bool:
    """Whether an archive of torch.save holds no floating-point tensor: a scheduler, a generator's state, arguments.

    Only its directory and the names in its pickle are looked at; where they do not tell, the answer is no.
    """
    try:
        entries = read_archive(path, Path(path))
        pickled = [entry for name, entry in entries.items() if name.endswith("/data.pkl")]
        if len(pickled) != 1 or any("/code/" in name for name in entries):
            return False
        if pickled[0].compressed or pickled[0].end - pickled[0].begin > PICKLE_LIMIT:
            return False
        with open(path, "rb") as file:
            file.seek(pickled[0].begin)
            names = _STORAGE.findall(file.read(pickled[0].end - pickled[0].begin))
    except (LoadError, OSError):  # its opener says it better
        return False
    return set(names) <= _WHOLE_NUMBERS


def _whole(paths: Iterable[str]) -> Iterator[str]:
    """Each path, or what stands for the model that it is a shard of: the index, or the first part of a split GGUF."""
    indices: dict[str, dict[str, str]] = {}
    firsts: dict[tuple[str, str], str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in indices:
            indices[folder] = _shards(folder)
        part = _SPLIT_GGUF.fullmatch(path)
        yield indices[folder].get(name) or (firsts.setdefault((part[1], part[2]), path) if part else path)


def _shards(folder: str) -> dict[str, str]:
    """The files that an index in ``folder`` names, and the path of that index."""
    found: dict[str, str] = {}
    for name in sorted(_names(folder or "."), reverse=True):
        if name.endswith(".index.json"):
            index = os.path.join(folder, name)
            found.update((shard, index) for shard in _named_by(index))
    return found


def _named_by(index: str) -> set[str]:
    try:
        named = Config.from_file(index).values.get("weight_map")
    except LoadError:
        return set()
    return {name for name in named.values() if isinstance(name, str)} if isinstance(named, dict) else set()


def _join_shards(listing: Listing) -> None:
    """Two or more typed shards of one model, as a shell's own pattern gives them, are that model."""
    typed = [item.spec for item in listing.targets if not item.error and os.path.isfile(item.spec)]
    if len(typed) < 2:
        return
    whole = dict(zip(typed, _whole(typed), strict=True))
    counts = Counter(whole.values())
    joined = {spec: model for spec, model in whole.items() if model != spec and counts[model] > 1}
    listing.targets = [
        Named(joined[item.spec], item.word) if item.spec in joined else item for item in listing.targets
    ]
    listing.notes += [
        f"{model}: its {counts[model]} shards are one model" for model in dict.fromkeys(joined.values())
    ]


def _drop_repeats(listing: Listing) -> None:
    """Keep the first of targets that are the same file, folder or object."""
    first: dict[str, Named] = {}
    for item in listing.targets:
        kept = first.setdefault(identity(item.spec), item)
        if kept.spec != item.spec:
            listing.notes.append(f"{item.spec}: the same as {kept.spec}, checked once")
    listing.targets = list(first.values())


def identity(spec: str) -> str:
    """What is equal for two specs that name the same file, folder or object."""
    if os.path.exists(spec):
        return os.path.realpath(spec)
    path, name = split_spec(spec) or (spec, "")
    return f"{os.path.realpath(path)}:{name}" if name and os.path.exists(path) else spec


def _matches(word: str, pattern: str) -> list[str]:
    """Paths that match, in natural order. ``**`` follows no links, and hidden names need a pattern with a dot."""
    root = os.path.sep if pattern.startswith("/") else ""
    parts = [part for part in pattern.split("/") if part]
    todo, seen, found = [(root, 0)], set(), set()
    while todo:
        base, at = step = todo.pop()
        if step in seen:
            continue
        seen.add(step)
        if at == len(parts):
            found.add(base)
        else:
            todo += _stepped(base, at, parts)
        if len(found) > 10 * MOST:
            raise LoadError(f"{word}: matches more than {10 * MOST:,} paths: name fewer")
    return sorted(found - {""}, key=_natural)


def _stepped(base: str, at: int, parts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Paths one step into the pattern from ``base``, with the number of parts that they match."""
    part, below = parts[at], partial(os.path.join, base)
    if part == "**":
        yield base, at + 1
        for name in _names(base or "."):
            path = below(name)
            if os.path.isdir(path) and not os.path.islink(path):
                yield path, at
            elif at + 1 == len(parts):
                yield path, at + 1
    elif not _MAGIC.search(part):
        if os.path.exists(below(part)):
            yield below(part), at + 1
    else:
        names = _names(base or ".", hidden=part.startswith("."))
        yield from ((below(name), at + 1) for name in names if fnmatch.fnmatchcase(name, part))


def _names(folder: str, *, hidden: bool = False) -> list[str]:
    """Names in a folder, none where it cannot be read."""
    try:
        return [name for name in os.listdir(folder) if hidden or not name.startswith(".")]
    except OSError:
        return []


def _natural(path: str) -> list[list[str | int]]:
    """A key that puts ``step-9`` before ``step-10``."""
    split = [re.split(r"([0-9]+)", part) for part in path.split(os.path.sep)]
    return [[int(piece) if at % 2 else piece for at, piece in enumerate(part)] for part in split]
