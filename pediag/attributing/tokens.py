"""What a model is fed: texts by the tokenizer beside it, tensors of the user's, or those of ``example_inputs``."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pediag.errors import LoadError, UsageError
from pediag.targets import Target, describe
from pediag.trace import positions
from pediag.trace.inputs import Input, made_up

if TYPE_CHECKING:
    from torch import nn

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model", "spiece.model")
LARGEST_FILE = 64 * 2**20
MASK, IDS, POSITIONS, DECODER = "attention_mask", "input_ids", "position_ids", "decoder_input_ids"
FEWEST_TOKENS = 2
EXAMPLE_TOKENS = 16
"""Tokens that ``example_inputs`` is asked for, unless a length is given."""


@dataclass(slots=True)
class Fed:
    """One call of the model, of ``length`` tokens. ``words`` are its tokens as a person reads them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    length: int
    words: list[str]
    special: frozenset[int] = frozenset()
    masked: int | None = None

    def separators(self) -> list[int]:
        """The places of special tokens, the first of the text apart."""
        ids = self.kwargs.get(IDS)
        listed = ids[0].tolist() if isinstance(ids, torch.Tensor) and ids.dim() == 2 else []
        return [place for place, one in enumerate(listed) if place and one in self.special]

    def example(self, length: int) -> Any:
        """The same call with ``length`` tokens: repeated, or cut; batches of one stay one."""
        made_args = tuple(_resized(item, self.length, length) for item in self.args)
        made = {name: _resized(item, self.length, length, name) for name, item in self.kwargs.items()}
        return made_args if made_args else made


@dataclass(slots=True)
class Reader:
    """A tokenizer. ``special`` are the ids of its special tokens, ``mask`` that of the mask token."""

    encode: Callable[[str], list[int]]
    called: Callable[[int], str]
    special: frozenset[int] = frozenset()
    mask: int | None = None
    spec: str = ""

    def name(self, index: int) -> str:
        """The token of an id; the id itself where it has none."""
        try:
            return self.called(index)
        except (OverflowError, IndexError, KeyError, ValueError, TypeError):
            return str(index)


def reader_of(given: Any, target: Target) -> Reader | None:
    """The tokenizer that is given, by object or folder, or the one in the target's folder; None without one."""
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return _of_object(given)
    folder = Path(os.fsdecode(given)) if given is not None else Path(target.spec)
    if given is None and not (folder.is_dir() and any((folder / name).is_file() for name in TOKENIZER_FILES)):
        return None
    if not folder.is_dir():
        raise LoadError(f"--tokenizer {folder}: is no folder; name the one that holds tokenizer.json")
    return _of_folder(folder)


def _of_folder(folder: Path) -> Reader:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise LoadError("a text needs transformers to be read: pip install 'pediag[transformers]'") from None
    try:
        return _of_object(
            AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        )
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{folder}: its tokenizer cannot be read: {describe(error)}") from None


