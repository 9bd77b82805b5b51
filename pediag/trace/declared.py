"""What to feed a model that declares its inputs as those of transformers do: ``main_input_name`` and a config.

Sizes come from the configuration of the part that reads the input: pixels of a side, mel bands, strides of the
convolutions. Several readings of one name are tried, the likeliest first.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pediag.trace.inputs import Candidate, Input, Maker, image_sides

Readings = Callable[[Any, nn.Module], Iterator[Input]]

_FLOAT = torch.float32
_SIDE = 224
_FRAMES = 8
_MELS = 80
# Patches of a made-up image given as a list of patches, along its sides; both divide by any merging of 2 or 4.
_GRID = (8, 12)
# Names of one input each; a model takes at most one of a group, and what is of several groups takes one of each.
_MODALITIES = ("input_ids", "pixel_values", "pixel_values_videos", "input_features", "input_values")


def of_model(model: nn.Module) -> Iterator[Maker]:
    """Ways to call ``model``, the likeliest first: its main input, then with what else it takes, then text alone."""
    main = main_input(model)
    accepted = inspect.signature(model.forward).parameters
    others = [name for name in _MODALITIES if name in accepted and name != main]
    together = [main, *(name for name in others if name != "pixel_values_videos")]
    tried: list[set[str]] = []
    for names in ([main], together, ["input_ids"] if "input_ids" in others else []):
        asked = _asked(model, names)
        if names and set(asked) not in tried:
            tried.append(set(asked))
            yield from _ways(model, asked)


def main_input(model: nn.Module) -> str:
    """The name of the main input; the first argument of forward where the one declared is none of its."""
    accepted = list(inspect.signature(model.forward).parameters)
    named = getattr(model, "main_input_name", "input_ids")
    first = str(named[0] if isinstance(named, (list, tuple)) and named else named)
    return first if first in accepted or not accepted else accepted[0]


def _asked(model: nn.Module, names: list[str]) -> list[str]:
    """These arguments, those that forward needs and a decoder's."""
    accepted = inspect.signature(model.forward).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in accepted.values() if p.default is p.empty and p.kind in named]
    decoder = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted
    return list(dict.fromkeys([*names, *needed, *(["decoder_input_ids"] if decoder else [])]))


def _ways(model: nn.Module, names: list[str]) -> Iterator[Maker]:
    """Calls with these arguments, every reading of them; without a cache where forward takes that."""
    accepted = inspect.signature(model.forward).parameters
    for together in _together(model, model.config, names, accepted):
        yield _maker({**together, **_no_cache(accepted)})
        if "use_cache" in accepted:
            yield _maker(together)


def _no_cache(accepted: Any) -> dict[str, Input]:
    return {"use_cache": Input(value=False, literal=True)} if "use_cache" in accepted else {}


def _maker(kwargs: dict[str, Any]) -> Maker:
    return lambda sizes: Candidate([], dict(kwargs))


def _together(model: nn.Module, config: Any, names: list[str], accepted: Any) -> Iterator[dict[str, Input]]:
    """Readings of several arguments, every combination."""
    packed = _packed(model, config, names, accepted)
    rest = [name for name in names if name not in packed]
    ways = [list(_readings(name, config, model)) for name in rest]
    for chosen in itertools.product(*ways):
        yield {**packed, **dict(zip(rest, chosen, strict=True))}


def _readings(name: str, config: Any, model: nn.Module) -> Iterator[Input]:
    if name in _NAMED:
        yield from _NAMED[name](config, model)
    elif "mask" in name:
        yield Input(torch.bool, ("B", "N"), "mask")
    elif name.endswith("input_ids"):
        yield Input(dims=("B", "M" if name.startswith("decoder") else "N"))
    elif name.endswith("embeds"):
        yield Input(_FLOAT, ("B", "N", _first(config, _WIDTHS, 768)))
    elif "pixel_values" in name:
        yield from _pixels(config, model)
    else:
        yield Input()


# -- what the configuration says ------------------------------------------------------------------------------

_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_MEL_KEYS = ("num_mel_bins", "n_mels", "mel_bins", "feature_size", "input_feat_per_channel")


def _configs(config: Any) -> Iterator[Any]:
    """The configuration and those inside it."""
    yield config
    for name in (*getattr(config, "sub_configs", ()), "backbone_config"):
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            yield from _configs(inner)


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    """The first whole number that the configuration, or one inside it, has under one of ``names``."""
    for part in _configs(config):
        for name in names:
            value = getattr(part, name, None)
            if type(value) is int:
                return value
    return default


def _sides(config: Any, model: nn.Module) -> tuple[int, int]:
    """Height and width of an image in pixels."""
    for part in _configs(config):
        for name in ("image_size", "crop_size", "input_size"):
            value = getattr(part, name, None)
            if isinstance(value, dict):
                value = (value.get("height"), value.get("width"))
            sides = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
            if len(sides) == 2 and all(type(side) is int and side > 1 for side in sides):
                return sides[0], sides[1]
    side = next(iter(image_sides(model)), _SIDE)
    return side, side


