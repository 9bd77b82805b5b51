"""What is added to content, recovered and compared with formulas written out here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pediag.encodings import (
    Encoding,
    Learned,
    Sinusoidal,
    Unrecognised,
    additive,
    misplaced,
    program,
    recognise,
)
from pediag.targets import Target, open_target
from pediag.trace import Session, Trace

FIXTURES = Path(__file__).parents[2] / "fixtures"


def frequencies(width: int, base: float = 10000.0) -> np.ndarray:
    return base ** -(2.0 * np.arange(width // 2) / width)


def waves(m: Tensor, width: int, base: float = 10000.0) -> Tensor:
    angle = m[:, None].double() * torch.tensor(frequencies(width, base))
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


class Adds(nn.Module):
    """Adds what ``make(module, ids)`` gives to embedded ids."""

    def __init__(
        self, make: Callable[[nn.Module, Tensor], Tensor], width: int = 32, **tensors: Tensor
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, width)
        self.make = make
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.make(self, ids)


def trace_of(model: nn.Module) -> Trace:
    return Session(Target(spec="model", loader="live", module=model.eval())).structural()


def found(model: nn.Module) -> list[Encoding]:
    trace = trace_of(model)
    assert trace.failure is None
    return additive.find(trace, set())


def from_fixture(name: str) -> list[Encoding]:
    return additive.find(Session(open_target(str(FIXTURES / name))).structural(), set())


@pytest.mark.parametrize(
    ("name", "layout", "width"),
    [
        ("documents/sinusoidal.py:model", "interleaved", 64),
        ("documents/lazy_sinusoidal.py:model", "interleaved", 32),
        ("documents/text_image.py:model", "interleaved", 64),
        ("documents/timestamps.py:model", "interleaved", 48),
        ("healthy/mha_encoder.py:model", "interleaved", 64),
        ("healthy/mha_encoder_sequence_first.py:model", "interleaved", 48),
    ],
)
def test_sinusoids_of_the_fixtures(name: str, layout: str, width: int) -> None:
    (encoding,) = from_fixture(name)
    assert isinstance(encoding, Sinusoidal)
    assert (encoding.layout, encoding.width, encoding.parameters["base"]) == (layout, width, 10000.0)
    np.testing.assert_allclose(encoding.frequencies, frequencies(width), rtol=1e-5)
    assert encoding.amplitude == 1.0
    assert encoding.source_file is not None
    assert encoding.source_file.endswith(name.partition(":")[0])


def test_page_coordinates_are_three_sinusoids() -> None:
    encodings = from_fixture("documents/layout_2d.py:model")
    assert [type(encoding) for encoding in encodings] == [Sinusoidal] * 3
    assert [encoding.width for encoding in encodings] == [32, 16, 16]
    assert [encoding.table and encoding.table.rows for encoding in encodings] == [None, 101, 51]


def test_mixture_keeps_its_weights() -> None:
    wave, row = from_fixture("documents/sinusoid_learned_mixture.py:model")
    assert isinstance(wave, Sinusoidal)
    assert isinstance(row, Learned)
    assert wave.amplitude == pytest.approx(0.7)
    assert wave.parameters["exponent"] == "tensor2tensor"
    np.testing.assert_allclose(wave.frequencies, 10000.0 ** -(np.arange(32) / 31), rtol=1e-5)
    assert (row.table.rows, row.table.by, row.leaves) == (1024, "slice", ["mixed.trained.weight"])


@pytest.mark.parametrize(
    ("name", "rows", "first", "by"),
    [
        ("documents/learned.py:model", 1024, 0, "position-ids"),
        ("healthy/nanogpt_style.py:model", 1024, 0, "lookup"),
        ("healthy/roberta_positions.py:model", 514, 2, "cumulative mask"),
    ],
)
def test_learned_tables_of_the_fixtures(name: str, rows: int, first: int, by: str) -> None:
    (encoding,) = from_fixture(name)
    assert isinstance(encoding, Learned)
    assert (encoding.table.rows, encoding.table.first, encoding.table.by) == (rows, first, by)
    assert encoding.parameters["trainable"] is True


def test_fairseq_counts_from_two() -> None:
    (encoding,) = from_fixture("healthy/fairseq_sinusoid.py:model")
    assert isinstance(encoding, Sinusoidal)
    assert encoding.parameters["first_position"] == 2.0
    assert encoding.table is None
    np.testing.assert_allclose(encoding.frequencies, 10000.0 ** -(np.arange(32) / 31), rtol=1e-5)


def test_two_sums_give_two_encodings_in_order() -> None:
    kinds = [encoding.scheme for encoding in from_fixture("healthy/sinusoid_then_learned.py:model")]
    assert kinds == ["sinusoidal", "learned"]


@pytest.mark.parametrize("name", ["faulty", "faulty_learned"])
def test_a_table_along_the_batch_says_so(name: str) -> None:
    (encoding,) = from_fixture(f"rules/pe306_wrong_axis.py:{name}")
    assert encoding.parameters["axis"] == "batch"
    assert isinstance(encoding, (Sinusoidal, Learned))


@pytest.mark.parametrize("name", ["healthy", "healthy_learned"])
def test_a_table_along_the_tokens_does_not(name: str) -> None:
    (encoding,) = from_fixture(f"rules/pe306_wrong_axis.py:{name}")
    assert "axis" not in encoding.parameters


def test_other_base_first_position_and_amplitude() -> None:
    rows = 3.0 * waves(torch.arange(400.0) + 5, 32, base=500.0)
    (encoding,) = found(Adds(lambda m, ids: m.rows[: ids.shape[1]], rows=rows))
    assert isinstance(encoding, Sinusoidal)
    assert encoding.parameters["base"] == pytest.approx(500.0)
    assert encoding.parameters["first_position"] == pytest.approx(5.0)
    assert encoding.amplitude == pytest.approx(3.0)


def test_a_subtracted_sinusoid_is_one() -> None:
    class Subtracts(Adds):
        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids) - self.make(self, ids)

    (encoding,) = found(Subtracts(lambda m, ids: m.rows[: ids.shape[1]], rows=waves(torch.arange(400.0), 32)))
    assert isinstance(encoding, Sinusoidal)


def test_features_before_tokens() -> None:
    class ChannelsFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 32)
            self.register_buffer("rows", waves(torch.arange(400.0), 32).T.contiguous())

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).transpose(1, 2) + self.rows[:, : ids.shape[1]]

    (encoding,) = found(ChannelsFirst())
    assert isinstance(encoding, Sinusoidal)
    np.testing.assert_allclose(encoding.frequencies, frequencies(32), rtol=1e-5)


def test_features_joined_beside_content() -> None:
    class Beside(Adds):
        def forward(self, ids: Tensor) -> Tensor:
            where = self.make(self, ids).expand(ids.shape[0], -1, -1)
            return torch.cat((self.embed(ids), where), dim=-1)

    (encoding,) = found(Beside(lambda m, ids: m.rows[: ids.shape[1]], rows=waves(torch.arange(400.0), 24)))
    assert isinstance(encoding, Sinusoidal)
    assert encoding.width == 24


def test_a_trained_table_of_zeros_is_learned() -> None:
    table = nn.Parameter(torch.zeros(1, 400, 32))
    (encoding,) = found(Adds(lambda m, ids: m.table[:, : ids.shape[1]], table=table))
    assert isinstance(encoding, Learned)
    assert encoding.parameters == {"rows": 400, "width": 32, "first_row": 0, "by": "slice", "trainable": True}


def test_a_trainable_sinusoid_is_a_sinusoid_with_a_trainable_table() -> None:
    table = nn.Parameter(waves(torch.arange(400.0), 32))
    (encoding,) = found(Adds(lambda m, ids: m.table[: ids.shape[1]], table=table))
    assert isinstance(encoding, Sinusoidal)
    assert encoding.table is not None
    assert encoding.table.leaf.trainable
    assert encoding.table.rows == 400


def test_a_fixed_table_of_other_numbers_is_a_stored_table() -> None:
    rows = torch.randn(400, 32, generator=torch.Generator().manual_seed(1))
    (encoding,) = found(Adds(lambda m, ids: m.rows[: ids.shape[1]], rows=rows))
    assert isinstance(encoding, Learned)
    assert encoding.parameters["trainable"] is False


def test_rows_read_out_of_order_are_judged_by_the_table() -> None:
    def backwards(model: nn.Module, ids: Tensor) -> Tensor:
        return model.rows[399 - 2 * torch.arange(ids.shape[1])]

    (encoding,) = found(Adds(backwards, rows=waves(torch.arange(400.0), 32)))
    assert isinstance(encoding, Sinusoidal)
    np.testing.assert_allclose(encoding.frequencies, frequencies(32), rtol=1e-5)
    assert encoding.parameters["first_row"] == 399


def test_another_signal_is_unrecognised() -> None:
    (encoding,) = found(Adds(lambda m, ids: (torch.arange(ids.shape[1]).float()[:, None] / 100) ** 2))
    assert isinstance(encoding, Unrecognised)
    assert encoding.kind == "additive"


@pytest.mark.parametrize("way", ["index_copy", "index_put"])
def test_content_that_is_kept_in_slots_meets_no_signal(way: str) -> None:
    """A memory of its own takes token by token, in slots that are counted."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 32)
            self.rows = nn.Parameter(torch.randn(400, 32))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + self.rows[: ids.shape[1]]
            slots = torch.arange(ids.shape[1])
            memory = x.new_zeros(len(ids), 400, 32)
            if way == "index_copy":
                memory.index_copy_(1, slots, x)
            else:
                memory[:, slots] = x
            return memory.sum(1)

    assert [item.scheme for item in recognise(trace_of(Keeping()))] == ["learned"]


