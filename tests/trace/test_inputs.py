"""What a model is fed: made up from its forward, or as the user says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pediag.errors import TraceError, UsageError
from pediag.targets import InputSpec, parse_input_spec
from pediag.trace import Node, Provenance, Trace, positions
from tests.trace._sessions import WIDTH, joins, session, trace

D = WIDTH
CONTENT, POSITION, MASK = Provenance.CONTENT, Provenance.POSITION, Provenance.MASK


def inputs(made: Trace) -> list[Node]:
    return [node for node in made.graph.nodes if node.op == "leaf" and node.names == ["input"]]


def seen(made: Trace) -> list[tuple[Any, ...]]:
    """Per input: its shape in letters, its kind of number, its provenance."""
    sizes = made.sizes
    letters = {sizes.batch: "B", sizes.tokens: "N", sizes.keys: "M"}
    return [
        (*(letters.get(size, size) for size in node.shape), str(node.dtype)[6:], node.provenance.name)
        for node in inputs(made)
    ]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, D)
        self.out = nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids) + torch.arange(ids.shape[1])[:, None])


class Vectors(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.project = nn.Linear(width, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + torch.arange(x.shape[1])[:, None]


class Masked(Tokens):
    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = attention_mask.long().cumsum(1) - 1
        return self.out(self.table(ids) + places[..., None])


class OptionalMask(Tokens):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None
        return super().forward(ids)


class RequiredMaybeMask(Tokens):
    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        x = super().forward(ids)
        return x if mask is None else x * mask[..., None]


class GivenPositions(Tokens):
    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.out(self.table(ids) + position_ids[..., None].to(torch.float32).sin())


class Decoding(Tokens):
    def forward(self, ids: Tensor, start_pos: int) -> Tensor:
        places = torch.arange(start_pos, start_pos + ids.shape[1])
        return self.out(self.table(ids) + places[:, None])


class TwoSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(50, D), nn.Embedding(50, D)
        self.cross = nn.MultiheadAttention(D, 3, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        x = self.source(src) + torch.arange(src.shape[1])[:, None]
        y = self.target(tgt) + torch.arange(tgt.shape[1])[:, None]
        return self.cross(y, x, x)[0]


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.arange(x.shape[0])[:, None, None]
        return self.attention(x, x, x)[0]


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, 196, D))

    def forward(self, images: Tensor) -> Tensor:
        return self.patches(images).flatten(2).transpose(1, 2) + self.positions


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(D, 3, 8, batch_first=True)
        self.head = nn.Linear(D, 2)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.attention(features + torch.arange(features.shape[1])[:, None]))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Tokens(), [("B", "N", "int64", "CONTENT")]),
        (Vectors(), [("B", "N", D, "float32", "CONTENT")]),
        (Vectors().half(), [("B", "N", D, "float16", "CONTENT")]),
        (Vectors().double(), [("B", "N", D, "float64", "CONTENT")]),
        (Vectors(31), [("B", "N", 31, "float32", "CONTENT")]),
        (Masked(), [("B", "N", "int64", "CONTENT"), ("B", "N", "bool", "MASK")]),
        (OptionalMask(), [("B", "N", "int64", "CONTENT")]),
        (RequiredMaybeMask(), [("B", "N", "int64", "CONTENT")]),
        (GivenPositions(), [("B", "N", "int64", "CONTENT"), ("B", "N", "int64", "POSITION")]),
        (Decoding(), [("B", "N", "int64", "CONTENT")]),
        (TwoSequences(), [("B", "N", "int64", "CONTENT"), ("B", "M", "int64", "CONTENT")]),
        (SequenceFirst(), [("N", "B", D, "float32", "CONTENT")]),
        (Patches(), [("B", 3, 224, 224, "float32", "CONTENT")]),
        (Convolution(), [("B", "N", D, "float32", "CONTENT")]),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, nn.Module) else "",
)
def test_inputs_are_made_up(model: nn.Module, expected: list[tuple[Any, ...]]) -> None:
    assert seen(trace(model)) == expected


class Around(nn.Module):
    """A wrapper that hands on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()
        self.inner = inner


class AroundBoth(Around):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


class AroundKeywords(Around):
    def forward(self, **batch: Any) -> Tensor:
        return self.inner(**batch)


@pytest.mark.parametrize("wrapper", [AroundBoth, AroundKeywords])
@pytest.mark.parametrize("inner", [Tokens, Vectors, Masked])
def test_a_wrapper_that_hands_its_arguments_on(wrapper: type[Around], inner: type[nn.Module]) -> None:
    assert seen(trace(wrapper(inner()))) == seen(trace(inner()))
    assert seen(trace(wrapper(AroundKeywords(inner())))) == seen(trace(inner()))


