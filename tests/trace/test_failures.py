"""Why a pass stopped: what is told, of which module and line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pediag.errors import TraceError
from pediag.trace import Failure, Provenance
from tests.trace._sessions import WIDTH, session

D = WIDTH


def line_of(marker: str) -> int:
    with open(__file__) as source:
        (found,) = [i for i, line in enumerate(source, 1) if line.rstrip().endswith(f"# {marker}")]
    return found


class Embeds(nn.Module):
    """Tokens (B, N) embedded, then ``then(self, ids, x)``."""

    def __init__(self, then: Callable[[Embeds, Tensor, Tensor], Tensor], rows: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(90, D)
        self.positions = nn.Embedding(rows, D)
        self.register_buffer("table", torch.arange(float(rows))[:, None].expand(-1, D).sin())
        self.out = nn.Linear(D, D)
        self.then = then

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.then(self, ids, self.tokens(ids)))


def failure(then: Callable[[Embeds, Tensor, Tensor], Tensor], tokens: int = 100) -> Failure:
    made = session(Embeds(then))
    assert made.structural().failure is None, made.structural().failure
    found = made.at(tokens).failure
    assert found is not None
    return found


def looked_up(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
    return x + self.positions(torch.arange(ids.shape[1]))  # looked up


def summed_mask(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
    return x + self.positions(ids.ne(1).long().cumsum(1) + 1)


@pytest.mark.parametrize(("then", "offset"), [(looked_up, 0), (summed_mask, 2)])
@pytest.mark.parametrize("tokens", [65, 100, 4096])
def test_a_table_that_ends(then: Callable[..., Tensor], offset: int, tokens: int) -> None:
    found = failure(then, tokens)
    assert found.table is not None
    assert found.table.names == ["positions.weight"]
    assert found.table.shape == (64, D)
    assert found.largest == tokens - 1 + offset
    assert found.module == "positions"
    assert f"index {tokens - 1 + offset}" in found.message
    assert "64 rows" in found.message
    assert found.frame is not None
    assert found.frame.file == __file__


def test_the_line_of_a_table_that_ends() -> None:
    found = failure(looked_up)
    assert found.frame is not None
    assert found.frame.line == line_of("looked up")


def test_the_last_row_is_still_there() -> None:
    made = session(Embeds(looked_up))
    assert made.at(64).failure is None


@pytest.mark.parametrize("index", [lambda t, ids: t[ids], lambda t, ids: t.index_select(0, ids)])
def test_a_table_that_ends_however_it_is_indexed(index: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = failure(lambda self, ids, x: x + index(self.table, torch.arange(ids.shape[1])), 80)
    assert found.table is not None
    assert found.largest == 79


def test_a_negative_index_is_an_overrun_too() -> None:
    found = failure(lambda self, ids, x: x + self.positions(63 - torch.arange(ids.shape[1])), 65)
    assert found.table is not None
    assert found.largest == -1


def short_slice(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
    return x + self.table[: ids.shape[1]]  # short slice


def test_a_slice_that_is_too_short() -> None:
    found = failure(short_slice)
    assert found.site is not None
    assert found.site.content[0].shape == (1, 100, D)
    assert found.site.position[0].shape == (64, D)
    assert found.site.position[0].provenance is Provenance.POSITION
    assert found.site.op == "add"
    assert found.module == ""
    assert found.frame is not None
    assert (found.frame.file, found.frame.line) == (__file__, line_of("short slice"))


def test_positions_laid_along_the_heads_axis_do_not_fit() -> None:
    class Misplaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            q = self.linear(x).view(*x.shape[:2], 3, 4)
            return q * torch.arange(x.shape[1])[None, None, :, None]

    found = session(Misplaced()).structural().failure
    assert found is not None
    assert found.site is not None
    assert found.site.op == "mul"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.max().item(),
        lambda x: float(x.sum()),
        lambda x: x.sum() > 0 and 1,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.unique(x).shape[0],
        lambda x: torch.equal(x, x + 1) or 1,
        lambda x: torch.arange(x.sum()).shape[0],
    ],
    ids=["item", "float", "bool", "tolist", "numpy", "unique", "equal", "arange"],
)
def test_code_that_reads_content_is_named_as_such(read: Callable[[Tensor], object]) -> None:
    def then(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
        read(x)
        return x

    found = session(Embeds(then)).structural().failure
    assert found is not None
    assert found.abstract
    assert found.message
    assert "\n" not in found.message
    assert found.frame is not None
    assert found.frame.file == __file__


def raises(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
    raise LookupError("no such thing\nand more")  # raises


def test_the_models_own_exception() -> None:
    found = session(Embeds(raises)).structural().failure
    assert found is not None
    assert found.message == "LookupError: no such thing"
    assert not found.abstract
    assert found.site is None
    assert found.table is None
    assert found.frame is not None
    assert (found.frame.file, found.frame.line) == (__file__, line_of("raises"))


def test_an_error_that_the_model_caught_is_not_the_reason() -> None:
    def then(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            x = x + torch.arange(ids.shape[1] + 4)[:, None]
        self.out(x)
        raise ValueError("another")

    found = session(Embeds(then)).structural().failure
    assert found is not None
    assert found.site is None
    assert found.message == "ValueError: another"
    assert found.module == ""


def test_the_error_behind_the_models_own_words() -> None:
    def then(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
        try:
            return looked_up(self, ids, x)
        except IndexError as error:
            raise ValueError("sequence too long") from error
        except Exception as error:
            raise ValueError("something else") from error

    found = failure(then)
    assert found.table is not None
    assert found.largest == 99


def test_content_picked_beyond_its_end() -> None:
    def then(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
        return x[:, torch.arange(ids.shape[1]) + 1]

    found = session(Embeds(then)).structural().failure
    assert found is not None
    assert found.message.startswith("IndexError: index")
    assert found.table is None


def test_the_module_of_an_exception() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("here")

    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(Raises()))
    found = session(model).structural().failure
    assert found is not None
    assert found.module == "1.0"


def test_sizes_of_content_that_do_not_fit() -> None:
    found = session(nn.Sequential(nn.Linear(D, D), nn.Linear(D + 1, D))).structural().failure
    assert found is not None
    assert found.site is None
    assert found.module == "1"


def test_what_ran_before_the_failure_is_recorded() -> None:
    def then(self: Embeds, ids: Tensor, x: Tensor) -> Tensor:
        x = x + torch.arange(ids.shape[1], dtype=x.dtype)[:, None]
        raise ValueError("late")

    made = session(Embeds(then)).structural()
    assert made.failure is not None
    assert len(made.graph.sites) == 1


def test_a_session_that_failed_fails_again_in_the_same_way() -> None:
    made = session(Embeds(looked_up))
    first, second = made.at(100).failure, made.at(100).failure
    assert first is not None
    assert second is not None
    assert first.message == second.message
    assert made.at(20).failure is None


def test_a_recipe_that_raises_is_a_trace_error() -> None:
    from pediag.targets import Target
    from pediag.trace import Session

    def build() -> nn.Module:
        raise ValueError("not today\nnor tomorrow")

    with pytest.raises(TraceError, match=r"cannot be built without weights: ValueError: not today$"):
        Session(Target(spec="recipe", loader="python", build=build))


class _FourInputs(nn.Module):
    """A short table, and arguments that cannot be guessed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.words = nn.Embedding(50, 16)

    def forward(self, alpha: Tensor, beta: Tensor, gamma: Tensor, delta: Tensor) -> Tensor:
        x = self.words(alpha) + self.table(torch.arange(alpha.shape[1]))
        return x @ beta.view(16, 5) + gamma[..., :7] + delta


def test_a_table_that_a_shorter_input_got_past_is_not_the_reason() -> None:
    trace = session(_FourInputs()).structural()
    assert trace.failure is not None
    assert trace.failure.table is None


def test_a_stored_row_of_types_that_ends_is_met_by_a_shorter_input() -> None:
    """BERT spreads a buffer of zeros, cut to the tokens there are, over the texts."""

    class Types(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(128, D)
            self.types = nn.Embedding(2, D)
            self.register_buffer("zeros", torch.zeros(1, 128, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            types = self.zeros[:, : x.shape[1]].expand(x.shape[0], x.shape[1])
            return (
                x @ self.places.weight.T @ self.places.weight
                + self.types(types)
                + self.places.weight[: x.shape[1]]
            )

    found = session(Types()).structural()
    assert found.failure is None, found.failure
    assert found.sizes.tokens < 128