def test_layers_that_add_one_value_share_one_encoding() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 32)
            self.register_buffer("rows", waves(torch.arange(400.0), 32))
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x + self.rows[: ids.shape[1]])
            return x

    (encoding,) = found(Deep())
    assert len(encoding.sites) == 8


def test_claimed_sites_are_left_alone() -> None:
    trace = trace_of(Adds(lambda m, ids: m.rows[: ids.shape[1]], rows=waves(torch.arange(400.0), 32)))
    claimed = {id(site) for site in trace.graph.sites}
    assert additive.find(trace, claimed) == []


# -- the walk ------------------------------------------------------


def test_lookup_sees_through_views_and_factors() -> None:
    def read(model: nn.Module, ids: Tensor) -> Tensor:
        return 0.5 * model.rows.double()[3 : 3 + ids.shape[1]].unsqueeze(0).float()

    trace = trace_of(Adds(read, rows=torch.randn(400, 32)))
    looked = program.lookup(trace.graph.sites[0].position[0])
    assert looked is not None
    assert (looked.table.names, looked.first, looked.rows, looked.by) == (["rows"], 3, 400, "slice")
    np.testing.assert_array_equal(looked.picked, np.arange(3, 3 + trace.seq_len))


@pytest.mark.parametrize("sliced", [False, True], ids=["moved whole", "moved by the rows in use"])
def test_a_plain_table_that_is_moved_in_forward_keeps_its_name_and_rows(sliced: bool) -> None:
    def moved(model: nn.Module, ids: Tensor) -> Tensor:
        table = model.plain[: ids.shape[1]] if sliced else model.plain
        return table.to(ids.device)[: ids.shape[1]]

    model = Adds(moved)
    model.plain = waves(torch.arange(700), 32)
    (sinusoid,) = found(model)
    assert isinstance(sinusoid, Sinusoidal)
    assert sinusoid.table is not None
    assert (sinusoid.table.rows, sinusoid.table.leaf.names) == (700, ["plain"])


