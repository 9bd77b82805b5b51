"""Inputs of models that declare what they are fed, and the parts that their forward leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pediag.trace import Trace
from pediag.trace.declared import main_input, of_model
from pediag.trace.dimensions import free
from pediag.trace.inputs import Input, Sizes, made_up
from tests.trace._sessions import session

D = 24
SIDE, PATCH = 28, 7
PATCHES = (SIDE // PATCH) ** 2


class Config:
    """What a configuration of transformers has: attributes, and others inside it."""

    def __init__(self, **values: Any) -> None:
        self.sub_configs = {name: Config for name, value in values.items() if isinstance(value, Config)}
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


class Tower(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(image_size=SIDE, num_channels=3)
        self.patches = nn.Conv2d(3, D, PATCH, PATCH)
        self.table = nn.Embedding(PATCHES, D)
        self.attention = Attention()

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        return self.attention(x + self.table(torch.arange(x.shape[1])))


class Reader(nn.Module):
    """Reads text; images only where they are given."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(vision_config=Config(image_size=SIDE))
        self.tower = Tower()
        self.words = nn.Embedding(50, D)
        self.places = nn.Embedding(400, D)
        self.attention = Attention()

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        if pixel_values is not None:
            x = torch.cat([self.tower(pixel_values), x], 1)
        return self.attention(x)


class NeedsBoth(Reader):
    """As CLIP: neither side may be missing."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        assert pixel_values is not None
        return super().forward(input_ids) @ self.tower(pixel_values).mean(1, keepdim=True).transpose(1, 2)


class Refuses(Reader):
    """A forward that cannot be fed by what it declares."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        raise ValueError("a session is needed")


def added(trace: Trace) -> set[tuple[str, int]]:
    """Modules where positions are added to content, and how many rows of them."""
    sites = [site for site in trace.graph.sites if site.kind == "additive"]
    return {(site.module, site.position[0].shape[-2]) for site in sites}


def test_a_tower_that_forward_leaves_out_runs_beside_it() -> None:
    trace = session(Reader()).structural()
    assert trace.failure is None
    assert added(trace) == {("", trace.sizes.tokens), ("tower", PATCHES)}
    assert trace.places == {PATCHES}
    assert "tower({pixel_values: float32[B,3,28,28]})" in trace.inputs


def test_a_model_that_needs_both_sides_is_fed_both() -> None:
    trace = session(NeedsBoth()).structural()
    assert trace.failure is None
    assert added(trace) == {("", trace.sizes.tokens), ("tower", PATCHES)}
    assert not trace.fed.beside


def test_of_a_model_that_cannot_be_fed_the_parts_run_and_it_is_said() -> None:
    made = session(Refuses())
    trace = made.structural()
    assert trace.failure is None
    assert added(trace) == {("tower", PATCHES)}
    assert not made.whole
    assert any(
        "was not run as a whole" in note and "a session is needed" in note for note in made.target.notes
    )


def test_a_tower_that_cannot_be_fed_is_said_not_to_be_judged() -> None:
    class Closed(Tower):
        def forward(self, pixel_values: Tensor) -> Tensor:
            raise ValueError("a session is needed")

    model = Reader()
    model.tower = Closed()
    made = session(model)
    assert added(made.structural()) == {("", made.structural().sizes.tokens)}
    assert [note for note in made.target.notes if "`tower` does not run" in note]
    made = session(Reader())
    made.structural()
    assert made.target.notes == []


def test_parts_of_parts_that_these_leave_out_run_too() -> None:
    class Whole(nn.Module):
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__()
            self.config, self.reader = Config(), Reader()

        def forward(self, input_ids: Tensor) -> Tensor:
            raise ValueError("a session is needed")

    made = session(Whole())
    trace = made.structural()
    assert added(trace) == {("reader", trace.sizes.tokens), ("reader.tower", PATCHES)}


def test_the_number_of_patches_stays_at_any_length() -> None:
    made = session(Reader())
    made.structural()
    longer = made.at(300)
    assert added(longer) == {("", 300), ("tower", PATCHES)}


