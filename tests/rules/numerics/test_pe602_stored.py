"""PE602 on files: radians at the length asked about, by the dtype of a list or by its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rules._stored import judged

LENGTH = 8192


def plain(base: float, width: int) -> Tensor:
    """float64."""
    return base ** -(torch.arange(0, width, 2).double() / width)


def error(base: float, width: int, dtype: torch.dtype, length: int = LENGTH) -> float:
    """max_i (L - 1) |round(w_i) - w_i| in radians, rounded from float32 as a cast does."""
    w = plain(base, width)
    return float(((length - 1) * (w.float().to(dtype).double() - w).abs()).max())


@pytest.mark.parametrize("held", ["half dtype", "float32 again"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("base", "width"), [(1e4, 64), (5e5, 128), (1e6, 128)])
def test_lists(tmp_path: Path, base: float, width: int, dtype: torch.dtype, held: str) -> None:
    w = plain(base, width).float().to(dtype)
    w = w if held == "half dtype" else w.float()
    state = {f"layers.{i}.rot.w": w for i in range(3)}
    (finding,) = judged(tmp_path, state, "PE602", seq_len=LENGTH).findings
    assert finding.severity == "warning"
    assert finding.evidence.measured == pytest.approx(error(base, width, dtype), rel=1e-3)
    assert str(dtype).removeprefix("torch.") in finding.message
    assert f"1.0 / {base:.10g} ** (torch.arange(0, {width}, 2" in finding.fix.summary


def test_a_list_that_stands_alone_is_a_note(tmp_path: Path) -> None:
    """Llama 2 as Meta published it: one list in bfloat16 beside the layers, which its code computes anew."""
    state = {"rope.freqs": plain(1e4, 128).bfloat16(), "layers.0.w": torch.ones(64, 64)}
    (finding,) = judged(tmp_path, state, "PE602", seq_len=LENGTH).findings
    assert finding.severity == "note"
    assert "Uncertain" in finding.effect and "timestep" in finding.effect


@pytest.mark.parametrize("kind", ["pair", "complex"])
def test_tables_of_rounded_frequencies(tmp_path: Path, kind: str) -> None:
    angle = torch.outer(torch.arange(4096.0), plain(1e4, 64).float().bfloat16().float())
    state = {"c": angle.cos(), "s": angle.sin()}
    state = state if kind == "pair" else {"z": torch.polar(torch.ones_like(angle), angle)}
    (finding,) = judged(tmp_path, state, "PE602", seq_len=LENGTH).findings
    assert finding.evidence.measured == pytest.approx(error(1e4, 64, torch.bfloat16), rel=0.01)


def healthy() -> dict[str, dict[str, Tensor]]:
    angle = torch.outer(torch.arange(1024.0), plain(5e5, 128).float())
    interleaved = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    return {
        "float32 list": {"w": plain(1e4, 128).float()},
        "finished tables": {"c": angle.cos().bfloat16(), "s": angle.sin().bfloat16()},
        "finished sinusoid": {"t": interleaved.bfloat16()},
        "powers that any format holds": {"w": 65536.0 ** -(torch.arange(0, 64, 4).double() / 64).float()},
    }


@pytest.mark.parametrize("kind", healthy())
def test_silent(tmp_path: Path, kind: str) -> None:
    assert not judged(tmp_path, healthy()[kind], "PE602", seq_len=LENGTH).findings


def test_what_a_model_does_not_read_is_a_note() -> None:
    from pediag.encodings.from_tensors import read
    from pediag.rules.registry import find
    from pediag.rules.rule import Facets
    from pediag.targets import LazyTensor

    w = plain(1e4, 64).bfloat16()
    lazy = {"w": LazyTensor("w", (32,), "bfloat16", lambda: w)}
    (finding,) = find("PE602").check(Facets(seq_len=LENGTH, tensors=lazy, unread=read(lazy)))
    assert finding.severity == "note" and "does not read it" in finding.effect