def _of_object(tokenizer: Any) -> Reader:
    """A tokenizer of transformers, or one of the library tokenizers, or a function from a text to ids."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return Reader(
            lambda text: list(tokenizer(text, verbose=False)["input_ids"]),
            lambda index: str(tokenizer.convert_ids_to_tokens(int(index))),
            frozenset(int(item) for item in tokenizer.all_special_ids if item is not None),
            tokenizer.mask_token_id,
        )
    if hasattr(tokenizer, "id_to_token"):
        return Reader(
            lambda text: list(tokenizer.encode(text).ids),
            lambda index: str(tokenizer.id_to_token(int(index))),
        )
    if callable(tokenizer):
        return Reader(lambda text: [int(item) for item in tokenizer(text)], str)
    raise UsageError(
        "tokenizer must be a folder, a tokenizer of transformers, or a function from text to ids"
    )


def of_text(text: str, reader: Reader, model: nn.Module) -> Fed:
    """A text as the model takes it: one row of ids, with an explicit mask.

    Raises UsageError for a text of fewer than two tokens, or ids beyond the model's own.
    """
    if not text.strip():
        raise UsageError("an empty text: give one of two tokens or more")
    try:
        ids = reader.encode(text)
        rows = torch.tensor([ids], dtype=torch.int64)
    except Exception as error:
        raise UsageError(f"of this text the tokenizer makes no ids: {describe(error)}") from error
    if len(ids) < FEWEST_TOKENS:
        raise UsageError(
            f"{text!r} is {len(ids)} token: give a text of two or more, so that positions can matter"
        )
    accepted = _accepted(model)
    if IDS in accepted or not accepted:
        fed = Fed((), {IDS: rows}, len(ids), [reader.name(one) for one in ids])
    else:
        fed = Fed((rows,), {}, len(ids), [reader.name(one) for one in ids])
    fed.special = reader.special
    fed.masked = ids.index(reader.mask) if reader.mask in ids else None
    return explicit(fed, model)


def single(inputs: Any) -> list[Any]:
    """The texts of a batch, one by one, without their padding, as ``attention_mask`` tells it."""
    named = inputs if isinstance(inputs, Mapping) else None
    items = (
        tuple(named.values())
        if named is not None
        else inputs
        if isinstance(inputs, (tuple, list))
        else (inputs,)
    )
    sizes = {len(item) for item in items if isinstance(item, torch.Tensor) and item.dim() > 1}
    count = sizes.pop() if len(sizes) == 1 else 1
    masked = named is not None and isinstance(mask := named.get(MASK), torch.Tensor) and mask.dim() == 2
    if count == 1 and not masked:
        return [inputs]
    rows = []
    for row in range(count):
        kept = named[MASK][row].bool() if masked and named is not None else None
        parts = [_row(item, row, count, kept) for item in items]
        rows.append(dict(zip(named, parts, strict=True)) if named is not None else tuple(parts))
    return rows


def _row(item: Any, row: int, count: int, kept: torch.Tensor | None) -> Any:
    """One text of what holds ``count`` of them; of ``kept`` the tokens that are no padding."""
    if not isinstance(item, torch.Tensor) or item.dim() < 2 or len(item) != count:
        return item
    one = item[row : row + 1]
    if kept is not None and one.shape[1] == len(kept) and not bool(kept.all()):
        one = one[:, kept]
    return positions(one) if getattr(item, "_pediag_role", "") == "positions" else one


def of_inputs(inputs: Any, model: nn.Module, reader: Reader | None = None) -> Fed:
    """The user's own inputs: a tensor, a tuple, or a mapping from names of arguments. Raises UsageError."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = {str(name): item for name, item in inputs.items()}
    else:
        args, kwargs = _named(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), model)
    main = _main(args, kwargs)
    if main.is_meta:
        raise UsageError("inputs are on the meta device and hold no numbers: give real ones")
    if main.dim() > 3:
        raise UsageError(
            f"inputs of shape {tuple(main.shape)} are no sequence: tokens (1, N) or vectors (1, N, D) are attributed; "
            "of a model of images give the part behind its patches"
        )
    if main.shape[0] != 1 and main.dim() > 1:
        raise UsageError(f"inputs hold {main.shape[0]} texts: give one at a time, so that none is padded")
    length = int(main.shape[1] if main.dim() > 1 else main.shape[0])
    if length < FEWEST_TOKENS:
        raise UsageError("inputs hold fewer than two tokens: give two or more, so that positions can matter")
    ids = main.reshape(-1).tolist() if not main.is_floating_point() and main.dim() <= 2 else []
    words = [reader.name(one) if reader else str(one) for one in ids] or [
        str(place) for place in range(length)
    ]
    fed = Fed(args, kwargs, length, words, reader.special if reader else frozenset())
    if reader is not None and reader.mask in ids:
        fed.masked = ids.index(reader.mask)
    if isinstance(given := kwargs.get(POSITIONS), torch.Tensor):
        fed.kwargs[POSITIONS] = positions(given.clone())
    return explicit(fed, model)


