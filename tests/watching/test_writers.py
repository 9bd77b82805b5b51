"""Where records go."""

from __future__ import annotations

import json
import sys

import pytest

from pediag.errors import UsageError
from pediag.watching.writers import JsonLines, TensorBoard

STEP = {
    "kind": "step", "step": 7, "time": 0.0, "scale": {"learned-1 in the model": 0.5},
    "gradient": {"share": 0.25, "norm": float("nan")}, "tables": {"wpe": {"drift": 0.125, "rank": None, "moved": True}},
    "attention": {"h.0": {"first": 0.75, "distance": 3.0, "entropy": 1.0}}, "constants_changed": [], "cost_s": 0.01,
}  # fmt: skip


def test_each_line_is_there_at_once_and_a_file_is_continued(tmp_path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        writer = JsonLines(path)
        writer.write(STEP)
        assert json.loads(path.read_text().splitlines()[-1])["gradient"] == {"share": 0.25, "norm": "nan"}
        writer.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_record_that_was_cut_is_not_written_on(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "step", "step": 6}\n{"kind": "step", "st')
    writer = JsonLines(path)
    writer.write(STEP)
    writer.close()
    first, cut, last = path.read_text().splitlines()
    assert cut == '{"kind": "step", "st'
    assert (json.loads(first)["step"], json.loads(last)["step"]) == (6, 7)


@pytest.mark.parametrize("own", ["my notes\n", "import torch", '{"a": 1}', '{"kind"'])
def test_a_file_that_is_no_log_is_left_as_it_is(tmp_path, own):
    path = tmp_path / "notes.txt"
    path.write_text(own)
    with pytest.raises(UsageError, match="holds something else than a log; give another name"):
        JsonLines(path)
    assert path.read_text() == own


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, name, value, step):
        self.scalars[name] = (value, step)

    def add_text(self, name, text, step):
        self.texts.append((name, text, step))

    def flush(self):
        pass


def test_scalars_of_a_step_go_to_a_writer_that_is_there():
    own = Writer()
    board = TensorBoard(own)
    board.write(STEP)
    board.write({"kind": "finding", "step": 8, "code": "PE301", "message": "too large"})
    board.write({"kind": "end", "step": 9, "cost_s": 0.0, "run_s": 1.0})
    board.close()
    assert own.scalars["pediag/scale/learned-1 in the model"] == (0.5, 7)
    assert own.scalars["pediag/gradient/share"] == (0.25, 7)
    assert own.scalars["pediag/tables/wpe/drift"] == (0.125, 7)
    assert own.scalars["pediag/attention/h.0/first"] == (0.75, 7)
    assert not [name for name in own.scalars if "moved" in name or name.endswith("rank")]
    assert own.texts == [("pediag/PE301", "too large", 8)]


def test_a_folder_gets_an_event_file(tmp_path):
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path / "board")
    board.write(STEP)
    board.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    (event,) = found.Scalars("pediag/gradient/share")
    assert (event.value, event.step) == (0.25, 7)


def test_without_tensorboard_there_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="tensorboard is not installed: pip install tensorboard"):
        TensorBoard(tmp_path)


def test_a_board_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="tensorboard must be a folder or a SummaryWriter; got a int"):
        TensorBoard(5)
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot be used as a folder"):
        TensorBoard(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