def test_given_positions_are_a_range() -> None:
    made = trace(GivenPositions())
    node = inputs(made)[1]
    assert torch.equal(made.value(node)[-1], torch.arange(made.sizes.tokens))


def test_a_mask_lets_every_token_be_seen() -> None:
    made = trace(Masked())
    places = made.value(joins(made)[0].position[-1])
    assert torch.equal(places[-1, :, 0], torch.arange(made.sizes.tokens))


def test_the_length_asked_for_with_one_sequence_or_two() -> None:
    for model in (Tokens(), TwoSequences(), SequenceFirst()):
        made = session(model).at(23)
        assert made.failure is None
        assert made.seq_len == 23


# -- the user's own -----------------------------------------------------------------------------------------


class Hard(nn.Module):
    """Nothing tells from the outside what this takes."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)

    def forward(self, batch: Any, scale: float) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch
        return self.project(x * scale) + torch.arange(x.shape[-2])[:, None]


def test_an_example_as_a_tuple() -> None:
    made = trace(Hard(), example=lambda n: (torch.zeros(2, n, D), 0.5))
    assert [node.shape for node in inputs(made)] == [(made.sizes.batch, made.sizes.tokens, D)]
    assert len(made.graph.sites) == 1


def test_an_example_as_a_mapping() -> None:
    made = trace(Hard(), example=lambda n: {"scale": 2.0, "batch": torch.zeros(2, n, D)})
    assert len(made.graph.sites) == 1


def test_an_example_as_one_tensor() -> None:
    made = trace(Vectors(), example=lambda n: torch.zeros(2, n, D))
    assert [node.shape for node in inputs(made)] == [(made.sizes.batch, made.sizes.tokens, D)]


def test_an_example_with_tensors_inside_containers() -> None:
    made = trace(Hard(), example=lambda n: ({"x": torch.zeros(2, n, D)}, 1.0))
    assert [node.shape for node in inputs(made)] == [(made.sizes.batch, made.sizes.tokens, D)]
    assert [node.provenance for node in inputs(made)] == [CONTENT]
    assert len(made.graph.sites) == 1


def test_an_example_of_few_texts_is_repeated_so_that_they_are_no_size_of_the_model() -> None:
    ids = torch.arange(2)[:, None]

    def example(n: int) -> Any:
        return {"position_ids": ids.expand(2, n), "x": torch.zeros(2, n, D)}

    made = trace(Placed(), example=example)
    assert made.sizes.batch == 5
    assert torch.equal(
        made.value(joins(made)[0].position[-1])[:, 0, 0], torch.tensor([0, 1, 0, 1, 0.0]).sin()
    )


def test_an_example_for_a_model_that_takes_no_other_number_of_texts() -> None:
    made = trace(FewTexts(2), example=lambda n: torch.zeros(2, n, dtype=torch.long))
    assert made.failure is None
    assert [node.shape for node in inputs(made)] == [(2, made.sizes.tokens)]


def test_an_example_is_asked_for_the_length_of_each_pass() -> None:
    asked: list[int] = []

    def example(n: int) -> Tensor:
        asked.append(n)
        return torch.zeros(2, n, D)

    made = session(Vectors(), example=example)
    structural = made.structural().seq_len
    assert made.at(77).seq_len == 77
    assert asked == [structural, 77]


def test_an_example_that_raises() -> None:
    def example(n: int) -> Tensor:
        raise ValueError("no data")

    with pytest.raises(TraceError, match=r"example_inputs\(\d+\) raised ValueError: no data; it must return"):
        session(Vectors(), example=example).structural()


def test_marked_positions_keep_their_numbers() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(D, D)

        def forward(self, x: Tensor, times: Tensor) -> Tensor:
            return self.project(x) + times[..., None].sin()

    def example(n: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, n, D), positions(torch.linspace(5, 9, n).flip(0).expand(2, n))

    made = trace(Timed(), example=example)
    expected = torch.linspace(5, 9, made.sizes.tokens).flip(0).expand(made.sizes.batch, -1)[..., None].sin()
    assert torch.equal(made.value(joins(made)[0].position[-1]), expected)


@pytest.mark.parametrize(
    ("column", "kind"),
    [(0, "POSITION"), (1, "CONTENT"), (2, "CONTENT")],
    ids=["row after row of a grid", "colours", "ones and zeros"],
)
def test_coordinates_of_a_grid_are_positions(column: int, kind: str) -> None:
    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(D, D)

        def forward(self, words: Tensor, word_ids: Tensor, patches: Tensor, ids: Tensor) -> Tensor:
            places = torch.cat((word_ids, ids), 1).sum(-1, keepdim=True).sin()
            return self.project(torch.cat((words, patches), 1)) + places

    def example(n: int) -> tuple[Tensor, ...]:
        grid = torch.stack(torch.meshgrid(torch.arange(n / 4), torch.arange(4.0), indexing="ij"), -1)
        colours = (torch.arange(2.0 * 4 * grid.shape[0]) * 37 % 256).reshape(grid.shape)
        ids = (grid, colours, (colours > 99).float())[column].reshape(1, -1, 2)
        return torch.rand(1, 5, D), torch.zeros(1, 5, 2), torch.rand(1, ids.shape[1], D), ids

    made = session(Pictures(), example=example).structural()
    assert made.failure is None
    places = [node for node in made.graph.nodes if node.op_name == "sin"]
    assert [node.provenance.name for node in places] == [kind]


class Steps(nn.Module):
    """States, one a step, and the numbers of their steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.states, self.steps = nn.Linear(width, D) if width else nn.Embedding(400, D), nn.Embedding(400, D)

    def forward(self, states: Tensor, steps: Tensor) -> Tensor:
        return self.states(states) + self.steps(steps)


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize("counted", [True, False])
def test_a_count_of_steps_beside_vectors_is_positions(vectors: bool, counted: bool) -> None:
    def example(n: int) -> tuple[Tensor, Tensor]:
        steps = torch.arange(n).expand(2, n)
        return torch.rand(2, n, 3) if vectors else torch.ones(2, n).long(), steps if counted else steps // 2

    made = trace(Steps(3 if vectors else 0), example=example)
    places = [node.args[1].provenance.name for node in made.graph.nodes if node.op_name == "embedding"]
    assert places[-1] == ("POSITION" if vectors and counted else "CONTENT")


