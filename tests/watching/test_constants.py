"""What became of tensors that training must not change."""

from __future__ import annotations

import torch
from torch import nn

from pediag.rules.finding import Where
from pediag.watching import constants, findings
from pediag.watching.constants import Constants
from pediag.watching.subjects import Held


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", 10000.0 ** (-torch.arange(8) / 8))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, 5.0))
        self.register_buffer("table", torch.arange(12.0).reshape(4, 3))
        self.ids = torch.arange(6)  # a plain attribute


def watched(module: nn.Module) -> Constants:
    return Constants(
        [
            Held(name, module, name, "rope-1", "rotary", Where(), frequencies=name == "w")
            for name in ("w", "slopes", "table", "ids")
        ]
    )


def test_nothing_changes_by_itself_and_a_change_is_told_once():
    module = Holder()
    kept = watched(module)
    assert kept.casts() == kept.changes() == []
    module.table[3, 1] = 99
    assert kept.casts() == []
    (change,) = kept.changes()
    assert (change.held.name, change.kind, change.largest) == ("table", "values", 99 - 10)
    assert kept.changes() == []


def test_a_cast_that_rounds_and_one_that_does_not():
    module = Holder()
    kept = watched(module)
    exact = module.w.double()
    module.half()
    rounded, slopes, table = kept.casts()
    assert (rounded.before, rounded.after, rounded.rounded) == ("float32", "float16", "float16")
    assert rounded.largest == float((exact.half().double() - exact).abs().max())
    assert slopes.largest == table.largest == 0
    assert findings.changed(rounded, 3, 1) is None  # below what can be noticed at one token
    told = findings.changed(rounded, 3, 100_000)
    assert told is not None and told.code == "PE602"
    assert told.evidence.measured == rounded.largest * 100_000
    assert findings.changed(slopes, 3, 100_000) is None


def test_a_table_that_grows_keeps_its_rows():
    module = Holder()
    kept = watched(module)
    module.table = torch.arange(24.0).reshape(8, 3)
    module.ids = torch.arange(9)
    assert kept.changes() == []
    module.ids = torch.arange(9) + 1
    assert [change.held.name for change in kept.changes()] == ["ids"]


def test_what_is_gone_is_told_and_no_finding():
    module = Holder()
    kept = watched(module)
    module.table = None
    (change,) = kept.casts()
    assert change.kind == "gone" and findings.changed(change, 1, 10) is None


def test_large_tensors_are_kept_as_digests(monkeypatch):
    monkeypatch.setattr(constants, "KEPT", 4)
    module = Holder()
    kept = watched(module)
    assert kept.changes() == []
    module.w[7] *= 2
    (change,) = kept.changes()
    assert change.largest is None
    told = findings.changed(change, 1, 10)
    assert told is not None and told.code == "PE705"
