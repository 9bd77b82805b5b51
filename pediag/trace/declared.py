"""What to feed a model that declares its inputs as those of transformers do: ``main_input_name`` and a config.

Sizes come from the configuration of the part that reads the input: pixels of a side, mel bands, strides of the
convolutions. Several readings of one name are tried, the likeliest first.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pediag.trace.inputs import Candidate, Input, Maker, image_sides

Readings = Callable[[Any, nn.Module], Iterator[Input]]

_FLOAT = torch.float32
_SIDE = 224
_LEAST_SIDE = 64
_FRAMES = 8
_MELS = 80
# Patches of a made-up image given as a list of patches, along its sides; both divide by any merging of 2, 3 or 4.
_GRID = (12, 24)
# Chunks of made-up sound that is cut into such.
_CHUNKS = 12
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
    """Calls with these arguments, every reading of them; without a cache where forward takes that.

    Then the same with what forward can do without by its signature, and what some models need all the same.
    """
    accepted = inspect.signature(model.forward).parameters
    beside = [name for name in _BESIDE if name in accepted and name not in names]
    beside += [name for name in (f"{names[0]}_mask",) if name in accepted and name not in names]
    ways = [names, [*names, *beside]] if beside else [names]
    # Without boxes a model of pages makes them up, all alike: what its code calls content would be a constant.
    for asked in reversed(ways) if "bbox" in beside else ways:
        for together in _together(model, model.config, asked, accepted):
            yield _maker({**together, **_no_cache(accepted)})
            if "use_cache" in accepted:
                yield _maker(together)


def _no_cache(accepted: Any) -> dict[str, Input]:
    return {"use_cache": Input(value=False, literal=True)} if "use_cache" in accepted else {}


def _maker(kwargs: dict[str, Any]) -> Maker:
    return lambda sizes: Candidate([], dict(kwargs))


def _together(model: nn.Module, config: Any, names: list[str], accepted: Any) -> Iterator[dict[str, Input]]:
    """Readings of several arguments, every combination."""
    for packed in _packed(config, model, names, accepted) or [{}]:
        rest = [name for name in names if name not in packed]
        masks = [name for name in rest if "mask" in name]
        ways = [list(_readings(name, config, model)) for name in rest if name not in masks]
        for chosen in itertools.product(*ways):
            made = {**packed, **dict(zip([name for name in rest if name not in masks], chosen, strict=True))}
            yield {**made, **{name: _mask_of(made.get(names[0])) for name in masks}}


def _mask_of(main: Input | None) -> Input:
    """A mask in which nothing is hidden, with an entry a token, a frame or a patch of the main input."""
    dims = main.dims[1:] if main is not None else ()
    named = next((dim for dim in dims if isinstance(dim, str)), "N")
    along = max((dim for dim in dims[:2] if isinstance(dim, int)), default=0)
    return Input(torch.bool, ("B", along if along and named == "N" and "N" not in dims else named), "mask")


def _readings(name: str, config: Any, model: nn.Module) -> Iterator[Input]:
    if name in _NAMED:
        yield from _NAMED[name](config, model)
    elif name.endswith("input_ids"):
        yield from _ids("M" if name.startswith("decoder") else "N", config)
    elif name.endswith("embeds"):
        yield Input(_FLOAT, ("B", "N", _first(config, _WIDTHS, 768)))
    elif "pixel_values" in name:
        yield from _pixels(config, model)
    else:
        yield from _first_layer(config, model)
        yield from _of_one_length(name, config)
        yield Input()


def _first_layer(config: Any, model: nn.Module) -> Iterator[Input]:
    """What the first layer with weights takes, where that is no table: vectors, or a row of channels."""
    first = next(
        (part for part in model.modules() if any(True for _ in part.parameters(recurse=False))), None
    )
    if isinstance(first, nn.Linear):
        yield Input(_FLOAT, ("B", "N", first.in_features))
    elif isinstance(first, (nn.Conv1d, nn.ConvTranspose1d)):
        yield Input(_FLOAT, ("B", first.in_channels, "N"))
    elif isinstance(first, nn.Conv2d) and first.in_channels == 1:
        yield Input(_FLOAT, ("B", "N", _first(config, (*_MEL_KEYS, "input_size"), _MELS)))


def _of_one_length(name: str, config: Any) -> Iterator[Input]:
    """Ids that are padded to the length that the configuration gives them, as those of a task are."""
    length = _first(config, (f"{name.partition('_')[0]}_seq_len",), 0)
    if length:
        yield Input(dims=("B", length))


def _ids(length: str, config: Any) -> Iterator[Input]:
    """Ids of tokens; where the configuration counts codebooks, of each of them too."""
    yield Input(dims=("B", length))
    books = _first(config, ("num_codebooks", "num_channels", "n_codebooks"), 1)
    if books > 1:
        yield Input(dims=(f"{books}B", length))
        yield Input(dims=("B", length, books))


# -- what the configuration says ------------------------------------------------------------------------------

_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_MEL_KEYS = (
    *("num_mel_bins", "n_mels", "mel_bins", "feature_size", "input_feat_per_channel", "input_feat_size"),
)


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


def _sides(config: Any, model: nn.Module | None = None) -> tuple[int, int]:
    """Height and width of an image in pixels: as declared, as tables of ``model`` fit, else the usual."""
    for part in _configs(config):
        for name in ("image_size", "crop_size", "input_size", "eval_size"):
            value = getattr(part, name, None)
            if isinstance(value, dict):
                value = (value.get("height"), value.get("width"))
            sides = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
            if len(sides) == 2 and all(type(side) is int and side > 1 for side in sides):
                return sides[0], sides[1]
    fits = (side for side in image_sides(model) if side >= _LEAST_SIDE) if model is not None else iter(())
    side = next(fits, _SIDE)
    return side, side


# -- images ---------------------------------------------------------------------------------------------------


def _channels(config: Any) -> int:
    return _first(config, ("num_channels", "in_channels", "in_chans"), 3)


def _pixels(config: Any, model: nn.Module) -> Iterator[Input]:
    """One image, or a clip where the configuration counts frames; rows of patches where a linear layer takes them."""
    yield from _in_rows(config, model)
    sides = _sides(config, model)
    image = Input(_FLOAT, ("B", _channels(config), *sides))
    frames = _first(config, ("num_frames", "frames_per_clip"), 0)
    if frames:
        yield Input(_FLOAT, ("B", frames, _channels(config), *sides))
    yield image
    if not frames:
        yield from (Input(_FLOAT, ("B", several, _channels(config), *sides)) for several in (1, 2))


def _in_rows(config: Any, model: nn.Module) -> Iterator[Input]:
    """Patches as rows of numbers, as many as a table of the width of what is made of them has rows."""
    patch = _first(config, ("patch_size",), 0)
    numbers = _channels(config) * patch * patch
    first = next(
        (part for part in model.modules() if isinstance(part, (nn.Linear, nn.Conv2d, nn.Conv3d))), None
    )
    if not isinstance(first, nn.Linear) or first.in_features != numbers:
        return
    kernels = {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)}
    for table in model.parameters():
        if table.dim() >= 2 and table.shape[-1] == first.out_features and id(table) not in kernels:
            yield Input(_FLOAT, ("B", int(table.shape[-2]), numbers))
            return


def _clip(config: Any, model: nn.Module) -> Iterator[Input]:
    frames = _first(config, ("num_frames", "frames_per_clip"), _FRAMES)
    yield Input(_FLOAT, ("B", frames, _channels(config), *_sides(config, model)))


def _packed(config: Any, model: nn.Module, names: list[str], accepted: Any) -> list[dict[str, Input]]:
    """Readings of images given as a list of patches or of tiles, where forward takes their grid beside them."""
    main = names[0]
    if main == "input_ids":
        return []
    if main == "input_features":
        return _in_chunks(config, accepted)
    height, width = _GRID
    patch = _first(config, ("patch_size", "spatial_patch_size"), 14)
    channels, deep = _channels(config), _first(config, ("temporal_patch_size",), 1)
    places, numbers = height * width, channels * patch * patch
    if grid := next((name for name in _GRIDS if name in accepted), None):
        read = next((part.in_features for part in model.modules() if isinstance(part, nn.Linear)), numbers)
        shapes = ((deep * numbers,), (read,), (channels, patch, patch), (deep, channels, patch, patch))
        fixed = Input(role="positions", value=torch.tensor([[1, height, width]]))
        return [{main: Input(_FLOAT, (places, *shape)), grid: fixed} for shape in shapes]
    if spots := next((name for name in _SPOTS if name in accepted), None):
        row = tuple((x, y) for y in range(height) for x in range(width))
        where = Input(dims=("B", places, 2), role="positions", row=row)
        return [{main: Input(_FLOAT, ("B", places, numbers)), spots: where}]
    if "target_sizes" in accepted:
        fixed = Input(role="positions", value=torch.tensor([[height, width]]))
        return [{main: Input(_FLOAT, (1, channels, patch, patch * places)), "target_sizes": fixed}]
    if "spatial_shapes" in accepted:
        masks = [name for name in ("pixel_attention_mask", "attention_mask") if name in accepted]
        hidden = {name: Input(torch.bool, ("B", places), "mask") for name in masks[:1]}
        made = {main: Input(_FLOAT, ("B", places, numbers)), "spatial_shapes": _rows(height, width)}
        return [{**made, **hidden}]
    if "image_sizes" in accepted and main == "pixel_values":
        sides = (height * patch, width * patch)
        return [{main: Input(_FLOAT, ("B", channels, *sides)), "image_sizes": _rows(*sides)}]
    if "aspect_ratio_ids" in accepted:
        tiles = _first(config, ("max_num_tiles",), 1)
        # One image: masks of its many places, one for each text, would be above what is computed.
        image = Input(_FLOAT, (1, 1, tiles, channels, *_sides(config)))
        mask = Input(torch.int64, (1, 1, tiles), "mask")
        return [{main: image, "aspect_ratio_ids": Input(dims=(1, 1)), "aspect_ratio_mask": mask}]
    return []


_GRIDS = ("grid_thw", "image_grid_thw", "grid_thws")
_SPOTS = ("pixel_position_ids", "image_position_ids")


def _rows(*row: int) -> Input:
    """The same row for each text or image of the batch."""
    return Input(dims=("B", len(row)), role="positions", row=row)


# -- sound ----------------------------------------------------------------------------------------------------


def _in_chunks(config: Any, accepted: Any) -> list[dict[str, Input]]:
    """Sound that is cut into chunks of two windows: of one text with its length beside it, or of all with a mask."""
    window = _first(config, ("n_window",), 0)
    if not window:
        return []
    frames, mels = 2 * window * _CHUNKS, _first(config, _MEL_KEYS, _MELS)
    if "feature_lens" in accepted:
        fixed = Input(role="positions", value=torch.tensor([frames]))
        return [{"input_features": Input(_FLOAT, (mels, frames)), "feature_lens": fixed}]
    return [{"input_features": Input(_FLOAT, ("B", mels, frames))}]


def _features(config: Any, model: nn.Module) -> Iterator[Input]:
    """A spectrogram: of the only length that is taken where that is declared, else frames for N places."""
    declared = _first(config, _MEL_KEYS, 0) or _first(
        config, ("feature_projection_input_dim", "input_dim"), _MELS
    )
    declared *= _first(config, ("input_channels",), 1)
    longest = _first(config, ("max_source_positions",), 0)
    if longest:
        yield Input(_FLOAT, ("B", declared, 2 * longest))
    stride = _first(config, ("subsampling_factor", "subsampling_conv_stride"), 1)
    first = next((part.in_features for part in model.modules() if isinstance(part, nn.Linear)), declared)
    frames = f"{stride}N-{stride - 1}" if stride > 1 else "N"
    for mels in dict.fromkeys((declared, first)):
        yield Input(_FLOAT, ("B", frames, mels))
    yield Input(_FLOAT, ("B", declared, frames))
    yield Input(_FLOAT, ("B", 1, _first(config, ("spec_size", "max_length"), 1024), declared))


def _samples(config: Any, model: nn.Module) -> Iterator[Input]:
    """A wave of samples, of which the convolutions make N places; else a spectrogram under the same name."""
    kernels, strides = (_numbers(config, name) for name in ("conv_kernel", "conv_stride"))
    if kernels and len(kernels) == len(strides):
        long = _wave(kernels, strides)
        yield from (Input(_FLOAT, ("B", long)), Input(_FLOAT, ("B", 1, long)))
        return
    frames, mels = _first(config, ("max_length",), 0), _first(config, _MEL_KEYS, 0)
    if frames and mels:
        yield Input(_FLOAT, ("B", frames, mels))
    hop = math.prod(next(filter(None, (_numbers(config, name) for name in _RATIOS)), (1,)))
    hop = hop if hop > 1 else _first(config, ("hop_length", "frame_size"), 1)
    made = _first_convolutions(model)
    longs = [f"{hop}N"] if hop > 1 else []
    longs += (
        [_wave([conv.kernel_size[0] for conv in made], [conv.stride[0] for conv in made])] if made else []
    )
    for samples in longs or ["N"]:
        yield from (Input(_FLOAT, ("B", 1, samples)), Input(_FLOAT, ("B", samples)))


def _wave(kernels: Sequence[int], strides: Sequence[int]) -> str:
    """Samples of which convolutions, one after the other, make N places."""
    seen = 1
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        seen = (seen - 1) * stride + kernel
    step = math.prod(strides)
    return f"{step}N{seen - step:+d}"


def _first_convolutions(model: nn.Module) -> list[nn.Conv1d]:
    """The convolutions before the first linear layer."""
    parts = [part for part in model.modules() if isinstance(part, (nn.Conv1d, nn.Linear))]
    return list(itertools.takewhile(lambda part: isinstance(part, nn.Conv1d), parts))  # type: ignore[arg-type]


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


def _boxes(config: Any, model: nn.Module) -> Iterator[Input]:
    yield Input(dims=("B", "N", 4))
    yield Input(_FLOAT, ("B", "N", 4))


def _flattened(config: Any, model: nn.Module) -> Iterator[Input]:
    """Patches in a row, each behind the numbers of its row and column (Pix2Struct)."""
    patch = _first(config, ("patch_size",), 16)
    yield Input(_FLOAT, ("B", "N", 2 + _channels(config) * patch * patch))


# Arguments that have a default, and that some models need all the same.
_BESIDE = ("bbox", "feature_attention_mask")

_NAMED: dict[str, Readings] = {
    "pixel_values": _pixels,
    "pixel_values_videos": _clip,
    "input_features": _features,
    "audio_mel": _features,
    "bbox": _boxes,
    "flattened_patches": _flattened,
    "input_values": _samples,
    "decoder_input_values": _decoded,
}
