"""PE311: what ids and tables change of the outputs, run for real, against what the rule says without running."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load, marked_lines
from tests.rules.entry._judge import cases, findings, outcome

FIXTURE = load("pe311_positions_ignored")
CODE = "PE311"


def given(model: nn.Module, ids: Tensor) -> Tensor:
    """The outputs with position ids (1, N)."""
    tokens = torch.arange(ids.shape[1])[None] % 90 + 1
    with torch.no_grad():
        return model.double()(tokens, ids)


def gaps() -> Tensor:
    """Ids whose distances are not those of the places in the row."""
    return torch.tensor([[0, 1, 2, 7, 8, 20, 21, 40]])


@pytest.mark.parametrize("factory", [FIXTURE.faulty, FIXTURE.faulty_complex])
def test_ids_change_no_output_and_the_rule_says_so(factory: Any) -> None:
    assert torch.equal(given(factory(), gaps()), given(factory(), torch.arange(8)[None]))
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert (finding.evidence.measured, finding.severity) == (0, "warning")


@pytest.mark.parametrize("factory", [FIXTURE.healthy, FIXTURE.healthy_complex])
def test_ids_change_outputs_and_the_rule_is_silent(factory: Any) -> None:
    assert float((given(factory(), gaps()) - given(factory(), torch.arange(8)[None])).abs().max()) > 1e-3
    assert outcome(factory(), CODE, FIXTURE.SEQ_LEN).status == "pass"


def test_shifts_and_resets_change_nothing_under_a_rotation() -> None:
    """What the finding's effect says: only ids with other distances are lost."""
    plain = given(FIXTURE.healthy(), torch.arange(8)[None])
    torch.testing.assert_close(
        given(FIXTURE.healthy(), torch.arange(8)[None] + 100), plain, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_one_finding_at_the_line(factory: Any) -> None:
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert finding.where.file == FIXTURE.__file__
    assert finding.where.line in marked_lines(FIXTURE, CODE)
    assert finding.effect and finding.fix.summary


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_silent(factory: Any) -> None:
    assert not findings(factory(), CODE, FIXTURE.SEQ_LEN)


@pytest.mark.parametrize(
    "name", ["faulty_never_applied", "faulty_zeros", "faulty_never_called", "faulty_rows"]
)
def test_tables_that_change_no_output(name: str) -> None:
    """Doubling every stored or computed table of the one that does nothing leaves the outputs as they are."""
    ids = torch.arange(1, 12)[None]
    model = getattr(FIXTURE, name)()
    with torch.no_grad():
        before = model(ids)
        for path, tensor in [*model.named_buffers(), *model.named_parameters()]:
            if "turner" in path and name == "faulty_never_called" or path == "places":
                tensor.mul_(2)
        after = model(ids)
    assert torch.equal(before, after)


def test_zero_rows_are_a_note_while_they_train() -> None:
    (finding,) = findings(FIXTURE.zero_rows(), CODE, 256)
    assert (finding.severity, finding.evidence.measured, finding.evidence.expected) == ("note", 1, 256)
    frozen = FIXTURE.zero_rows()
    frozen.places.requires_grad_(False)
    (finding,) = findings(frozen, CODE, 256)
    assert finding.severity in ("warning", "note")


def test_distances_need_no_ids_and_that_is_said() -> None:
    found = outcome(FIXTURE.healthy_distances(), CODE, FIXTURE.SEQ_LEN)
    assert found.status == "not-applicable"
    assert "distances only" in found.reason


def test_a_model_of_text_alone_leaves_the_tables_for_images_unread() -> None:
    class Pictures(FIXTURE.TwoTowers):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.patch_places = nn.Embedding(320, FIXTURE.HEADS * FIXTURE.D)
            self.longest = 320

    assert not findings(Pictures().eval(), CODE, 256)


def test_a_table_for_what_joins_a_tower_to_its_text_is_left_unread() -> None:
    """The tower runs beside the text, and a vocabulary of what it sees is read where both are given."""

    class Tower(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config, self.patches = SimpleNamespace(image_size=56), nn.Conv2d(3, 8, 14, 14)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.patches(pixel_values).flatten(1)

    class Reader(nn.Module):
        main_input_name = "input_ids"

        def __init__(self) -> None:
            super().__init__()
            self.config, self.text, self.tower = SimpleNamespace(), FIXTURE.Tables(True), Tower()
            self.seen, self.vocabulary = nn.Embedding(320, FIXTURE.HEADS * FIXTURE.D), 320

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
            x: Tensor = self.text(input_ids)
            return x if pixel_values is None else x + self.tower(pixel_values) @ self.seen.weight[:128, :1]

    assert not findings(Reader().eval(), CODE, 256)


def test_one_module_may_make_tables_for_further_layers() -> None:
    class Wide(FIXTURE.Complex):  # type: ignore[misc,name-defined]
        def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
            other = torch.arange(ids.shape[1])[:, None] * self.omega / 8
            other.cos()
            return super().forward(ids, positions)

    assert not findings(Wide(False).eval(), CODE, 256)
