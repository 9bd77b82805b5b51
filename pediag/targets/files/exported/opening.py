"""Exported programs (``torch.export.save``): the graph is read and run here, and no code comes with it.

PyTorch's own loader unpickles the example inputs, evaluates size expressions and conditions as Python, and looks
operations up as attributes of Python modules, so it is not used. What is read is the JSON of the graph and the
raw bytes of the tensors; what is run is an allow-list of operations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pediag.errors import LoadError
from pediag.targets._paths import digest, first_bytes, shortened
from pediag.targets._trust import Trust, trusted_by
from pediag.targets.config import Config
from pediag.targets.files.exported.archive import Archive
from pediag.targets.files.exported.dims import Condition, Dim, Shapes, Taken, Unreadable, bounds_of, parse_dim
from pediag.targets.files.exported.graph import Plan, Reader, dtype_of
from pediag.targets.files.exported.operators import NotRunnable
from pediag.targets.files.exported.run import Exported
from pediag.targets.files.exported.tensors import Payload
from pediag.targets.target import LazyTensor, Target

GRAPH_LIMIT = 64 * 2**20
"""Bytes of a program's JSON above which it is refused; 80 decoder layers take about 15 MiB."""

SCHEMA_MAJOR = 8
"""Version of the graph's schema that is read; the minor one only adds to it."""

_MODELS, _WEIGHTS, _CONSTANTS = "models/", "data/weights/", "data/constants/"
ZIP = b"PK\x03\x04"
_OLD = "serialized_exported_program.json"


def is_exported(names: set[str]) -> bool:
    """Whether an archive with these entries holds an exported program, in today's layout or an older one."""
    return "archive_format" in names or any(name.startswith(_MODELS) for name in names) or _OLD in names


def open_exported(spec: str, path: Path, *, config: Config | None = None, trust: Trust = False) -> Target:
    """Open a ``.pt2`` file: its graph as a module where it can be traced, else its tensors.

    Raises LoadError for a file that is damaged, or asks for more than computing; with ``trust`` pickled
    tensors are read and operations of other libraries are called.
    """
    if not first_bytes(path, spec).startswith(ZIP):
        raise LoadError(
            f"{spec}: not an exported program, which is a zip archive that torch.export.save writes"
        )
    archive = Archive(spec, path)
    if not is_exported(archive.names):
        from pediag.targets.files.checkpoint import open_checkpoint

        return open_checkpoint(spec, path, config=config, trust=trust)
    if _OLD in archive.names:
        raise LoadError(f"{spec}: {_OLD_LAYOUT}")
    name, notes = _chosen(archive)
    program = _json(archive, f"{_MODELS}{name}.json")
    version = _version(archive, program)
    payload = Payload(archive, trust=trust)
    weights = _tensors(archive, payload, name)
    target = Target(spec, f"exported program (PyTorch {version})", digest(path), config=config, notes=notes)
    _add_module(target, archive, program, weights, payload, trust=trust)
    return target


def _add_module(
    target: Target,
    archive: Archive,
    program: dict[str, Any],
    weights: dict[str, torch.Tensor],
    payload: Payload,
    *,
    trust: Trust,
) -> None:
    """Give ``target`` the program as a module; where it cannot be traced, its tensors and the reason."""
    reader = Reader(target.spec, trust)
    try:
        module = _module(reader, archive, program, weights)
        shapes = module._shapes[0]
        _refuse_collision(shapes, weights)
        target.inputs, target.longest = shapes.specs(), shapes.longest()
        target.takes = shapes.takes if shapes.tokens is not None else None
        target.module = module
    except (NotRunnable, Unreadable) as reason:
        text = str(reason) or "the sizes of its inputs depend on each other in a way that is not read"
        target.reason_not_runnable = f"an exported program, not traced: {text}"
        target.tensors = {name: _lazy(name, tensor) for name, tensor in weights.items() if not tensor.is_meta}
    if payload.without_numbers:
        target.notes.append(f"saved without their numbers: {shortened(payload.without_numbers, 4)}")
    if payload.ran or reader.custom:
        called = f": it called {shortened(sorted(reader.custom), 4)}" if reader.custom else ""
        target.notes.append(f"{trusted_by(trust)} was used: code in {target.spec} ran{called}")