class Placed(nn.Module):
    """Adds a function of the positions that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return self.project(x) + position_ids[..., None].float().sin()


@pytest.mark.parametrize("as_mapping", [True, False])
def test_whole_numbers_for_an_argument_of_positions_keep_their_values(as_mapping: bool) -> None:
    def example(n: int) -> Any:
        rows, x = (torch.arange(n) // 4).expand(2, n), torch.zeros(2, n, D)
        return {"position_ids": rows, "x": x} if as_mapping else (x, rows)

    made = trace(Placed(), example=example)
    expected = (torch.arange(made.sizes.tokens) // 4).expand(made.sizes.batch, -1)[..., None].float().sin()
    assert torch.equal(made.value(joins(made)[0].position[-1]), expected)


def test_real_numbers_for_an_argument_of_positions_may_be_content() -> None:
    made = trace(Placed(), example=lambda n: (torch.zeros(2, n, D), torch.randn(2, n)))
    assert not joins(made)


def spec(text: str) -> InputSpec:
    return parse_input_spec(text)


def test_given_specs() -> None:
    made = trace(Hard2(), spec("x=float32[B,N,12]"), spec("where=int64[N]"))
    sizes = made.sizes
    assert [node.shape for node in inputs(made)] == [(sizes.batch, sizes.tokens, D), (sizes.tokens,)]


class Hard2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, D)

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        return self.project(x) + where[:, None].float().sin()


def test_a_name_that_forward_does_not_take() -> None:
    with pytest.raises(
        UsageError, match=r"--input ids: forward\(\) takes no such argument; it takes x, where"
    ):
        session(Hard2(), spec("ids=int64[B,N]"))


def test_any_name_when_forward_takes_keywords() -> None:
    class Keywords(Vectors):
        def forward(self, **given: Tensor) -> Tensor:
            return super().forward(given["x"])

    assert trace(Keywords(), spec("x=float32[B,N,12]")).failure is None


def test_nothing_that_works_tells_the_models_own_error() -> None:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("never")

    made = session(Never()).structural()
    assert made.failure is not None
    assert made.failure.message == "ValueError: never"
    assert made.inputs


def test_a_forward_without_arguments() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(10, D))

        def forward(self) -> Tensor:
            return self.table

    made = session(Empty()).structural()
    assert made.failure is None
    assert made.graph.sites == []


class FewTexts(nn.Module):
    """Keys of earlier tokens lie in a buffer for so many texts."""

    def __init__(self, texts: int, width: int = D) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(97, D), nn.Linear(width, width)
        self.register_buffer("kept", torch.zeros(texts, 400, D), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        batch, n = ids.shape
        self.kept[:batch, :n] = self.project(self.embed(ids))
        return self.kept[:batch, :n] + torch.arange(n)[:, None]


@pytest.mark.parametrize("texts", [1, 4])
def test_a_model_made_for_few_texts_is_given_one(texts: int) -> None:
    made = session(FewTexts(texts))
    assert made.structural().failure is None
    assert made.structural().sizes.batch == 1
    assert "it does not run on 5 texts at once, so one is given" in made.target.notes


def test_where_one_text_fails_too_the_first_failure_is_told() -> None:
    failed = session(FewTexts(4, width=D + 1)).structural()
    assert failed.failure is not None
    assert failed.sizes.batch == 5
    assert "[755, 12] X [13, 13]" in failed.failure.message
