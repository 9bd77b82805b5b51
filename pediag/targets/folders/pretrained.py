"""Models that transformers knows: from a configuration to a recipe that builds the model without weights.

Nothing is fetched, and no code of a checkpoint is run unless it is trusted: the configuration is read here, and the
class comes from the installed library. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pediag.errors import LoadError
from pediag.targets._paths import nearest, shortened
from pediag.targets._trust import Trust, trusted_by
from pediag.targets.code.usercode import describe
from pediag.targets.config import Config
from pediag.targets.folders.converted import stored_names
from pediag.targets.folders.remote import code_named, load_own_code
from pediag.targets.target import Target

if TYPE_CHECKING:
    from torch import nn

NO_TYPE = "the config names no model_type to build: name the model's factory as file.py:name"
MOST_LAYERS = 10_000
MOST_MODULES = 200_000
"""Modules of one model; 61 layers of 256 experts that are modules of their own have about 80,000."""

LAYER_KEYS = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "n_layer",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "n_encoder_layers",
    "n_decoder_layers",
    "depth",
)
"""Keys that say how many layers a model has."""

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys that say how many experts a layer has; Doge's class default is 16,384, rows of one table."""

NOT_INSTALLED = (
    "transformers is not installed, so the model cannot be built: pip install 'pediag[transformers]'"
)


def is_pretrained_config(value: object) -> bool:
    """Whether ``value`` is a transformers configuration; transformers is not imported to find out."""
    library = sys.modules.get("transformers")
    base = getattr(library, "PretrainedConfig", None) if library else None
    return base is not None and isinstance(value, base)


def loader_name() -> str:
    """``transformers 5.24.0, built without weights``; raises nothing."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "(unknown version)"
    return f"transformers {version}, built without weights"


def add_recipe(target: Target, *, folder: Path | None = None, trust: Trust = False) -> None:
    """Give ``target`` a ``build`` from its own config, or the reason why there is none.

    Where only code in ``folder`` knows the type of model, that code is what ``build`` runs under ``trust``.
    """
    config = target.config
    if config is None or not (config.get("model_type") or config.get("architectures")):
        target.reason_not_runnable = NO_TYPE
    elif importlib.util.find_spec("transformers") is None:
        target.reason_not_runnable = NOT_INSTALLED
    else:
        target.loader = loader_name()
        target.build = build_recipe(target, None)
        if code_named(config):
            _with_own_code(target, config, folder, trust)


def _with_own_code(target: Target, config: Config, folder: Path | None, trust: Trust) -> None:
    """The recipe of a model whose config names code: transformers' own class, theirs under ``trust``, or none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    files = shortened(code_named(config), 4)
    if str(config.get("model_type")) in CONFIG_MAPPING_NAMES:
        target.notes.append(f"transformers has this type of model, so its own code ({files}) was not used")
        return
    if folder is not None and trust:
        target.build = own_code_recipe(target, folder, trust)
        target.loader = f"{loader_name()} by code of the folder (trusted)"
        return
    target.build, target.loader = None, "config.json"
    target.notes.append(f"code that comes with the checkpoint ({files}) was not run")
    target.reason_not_runnable = (
        f"the code of a {config.get('model_type')!r} comes with the checkpoint ({files}) and was not run: "
        "add --trust if you trust its origin, or import it and name it as file.py:name"
    )


def with_config(target: Target, config: Config | None) -> Target:
    """``target`` with the user's config in place of its own; tensors alone get a recipe from it."""
    if config is None:
        return target
    target.config = config
    if target.module is None and target.build is None and target.tensors:
        loader, reason = target.loader, target.reason_not_runnable
        add_recipe(target)
        target.loader = f"{loader}; {target.loader}" if target.build else loader
        target.reason_not_runnable = "" if target.build else target.reason_not_runnable or reason
    return target


def build_recipe(target: Target, ready: Any | None) -> Callable[[], nn.Module]:
    """A recipe that builds the model of ``ready``, a transformers config, or of ``target.config`` when None.

    The recipe enters no abstract mode; called outside one it allocates the weights, uninitialised. It raises
    LoadError with one line when transformers refuses the configuration. It sets ``target.prefix`` and ``renamed``.
    """
    declared = target.config

    def build() -> nn.Module:
        with _quiet():
            config = (
                copy.deepcopy(ready) if ready is not None else _transformers_config(target.spec, declared)
            )
            cls = _model_class(target.spec, config)
            config = _own_part(cls, config)
            target.prefix = getattr(cls, "base_model_prefix", "") or ""
            model = _construct(target.spec, cls, config)
            _fill_fixed(model)
            target.renamed = stored_names(model, target.tensors)
            return model

    return build


