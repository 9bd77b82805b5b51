"""Every kind of file on the command line: the shipped one opens, a cut or overwritten one is one line and status 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pediag.cli import main

FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"
# What each fixture was made with, see fixtures/formats/make_*.py; base 10000 is what torch computed there.
HELD = {
    "tiny.pt": "rotary frequencies, base 10000",
    "tiny_legacy.pt": "rotary frequencies, base 10000",
    "tiny_training.pt": "rotary frequencies, base 10000",
    "tiny_lightning.ckpt": "rotary frequencies, base 10000",
    "tiny_torchscript.pt": "rotary frequencies, base 10000",
    "tiny.pt2": "learned, 64 rows, width 8",
    "tiny.gguf": "rotary, base 500000, llama3 scaling, width 64",
    "tiny_llama": "rotary, base 10000, yarn scaling",
    "tiny_llama/config.json": "rotary, base 10000, yarn scaling",
    "tiny_llama/model.safetensors.index.json": "",
    "tiny_gpt2": "learned, 64 rows, width 16",
    "tiny_gpt2/pytorch_model.bin.index.json": "",
    "tiny_adapter": "learned, 64 rows, width 16",
    "tiny_original": "rotary, base 500000, llama3 scaling",
    "tiny_own_code": "",
}
REFUSED = {"tiny_module.pt": "would run code when unpickled"}


@pytest.fixture
def formats(tmp_path: Path) -> Path:
    """The shipped files, where they may be damaged."""
    return Path(shutil.copytree(FORMATS, tmp_path / "formats"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_shipped_file_is_tried() -> None:
    made = {path.name for path in FORMATS.glob("tiny*")}
    assert made == {Path(name).parts[0] for name in (*HELD, *REFUSED)}


@pytest.mark.parametrize("name", HELD)
def test_what_is_shipped_opens(name: str, formats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name.endswith(".gguf"):
        pytest.importorskip("gguf")
    before = contents(formats)
    status = main(["check", str(formats / name), "--seq-len", "32"])
    said = capsys.readouterr()
    assert status == (0 if HELD[name] else 3), said.out + said.err
    assert HELD[name] in " ".join(said.out.split())
    assert contents(formats) == before


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_run_code_is_refused(name: str, formats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(formats / name)]) == 2
    said = capsys.readouterr()
    assert REFUSED[name] in said.err
    assert said.err.count("\n") == 1


WHOLE = [path.relative_to(FORMATS) for path in sorted(FORMATS.rglob("tiny*")) if path.is_file()]
PARTS = [
    path.relative_to(FORMATS)
    for path in sorted(FORMATS.rglob("*"))
    if path.is_file() and path.parent.name.startswith("tiny_") and path.suffix != ".py"
]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.97])
@pytest.mark.parametrize("name", WHOLE, ids=str)
def test_a_file_that_was_cut(
    name: Path, share: float, formats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = formats / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    before = contents(formats)
    assert main(["check", str(path), "--seq-len", "32"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("pediag: error: ")
    assert contents(formats) == before


@pytest.mark.parametrize("name", PARTS, ids=str)
def test_a_folder_with_a_file_that_was_overwritten(
    name: Path, formats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = formats / name
    path.write_bytes(b"\xff\x00<html>" * 40)
    before = contents(formats)
    assert main(["check", str(path.parent), "--seq-len", "32"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1), said
    assert "Traceback" not in said.err
    assert contents(formats) == before
