"""TorchScript archives: tensors as torch.jit.load would name them, and no code of theirs runs."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pediag
from pediag.errors import LoadError
from pediag.targets import open_target
from tests.targets.files._corruption import ends
from tests.targets.files._hostile import rewritten

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
FIXTURE = Path(__file__).parents[3] / "fixtures" / "formats" / "tiny_torchscript.pt"


class Stored(nn.Module):
    """Tensors in every usual way of being held."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.tokens.weight
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(2)])
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("across", torch.randn(4, 6).t())
        self.register_buffer("part", torch.randn(10, 6)[2:5, 1:])
        self.register_buffer("scalar", torch.tensor(3.0, dtype=torch.float64))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("temporary", torch.arange(5), persistent=False)
        kinds = (torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool)
        for kind in kinds:
            self.register_buffer(f"as_{str(kind)[6:]}", torch.tensor([[0, 1], [1, 0], [1, 1]]).to(kind))
        self.register_buffer("as_complex", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.table = torch.randn(12, 8)
        self.several = [torch.ones(2), torch.zeros(3)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.table[: ids.size(1)] + self.several[0].sum()
        for norm in self.norms:
            x = norm(x)
        return self.head(x)


def same(target: Any, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor of ``expected`` is there by name, with its dtype, strides and numbers."""
    for name, tensor in expected.items():
        lazy = target.tensors[name]
        read = lazy.load()
        assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert (read.shape, read.dtype, read.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert torch.equal(read, tensor)


def test_a_scripted_model(tmp_path: Path) -> None:
    model = Stored().eval()
    torch.jit.save(torch.jit.script(model), tmp_path / "m.pt")
    target = open_target(tmp_path / "m.pt")
    loaded = torch.jit.load(tmp_path / "m.pt")
    same(target, loaded.state_dict())
    plain = {"table": model.table, "several.0": model.several[0], "several.1": model.several[1]}
    same(target, plain)
    assert set(target.tensors) == {*loaded.state_dict(), *plain}
    assert target.module is None
    assert target.notes == []
    assert "give the Python module as file.py:name, or export it" in target.reason_not_runnable


def test_a_traced_and_a_frozen_model(tmp_path: Path) -> None:
    model = Stored().eval()
    torch.jit.save(torch.jit.trace(model, torch.zeros(2, 5, dtype=torch.long)), tmp_path / "traced.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.script(model)), tmp_path / "frozen.pt")
    traced, frozen = open_target(tmp_path / "traced.pt"), open_target(tmp_path / "frozen.pt")
    same(traced, torch.jit.load(tmp_path / "traced.pt").state_dict())
    assert any(
        torch.equal(lazy.load(), model.table) for name, lazy in traced.tensors.items() if "CONSTANTS" in name
    )
    assert all(name.startswith("CONSTANTS.c") for name in frozen.tensors)
    assert any(torch.equal(lazy.load(), model.tokens.weight) for lazy in frozen.tensors.values())


def test_the_fixture_is_judged_by_its_tensors() -> None:
    target = open_target(FIXTURE)
    same(target, torch.jit.load(FIXTURE).state_dict())
    report = pediag.check(FIXTURE)
    assert {encoding.scheme for encoding in report.encodings} >= {"rotary"}
    (outcome,) = [item for item in report.outcomes if item.rule.code == "PE302"]
    assert (outcome.status, "TorchScript" in str(outcome.reason)) == ("could-not-check", True)


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_are_left_out_with_a_note(tmp_path: Path) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("plain", torch.ones(3))
            self.register_buffer("small", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.plain + self.small.dequantize()

    torch.jit.save(torch.jit.script(Quantised()), tmp_path / "m.pt")
    target = open_target(tmp_path / "m.pt")
    assert list(target.tensors) == ["plain"]
    assert target.notes == ["not read: 1 quantised tensors"]


def test_config_beside_tensors_gives_a_recipe(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from pediag.targets import Config

    sizes = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    target = open_target(
        FIXTURE, config=Config.from_object({**sizes, "vocab_size": 11, "intermediate_size": 16})
    )
    assert target.build is not None
    assert target.reason_not_runnable == ""


# -- safety -------------------------------------------------------------------------------------------------


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("trust", [False, True])
def test_what_an_archive_defines_for_its_objects_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool
) -> None:
    class Writes(nn.Module):
        """Makes a file when it is restored."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.ones(3)

        @torch.jit.export
        def __getstate__(self) -> tuple[torch.Tensor, bool]:
            return self.weight, self.training

        @torch.jit.export
        def __setstate__(self, state: tuple[torch.Tensor, bool]) -> None:
            self.weight, self.training = state
            self.weight = self.weight + torch.from_file("ran", shared=True, size=8).sum()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.weight

    monkeypatch.chdir(tmp_path)
    torch.jit.save(torch.jit.script(Writes()), "m.pt")
    target = open_target("m.pt", trust=trust)
    assert [lazy.load().tolist() for lazy in target.tensors.values()] == [[1.0, 1.0, 1.0]]
    pediag.check("m.pt", trust=trust)
    assert [item.name for item in tmp_path.iterdir()] == ["m.pt"]
    torch.jit.load("m.pt")
    assert Path("ran").is_file()  # it is a way in


@pytest.mark.parametrize("name", ["data.pkl", "constants.pkl"])
def test_a_pickle_that_asks_for_python_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = rewritten(FIXTURE, Path("m.pt"), {name: b"cposix\nmkdir\n(S'ran'\ntR."})
    assert "its " + name + " asks for posix.mkdir" in refused(path)
    assert "asks for posix.mkdir" in refused(path, trust=True)
    assert [item.name for item in tmp_path.iterdir()] == ["m.pt"]


def test_a_live_scripted_module_is_refused() -> None:
    with pytest.raises(LoadError, match="scripted"):
        open_target(torch.jit.script(nn.Linear(2, 2)))


# -- damage -------------------------------------------------------------------------------------------------


def test_missing_parts(tmp_path: Path) -> None:
    assert "PyTorch before 1.4" in refused(rewritten(FIXTURE, tmp_path / "old.pt", {"data.pkl": None}))
    with zipfile.ZipFile(FIXTURE) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size * ("/data/" in entry.filename))
    short = rewritten(FIXTURE, tmp_path / "m.pt", {largest.filename.partition("/")[2]: b"1234"})
    assert "would need more than the 4 bytes" in refused(short)
    gone = rewritten(FIXTURE, tmp_path / "n.pt", {largest.filename.partition("/")[2]: None})
    assert "has no data in the file" in refused(gone)


def test_values_that_hold_themselves_end(tmp_path: Path) -> None:
    circle = b"\x80\x02]q\x00h\x00a."
    assert "without tensors" in refused(rewritten(FIXTURE, tmp_path / "m.pt", {"data.pkl": circle}))
    doubled = b"\x80\x02K\x01" + b"".join(b"q\x00h\x00\x86" for _ in range(200)) + b"."
    assert "refers to more than" in refused(rewritten(FIXTURE, tmp_path / "n.pt", {"data.pkl": doubled}))


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_copies_open_or_are_refused(tmp_path: Path, seed: int) -> None:
    assert ends("tiny_torchscript.pt", seed, tmp_path)["opened"] > 300