def own_code_recipe(target: Target, folder: Path, trust: Trust) -> Callable[[], nn.Module]:
    """A recipe that runs the code which ``target.config`` names in ``folder``; a note tells that it ran."""
    declared = target.config
    assert declared is not None

    def build() -> nn.Module:
        with _quiet():
            target.notes += [
                f"{trusted_by(trust)} was used: code in {folder / name} ran" for name in code_named(declared)
            ]
            config_class, cls = load_own_code(target.spec, folder, declared)
            try:
                config = config_class.from_dict(copy.deepcopy(declared.values))
            except Exception as error:
                raise LoadError(f"{target.spec}: {config_class.__name__} raised {describe(error)}") from error
            target.prefix = getattr(cls, "base_model_prefix", "") or ""
            return _construct(target.spec, cls, config)

    return build


def _transformers_config(spec: str, declared: Config | None) -> Any:
    """The declaration as an object of its transformers class. Raises LoadError for one that it refuses."""
    from transformers import CONFIG_MAPPING

    values = copy.deepcopy(declared.values) if declared else {}
    model_type = values.get("model_type") or _type_of_architecture(values)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise LoadError(_unknown_type(spec, model_type, list(CONFIG_MAPPING.keys())))
    _refuse_endless(spec, declared)
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:
        raise LoadError(f"{spec}: transformers refuses this configuration: {describe(error)}") from None


def _refuse_endless(spec: str, declared: Config | None) -> None:
    """Refuse numbers of layers and experts that no model has: classes make lists as long as that."""
    most = {**dict.fromkeys(LAYER_KEYS, MOST_LAYERS), **dict.fromkeys(EXPERT_KEYS, MOST_MODULES)}
    for path, section in declared.sections() if declared else ():
        for key, value in section.items():
            if key in most and isinstance(value, (int, float)) and value > most[key]:
                where = f"{path}.{key}" if path else key
                raise LoadError(f"{spec}: {where} is above {most[key]:,}, which it is in no model")


def _type_of_architecture(values: dict[str, Any]) -> Any:
    """The model type of a config that names only its class."""
    cls = _named_class(values.get("architectures"))
    return getattr(getattr(cls, "config_class", None), "model_type", None)


def _unknown_type(spec: str, model_type: object, known: list[str]) -> str:
    near = nearest(str(model_type), known)
    why = f"nearest: {', '.join(near)}" if near else "name the model's factory as file.py:name"
    version = importlib.metadata.version("transformers")
    return f"{spec}: transformers {version} knows no model type {model_type!r}; {why}"


def _model_class(spec: str, config: Any) -> Any:
    """The class that ``architectures`` names, else the causal language model, else the bare model.

    An encoder-decoder's causal model is its decoder alone, so there the bare model comes first.
    """
    import transformers

    if (named := _named_class(getattr(config, "architectures", None))) is not None:
        return named
    mappings = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING]
    for mapping in reversed(mappings) if getattr(config, "is_encoder_decoder", False) else mappings:
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise LoadError(f"{spec}: transformers has no model class for a {type(config).__name__}")


def _named_class(architectures: object) -> Any | None:
    """The model class of transformers that the first architecture names, or None."""
    import transformers

    first = architectures[0] if isinstance(architectures, (list, tuple)) and architectures else None
    cls = getattr(transformers, first, None) if isinstance(first, str) and first.isidentifier() else None
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def _own_part(cls: Any, config: Any) -> Any:
    """The section of a composite configuration that ``cls`` is made of, its text section say; else all of it."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    sections = getattr(config, "sub_configs", None) or {}
    own = next((name for name, kind in sections.items() if kind is wanted), None)
    return config if own is None else getattr(config, own)


def _construct(spec: str, cls: Any, config: Any) -> nn.Module:
    """Build under the config's dtype with weight initialisation skipped."""
    try:
        with _no_init_weights()(), _bounded(spec):
            made: nn.Module = cls._from_config(config)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(f"{spec}: transformers cannot build {cls.__name__}: {describe(error)}") from error
    return made


def _fill_fixed(model: nn.Module) -> None:
    """Give tables that no training moves their numbers, where transformers' initialisers can be kept from others."""
    if importlib.util.find_spec("transformers.initialization") is not None:
        from pediag.targets.folders.fixed import fill_fixed

        fill_fixed(model)


@contextmanager
def _bounded(spec: str) -> Iterator[None]:
    """Refuse to build more than ``MOST_MODULES`` modules."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = itertools.count(1)

    def seen(holder: nn.Module, name: str, part: nn.Module | None) -> None:
        if next(count) > MOST_MODULES:
            raise LoadError(
                f"{spec}: the config describes more than {MOST_MODULES:,} modules, which no model has"
            )

    handle = register_module_module_registration_hook(seen)
    try:
        yield
    finally:
        handle.remove()


def _no_init_weights() -> Callable[[], AbstractContextManager[None]]:
    """The context of transformers that skips initialisers; it moved in version 5."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:
        from transformers.modeling_utils import no_init_weights
    found: Callable[[], AbstractContextManager[None]] = no_init_weights
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what transformers logs about a configuration; judging it is the rules' work."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
