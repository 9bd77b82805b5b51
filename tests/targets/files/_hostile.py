"""Archives that ask for more than they should; each would make the folder ``ran`` where it is loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Edit = Callable[[dict[str, Any]], None]
ROOT = "m"
MAKES = "__import__('os').mkdir('ran')"


class Runs:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("ran",)


def rewritten(source: Path, path: Path, changes: dict[str, bytes | None]) -> Path:
    """A copy of an archive with some entries changed, added, or left out where they are None."""
    with zipfile.ZipFile(source) as archive:
        held = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    held.update({name: data for name, data in changes.items() if data is not None})
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            if changes.get(name, data) is not None:
                archive.writestr(zipfile.ZipInfo(f"{path.stem}/{name}"), data)
    return path


def program(source: Path, path: Path, edit: Edit, entry: str = "models/model.json") -> Path:
    """A copy of an exported program with its JSON changed by ``edit``."""
    with zipfile.ZipFile(source) as archive:
        name = next(item for item in archive.namelist() if item.endswith(entry))
        held = json.loads(archive.read(name))
    edit(held)
    return rewritten(source, path, {entry: json.dumps(held).encode()})


def saved(value: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled_example(source: Path, path: Path) -> Path:
    """The example inputs, which PyTorch's loader unpickles."""
    return rewritten(source, path, {"data/sample_inputs/model.pt": saved(((Runs(),), {}))})


def _payload(table: str, change: dict[str, Any], file: str, data: bytes) -> Callable[[Path, Path], Path]:
    def make(source: Path, path: Path) -> Path:
        folder = table.rpartition("/")[0]
        with zipfile.ZipFile(source) as archive:
            entry = next(item for item in archive.namelist() if item.endswith(table))
            held = json.loads(archive.read(entry))
        first = next(iter(held["config"].values()))
        first.update({"path_name": file, **change})
        return rewritten(source, path, {table: json.dumps(held).encode(), f"{folder}/{file}": data})

    return make


_WEIGHTS, _CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
pickled_weight = _payload(_WEIGHTS, {"use_pickle": True}, "weight_9", saved(Runs()))
pickled_constant = _payload(_CONSTANTS, {"use_pickle": True}, "tensor_9", saved(Runs()))
opaque_object = _payload(
    _CONSTANTS, {"use_pickle": True, "tensor_meta": None}, "opaque_obj_0", pickle.dumps(Runs(), protocol=2)
)
script_object = _payload(_CONSTANTS, {"use_pickle": True, "tensor_meta": None}, "custom_obj_0", saved(Runs()))


def _edited(edit: Edit) -> Callable[[Path, Path], Path]:
    return lambda source, path: program(source, path, edit)


def _sizes(held: dict[str, Any], name: str) -> list[Any]:
    return held["graph_module"]["graph"]["tensor_values"][name]["sizes"]


def _node(held: dict[str, Any], target: str) -> dict[str, Any]:
    return next(item for item in held["graph_module"]["graph"]["nodes"] if target in item["target"])


def _in_input(held: dict[str, Any]) -> None:
    _sizes(held, "ids")[1]["as_expr"]["expr_str"] = MAKES


def _in_value(held: dict[str, Any]) -> None:
    _sizes(held, "embedding")[1]["as_expr"]["expr_str"] = MAKES


def _in_size(held: dict[str, Any]) -> None:
    next(iter(held["graph_module"]["graph"]["sym_int_values"].values()))["as_expr"]["expr_str"] = MAKES


def _in_range(held: dict[str, Any]) -> None:
    held["range_constraints"][MAKES] = {"min_val": 0, "max_val": 64}


def _in_guard(held: dict[str, Any]) -> None:
    held["guards_code"] = [MAKES, f"{MAKES} or L['ids'].size()[1] == 5", f"L['ids'].size()[{MAKES}] == 5"]


def _in_tree(held: dict[str, Any]) -> None:
    call = held["graph_module"]["module_call_graph"][0]["signature"]
    call["in_spec"] = call["out_spec"] = MAKES


def _in_metadata(held: dict[str, Any]) -> None:
    for node in held["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {
            "stack_trace": f'File "{MAKES}.py", line 1, in {MAKES}\n    {MAKES}',
            "nn_module_stack": f"{MAKES},{MAKES},{MAKES}",
            "source_fn_stack": f"a,torch.{MAKES}",
            "torch_fn": f"{MAKES};{MAKES}",
            "custom": "[" * 2000,
            "from_node": MAKES,
        }


