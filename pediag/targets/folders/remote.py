"""Code that a checkpoint's folder brings, as its config names it: loaded from the folder itself, and only if trusted.

transformers copies such code into a cache and imports it from there. Here the folder is imported as a package where it
lies, so that nothing is written, and source lines are those of the folder's files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pediag.errors import LoadError
from pediag.targets.code.usercode import FILE_MODULE, told_as_theirs
from pediag.targets.config import Config

MODEL_ROLES = ("AutoModelForCausalLM", "AutoModel", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
"""Entries of ``auto_map`` that are models, the one to prefer first."""


def code_named(config: Config) -> list[str]:
    """Names of the files that ``auto_map`` takes classes from: configurations and models, not tokenizers."""
    named = config.get("auto_map")
    roles = (
        {role: place for role, place in named.items() if _is_model(role)} if isinstance(named, dict) else {}
    )
    places = [place for place in roles.values() if isinstance(place, str) and "." in place]
    return sorted({f"{place.rpartition('.')[0].replace('.', '/')}.py" for place in places})


def load_own_code(spec: str, folder: Path, config: Config) -> tuple[Any, Any]:
    """The classes of configuration and model that ``config`` names, from files in ``folder``.

    Raises LoadError where the code is not in the folder, fails, or has no such class.
    """
    named = config.get("auto_map")
    model = next((named[role] for role in (*MODEL_ROLES, *named) if _is_network(role, named)), None)
    architectures = config.get("architectures")
    wanted = architectures[0] if isinstance(architectures, list) and architectures else None
    for role, place in named.items():
        if isinstance(place, str) and place.rpartition(".")[2] == wanted and _is_network(role, named):
            model = place
    if not isinstance(model, str) or not isinstance(named.get("AutoConfig"), str):
        raise LoadError(f"{spec}: its auto_map names no class of a model, or none of a configuration")
    with told_as_theirs(f"{spec}: running its own code"), _offline():
        return _found(spec, folder, named["AutoConfig"]), _found(spec, folder, model)


def _is_model(role: object) -> bool:
    return role == "AutoConfig" or (
        isinstance(role, str) and role.startswith(("AutoModel", "Flax", "TFAuto"))
    )


def _is_network(role: object, named: dict[str, Any]) -> bool:
    return isinstance(role, str) and role.startswith("AutoModel") and isinstance(named.get(role), str)


def _found(spec: str, folder: Path, place: str) -> Any:
    """The class at ``module.Class`` in the folder."""
    repository, dashes, inside = place.rpartition("--")
    module, _, name = inside.rpartition(".")
    if dashes and not (folder / f"{module}.py").is_file():
        raise LoadError(
            f"{spec}: its code is in another repository ({repository}): put the files into its folder"
        )
    if not module.replace(".", "").replace("_", "").isalnum() or not (folder / _file(module)).is_file():
        raise LoadError(
            f"{spec}: its auto_map names {place!r}, and there is no {_file(module)} in the folder"
        )
    found = getattr(_imported(folder, module), name, None)
    if not isinstance(found, type):
        raise LoadError(f"{spec}: {_file(module)} has no class {name}")
    return found


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _imported(folder: Path, module: str) -> ModuleType:
    """A module of the folder, as part of a package that is the folder."""
    stem = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]
    package = f"{FILE_MODULE}folder_{stem}"
    if package not in sys.modules:
        made = ModuleType(package)
        made.__path__ = [str(folder.resolve())]
        sys.modules[package] = made
    return importlib.import_module(f"{package}.{module}")


@contextmanager
def _offline() -> Iterator[None]:
    """Fetch nothing and write no bytecode while code of a checkpoint is imported."""
    before, written = os.environ.get("HF_HUB_OFFLINE"), sys.dont_write_bytecode
    constants: Any = sys.modules.get("huggingface_hub.constants")
    flag = getattr(constants, "HF_HUB_OFFLINE", None)
    os.environ["HF_HUB_OFFLINE"], sys.dont_write_bytecode = "1", True
    if constants is not None:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        if constants is not None:
            constants.HF_HUB_OFFLINE = flag
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