# -- images ---------------------------------------------------------------------------------------------------


def _channels(config: Any) -> int:
    return _first(config, ("num_channels", "in_channels", "in_chans"), 3)


def _pixels(config: Any, model: nn.Module) -> Iterator[Input]:
    """One image, or a clip where the configuration counts frames."""
    sides = _sides(config, model)
    image = Input(_FLOAT, ("B", _channels(config), *sides))
    frames = _first(config, ("num_frames", "frames_per_clip"), 0)
    if frames:
        yield Input(_FLOAT, ("B", frames, _channels(config), *sides))
    yield image
    if not frames:
        yield Input(_FLOAT, ("B", 1, _channels(config), *sides))


def _clip(config: Any, model: nn.Module) -> Iterator[Input]:
    frames = _first(config, ("num_frames", "frames_per_clip"), _FRAMES)
    yield Input(_FLOAT, ("B", frames, _channels(config), *_sides(config, model)))


def _packed(model: nn.Module, config: Any, names: list[str], accepted: Any) -> dict[str, Input]:
    """Images given as a list of patches beside the size of their grid, where forward takes that."""
    main = names[0]
    height, width = _GRID
    patch = _first(config, ("patch_size", "spatial_patch_size"), 14)
    numbers = _channels(config) * patch * patch
    if "grid_thw" in accepted:
        deep = numbers * _first(config, ("temporal_patch_size",), 1)
        return {main: Input(_FLOAT, (height * width, deep)), "grid_thw": _fixed([[1, height, width]])}
    if "spatial_shapes" in accepted and main != "input_ids":
        made = {main: Input(_FLOAT, ("B", height * width, numbers)), "spatial_shapes": _rows([height, width])}
        masks = [name for name in ("attention_mask", "pixel_attention_mask") if name in accepted]
        return {**made, **{name: Input(torch.bool, ("B", height * width), "mask") for name in masks[:1]}}
    if "image_sizes" in accepted and main == "pixel_values":
        return {main: next(_pixels(config, model)), "image_sizes": _rows(list(_sides(config, model)))}
    return {}


def _fixed(rows: Any) -> Input:
    return Input(value=torch.tensor(rows), role="positions")


def _rows(row: list[int]) -> Input:
    """The same row for each text or image of the batch."""
    return Input(dims=("B", len(row)), role="positions", row=tuple(row))


# -- sound ----------------------------------------------------------------------------------------------------


def _features(config: Any, model: nn.Module) -> Iterator[Input]:
    """A spectrogram: of the only length that is taken where that is declared, else frames for N places."""
    mels = _first(config, _MEL_KEYS, 0) or _first(
        config, ("feature_projection_input_dim", "input_dim"), _MELS
    )
    mels *= _first(config, ("input_channels",), 1)
    longest = _first(config, ("max_source_positions",), 0)
    if longest:
        yield Input(_FLOAT, ("B", mels, 2 * longest))
    stride = _first(config, ("subsampling_factor", "subsampling_conv_stride"), 1)
    yield Input(_FLOAT, ("B", f"{stride}N", mels))
    yield Input(_FLOAT, ("B", mels, f"{stride}N"))
    yield Input(_FLOAT, ("B", 1, _first(config, ("spec_size", "max_length"), 1024), mels))


def _samples(config: Any, model: nn.Module) -> Iterator[Input]:
    """A wave of samples, of which the convolutions make N places; else a spectrogram under the same name."""
    kernels, strides = (_numbers(config, name) for name in ("conv_kernel", "conv_stride"))
    if kernels and len(kernels) == len(strides):
        seen = 1
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            seen = (seen - 1) * stride + kernel
        step = math.prod(strides)
        yield Input(_FLOAT, ("B", f"{step}N{seen - step:+d}"))
    hop = math.prod(next(filter(None, (_numbers(config, name) for name in _RATIOS)), (1,)))
    long = _first(config, ("max_length",), 0)
    mels = _first(config, _MEL_KEYS, 0)
    if long and mels:
        yield Input(_FLOAT, ("B", long, mels))
    if not kernels or hop > 1:
        hop *= _first(config, ("hop_length",), 1) if hop == 1 else 1
        yield Input(_FLOAT, ("B", 1, f"{hop}N"))
        yield Input(_FLOAT, ("B", f"{hop}N"))


_RATIOS = ("upsampling_ratios", "downsampling_ratios", "encoder_rates", "upsample_rates")


def _numbers(config: Any, name: str) -> tuple[int, ...]:
    """A list of whole numbers of the configuration or one inside it; empty where there is none."""
    for part in _configs(config):
        value = getattr(part, name, None)
        if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            return tuple(value)
    return ()


def _decoded(config: Any, model: nn.Module) -> Iterator[Input]:
    yield Input(_FLOAT, ("B", "M", _first(config, _MEL_KEYS, _MELS)))


_NAMED: dict[str, Readings] = {
    "pixel_values": _pixels,
    "pixel_values_videos": _clip,
    "input_features": _features,
    "input_values": _samples,
    "decoder_input_values": _decoded,
}
