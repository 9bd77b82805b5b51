"""Many targets in one call: workers that die, order, streams, interrupts, what is kept of each."""

from __future__ import annotations

import builtins
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import weakref
from io import BytesIO, StringIO
from pathlib import Path

import pytest
from rich.console import Console

import pediag
from pediag.cli import main
from pediag.command import many
from pediag.command.terminal import Progress
from pediag.report import json as as_json
from pediag.report import rich as as_table
from pediag.report.model import Report, Stopped
from pediag.targets.naming import named

ROOT = Path(__file__).parents[2]
GOOD = """
import sys
import torch
from torch import nn

print("said at import")
print("threads", torch.get_num_threads(), file=sys.stderr)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(50, 16)
        self.place = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.attention(x, x, x)[0]


build = Net
net = Net()
"""
DYING = {
    "leaves": ("import os\nos._exit(7)\n", "ended with exit status 7"),
    "killed": ("import os\nos.kill(os.getpid(), 9)\n", "was killed by signal 9 (out of memory?)"),
    "crashes": ("import ctypes\nctypes.string_at(0)\n", "was killed by signal 11 (SIGSEGV)"),
}
HANGS = "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    for name, (source, _) in DYING.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "hangs.py").write_text(HANGS)
    return tmp_path


def command(*words: str, **options) -> subprocess.Popen[str]:
    """The command line as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    environment.pop("MKL_NUM_THREADS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "pediag", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def ran(*words: str) -> tuple[int, str, str]:
    process = command(*words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_worker_that_dies_costs_its_target_only(folder):
    words = ["good.py:build", "leaves.py:x", "killed.py:x", "good.py:Net", "crashes.py:x", "good.py:net"]
    status, out, err = ran("check", *words, "--jobs", "2", "--format", "json")
    assert status == 2
    several = json.loads(out)
    assert [report["target"]["spec"] for report in several["reports"]] == words[::3] + words[5:]
    assert {report["verdict"] for report in several["reports"]} == {"pass"}
    told = [f"{name}.py:x: the process that checked it {ending}" for name, (_, ending) in DYING.items()]
    assert [failure["message"] for failure in several["failures"]] == told
    assert [line for line in err.splitlines() if line.startswith("pediag: ")] == [
        f"pediag: error: {line}" for line in told
    ]
    assert "said at import" in err
    share = max(1, many.processors() // 2)
    assert {line for line in err.splitlines() if line.startswith("threads ")} == {f"threads {share}"}


def test_workers_say_what_one_process_says(folder):
    words = ["check", "good.py:build", "missing.py:x", "good.py:net", "--seq-len", "40"]
    alone, shared = ran(*words), ran(*words, "--jobs", "2")
    assert alone[:2] == shared[:2]
    assert alone[0] == 2
    assert "PE502" in alone[1]


def test_one_target_can_be_isolated_too(folder):
    status, out, err = ran("inspect", "leaves.py:x", "--jobs", "0", "--format", "json")
    assert (status, out) == (2, "")
    assert err == "pediag: error: leaves.py:x: the process that checked it ended with exit status 7\n"


def test_the_parent_of_workers_imports_no_torch(folder):
    code = (
        "import sys; from pediag.cli import main\n"
        "assert main(['check', 'good.py:build', 'good.py:net', '--jobs', '2']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-c", code]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups")
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_ends_all_at_once(folder, jobs):
    # A test run in the background may ignore interrupts, which children inherit.
    heard = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = command("check", "hangs.py:x", "good.py:build", "--jobs", jobs, **heard)
    until(lambda: (folder / "started").exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if "said" not in line and "threads" not in line] == [
        "pediag: interrupted"
    ]
    until(lambda: not alive(process.pid))


def until(true, seconds: float = 60.0) -> None:
    """Wait for something that is sure to come."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(group: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups")
def test_workers_do_not_outlive_their_parent(folder):
    process = command("check", "hangs.py:x", "hangs.py:y", "--jobs", "2", start_new_session=True)
    until(lambda: (folder / "started").exists() or process.poll() is not None)
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not alive(process.pid))


FIXTURES = (
    "fixtures/rules/pe302_dropout_on_positions.py:faulty",
    "fixtures/rules/pe502_table_too_short.py:faulty",
    "fixtures/rules/pe201_uninitialised_frequencies.py:faulty",
    "fixtures/rules/pe501_theta_saturation.py:faulty",
    "fixtures/healthy/t5_decoder.py:model",
    "fixtures/healthy/alibi_symmetric_encoder.py:model",
    "fixtures/healthy/sinusoid_then_learned.py:model",
    "fixtures/healthy/interleaved_partial.py:model",
)


