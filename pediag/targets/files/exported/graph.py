"""The graph of an exported program, read from its JSON into steps that can be run.

Schema: torch/_export/serde/schema.py of PyTorch. Everything is checked while it is read: names that are
defined, operations that may be called, arguments that their schemas have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pediag.errors import LoadError
from pediag.targets._trust import Trust
from pediag.targets.files.exported import operators
from pediag.targets.files.exported.operators import NotRunnable
from pediag.targets.files.exported.places import Within, frames, module_path, within

DTYPES: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
"""Numbers of the schema's ScalarType."""

_MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_STRIDED = 7
_NAMED_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_HERE = torch.device("cpu")
# Arguments before the graph, and what a region of this kind means.
_INLINED = frozenset(
    (
        "wrap_with_set_grad_enabled",
        "wrap_with_autocast",
        "wrap_activation_checkpoint",
        "tag_activation_checkpoint",
    )
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A value by the name that the graph gives it."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: what to call with what, the names of its results, its module path and source frames.

    A name of a result is None where nothing uses it, and a tuple of names for a list of tensors.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Any, ...]
    module: str = ""
    frames: tuple[Within, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """Graphs inside a graph: a region under a mode, or the two branches of a condition."""

    kind: str
    settings: tuple[Any, ...]
    graphs: tuple[Plan, ...]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a graph takes, does and returns."""

    inputs: tuple[str | None, ...]
    steps: tuple[Step | Region, ...]
    outputs: tuple[Any, ...]

    def modules(self) -> Iterator[str]:
        """Every module path in the graph and in those inside it."""
        for step in self.steps:
            if isinstance(step, Step):
                yield step.module
            else:
                for graph in step.graphs:
                    yield from graph.modules()


@dataclass(slots=True)
class Reader:
    """Reads graphs of the program ``spec``. ``custom`` collects operations that only ``trust`` lets through.

    Raises LoadError for a graph that is malformed or asks for what is not allowed, NotRunnable for one that
    holds something harmless without a form here.
    """

    spec: str
    trust: Trust
    custom: set[str] = field(default_factory=set)

    def graph(self, value: object) -> Plan:
        """A graph with those inside it."""
        held = self._mapping(value, "graph")
        inputs = tuple(self._input(item) for item in self._list(held.get("inputs")))
        known = {name for name in inputs if name is not None}
        steps = tuple(self._steps(self._list(held.get("nodes")), known))
        outputs = tuple(self._value(item, known) for item in self._list(held.get("outputs")))
        return Plan(inputs, steps, outputs)

    def malformed(self, what: str) -> LoadError:
        """The error for a graph that does not follow its schema."""
        return LoadError(f"{self.spec}: damaged: {what} of the exported program is malformed")

    # -- nodes --------------------------------------------------------------------------------------------

    def _steps(self, nodes: Sequence[object], known: set[str]) -> Iterator[Step | Region]:
        last: dict[str, tuple[Within, ...]] = {}
        for item in nodes:
            node = self._mapping(item, "a node")
            metadata = node.get("metadata") if isinstance(node.get("metadata"), dict) else {}
            assert isinstance(metadata, dict)
            path = module_path(metadata.get("nn_module_stack"))
            # What the exporter put in itself, such as a size, stands beside what it was put in for.
            found = frames(metadata.get("stack_trace"), metadata.get("nn_module_stack")) or last.get(path, ())
            last[path] = found
            step = self._step(node, known, path, found or (within(f"{self.spec} (no source lines)", 0, ""),))
            known.update(_names(step.results) if step is not None else ())
            if step is not None:
                yield step

    def _step(
        self, node: Mapping[str, Any], known: set[str], path: str, found: tuple[Within, ...]
    ) -> Step | Region | None:
        target = node.get("target")
        if not isinstance(target, str):
            raise self.malformed("a node's target")
        results = tuple(self._result(item) for item in self._list(node.get("outputs")))
        inputs = [self._mapping(item, "an input") for item in self._list(node.get("inputs"))]
        if target.startswith("torch.ops.higher_order."):
            return self._region(target.removeprefix("torch.ops.higher_order."), inputs, results, known)
        values = [(item.get("name"), self._value(item.get("arg"), known)) for item in inputs]
        if not target.startswith(operators.PREFIX):
            call = operators.function(self.spec, target)
            return Step(call, tuple(value for _, value in values), {}, results, path, found)
        return self._operation(target, dict(values), results, path, found)

    def _operation(
        self,
        target: str,
        given: dict[Any, Any],
        results: tuple[Any, ...],
        path: str,
        found: tuple[Within, ...],
    ) -> Step | None:
        name = target.removeprefix(operators.PREFIX)
        if name in operators.CHECKS:
            return None
        overload = operators.overload(self.spec, target, trust=self.trust)
        if name.partition(".")[0] not in operators.OWN:
            self.custom.add(name.rpartition(".")[0].replace(".", "::"))
        args, kwargs = self._bound(overload, name, given)
        if name in operators.SAME:
            return Step(_same, args[:1], {}, results, path, found)
        return Step(operators.PUBLIC.get(name, overload), args, kwargs, results, path, found)

    def _bound(
        self, overload: Any, name: str, given: dict[Any, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in the order of the operation's schema; defaults fill what is left out in between."""
        schema = overload._schema.arguments
        if unknown := set(given) - {argument.name for argument in schema}:
            raise LoadError(f"{self.spec}: {name} takes no {', '.join(sorted(map(str, unknown)))}")
        self._refuse_texts(name, given)
        places = [place for place, item in enumerate(schema) if item.name in given and not item.kwarg_only]
        args = []
        for argument in schema[: max(places, default=-1) + 1]:
            if argument.name not in given and not argument.has_default_value():
                raise LoadError(f"{self.spec}: {name} is not given its {argument.name}")
            args.append(given.get(argument.name, argument.default_value))
        named = {item.name for item in schema if item.kwarg_only} & set(given) - {"pin_memory", "device"}
        return tuple(args), {key: given[key] for key in sorted(named)}

    def _refuse_texts(self, name: str, given: dict[Any, Any]) -> None:
        for key, value in given.items():
            if isinstance(value, str) and key not in operators.TEXTS and not self.trust:
                raise LoadError(f"{self.spec}: hands a text to {name} as its {key}: not opened")

    def _region(
        self, kind: str, inputs: Sequence[Mapping[str, Any]], results: tuple[Any, ...], known: set[str]
    ) -> Region:
        if kind not in (*_INLINED, "cond"):
            raise NotRunnable(f"its graph has a {kind}, which cannot be traced from a file")
        places = [
            place for place, item in enumerate(inputs) if "as_graph" in self._mapping(item.get("arg"), "arg")
        ]
        if len(places) != (2 if kind == "cond" else 1) or places[-1] - places[0] != len(places) - 1:
            raise self.malformed(f"a {kind}")
        before = [self._value(item.get("arg"), known) for item in inputs[: places[0]]]
        graphs = [
            self.graph(self._mapping(inputs[place]["arg"]["as_graph"], "a graph").get("graph"))
            for place in places
        ]
        after = [
            self._value(item.get("arg"), known)
            for item in inputs[places[-1] + 1 :]
            if item.get("name") in ("", None)
        ]
        operands = after[0] if kind == "cond" and after and isinstance(after[0], (list, tuple)) else after
        if any(len(graph.inputs) != len(operands) for graph in graphs):
            raise self.malformed(f"a {kind}")
        return Region(kind, tuple(before), tuple(graphs), tuple(operands), results)

    # -- values -------------------------------------------------------------------------------------------

    def _input(self, value: object) -> str | None:
        """The name of a graph's input; None for a constant."""
        kind, held = self._only(value)
        if kind == "as_custom_obj":
            raise self._script_object(held)
        if kind == "as_tensor":
            return self._named(held, "name")
        return self._named(held, "as_name") if kind.startswith("as_sym_") and "as_name" in held else None

    def _result(self, value: object) -> Any:
        kind, held = self._only(value)
        if kind == "as_tensor":
            return self._named(held, "name")
        if kind == "as_tensors":
            return tuple(self._named(item, "name") for item in self._list(held))
        if kind == "as_optional_tensors":
            return tuple(self._result(item) for item in self._list(held))
        if kind == "as_optional_tensor":
            return self._result(held)
        if kind.startswith("as_sym_") and isinstance(held, dict):
            return self._named(held, "as_name") if "as_name" in held else None
        if kind.startswith("as_sym_"):
            return tuple(
                self._named(item, "as_name") if "as_name" in item else None for item in self._list(held)
            )
        if kind == "as_custom_obj":
            raise self._script_object(held)
        return None

    def _value(self, value: object, known: set[str]) -> Any:
        kind, held = self._only(value)
        if kind in _PLAIN:
            if not _PLAIN[kind](held):
                raise self.malformed("an argument")
            return tuple(held) if isinstance(held, list) else held
        if kind == "as_none":
            return None
        read = getattr(self, f"_{kind}", None) if kind in _READ else None
        if read is None:
            raise NotRunnable(f"its graph has an argument of the kind {kind[:40]!r}, which is not known here")
        return read(held, known)

    def _as_tensor(self, held: object, known: set[str]) -> Ref:
        return self._ref(held, "name", known)

    def _as_tensors(self, held: object, known: set[str]) -> list[Any]:
        return [self._ref(item, "name", known) for item in self._list(held)]

    def _as_nested_tensors(self, held: object, known: set[str]) -> list[Any]:
        return [self._as_tensors(item, known) for item in self._list(held)]

    def _as_optional_tensor(self, held: object, known: set[str]) -> Any:
        return self._value(held, known)

    def _as_optional_tensors(self, held: object, known: set[str]) -> list[Any]:
        return [self._value(item, known) for item in self._list(held)]

    def _as_sym(self, held: object, known: set[str]) -> Any:
        """A number, or the name of one."""
        key, item = self._only(held)
        if key == "as_name":
            return self._ref(held, "as_name", known)
        if not isinstance(item, (int, float)):
            return self._number(item)
        return item

    _as_sym_int = _as_sym_float = _as_sym_bool = _as_sym

    def _as_syms(self, held: object, known: set[str]) -> list[Any]:
        return [self._as_sym(item, known) for item in self._list(held)]

    _as_sym_ints = _as_sym_floats = _as_sym_bools = _as_syms

    def _as_float(self, held: object, known: set[str]) -> float:
        return self._number(held)

    def _as_floats(self, held: object, known: set[str]) -> list[float]:
        return [self._number(item) for item in self._list(held)]

    def _as_complex(self, held: object, known: set[str]) -> complex:
        parts = self._mapping(held, "a number")
        return complex(self._number(parts.get("real")), self._number(parts.get("imag")))

    def _as_scalar_type(self, held: object, known: set[str]) -> torch.dtype:
        return dtype_of(self.spec, held)

    def _as_memory_format(self, held: object, known: set[str]) -> torch.memory_format:
        if not isinstance(held, int) or held not in _MEMORY_FORMATS:
            raise self.malformed("a memory format")
        return _MEMORY_FORMATS[held]

    def _as_layout(self, held: object, known: set[str]) -> torch.layout:
        if held != _STRIDED:
            raise NotRunnable("its graph has tensors that are not laid out by strides")
        return torch.strided

    def _as_device(self, held: object, known: set[str]) -> torch.device:
        """The program is run where it is looked at, whatever device it was exported for."""
        return _HERE

    def _as_custom_obj(self, held: object, known: set[str]) -> Any:
        raise self._script_object(held)

    def _as_operator(self, held: object, known: set[str]) -> Any:
        raise NotRunnable("its graph hands an operation to another, which cannot be traced from a file")

    # -- shapes of the JSON -------------------------------------------------------------------------------

    def _ref(self, held: object, key: str, known: set[str]) -> Ref:
        name = self._named(held, key)
        if name not in known:
            raise self.malformed(f"the value {name[:80]!r}")
        return Ref(name)

    def _named(self, held: object, key: str) -> str:
        name = held.get(key) if isinstance(held, dict) else None
        if not isinstance(name, str):
            raise self.malformed("a name")
        return name

    def _number(self, held: object) -> float:
        if isinstance(held, str) and held in _NAMED_FLOATS:
            return _NAMED_FLOATS[held]
        if not isinstance(held, (int, float)):
            raise self.malformed("a number")
        return float(held)

    def _only(self, value: object) -> tuple[str, Any]:
        """The one tag of a union, and what it holds; tags without a value are left out by some versions."""
        held = (
            [(key, item) for key, item in value.items() if item is not None]
            if isinstance(value, dict)
            else []
        )
        if len(held) != 1 or not isinstance(held[0][0], str):
            raise self.malformed("an argument")
        return held[0]

    def _list(self, value: object) -> list[Any]:
        if not isinstance(value, list):
            raise self.malformed("a list")
        return value

    def _mapping(self, value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.malformed(what)
        return value

    def _script_object(self, held: object) -> LoadError:
        name = held.get("class_fqn") if isinstance(held, dict) else None
        return script_object(self.spec, str(name or "an object"))


def script_object(spec: str, name: str) -> LoadError:
    """The error for a program that carries an object with code of its own."""
    return LoadError(
        f"{spec}: holds {name[:80]}, an object with code of its own: give the Python model as file.py:name"
    )


def dtype_of(spec: str, value: object) -> torch.dtype:
    """The dtype that a number of the schema stands for. Raises LoadError for another."""
    if not isinstance(value, int) or value not in DTYPES:
        raise LoadError(f"{spec}: has a tensor of the unknown dtype number {str(value)[:20]}")
    return DTYPES[value]


def _integer(value: object) -> bool:
    return type(value) is int


def _all(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


_PLAIN: dict[str, Callable[[object], bool]] = {
    "as_int": _integer,
    "as_bool": lambda value: type(value) is bool,
    "as_string": lambda value: isinstance(value, str),
    "as_ints": _all(int),
    "as_bools": _all(bool),
    "as_strings": _all(str),
}
_READ = frozenset(
    (
        "as_tensor as_tensors as_nested_tensors as_optional_tensor as_optional_tensors as_sym_int "
        "as_sym_float as_sym_bool as_sym_ints as_sym_floats as_sym_bools as_float as_floats as_complex "
        "as_scalar_type as_memory_format as_layout as_device as_custom_obj as_operator"
    ).split()
)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _names(results: tuple[Any, ...]) -> Iterator[str]:
    for item in results:
        if isinstance(item, tuple):
            yield from _names(item)
        elif item is not None:
            yield item