def explicit(fed: Fed, model: nn.Module) -> Fed:
    """The call with what its model would else make up by itself: the mask, the decoder's tokens, no cache.

    Where the mask is left out, decoders of transformers take repeated position ids for several documents in one row,
    and hide all but the own one from each token.
    """
    accepted = _accepted(model)
    ids = fed.kwargs.get(IDS)
    if isinstance(ids, torch.Tensor):
        if MASK in accepted and MASK not in fed.kwargs:
            fed.kwargs[MASK] = torch.ones_like(ids)
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False) and DECODER in accepted and DECODER not in fed.kwargs:
            start = getattr(config, "decoder_start_token_id", None) or 0
            fed.kwargs[DECODER] = torch.cat((torch.full_like(ids[:, :1], start), ids[:, :-1]), 1)
    if "use_cache" in accepted and "use_cache" not in fed.kwargs and hasattr(model, "config"):
        fed.kwargs["use_cache"] = False
    device = next((item.device for item in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    fed.args = tuple(_moved(item, device) for item in fed.args)
    fed.kwargs = {name: _moved(item, device) for name, item in fed.kwargs.items()}
    return fed


def _named(args: tuple[Any, ...], model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments by their names, where forward has names for all of them."""
    by_place = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    names = [
        item.name for item in inspect.signature(model.forward).parameters.values() if item.kind in by_place
    ]
    return (args, {}) if len(names) < len(args) else ((), dict(zip(names, args, strict=False)))


def of_example(target: Target, model: nn.Module, length: int | None, reader: Reader | None) -> Fed:
    """What the user's ``example_inputs`` gives, the first text of it; random tokens without one, and a note."""
    wanted = length or EXAMPLE_TOKENS
    if target.example_inputs is None:
        target.notes.append(f"nothing was given to run on: {wanted} random tokens were taken")
        return _made_up(target, model, wanted, reader)
    try:
        made = target.example_inputs(wanted)
    except Exception as error:
        raise UsageError(f"example_inputs({wanted}) raised {describe(error)}") from error
    return of_inputs(_first_rows(made), model, reader)


def _made_up(target: Target, model: nn.Module, length: int, reader: Reader | None) -> Fed:
    """Random tokens in the shapes that the model takes, of the upper half of its table: padding is in the lower."""
    from pediag.trace import Session
    from pediag.trace.inputs import Sizes

    live = Target(target.spec, target.loader, module=model, config=target.config)
    called = Session(live).called(Sizes(1, length, length))
    generator = torch.Generator().manual_seed(0)
    rows = [part.num_embeddings for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    most = max(4, min([*rows, 256]) if rows else length)

    def make(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: make(part) for name, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(make(part) for part in item)
        if not isinstance(item, Input) or item.literal:
            return item.value if isinstance(item, Input) else item
        shape = item.shape(Sizes(1, length, length))
        if item.role != "content":
            made = item.value if item.value is not None else made_up(item, shape, Sizes(1, length, length))
            return positions(made) if item.role == "positions" else made
        if item.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(item.dtype)
        return torch.randint(most // 2, most, shape, generator=generator).to(item.dtype)

    args, kwargs = make(called.args), make(called.kwargs)
    named = _named(tuple(args), model) if args else ((), {})
    return of_inputs({**named[1], **kwargs} if not named[0] else named[0], model, reader)


def read_inputs(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The inputs in a JSON file: an object of names and nested lists of numbers, or a list of such.

    Raises UsageError with one line for a file that is none of these.
    """
    try:
        value = json.loads(_bytes("--input", path))
    except OSError as error:
        raise UsageError(f"--input {path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--input {path}: is no JSON: {describe(error)}") from None
    several = value if isinstance(value, list) else [value]
    for one in several:
        if not isinstance(one, dict) or not one:
            raise UsageError(
                f'--input {path}: write an object such as {{"input_ids": [[1, 2, 3]]}}, or a list of them'
            )
        yield {name: _tensor(path, name, item) for name, item in one.items()}


def _tensor(path: Path, name: str, item: Any) -> torch.Tensor:
    try:
        made = torch.tensor(item)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(f"--input {path}: {name} is no array of numbers: {describe(error)}") from None
    return made[None] if made.dim() == 1 else made


def read_texts(path: Path) -> list[str]:
    """The lines of a text file that are not empty. Raises UsageError."""
    try:
        lines = _bytes("--texts", path).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"--texts {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--texts {path}: is no text in UTF-8") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise UsageError(f"--texts {path}: holds no text; write one a line")
    return found


def _bytes(option: str, path: Path) -> bytes:
    """What the file holds; a device may have no end. Raises UsageError for too much, OSError."""
    with path.open("rb") as file:
        found = file.read(LARGEST_FILE + 1)
    if len(found) > LARGEST_FILE:
        raise UsageError(f"{option} {path}: is above {LARGEST_FILE // 2**20} MiB; give fewer texts")
    return found


def _accepted(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _main(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of tokens: ``input_ids``, or the first whole-numbered one, or the first of all."""
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor) and item.dim()]
    if isinstance(found := kwargs.get(IDS), torch.Tensor):
        return found
    if not tensors:
        raise UsageError('inputs hold no tensor: give such as {"input_ids": torch.tensor([[1, 2, 3]])}')
    whole = (torch.int64, torch.int32)
    named = {id(kwargs[name]) for name in (MASK, POSITIONS) if name in kwargs}
    return next((item for item in tensors if item.dtype in whole and id(item) not in named), tensors[0])


def _resized(item: Any, old: int, new: int, name: str = "") -> Any:
    """A tensor with its axis of ``old`` tokens made ``new`` long; positions count on."""
    if isinstance(item, (tuple, list)):
        return type(item)(_resized(part, old, new) for part in item)
    if not isinstance(item, torch.Tensor) or not item.dim():
        return item
    axes = [axis for axis in range(min(1, item.dim() - 1), item.dim()) if item.shape[axis] == old]
    if not axes or new == old:
        return item
    if getattr(item, "_pediag_role", "") == "positions" or name == POSITIONS:
        return positions(_counted_on(item, axes[0], new))
    for axis in axes[:1] if item.dim() <= 2 or item.is_floating_point() else axes:
        item = item.index_select(axis, torch.arange(new, device=item.device) % old)
    return item


def _counted_on(item: torch.Tensor, axis: int, new: int) -> torch.Tensor:
    """Positions up to ``new`` tokens: as given, then by the last step on."""
    old = item.shape[axis]
    last = item.narrow(axis, old - 1, 1)
    step = last - item.narrow(axis, max(old - 2, 0), 1)
    view = [-1 if other == axis else 1 for other in range(item.dim())]
    beyond = torch.arange(1, max(new - old, 0) + 1, device=item.device).view(view) * step + last
    return torch.cat((item, beyond.to(item.dtype)), axis).narrow(axis, 0, new)


def _moved(item: Any, device: torch.device) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    moved = item.to(device)
    return positions(moved) if getattr(item, "_pediag_role", "") == "positions" else moved


def _first_rows(made: Any) -> Any:
    """The first text of a batch."""
    if isinstance(made, Mapping):
        return {name: _first_rows(item) for name, item in made.items()}
    if isinstance(made, (tuple, list)):
        return type(made)(_first_rows(item) for item in made)
    if isinstance(made, torch.Tensor) and made.dim() > 1 and made.shape[0] > 1:
        role = getattr(made, "_pediag_role", "")
        return positions(made[:1]) if role == "positions" else made[:1]
    return made