@pytest.mark.parametrize("spec", FIXTURES)
def test_a_detached_report_is_shown_alike_and_travels_without_torch(spec, monkeypatch):
    monkeypatch.chdir(ROOT)
    report = pediag.check(spec, seq_len=512)
    assert report.encodings
    watching = Watching(BytesIO(pickle.dumps(report.detached())))
    travelled = watching.load()
    assert {name.partition(".")[0] for name in watching.modules} <= {"pediag", "numpy"}
    for other in (report.detached(), travelled):
        assert as_json.render(other) == as_json.render(report)
        assert as_json.render(other, describe=as_json.inspection) == as_json.render(
            report, describe=as_json.inspection
        )
        assert str(other) == str(report)
        assert inspected(other) == inspected(report)


class Watching(pickle.Unpickler):
    """An unpickler that keeps the names of the modules that it imports from."""

    def __init__(self, stream) -> None:
        super().__init__(stream)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str):
        self.modules.add(module)
        return super().find_class(module, name)


def inspected(report: Report) -> str:
    stream = StringIO()
    as_table.render_inspection(report, Console(file=stream, width=160, color_system=None))
    return stream.getvalue()


def test_nothing_of_a_target_is_kept(folder):
    (folder / "watched.py").write_text(
        GOOD + "import builtins, weakref\nbuiltins.watched = weakref.ref(net)\n"
    )
    work = many.Work("check", {"seq_len": 32})
    before = modes()
    with Progress() as progress:
        ((_, report),) = many.in_turn(["watched.py:net"], work, progress)
    assert report.encodings
    watched: weakref.ref[object] = builtins.__dict__.pop("watched")
    assert modes() <= before
    assert watched() is None
    assert not [name for name in sys.modules if name.startswith("_pediag_target_")]


def modes() -> int:
    """Abstract modes alive; each trace has one, and all that it recorded hangs on it."""
    gc.collect()
    return sum(type(item).__name__ == "FakeTensorMode" for item in gc.get_objects())


def test_results_come_in_the_order_of_the_targets(monkeypatch):
    listing = named(["slow.py:x", "no match [*]", "quick.py:x", "other.py:x"])

    def coming(specs, work, count, progress):
        assert (count, specs) == (3, ["slow.py:x", "quick.py:x", "other.py:x"])
        yield from ((place, Stopped(specs[place], "done")) for place in (1, 2, 0))

    monkeypatch.setattr(many, "in_processes", coming)
    results = list(many.run(listing, many.Work("check", {}), 3, Progress()))
    assert [result.spec for result in results] == ["slow.py:x", "no match [*]", "quick.py:x", "other.py:x"]
    assert results[1].message == "no such file: no match [*] (as a pattern it matches nothing)"


def test_what_an_earlier_target_left_behind_is_not_held_against_the_next(folder):
    """The second dies of the first, and is tried again in a new process; the third dies of itself."""
    (folder / "first.py").write_text("import os\nos.environ['LEFT_BEHIND'] = '1'\n" + GOOD)
    (folder / "second.py").write_text("import os\nif 'LEFT_BEHIND' in os.environ: os._exit(5)\n" + GOOD)
    specs = ["first.py:net", "second.py:net", "leaves.py:x", "good.py:net"]
    results = dict(many.in_processes(specs, many.Work("check", {}), 1, Progress()))
    assert [results[place].spec for place in range(4) if isinstance(results[place], Stopped)] == specs[2:3]


def test_files_beside_models_are_left_out_with_a_note(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    weights = {"place.weight": torch.randn(64, 32), "token.weight": torch.randn(500, 32)}
    parameter = torch.nn.Parameter(weights["place.weight"])
    optimiser = torch.optim.Adam([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    (tmp_path / "run").mkdir()
    torch.save(weights, "run/step-9.pt")
    torch.save(weights, "run/step-10.pt")
    torch.save(optimiser.state_dict(), "run/optimizer.pt")
    assert main(["check", "run", "--format", "json"]) in (0, 1, 3)
    several = json.loads(capsys.readouterr().out)
    assert [report["target"]["spec"] for report in several["reports"]] == ["run/step-9.pt", "run/step-10.pt"]
    assert several["failures"] == []
    assert [note.partition(": ")[0] for note in several["notes"]] == ["run", "left out"]
    assert main(["check", "run/optim*.pt", "--format", "json", "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert [failure["target"] for failure in json.loads(out)["failures"]] == ["run/optimizer.pt"]
    assert err.count("\n") == 1
    assert main(["check", "run/optimizer.pt"]) == 2


LIBRARY = """json torch typer numpy multiprocessing random struct signal pickle socket tempfile resource_tracker
transformers safetensors click rich gguf logging argparse shutil""".split()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_files_of_the_current_folder_are_not_imported_for_a_library(folder, jobs):
    for name in LIBRARY:
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__)\nraise SystemExit(7)\n")
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text('{"model_type": "llama", "rope_theta": 1e4}')
        shutil.copy(ROOT / "fixtures" / "formats" / "tiny.pt", folder / f"{name}.pt")
    process = command("check", "a.json", "b.json", "a.pt", "--jobs", jobs)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 2, out + err
    assert not (folder / "ran").exists()
    process = command("check", "good.py:net", "hangs.py", "--jobs", jobs)  # code is found where it was named
    out, err = process.communicate(timeout=120)
    assert "good.py:net" in out
