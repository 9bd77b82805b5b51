"""The ``--input`` option: what to feed a model whose forward cannot be guessed. Imports no torch."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pediag.errors import UsageError

Role = Literal["content", "positions", "mask"]

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
SERVING = {
    "float64": "float64",
    "fp64": "float64",
    "double": "float64",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""What a serving dtype may be called, and its name."""

# Argument names by which models in wide use take positions; a calling convention, not a diagnosis.
POSITION_ARGUMENTS = frozenset(("position_ids", "positions", "pos_ids", "input_pos", "pos", "position"))
LETTERS = ("B", "N", "M")
ROLES: tuple[Role, ...] = ("content", "positions", "mask")
GRAMMAR = (
    "write NAME=DTYPE[DIMS], optionally followed by :positions or :mask; DIMS are integers, the letters "
    "B (batch), N (tokens), M (keys), or sums and products of them; for example 'input_ids=int64[B,N]'"
)

_SPEC = re.compile(
    r"\s*(?P<name>[^=\[\]:]*?)\s*=\s*(?P<dtype>[^=\[\]:]*?)\s*\[(?P<dims>[^\[\]]*)\]\s*(?::\s*(?P<role>\w*)\s*)?"
)
_TERM = re.compile(r"[0-9]+|[A-Za-z]\w*|\S")
_FACTOR = r"(?:0|[1-9][0-9]{0,15}|[BNM])"
_DIM = re.compile(rf"{_FACTOR}(?:[+*-]{_FACTOR})*")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One named input. ``dims`` are sizes, or expressions in B, N and M such as ``"N+1"``."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    role: Role = "content"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The sizes with B, N and M replaced. Raises UsageError for a letter not given or a negative size."""
        return tuple(_evaluate(self, dim, sizes) for dim in self.dims)


Example = Callable[[int], Any]
"""Gives a model's arguments for a length in tokens, as ``example_inputs`` beside a model does."""

Inputs = str | InputSpec | Iterable[Any] | Mapping[str, Any] | Example
"""What ``inputs`` of the Python functions takes: see :func:`read_inputs`."""