def _lazy(name: str, tensor: torch.Tensor) -> LazyTensor:
    plain = tensor.detach()
    return LazyTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), lambda: plain)


# -- the archive --------------------------------------------------------------------------------------------


_OLD_LAYOUT = (
    "an exported program in the layout of an older PyTorch: load it with the version that wrote it, and save it "
    "with PyTorch 2.9 or newer"
)


def _chosen(archive: Archive) -> tuple[str, list[str]]:
    """The name of the program to look at, and notes on what else the archive holds."""
    programs = sorted(
        name[len(_MODELS) : -len(".json")]
        for name in archive.names
        if name.startswith(_MODELS) and name.endswith(".json") and name.count("/") == 1
    )
    compiled = any(name.startswith("data/aotinductor/") for name in archive.names)
    if not programs:
        what = "compiled code (AOTInductor), which is machine code" if compiled else "no program"
        raise LoadError(f"{archive.spec}: holds {what}: export the model with torch.export.save")
    if len(programs) > 1 and "model" not in programs:
        raise LoadError(
            f"{archive.spec}: holds several programs ({shortened(programs, 6)}): save one to check alone"
        )
    name = "model" if "model" in programs else programs[0]
    others = [item for item in programs if item != name]
    notes = [f"of its programs, {name} is checked, not {shortened(others, 4)}"] if others else []
    return name, notes + (["its compiled code (AOTInductor) was not read"] if compiled else [])


def _json(archive: Archive, name: str) -> dict[str, Any]:
    try:
        parsed = json.loads(archive.read(name, GRAPH_LIMIT))
    except (ValueError, RecursionError):
        raise archive.damaged(f"{name} is not valid JSON") from None
    if not isinstance(parsed, dict):
        raise archive.damaged(f"{name} is not a JSON object")
    return parsed


def _version(archive: Archive, program: Mapping[str, Any]) -> str:
    """The version of PyTorch that wrote the program. Raises LoadError for a schema that is not read."""
    schema = program.get("schema_version")
    major = schema.get("major") if isinstance(schema, dict) else None
    text = program.get("torch_version")
    version = (
        text if isinstance(text, str) and re.fullmatch(r"[\w.+<=-]{1,40}", text) else "of unknown version"
    )
    if major != SCHEMA_MAJOR:
        raise LoadError(
            f"{archive.spec}: its schema is version {str(major)[:20]}, and {SCHEMA_MAJOR} is read: export it with "
            f"PyTorch {torch.__version__.partition('+')[0]} or near"
        )
    return version


def _tensors(archive: Archive, payload: Payload, name: str) -> dict[str, torch.Tensor]:
    if f"{_WEIGHTS}{name}.pt" in archive.names or f"{_CONSTANTS}{name}.pt" in archive.names:
        raise LoadError(f"{archive.spec}: {_OLD_LAYOUT}")
    weights = payload.read(_json(archive, f"{_WEIGHTS}{name}_weights_config.json"), _WEIGHTS)
    constants = payload.read(_json(archive, f"{_CONSTANTS}{name}_constants_config.json"), _CONSTANTS)
    return {**weights, **constants}


# -- the program --------------------------------------------------------------------------------------------


def _module(
    reader: Reader, archive: Archive, program: dict[str, Any], weights: dict[str, torch.Tensor]
) -> Exported:
    try:
        held = program["graph_module"]
        graph, signature = held["graph"], held["signature"]
        specs = [next(iter(item.items())) for item in signature["input_specs"]]
        plan = reader.graph(graph)
        stored, taken, numbers = _inputs(reader, archive, specs, graph)
        shapes = Shapes(taken, bounds_of(program.get("range_constraints") or {}), _conditions(program))
    except (KeyError, TypeError, AttributeError, StopIteration, ValueError, RecursionError):
        raise archive.damaged("the graph of the program is malformed") from None
    if missing := [name for name in stored.values() if name not in weights]:
        raise archive.damaged(f"it lacks the tensors {shortened(missing, 4)}")
    _refuse_unfilled(archive, plan, {*stored, *numbers, *(item.name for item in taken)})
    try:
        module = Exported(plan, {name: weights[name] for name in stored.values()}, stored, shapes)
    except ValueError as error:
        raise archive.damaged(f"the tensor {str(error)[:80]!r} stands where a module does") from None
    module.numbers.update(numbers)
    return module.eval()