@pytest.mark.parametrize("join", ["cat", "stack"])
def test_a_table_whose_columns_are_read_twice_is_that_table(join: str) -> None:
    def twice(model: nn.Module, ids: Tensor) -> Tensor:
        half = model.part[: ids.shape[1]]
        return torch.cat((half, half), -1) if join == "cat" else torch.stack((half, half), -1).flatten(1)

    trace = trace_of(Adds(twice, part=torch.randn(700, 16, generator=torch.Generator().manual_seed(3))))
    (site,) = [site for site in trace.graph.sites if site.op == "add"]
    read = program.lookup(site.position[0], trace.lengths)
    assert read is not None
    assert (read.table.names, read.rows, read.first) == (["part"], 700, 0)


def test_table_2d_gives_the_numbers_of_the_tokens() -> None:
    rows = torch.randn(400, 1, 32)
    trace = trace_of(Adds(lambda m, ids: m.rows[: ids.shape[1]].transpose(0, 1), rows=rows))
    table = program.table_2d(trace, trace.graph.sites[0].position[0])
    np.testing.assert_array_equal(table, rows[: trace.seq_len, 0].double().numpy())


def test_terms_and_parts() -> None:
    def make(model: nn.Module, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        left = torch.cat((model.one[:n], model.two[:n]), dim=-1)
        return (left + 2 * model.three[:n])[None]

    trace = trace_of(
        Adds(make, one=torch.randn(400, 12), two=torch.randn(400, 20), three=torch.randn(400, 32))
    )
    summands = program.terms(trace.graph.sites[0].position[0])
    assert len(summands) == 2
    assert [(start, end) for _, start, end in program.parts(summands[0])] == [(0, 12), (12, 32)]


def test_phase_and_its_frequencies() -> None:
    def make(model: nn.Module, ids: Tensor) -> Tensor:
        angle = torch.arange(ids.shape[1])[:, None] * model.rate
        return torch.cat((angle.sin(), angle.cos()), -1)

    trace = trace_of(Adds(make, rate=torch.tensor(frequencies(32)).float()))
    angle = program.phase(trace.graph.sites[0].position[0])
    assert angle is not None
    assert angle.op_name == "mul"
    factor = program.frequency_factor(angle)
    assert factor is not None
    assert factor.names == ["rate"]


# -- positions along a wrong axis ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"), [("faulty_heads", 4), ("faulty_complex_heads", 8), ("faulty_cut_to_heads", 6)]
)
def test_rotary_tables_along_the_heads(name: str, size: int) -> None:
    trace = Session(open_target(str(FIXTURES / f"rules/pe306_wrong_axis.py:{name}"))).structural()
    encodings = misplaced.find(trace, set())
    assert encodings
    for encoding in encodings:
        assert isinstance(encoding, Unrecognised)
        assert encoding.kind == "misplaced"
        assert encoding.parameters == {"axis": 2, "size": size, "looks_like": "rotary table"}