def test_weights_of_convolutions_are_no_tables_of_places() -> None:
    class Narrow(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(PATCHES, D, 1)

        def forward(self, pixel_values: Tensor) -> Tensor:
            x = super().forward(pixel_values)
            return x + self.mix(x[..., None]).mean((1, 2, 3), keepdim=True)[..., 0]

    trace = session(Narrow()).structural()
    assert trace.places == {PATCHES}
    assert {site.module for site in trace.graph.sites} == {""}


# -- made-up inputs -------------------------------------------------------------------------------------------


class Takes(nn.Module):
    """Any declared inputs, never run."""

    def __init__(self, main: str, **config: Any) -> None:
        super().__init__()
        self.main_input_name, self.config = main, Config(**config)
        self.first = nn.Linear(8, 8)


class Wave(Takes):
    def forward(self, input_values: Tensor) -> None: ...


class Spectrogram(Takes):
    def forward(self, input_features: Tensor) -> None: ...


class Packed(Takes):
    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> None: ...


class Spots(Takes):
    def forward(self, pixel_values: Tensor, pixel_position_ids: Tensor) -> None: ...


SIZES = Sizes(2, 151, 139)


def shapes(model: nn.Module) -> list[dict[str, tuple[int, ...]]]:
    calls = [maker(SIZES).kwargs for maker in of_model(model)]
    return [{name: item.shape(SIZES) for name, item in call.items()} for call in calls]


def test_convolutions_make_as_many_places_of_a_wave_as_there_are_tokens() -> None:
    kernels, strides = [10, 3, 3, 3, 3, 2, 2], [5, 2, 2, 2, 2, 2, 2]
    made = shapes(Wave("input_values", conv_kernel=kernels, conv_stride=strides))[0]["input_values"]
    length = made[-1]
    for kernel, stride in zip(kernels, strides, strict=True):
        length = (length - kernel) // stride + 1
    assert length == SIZES.tokens


def test_a_spectrogram_of_one_length_is_that_long() -> None:
    model = Spectrogram("input_features", num_mel_bins=80, max_source_positions=1500)
    assert shapes(model)[0] == {"input_features": (2, 80, 3000)}


def test_patches_in_a_list_come_with_their_grid() -> None:
    model = Packed("pixel_values", patch_size=14, in_channels=3, temporal_patch_size=2)
    call = next(of_model(model))(SIZES).kwargs
    rows = call["hidden_states"].shape(SIZES)[0]
    assert rows == int(call["grid_thw"].value.prod())
    assert call["hidden_states"].shape(SIZES)[1] == 3 * 2 * 14 * 14


def test_places_of_patches_count_rows_and_columns() -> None:
    call = next(of_model(Spots("pixel_values", patch_size=16)))(SIZES).kwargs
    spots = call["pixel_position_ids"]
    numbers = made_up(spots, spots.shape(SIZES), SIZES)
    assert numbers.shape[:1] == (2,)
    assert len({tuple(row) for row in numbers[0].tolist()}) == numbers.shape[1]


class Asked(Tower):
    """A tower that is asked something: ids of a question that are filled up to one length, as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(image_size=SIDE, num_channels=3, question_seq_len=19)
        self.question = nn.Linear(19, D)

    def forward(self, pixel_values: Tensor, question_inputs: Tensor) -> Tensor:
        return super().forward(pixel_values) + self.question(question_inputs.float())[:, None]


def test_ids_of_one_length_are_that_long() -> None:
    found = session(Asked()).structural()
    assert found.failure is None
    assert not found.fed.parts_only
    assert found.fed.kwargs["question_inputs"].dims == ("B", 19)


def test_the_first_argument_is_fed_where_the_declared_one_is_none() -> None:
    assert main_input(Packed("pixel_values")) == "hidden_states"


@pytest.mark.parametrize(("dims", "shape"), [(("B", "3N-2"), (2, 451)), (("4B", "M"), (8, 139))])
def test_sizes_may_be_made_of_letters(dims: tuple[str, ...], shape: tuple[int, ...]) -> None:
    assert Input(dims=dims).shape(SIZES) == shape


def test_texts_and_heads_behind_one_another_are_no_length() -> None:
    assert free(61, {12})
    assert not free(61, {12}, batch=5)


class InOneStrip(Tower):
    """All patches of all images side by side, with the rows and columns of each image beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(image_size=SIDE, patch_size=PATCH, num_channels=3)

    def forward(self, pixel_values: Tensor, target_sizes: Tensor | None = None) -> Tensor:
        assert target_sizes is not None
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)
        ids = [torch.arange(rows * columns) % PATCHES for rows, columns in target_sizes.tolist()]
        return self.attention(x + self.table(torch.cat(ids)))