def _inputs(
    reader: Reader, archive: Archive, specs: list[tuple[str, Any]], graph: Mapping[str, Any]
) -> tuple[dict[str, str], list[Taken], dict[str, Any]]:
    """Stored tensors by graph input, tensors that the user gives, and inputs that are numbers."""
    stored: dict[str, str] = {}
    taken: list[Taken] = []
    numbers: dict[str, Any] = {}
    for kind, held in specs:
        if kind in ("parameter", "buffer", "tensor_constant"):
            stored[held["arg"]["name"]] = held[
                {"tensor_constant": "tensor_constant_name"}.get(kind, f"{kind}_name")
            ]
        elif kind == "user_input":
            tag, item = next(iter(held["arg"].items()))
            if tag == "as_tensor":
                taken.append(_taken(reader, item["name"], graph["tensor_values"][item["name"]]))
            elif tag.startswith("as_sym_") and "as_name" in item:
                numbers[item["as_name"]] = _example(graph, item["as_name"])
        elif kind == "custom_obj":
            reader._input({"as_custom_obj": held["arg"]})
        elif kind == "token":
            raise NotRunnable("its graph has operations with effects, which cannot be traced from a file")
    return stored, taken, numbers


def _taken(reader: Reader, name: str, meta: Mapping[str, Any]) -> Taken:
    dims = tuple(_size(item) for item in meta["sizes"])
    return Taken(name, str(dtype_of(reader.spec, meta["dtype"])).removeprefix("torch."), dims)


def _size(item: Mapping[str, Any]) -> Dim:
    if type(item.get("as_int")) is int:
        return Dim(0, "", item["as_int"])
    return parse_dim(item["as_expr"]["expr_str"])


def _example(graph: Mapping[str, Any], name: str) -> Any:
    """The number that a numeric input had when the program was exported."""
    for table in ("sym_int_values", "sym_float_values", "sym_bool_values"):
        held = (graph.get(table) or {}).get(name)
        if isinstance(held, dict) and isinstance(held.get("as_expr"), dict):
            hint = held["as_expr"].get("hint") or {}
            value = next((item for item in hint.values() if isinstance(item, (int, float))), None)
            if value is not None:
                return value
    raise NotRunnable(f"its input {name[:40]} is a number, and no example of it was saved")


def _conditions(program: Mapping[str, Any]) -> list[Condition]:
    """The conditions under which the program was exported, those left out that are of another form."""
    found = []
    for text in program.get("guards_code") or []:
        try:
            found.append(Condition(text))
        except Unreadable:
            continue
    return found


def _refuse_unfilled(archive: Archive, plan: Plan, filled: set[str]) -> None:
    if missing := [name for name in plan.inputs if name is not None and name not in filled]:
        raise archive.damaged(f"nothing is said of the graph's inputs {shortened(missing, 4)}")


def _refuse_collision(shapes: Shapes, weights: Mapping[str, torch.Tensor]) -> None:
    """A fixed length that is also a width of the model: axes could not be told apart."""
    length = shapes.fixed
    if length is None:
        return
    widths = {size for tensor in weights.values() for size in tensor.shape if size > 1}
    near = {length, length - 1, length + 1, 2 * length - 1, 2 * length, 2 * length + 1}
    if length < _SHORTEST or near & widths or any(size % length == 0 for size in widths):
        raise NotRunnable(
            f"it was exported for a fixed length of {length:,} tokens, which cannot be told from the model's own "
            "sizes: export it with dynamic_shapes, or name the Python model"
        )


_SHORTEST = 5
