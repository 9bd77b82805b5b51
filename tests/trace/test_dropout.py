"""Dropout is off while a trace runs, and is recorded all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trace._sessions import WIDTH, session, trace

D = WIDTH


class Drops(nn.Module):
    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        pe = torch.arange(x.shape[1], dtype=x.dtype)[:, None].expand(1, -1, D)
        return self.norm(x) + self.drop(pe)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.p, training=self.training)


SPELLINGS = {
    "module": (nn.Dropout(0.1), 0.1),
    "module of rows": (nn.Dropout1d(0.2), 0.2),
    "module of maps": (nn.Dropout2d(0.3), 0.3),
    "alpha": (nn.AlphaDropout(0.4), 0.4),
    "feature alpha": (nn.FeatureAlphaDropout(0.35), 0.35),
    "in place": (nn.Dropout(0.1, inplace=True), 0.1),
    "zero": (nn.Dropout(0.0), 0.0),
    "default": (nn.Dropout(), 0.5),
    "switched by the module": (Switched(), 0.25),
    "positional": (lambda x: F.dropout(x, 0.15, False), 0.15),
    "keyword": (lambda x: F.dropout(x, p=0.15, training=False), 0.15),
    "all keywords": (lambda x: F.dropout(input=x, p=0.15, training=False), 0.15),
    "forgotten switch": (lambda x: F.dropout(x, 0.6), 0.6),
    "default of the function": (lambda x: F.dropout(x, training=False), 0.5),
    "torch's own": (lambda x: torch.dropout(x, 0.7, False), 0.7),
    "in place function": (lambda x: F.dropout(x.clone(), 0.15, False, True), 0.15),
}


@pytest.mark.parametrize(("drop", "p"), SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_each_spelling_is_seen_once_with_its_probability(
    drop: Callable[[Tensor], Tensor], p: float, training: bool
) -> None:
    made = trace(Drops(drop).train(training))
    (seen,) = made.graph.dropouts
    assert seen.probability == p
    assert seen.frame is not None
    assert seen.frame.file == __file__
    (site,) = made.graph.sites
    assert seen.node is site.position[0]
    assert torch.equal(made.value(seen.node)[0, :, 3], torch.arange(made.sizes.tokens, dtype=torch.float32))


def test_the_module_that_drops_is_named() -> None:
    (seen,) = trace(Drops(nn.Dropout(0.1))).graph.dropouts
    assert seen.module == "drop"


def test_dropout_of_content_is_seen_as_such() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1), nn.Linear(D, D), nn.Dropout(0.2))
    seen = trace(model).graph.dropouts
    assert [(item.module, item.probability, item.node.provenance.name) for item in seen] == [
        ("1", 0.1, "CONTENT"),
        ("3", 0.2, "CONTENT"),
    ]


def test_dropout_inside_torchs_own_layers_is_seen() -> None:
    layer = nn.TransformerEncoderLayer(D, 3, 2 * D, dropout=0.3, batch_first=True)
    seen = trace(layer).graph.dropouts
    assert {(item.module, item.probability) for item in seen} == {
        ("dropout", 0.3),
        ("dropout1", 0.3),
        ("dropout2", 0.3),
    }


def test_no_dropout_none_seen() -> None:
    made = session(Drops(nn.Identity()))
    assert made.structural().graph.dropouts == []
    assert made.at(20).graph.dropouts == []
