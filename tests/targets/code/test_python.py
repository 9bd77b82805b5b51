"""``file.py:name`` and ``package.module:name``: imports, factories, and the user's own errors."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pediag.errors import LoadError
from pediag.targets import open_target
from pediag.targets.code.spec import split_spec

SOURCE = """
import sys
import torch
from torch import nn
from helper import WIDTH

class Model(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return self.linear(x)

class Wide(Model):
    def __init__(self, width, *, depth):
        super().__init__(width)

model = Model()
arguments = list(sys.argv)
settings = {"n_layer": 2, "max_position_embeddings": 64}
state = {"w": torch.ones(2, 3)}

def build():
    return Model()

def configured():
    return dict(settings)

def forgot():
    Model()

def fails():
    inner()

def inner():
    raise ValueError("width must\\nbe even")

def leaves():
    sys.exit("bye")

def wants(a, b=1):
    return a

def example_inputs(seq_len):
    return torch.zeros(3, seq_len)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 6\n")
    path = tmp_path / "some model.py"
    path.write_text(SOURCE)
    return path


def refused(spec: object) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(spec)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line_of(part: str) -> int:
    return next(number for number, line in enumerate(SOURCE.splitlines(), 1) if part in line)


@pytest.mark.parametrize(("name", "kind"), [("model", "object"), ("Model", "class"), ("build", "factory")])
def test_instance_class_and_factory(source: Path, name: str, kind: str) -> None:
    target = open_target(f"{source}:{name}")
    assert isinstance(target.module, nn.Module)
    assert target.module.linear.weight.shape == (6, 6)
    assert target.loader == f"python {kind} {source}:{name}"
    assert target.example_inputs is not None
    assert target.example_inputs(5).shape == (3, 5)


def test_the_process_is_left_as_it_was(source: Path) -> None:
    path, arguments = list(sys.path), list(sys.argv)
    random.seed(3)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    open_target(f"{source}:build")
    refused(f"{source}:fails")
    assert sys.path == path
    assert sys.argv == arguments
    assert torch.equal(torch.get_rng_state(), state)


def test_fresh_weights_are_the_same_in_every_run(source: Path) -> None:
    one, two = open_target(f"{source}:build").module, open_target(f"{source}:build").module
    assert one is not None
    assert two is not None
    assert torch.equal(one.linear.weight, two.linear.weight)


def test_two_folders_with_a_helper_of_the_same_name_do_not_mix(source: Path) -> None:
    other = source.parent / "other"
    other.mkdir()
    (other / "helper.py").write_text("WIDTH = 9\n")
    (other / "m.py").write_text(SOURCE)
    assert open_target(f"{source}:model").module.linear.in_features == 6  # type: ignore[union-attr]
    assert open_target(f"{other / 'm.py'}:model").module.linear.in_features == 9  # type: ignore[union-attr]


def test_configurations_and_state_dicts(source: Path) -> None:
    for name in ("settings", "configured"):
        target = open_target(f"{source}:{name}")
        assert target.module is None
        assert target.config is not None
        assert target.config.get("n_layer") == 2
        assert target.reason_not_runnable
    assert open_target(f"{source}:state").tensors["w"].shape == (2, 3)


def test_missing_names_are_answered_with_the_nearest(source: Path) -> None:
    assert refused(f"{source}:modle").endswith("has no 'modle'; nearest: Model, model")
    assert "it defines Model, Wide, model, build" in refused(f"{source}:zzzzzz")
    assert "has no 'nope'" in refused(f"{source}:Model.nope")


def test_a_factory_with_arguments_is_told_how(source: Path) -> None:
    text = refused(f"{source}:Wide")
    assert "class Wide needs width, depth" in text
    assert f"`def build(): return Wide(width=..., depth=...)`, and name it as {source}:build" in text
    assert "factory wants needs a:" in refused(f"{source}:wants")


def test_the_users_error_is_shown_as_theirs(source: Path) -> None:
    text = refused(f"{source}:fails")
    assert "calling fails() raised ValueError: width must be even" in text
    assert f"(at {source}:{line_of('be even')} in inner)" in text
    assert "SystemExit: bye" in refused(f"{source}:leaves")
    assert "None (does the factory return its model?)" in refused(f"{source}:forgot")


def test_errors_at_import(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("x = 1\nraise RuntimeError('no data')\n")
    assert f"importing {path} raised RuntimeError: no data (at {path}:2)" in refused(f"{path}:x")
    path.write_text("import missing_library_of_theirs\n")
    assert "ModuleNotFoundError: No module named 'missing_library_of_theirs'" in refused(f"{path}:x")
    path.write_text("x = 1\ndef f(:\n")
    assert f"(at {path}:2)" in refused(f"{path}:x")
    path.write_text("from torch import nn\nx = nn.Linear('a', 2)\n")
    assert f"(at {path}:2)" in refused(f"{path}:x")
    assert not [name for name in sys.modules if getattr(sys.modules[name], "__file__", None) == str(path)]


def test_a_file_inside_a_package_gets_advice(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "m.py").write_text("from . import other\n")
    assert "try package.module:name" in refused(f"{tmp_path / 'm.py'}:x")


def test_a_file_without_a_name_lists_its_names_and_runs_nothing(source: Path, tmp_path: Path) -> None:
    text = refused(source)
    assert f"{source}:Model, {source}:Wide, {source}:model" in text
    assert f"{source}:wants" not in text
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef build(): pass\n")
    assert f"{evil}:build" in refused(str(evil))
    assert not (tmp_path / "ran").exists()
    evil.write_text("def f(:")
    assert "cannot be parsed" in refused(evil)


def test_modules(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    (source.parent / "pediag_test_pkg").mkdir()
    (source.parent / "pediag_test_pkg" / "inner.py").write_text(
        "from torch import nn\nnet = nn.Linear(2, 3)\n"
    )
    assert isinstance(open_target("pediag_test_pkg.inner:net").module, nn.Linear)
    assert "no module named 'pediag_test_pkg.nope'" in refused("pediag_test_pkg.nope:net")
    assert "no module named 'absent_package'" in refused("absent_package.models:net")
    assert "no such file: nope.py" in refused("nope.py:model")


def test_unknown_paths_name_the_nearest(source: Path) -> None:
    assert refused(source.parent / "some modl.py").endswith("nearest there: some model.py")
    assert "there is no folder" in refused(source.parent / "none" / "x.pt")
    assert "empty target" in refused("")


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("a/b.py:model", ("a/b.py", "model")),
        ("a.b:C.build", ("a.b", "C.build")),
        (r"C:\x\model.py:net", (r"C:\x\model.py", "net")),
        (r"C:\x\model.py", None),
        ("C:model.py", None),
        ("model.pt", None),
        (":x", None),
        ("x:", None),
    ],
)
def test_specs_are_split(spec: str, parts: tuple[str, str] | None) -> None:
    assert split_spec(spec) == parts