def _python(target: str) -> Edit:
    def edit(held: dict[str, Any]) -> None:
        node = _node(held, "aten.embedding")
        node["target"] = target
        node["inputs"] = [{"name": "", "arg": {"as_string": "ran"}, "kind": 1}]

    return edit


def _operation(target: str, *given: tuple[str, Any]) -> Edit:
    def edit(held: dict[str, Any]) -> None:
        node = _node(held, "aten.embedding")
        node["target"] = target
        node["inputs"] = [{"name": name, "arg": arg, "kind": 1} for name, arg in given]

    return edit


def _operator_argument(held: dict[str, Any]) -> None:
    _node(held, "aten.embedding")["inputs"][0]["arg"] = {"as_operator": "torch.os.mkdir"}


def _custom_argument(held: dict[str, Any]) -> None:
    _node(held, "aten.embedding")["inputs"][0]["arg"] = {
        "as_custom_obj": {"name": "x", "class_fqn": "__torch__.Runs"}
    }


def _custom_input(held: dict[str, Any]) -> None:
    arg = {"name": "x", "class_fqn": "__torch__.Runs"}
    held["graph_module"]["graph"]["inputs"].append({"as_custom_obj": arg})
    held["graph_module"]["signature"]["input_specs"].append(
        {"custom_obj": {"arg": arg, "custom_obj_name": "x"}}
    )


_FILE = (("filename", {"as_string": "ran"}), ("shared", {"as_bool": True}), ("size", {"as_int": 8}))

OPENED = {
    "pickled example inputs": pickled_example,
    "text of an inner size": _edited(_in_value),
    "text of a size": _edited(_in_size),
    "text of a range": _edited(_in_range),
    "text of a condition": _edited(_in_guard),
    "text of a tree": _edited(_in_tree),
    "text of metadata": _edited(_in_metadata),
}
"""Ways that lead nowhere, since what they hide in is not read, or not as code."""

REFUSED = {
    "a pickled weight": (pickled_weight, "which is pickled: add --trust"),
    "a pickled constant": (pickled_constant, "which is pickled: add --trust"),
    "an opaque object": (opaque_object, "an object with code of its own"),
    "a script object": (script_object, "an object with code of its own"),
    "torch.os": (_edited(_python("torch.os.mkdir")), "asks to call torch.os.mkdir"),
    "torch.hub": (_edited(_python("torch.hub.load")), "asks to call torch.hub.load"),
    "a method of math": (_edited(_python("math.__loader__.create_module")), "asks to call math.__loader__"),
    "a caller of _operator": (
        _edited(_python("_operator.methodcaller")),
        "asks to call _operator.methodcaller",
    ),
    "an attribute of ops": (_edited(_python("torch.ops.load_library")), "calls torch.ops.load_library"),
    "an extension": (_edited(_python("#executorch:ran")), "asks to call #executorch:ran"),
    "aten::from_file": (
        _edited(_operation("torch.ops.aten.from_file.default", *_FILE)),
        "calls aten::from_file",
    ),
    "aten::save": (
        _edited(
            _operation(
                "torch.ops.aten.save.default", ("item", {"as_int": 1}), ("filename", {"as_string": "ran"})
            )
        ),
        "calls aten::save",
    ),
    "a text": (
        _edited(_operation("torch.ops.aten.dropout.default", ("input", {"as_string": "ran"}))),
        "hands a text to aten.dropout.default",
    ),
    "memory of another": (
        _edited(
            _operation("torch.ops.aten._reshape_alias.default", ("self", {"as_tensor": {"name": "ids"}}))
        ),
        "calls aten::_reshape_alias",
    ),
    "an object as argument": (_edited(_custom_argument), "__torch__.Runs, an object with code of its own"),
    "an object as input": (_edited(_custom_input), "__torch__.Runs, an object with code of its own"),
}
"""Ways that are refused, and what is said."""

UNTRACED = {
    "text of an input's size": (_edited(_in_input), "sizes of its inputs"),
    "an operation as argument": (_edited(_operator_argument), "hands an operation to another"),
    "an operation of a library": (
        _edited(_operation("torch.ops.mylib.mkdir.default")),
        "no library here registers mylib",
    ),
    "a kernel": (
        _edited(_operation("torch.ops.higher_order.triton_kernel_wrapper_functional")),
        "has a triton_kernel_wrapper_functional",
    ),
}
"""Ways that keep the program from being traced; its tensors are still read."""

LOADED_BY_TORCH = (
    "pickled example inputs",
    "text of an inner size",
    "a pickled weight",
    "text of an input's size",
)
"""Those of the above that run under ``torch.export.load``, which proves that they are ways in."""