class InRows(nn.Module):
    """Patches come as rows of numbers, as many as its table has rows."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(image_size=SIDE, patch_size=PATCH, num_channels=3)
        self.table = nn.Parameter(torch.zeros(37, D))
        self.patches = nn.Linear(3 * PATCH * PATCH, D)
        self.attention = Attention()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.attention(self.patches(pixel_values) + self.table)


class InChunks(nn.Module):
    """Sound that is cut into chunks of two windows; positions start again in each, and attention runs over all."""

    main_input_name = "input_features"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(n_window=11, num_mel_bins=16)
        self.mix = nn.Linear(16, D)
        self.table = nn.Parameter(torch.zeros(40, D))
        self.attention = Attention()

    def chunks(self, frames: Tensor, lengths: Tensor) -> Tensor:
        x = self.mix(torch.stack(frames.split([22] * (int(lengths.sum()) // 22))))
        x += self.table[: x.shape[1]]
        return self.attention(x.flatten(0, 1)[None])


class OfOneText(InChunks):
    def forward(self, input_features: Tensor, feature_lens: Tensor | None = None) -> Tensor:
        assert feature_lens is not None
        return self.chunks(input_features.T, feature_lens)


class OfAll(InChunks):
    def forward(self, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        frames = input_features.transpose(1, 2).flatten(0, 1)
        return self.chunks(frames, torch.tensor(list(input_features_mask.sum(-1))))


class OfVectors(nn.Module):
    """Takes vectors under a name of its own."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config, self.first, self.attention = Config(), nn.Linear(10, D), Attention()
        self.table = nn.Embedding(400, D)

    def forward(self, latents: Tensor) -> Tensor:
        return self.attention(self.first(latents) + self.table(torch.arange(latents.shape[1])))


@pytest.mark.parametrize(
    ("model", "rows"), [(InOneStrip, 288), (InRows, 37), (OfOneText, 22), (OfAll, 22), (OfVectors, 151)]
)
def test_inputs_of_other_forms_are_made_up(model: type[nn.Module], rows: int) -> None:
    trace = session(model()).structural()
    assert trace.failure is None
    assert added(trace) == {("", rows)}


def test_tiles_of_an_image_with_a_few_places_beside_each() -> None:
    """Each of 4 tiles has the rows of one table, and is filled up to a multiple of 8 before attention."""

    class Tiles(Tower):
        def forward(self, pixel_values: Tensor) -> Tensor:
            x = self.patches(pixel_values.repeat_interleave(4, 0)).flatten(2).transpose(1, 2)
            x = x.unflatten(0, (-1, 4)) + self.table.weight
            return self.attention(nn.functional.pad(x, (0, 0, 0, 7)).flatten(1, 2))

    trace = session(Tiles()).structural()
    assert added(trace) == {("", PATCHES)}


def test_weights_of_layers_as_wide_as_a_map_has_places_are_no_tables() -> None:
    """A table of 11 rows and 11 columns, a layer of 121 channels, and attention along 30 of the places."""

    class Wide(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config = Config(image_size=77, num_channels=3)
            self.patches, self.table = nn.Conv2d(3, D, 7, 7), nn.Parameter(torch.zeros(1, 11, 11, D))
            self.attention = Attention()
            self.mix = nn.Sequential(nn.Linear(D, 121), nn.GELU(), nn.Linear(121, D))

        def forward(self, pixel_values: Tensor) -> Tensor:
            x = self.patches(pixel_values).permute(0, 2, 3, 1) + self.table
            x = self.mix(self.attention(x.flatten(1, 2)))
            return self.attention(x[:, :30])

    trace = session(Wide()).structural()
    assert trace.failure is None
    assert {site.op for site in trace.graph.sites} == {"add"}
