"""The least that a comparison takes is a lower bound near the truth, and what cannot fit is refused."""

from __future__ import annotations

import pytest
import torch

from pediag.bench_schemes import bench_schemes
from pediag.errors import UsageError
from pediag.schemes import memory
from pediag.schemes.costs import costs
from pediag.schemes.encodings import SCHEMES
from pediag.schemes.model import Setting
from pediag.schemes.training import new


@pytest.mark.parametrize("scheme", ["rotary", "alibi", "learned"])
def test_a_lower_bound_of_what_is_measured(scheme: str) -> None:
    setting = Setting(d_model=128, heads=4, layers=3, seq_len=64, train_len=64, batch=8, schemes=(scheme,))
    weights = sum(one.numel() * one.element_size() for one in new(setting, SCHEMES[scheme], 0).parameters())
    taken = 4 * weights + costs(setting, lambda text: None, rounds=1)[0].peak
    assert 0.5 * taken < memory.least(setting) <= taken


def test_what_cannot_fit_is_refused_before_it_starts() -> None:
    with pytest.raises(
        UsageError, match=r"takes [\d,]+ GiB of memory at the least, and cpu has [\d,]+: give"
    ):
        bench_schemes(d_model=8_192, heads=64, layers=64, seq_len=131_072, batch=4_096, device="cpu")


def test_a_device_of_unknown_memory_refuses_nothing() -> None:
    setting = Setting(d_model=8_192, heads=64, layers=64, seq_len=131_072, schemes=("none",), device="meta")
    memory.refuse_too_large(setting)
    assert torch.device(setting.device).type == "meta"
