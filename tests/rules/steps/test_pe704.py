"""PE704: two texts in one row, kept apart by a mask, against the second alone, run for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rules._fixtures import load
from tests.rules.steps._judge import assert_points_at_mark, cases, findings, outcome, output, texts

FIXTURE = load("pe704_packing_ignored")
CODE = "PE704"
FIRST, SECOND = 9, 6


def positions_of_the_second(model: nn.Module) -> Tensor:
    """What a model adds to the same token at the places of the second text, less what it adds from place 0 on."""
    ids = torch.full((1, FIRST + SECOND), 5)
    restarted = torch.cat((torch.arange(FIRST), torch.arange(SECOND)))[None]
    documents = torch.tensor([[1] * FIRST + [2] * SECOND])
    names = model.forward.__code__.co_varnames
    told = next(
        {name: documents if name == "document_ids" else restarted}
        for name in ("position_ids", "positions", "document_ids")
        if name in names
    )
    entered: list[Tensor] = []
    handle = model.block.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    output(model, ids, **told)
    handle.remove()
    x = entered[0][0]
    return x[FIRST:] - x[:SECOND]


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_rows_of_the_second_text_are_others_and_the_rule_says_so(factory: Any) -> None:
    assert float(positions_of_the_second(factory()).abs().max()) > 1e-2
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert (finding.severity, finding.evidence.measured) == ("warning", 1.0)
    assert_points_at_mark(FIXTURE, CODE, factory)


@pytest.mark.parametrize("factory", [FIXTURE.healthy, FIXTURE.healthy_waves, FIXTURE.healthy_documents])
def test_rows_of_the_second_text_are_those_of_the_first(factory: Any) -> None:
    assert float(positions_of_the_second(factory()).abs().max()) < 1e-6
    assert outcome(factory(), CODE, FIXTURE.SEQ_LEN).status == "pass"


def test_a_rotation_gives_packed_texts_what_they_have_alone() -> None:
    model = FIXTURE.healthy_rotation()
    one, two = texts(1, FIRST), texts(1, SECOND) % 90 + 3
    documents = torch.tensor([[1] * FIRST + [2] * SECOND])
    packed = output(model, torch.cat((one, two), 1), document_ids=documents)[0, FIRST:]
    torch.testing.assert_close(packed, output(model, two)[0], atol=1e-6, rtol=0)
    found = outcome(FIXTURE.healthy_rotation(), CODE, FIXTURE.SEQ_LEN)
    assert (found.status, "the mask's part" in found.reason) == ("not-applicable", True)


def test_an_argument_without_any_effect_is_told_from_an_offset() -> None:
    (ignored,) = findings(FIXTURE.faulty(), CODE, 64)
    (offset,) = findings(FIXTURE.faulty_start(), CODE, 64)
    assert ignored.message.startswith("position_ids has no effect")
    assert offset.message.startswith("Starting position_ids again has no effect")


def test_document_ids_that_hide_nothing_are_kinds_of_tokens() -> None:
    class Kinds(FIXTURE.Documents):  # type: ignore[misc,name-defined]
        def forward(self, ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
            kinds = torch.zeros_like(ids) if document_ids is None else document_ids
            x = self.tokens(ids) + self.tokens(kinds) + self.table[torch.arange(ids.shape[1])]
            return self.block(x, FIXTURE.causal(ids.shape[1], ids.device))

    found = outcome(Kinds(False).eval(), CODE, 64)
    assert (found.status, found.reason) == ("not-applicable", "document_ids keeps no tokens of a row apart")


def test_forward_without_ids_is_not_judged() -> None:
    class Plain(FIXTURE.Rows):  # type: ignore[misc,name-defined]
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            return self.block(x, FIXTURE.causal(ids.shape[1], ids.device))

    assert outcome(Plain("ids").eval(), CODE, 64).status == "not-applicable"