@pytest.mark.parametrize("kind", ["noise", "ramp", "ones", "scales", "fourier"])
def test_ordinary_constants_are_silent(kind: str) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(101, 64)
            made = {
                "noise": torch.randn(4, 16, generator=torch.Generator().manual_seed(0)),
                "ramp": torch.arange(64.0).view(4, 16) / 64,
                "ones": torch.ones(4, 16),
                "scales": 2.0 ** -torch.arange(4.0)[:, None] * torch.ones(16),
                "fourier": torch.cos(torch.arange(4.0)[:, None] * torch.arange(16.0).flip(0) * 2.4 + 0.3),
            }
            self.register_buffer("scale", made[kind])

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).unflatten(-1, (4, 16)) * self.scale

    assert misplaced.find(trace_of(Heads()), set()) == []


# -- what tells parts apart, and tables made of tables -------------------------------------------------------


class Sorted(nn.Module):
    """Sorts tokens by a bucket of content, ties by place, as Reformer's hashing does, and starts afresh at place 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(101, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x, place = self.embed(ids), torch.arange(ids.shape[1])
        starts = (place == 0)[None, :, None]
        x = starts + ~starts * self.gate(x)
        order = (x.argmax(-1) * ids.shape[1] + place).argsort(-1)
        return x.gather(1, order[..., None].expand_as(x))


def test_ties_of_a_sort_and_starts_of_texts_are_no_signals() -> None:
    from pediag.encodings import recognise

    trace = trace_of(Sorted())
    assert trace.failure is None
    assert trace.graph.sites
    assert recognise(trace) == []


@pytest.mark.parametrize(("parts", "schemes"), [(2, []), (3, ["learned"])])
def test_two_rows_are_segments_and_more_are_places(parts: int, schemes: list[str]) -> None:
    def read(module: nn.Module, ids: Tensor) -> Tensor:
        part = (torch.arange(ids.shape[1]) // 20).clamp(max=parts - 1)
        return module.table[part]

    model = Adds(read, table=nn.Parameter(torch.randn(parts, 32)))
    assert [encoding.scheme for encoding in found(model)] == schemes


@pytest.mark.parametrize("by_text", [False, True])
def test_a_table_of_rows_beside_one_of_columns_is_learned(by_text: bool) -> None:
    """Kitaev et al. 2020, axial encodings: position i is row i // 16 of one table beside row i % 16 of another."""

    def read(module: nn.Module, ids: Tensor) -> Tensor:
        whole = torch.cat((module.down.expand(16, 16, 8), module.across.expand(16, 16, 24)), -1).flatten(0, 1)
        place = torch.arange(ids.shape[1])
        if by_text:
            return torch.cat([whole.index_select(0, place)[None] for _ in range(ids.shape[0])], 0)
        return whole[place]

    tables = {"down": torch.randn(16, 1, 8), "across": torch.randn(1, 16, 24)}
    model = Adds(read, **{name: nn.Parameter(table) for name, table in tables.items()})
    (encoding,) = found(model)
    assert isinstance(encoding, Learned)
    assert encoding.width == 32
    assert encoding.leaves == ["across", "down"]


