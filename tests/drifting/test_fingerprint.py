"""Fingerprints: small, without weights or names, read with mistrust, compared honestly."""

from __future__ import annotations

import getpass
import json
import platform
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pediag
from pediag.cli import main
from pediag.drifting import fingerprint
from pediag.errors import LoadError, UsageError
from pediag.report import drift as drawing
from tests.drifting.test_angles import SPEC, W32, Turns

SCHEMAS = Path(drawing.__file__).parent
SCHEMA = json.loads((SCHEMAS / "fingerprint_schema_version_1.json").read_text())
N = 4096


def product(n: int) -> Tensor:
    return torch.arange(n).float()[:, None] @ W32[None]


def shifted(n: int) -> Tensor:
    """As :func:`product`, with pair 3 off by a thousandth of itself."""
    w = W32.clone()
    w[3] *= 1.001
    return torch.arange(n).float()[:, None] @ w[None]


def elementwise(n: int) -> Tensor:
    """Other bits in a third of the entries: the same angles by another formula in float32."""
    return torch.arange(n).float()[:, None] / (10000.0 ** (torch.arange(0, 128, 2).float() / 128))


def drift(angles: Any = product, **options: Any) -> Any:
    return pediag.drift(Turns(angles).eval(), **{"seq_len": N, "inputs": SPEC, **options})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machines") / "a.json"
    drift().save(path)
    return path


def test_a_file_says_what_made_it_and_nothing_of_the_machine(saved):
    text = saved.read_text()
    value = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    assert value["made"]["torch"] == torch.__version__
    assert value["made"]["matmul_precision"] == torch.get_float32_matmul_precision()
    names = [platform.node(), str(Path(__file__).parent), str(Path.home()), ".py"]
    names += [getpass.getuser()] if len(getpass.getuser()) > 4 else []
    assert [name for name in names if name and name in text] == []
    assert saved.stat().st_size < 60_000


def test_the_values_are_angles_of_some_positions(saved):
    lane = json.loads(saved.read_text())["encodings"][0]["lanes"]["as written"]
    exact = 10000.0 ** (-np.arange(64) / 64)
    assert lane["positions"][-1] == N - 1
    for position, row in zip(lane["positions"], lane["values"], strict=True):
        assert row == pytest.approx(list(position * exact), rel=1e-6)


def test_the_same_machine_gives_the_same_bits(saved):
    made = drift(against=saved, seq_len=None)
    assert made.seq_len == N
    assert {item.verdict for item in made.compared} == {"same bits"}
    assert (made.verdict, made.exit_code()) == ("same", 0)


def test_another_formula_is_the_same_within_rounding(saved):
    made = drift(elementwise, against=saved, lanes="as written")
    (here,) = [item for item in made.compared if item.verdict != "not compared"]
    assert here.verdict == "same within rounding"
    assert here.first is not None
    assert 0 < here.measured < 1e-2
    assert made.exit_code() == 0


def test_one_moved_frequency_differs_by_so_many_radians_from_a_position_on(saved):
    made = drift(shifted, against=saved, lanes="as written")
    (here,) = [item for item in made.compared if item.verdict != "not compared"]
    off = 0.001 * 10000.0 ** (-3 / 64)
    assert (here.verdict, here.first, made.exit_code()) == ("differs", 1, 1)
    assert here.measured == pytest.approx(off * here.position, rel=1e-3)
    # Float32 allows 4 (2 + 1.5 ln b) 2^-24 m w, so that 0.001 m w passes it at once.
    assert here.beyond == 1


def test_positions_rounded_by_the_device_differ_from_2049_on(saved):
    """What a device with TF32 would have written, against the host's numbers."""
    there = fingerprint.read(saved)
    made = drift(lanes="tf32")
    (one,) = made.encodings
    one.lanes[0].lane = "cuda"
    compared = fingerprint.compare(made.encodings, there)
    (here,) = [item for item in compared if item.lane == "cuda"]
    assert (here.other, here.verdict) == ("as written", "differs")
    made.compared, made.there = compared, there.made
    assert made.exit_code() == 1
    assert "DIFFERS from position" in str(made)
    # The largest difference is that of the rounded frequencies and positions: numerics.txt, tf32/all at 4095: 1.21 rad.
    assert 0.3 < here.measured <= np.pi


