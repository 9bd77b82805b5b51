"""``params.json``: the declaration beside weights in the layout of the model's own code and not of transformers.

Meta's Llama (``params.json``, ``consolidated.NN.pth``), Mistral (``params.json``, ``consolidated.safetensors``), and
training code that dumps its arguments. The keys are kept as written; what they mean in the spelling of transformers is
added to them. What Meta's code fixes is in models/llama3/model.py and models/llama4/args.py of
https://github.com/meta-llama/llama-models. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pediag.targets._paths import digest
from pediag.targets._trust import Trust
from pediag.targets.config import Config
from pediag.targets.folders.weights import weights_in
from pediag.targets.target import Target

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What ``use_scaled_rope`` means in Meta's code for Llama 3 (``apply_scaling``)."""

FACTOR_KEYS = ("rope_scaling_factor", "rope_scale_factor")
MEANINGS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
"""Key -> what transformers calls it."""

YARN = {"beta": "beta_fast", "alpha": "beta_slow"}
"""Keys of Mistral's ``yarn`` object -> those of the published method as transformers spells them."""

NOT_RUNNABLE = (
    "params.json declares a model whose code is not here: name its factory as file.py:name, or the folder that was "
    "converted to the transformers layout"
)
UNREAD = "rope.freqs"
"""A tensor in Meta's files that Meta's code ignores when it loads them (``strict=False``)."""

STEMS = ("consolidated", "model", "pytorch_model")


def is_original(config: Config) -> bool:
    """Whether a declaration is a ``params.json``: a width and a number of heads in Meta's keys, and no model type."""
    return (
        "model_type" not in config
        and "architectures" not in config
        and {"dim", "n_heads"} <= set(config.values)
    )


def understood(config: Config) -> Config:
    """``config`` with its keys as written, and what they mean in the common spelling added to them.

    A file that has no such keys comes back as it is.
    """
    if not is_original(config):
        return config
    values = dict(config.values)
    for key, meaning in MEANINGS.items():
        if values.get(key) is not None:
            values.setdefault(meaning, values[key])
    width, heads = values.get("dim"), values.get("n_heads")
    if type(width) is int and type(heads) is int and heads > 0 and width % heads == 0:
        values.setdefault("head_dim", width // heads)
    scaling = _scaling(values)
    if scaling is not None:
        values.setdefault("rope_scaling", scaling)
    return Config(values, config.source, config.text, config.typed)


def open_original(spec: str, path: Path, declared: Config, *, config: Config | None = None) -> Target:
    """A ``params.json`` alone."""
    return Target(
        spec,
        "params.json",
        digest(path),
        config=config or understood(declared),
        notes=_notes(declared),
        reason_not_runnable=NOT_RUNNABLE,
    )


def open_original_folder(
    spec: str, path: Path, *, config: Config | None = None, trust: Trust = False
) -> Target:
    """A folder with ``params.json`` and weights. Raises LoadError for files that are damaged."""
    file = path / "params.json"
    declared = Config.from_file(file)
    target = open_original(spec, file, declared, config=config)
    read = weights_in(path, STEMS, trust=trust)
    target.tensors = {name: tensor for name, tensor in read.tensors.items() if name != UNREAD}
    target.notes += read.notes
    target.missing = read.missing
    if UNREAD in read.tensors:
        target.notes.append(
            f"{UNREAD} is left out: the code for params.json computes its frequencies and reads none"
        )
    if len(read.files) > 1 and read.files[0].startswith("consolidated."):
        target.notes.append(
            f"the {len(read.files)} files are parts of each matrix (model parallel); shapes are those of the last part"
        )
    if not read.files:
        target.notes.append("no weights in the folder: rules that read stored numbers have nothing to read")
    return target


def _scaling(values: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling of frequencies that the keys mean, in the spelling of transformers."""
    yarn = values.get("yarn")
    if isinstance(yarn, dict):
        renamed = {YARN.get(str(key), str(key)): value for key, value in yarn.items()}
        return {"rope_type": "yarn", **renamed}
    if values.get("use_scaled_rope") is not True:
        return None
    scaling = dict(LLAMA3_SCALING)
    if "moe_args" in values:  # the code for Llama 4 has factors of its own
        scaling |= {"factor": 16.0, "high_freq_factor": 1.0}
    for key in FACTOR_KEYS:
        if values.get(key) is not None:
            scaling["factor"] = values[key]
    if values.get("rope_high_freq_factor") is not None:
        scaling["high_freq_factor"] = values["rope_high_freq_factor"]
    return scaling


def _notes(declared: Config) -> list[str]:
    """What the keys leave to the code that reads them."""
    if not is_original(declared):
        return []
    notes = []
    if declared.get("rope_theta") is None:
        notes.append("params.json names no rope_theta: the base is what the model's code takes by default")
    named = any(declared.get(key) is not None for key in FACTOR_KEYS)
    scaling = None if named else _scaling(declared.values)
    if scaling is not None and scaling["rope_type"] == LLAMA3_SCALING["rope_type"]:
        notes.append(
            f"use_scaled_rope is read as Meta's code reads it: factor {scaling['factor']:g} from 8,192 tokens; "
            "conversions of Llama 3.2 1B and 3B to transformers declare factor 32"
        )
    return notes