def test_tokens_made_of_places_alone_are_read_where_they_join() -> None:
    """Qi et al. 2020, ProphetNet: streams of what is to be predicted start as places, behind the tokens."""

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.places = nn.Embedding(101, 32), nn.Embedding(512, 32)
            self.kind = nn.Parameter(torch.randn(32))

        def forward(self, ids: Tensor) -> Tensor:
            own = self.places(torch.arange(ids.shape[1]) + 1).expand(*ids.shape, -1)
            return torch.cat((self.embed(ids), own + self.kind), 1)

    (encoding,) = found(Streams())
    assert isinstance(encoding, Learned)
    assert (encoding.leaves, encoding.parameters["first_row"]) == (["places.weight"], 1)


@pytest.mark.parametrize("way", ["last", "channels first"])
def test_a_comparison_as_numbers_that_multiplies_tokens_hides_some(way: str) -> None:
    """Frames behind the end of a text are set to zero, as encoders of sound do by a product."""

    class Hides(Adds):
        def forward(self, ids: Tensor) -> Tensor:
            kept = torch.arange(ids.shape[1]) < torch.full((1, 1), ids.shape[1] - 20)
            x = super().forward(ids)
            if way == "last":
                return x * kept.float()[..., None]
            return (x.transpose(1, 2) * kept.unsqueeze(1).long()).transpose(1, 2)

    (found,) = recognise(trace_of(Hides(lambda module, ids: waves(torch.arange(ids.shape[1]), 32))))
    assert isinstance(found, Sinusoidal)


def test_a_comparison_that_multiplies_each_channel_otherwise_is_a_signal() -> None:
    class Gates(Adds):
        def forward(self, ids: Tensor) -> Tensor:
            m = torch.arange(ids.shape[1])
            return self.embed(ids) * (m[:, None] > torch.arange(32)).float()

    (found,) = recognise(trace_of(Gates(lambda module, ids: ids)))
    assert isinstance(found, Unrecognised)