def test_a_device_of_one_side_is_compared_with_the_host_of_the_other(monkeypatch, tmp_path):
    """A device whose lane runs on the host here: its numbers are those of the host."""
    from pediag.trace import lanes
    from pediag.trace.devices import OnDevice

    def stand_in() -> list[Any]:
        found = OnDevice("cpu")
        found.name = "cuda"
        return [found]

    with monkeypatch.context() as patched:
        patched.setattr(lanes, "accelerators", stand_in)
        there = drift()
    assert "cuda" in [lane.lane for lane in there.encodings[0].lanes]
    there.save(tmp_path / "cuda.json")
    made = drift(against=tmp_path / "cuda.json")
    pairs = {(item.lane, item.other): item.verdict for item in made.compared}
    assert pairs["as written", "cuda"] == pairs["as written", "as written"] == "same bits"
    assert made.exit_code() == 0


def test_trained_rows_are_digests_only(tmp_path):
    class Learned(nn.Module):
        def __init__(self, scale: float = 1.0) -> None:
            super().__init__()
            self.rows, self.out = nn.Embedding(256, 128), nn.Linear(128, 128)
            nn.init.normal_(self.rows.weight, std=scale, generator=torch.Generator().manual_seed(0))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + self.rows(torch.arange(x.shape[1])))

    path = tmp_path / "a.json"
    pediag.drift(Learned(), seq_len=256, inputs=SPEC).save(path)
    lanes = json.loads(path.read_text())["encodings"][0]["lanes"]
    assert {name: lane["values"] for name, lane in lanes.items()} == {name: [] for name in lanes}
    assert pediag.drift(Learned(), inputs=SPEC, against=path).verdict == "same"
    assert pediag.drift(Learned(2.0), inputs=SPEC, against=path).verdict == "differs"
    moved = Learned()
    with torch.no_grad():
        moved.rows.weight[100] += 1.0
    differs = pediag.drift(moved, inputs=SPEC, against=path)
    assert differs.exit_code() == 1
    assert "between the positions" in differs.compared[0].note


def test_nothing_in_common_is_no_success(saved):
    other = pediag.drift(
        nn.Sequential(nn.Embedding(9, 4)), seq_len=8, inputs=["input=int64[B,N]"], against=saved
    )
    assert (other.verdict, other.exit_code()) == ("nothing-compared", 3)


# -- reading --------------------------------------------------------------------------------------------------


def changed(saved: Path, *keys: Any, to: Any) -> str:
    value = json.loads(saved.read_text())
    inner = value
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return json.dumps(value)


LANE = ("encodings", 0, "lanes", "as written")
HOSTILE = {
    "kind": (("kind",), "else"),
    "version": (("version",), 2),
    "length": (("seq_len",), -1),
    "length as text": (("seq_len",), "4096"),
    "made": (("made",), []),
    "device": (("made", "device"), "\x1b[2J"),
    "long text": (("made", "torch"), "x" * 1000),
    "flag": (("made", "tf32"), "no"),
    "unit": (("encodings", 0, "unit"), "furlong"),
    "unit as a list": (("encodings", 0, "unit"), []),
    "lanes": (("encodings", 0, "lanes"), 3),
    "lane": (LANE, None),
    "digests": ((*LANE, "digests"), ["a"]),
    "values": ((*LANE, "values"), [[1.0]]),
    "a number": ((*LANE, "limits", 0), {"x": 1}),
    "a huge number": ((*LANE, "limits", 0), 10**400),
    "true as a number": ((*LANE, "at", 0), True),
    "same as nothing": (LANE, {"same_as": "nothing"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_as_written_is_one_line(name, saved, tmp_path, capsys):
    keys, value = HOSTILE[name]
    path = tmp_path / "b.json"
    path.write_text(changed(saved, *keys, to=value))
    with pytest.raises(LoadError) as caught:
        fingerprint.read(path)
    assert "\n" not in str(caught.value)
    assert "is no fingerprint" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '{"kind": NaN}', "\xff", '{"kind": "x"}', " " * 5_000_000]
)
def test_foreign_files_are_refused_and_left_alone(text, tmp_path, capsys):
    path = tmp_path / "notes.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["drift", "nowhere.py:model", "--against", str(path)]) == 2
    assert main(["drift", "nowhere.py:model", "--save", str(path), "--force"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert ["is no fingerprint" in line for line in lines] == [True, True]
    assert path.read_bytes() == text.encode("latin-1")


def test_a_fingerprint_is_written_over_with_force_only(saved, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(saved.read_bytes())
    made = drift(lanes="as written", seq_len=64)
    with pytest.raises(UsageError, match="--force"):
        made.save(path)
    assert path.read_bytes() == saved.read_bytes()
    made.save(path, force=True)
    assert fingerprint.read(path).seq_len == 64
    with pytest.raises(UsageError, match="does not exist"):
        made.save(tmp_path / "no" / "a.json")
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]