def read_inputs(inputs: Inputs) -> tuple[tuple[InputSpec, ...], Example | None]:
    """Specs, or what gives the arguments of forward.

    ``inputs`` is one spec such as ``"input_ids=int64[B,N]"`` or several; the arguments themselves, as a tensor, a tuple
    or a dictionary by name; or a function of the length in tokens that returns them. Raises UsageError for another
    thing, and for a spec that cannot be read or is given twice.
    """
    if isinstance(inputs, (str, InputSpec)):
        inputs = (inputs,)
    if isinstance(inputs, Mapping) or _is_tensor(inputs):
        given = inputs
        return (), lambda seq_len: given
    if callable(inputs):
        return (), inputs
    if not isinstance(inputs, Iterable):
        raise UsageError(_NO_INPUTS.format(type(inputs).__name__))
    items = tuple(inputs)
    if any(_is_tensor(item) or isinstance(item, Mapping) for item in items):
        return (), lambda seq_len: items
    if odd := next((item for item in items if not isinstance(item, (str, InputSpec))), None):
        raise UsageError(_NO_INPUTS.format(type(odd).__name__))
    specs = tuple(item if isinstance(item, InputSpec) else parse_input_spec(item) for item in items)
    names = [spec.name for spec in specs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--input {twice}: is given twice; give each input once")
    return specs, None


_NO_INPUTS = (
    "inputs: {} is no input; give specs such as 'input_ids=int64[B,N]', the arguments of forward (a tensor, a tuple "
    "or a dictionary by name), or a function of the length that returns them"
)


def _is_tensor(item: object) -> bool:
    """Whether it is a tensor, without importing torch: there is none where torch was not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(item, torch.Tensor)


def parse_input_spec(text: str) -> InputSpec:
    """Read ``name=dtype[dims]`` with an optional ``:positions`` or ``:mask``.

    Raises UsageError that says which part is wrong, what is allowed, and the grammar.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise UsageError(f"--input {text!r} cannot be read: {GRAMMAR}")
    name, dtype, role = match["name"], match["dtype"].removeprefix("torch."), match["role"]
    if not name.isidentifier():
        raise UsageError(f"--input {text!r}: {name!r} is not an argument name: {GRAMMAR}")
    if dtype not in DTYPES:
        allowed = f"{_nearest(dtype)}; allowed: {', '.join(DTYPES)}"
        raise UsageError(f"--input {text!r}: unknown dtype {dtype!r}{allowed}")
    if role is not None and role not in ROLES:
        raise UsageError(f"--input {text!r}: unknown role {role!r}; allowed: {', '.join(ROLES)}")
    return InputSpec(name, dtype, _dims(text, match["dims"]), _role(name, dtype, role))


def serving_dtype(value: object) -> str | None:
    """The plain name of a dtype that a model may be served in, such as ``"bfloat16"``; None stays None.

    ``value`` is a name, in any case and with or without ``torch.``, or a ``torch.dtype``. Raises UsageError.
    """
    if value is None:
        return None
    name = str(value).lower().removeprefix("torch.")
    if name not in SERVING:
        known = ", ".join(dict.fromkeys(SERVING.values()))
        raise UsageError(f"unknown dtype {str(value)!r}; known: {known}")
    return SERVING[name]


def _role(name: str, dtype: str, text: str | None) -> Role:
    """The role that was written; without one, whole numbers for an argument of positions are positions."""
    unsaid: Role = "positions" if name in POSITION_ARGUMENTS and "int" in dtype else "content"
    return next((role for role in ROLES if role == text), unsaid)


def _nearest(dtype: str) -> str:
    aliases = {"long": "int64", "int": "int32", "float": "float32", "half": "float16", "bf16": "bfloat16"}
    aliases |= {"fp16": "float16", "fp32": "float32", "fp64": "float64", "double": "float64", "i64": "int64"}
    near = aliases.get(dtype) or next(iter(difflib.get_close_matches(dtype, DTYPES, 1, 0.5)), None)
    return f" (did you mean {near}?)" if near else ""


def _dims(text: str, inside: str) -> tuple[int | str, ...]:
    parts = inside.split(",") if inside.strip() else []
    return tuple(_dim(text, part) for part in parts)


def _dim(text: str, part: str) -> int | str:
    compact = re.sub(r"\s+", "", part)
    unknown = [term for term in _TERM.findall(compact) if term[0].isalpha() and term not in LETTERS]
    if unknown:
        raise UsageError(f"--input {text!r}: unknown size {unknown[0]!r}; allowed letters: B, N, M")
    if not _DIM.fullmatch(compact):
        raise UsageError(f"--input {text!r}: {part.strip()!r} is not a size: {GRAMMAR}")
    return int(compact) if compact.isdecimal() else compact


def _evaluate(spec: InputSpec, dim: int | str, sizes: Mapping[str, int]) -> int:
    missing = [letter for letter in LETTERS if letter in str(dim) and letter not in sizes]
    if missing:
        raise UsageError(f"input {spec.name!r}: no size is known for {missing[0]}")
    size = dim if isinstance(dim, int) else _arithmetic(ast.parse(dim, mode="eval").body, sizes)
    if size < 0:
        raise UsageError(f"input {spec.name!r}: {dim} is {size}, and a size cannot be negative")
    return size


def _arithmetic(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Value of a sum, difference or product of integers and letters; ``_DIM`` let nothing else through."""
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _arithmetic(node.left, sizes), _arithmetic(node.right, sizes)
        if isinstance(node.op, ast.Mult):
            return left * right
        return left + right if isinstance(node.op, ast.Add) else left - right
    return int(ast.literal_eval(node))
