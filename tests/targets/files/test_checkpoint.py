"""Files that torch.save wrote: nothing of a pickle runs unless it is trusted."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import os
import pickle
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pediag.errors import LoadError
from pediag.targets import open_target, tensor_for
from tests.targets.files._pickles import archived, legacy, number, rebuilt, text, with_tensor


@pytest.mark.parametrize("new", [True, False])
def test_what_does_not_lie_in_the_file_as_it_is_used_is_told(tmp_path: Path, new: bool) -> None:
    stored = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.arange(4.0),
        "c": torch.arange(5.0, 9.0)[1:],
    }
    torch.save(stored, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
    data = (tmp_path / "m.pt").read_bytes()
    for name, tensor in open_target(tmp_path / "m.pt").tensors.items():
        assert data.count(raw := bytes(stored[name].numpy())) == 1 or name == "a"
        assert tensor.copied is (name != "a" and data.index(raw) % 4 != 0)
        assert torch.equal(tensor.load(), stored[name])


class Runs:
    """Creates the file ``ran`` when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(spec: object, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(spec, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_state_dict_gives_tensors_only(tmp_path: Path, suffix: str, legacy: bool) -> None:
    path = tmp_path / f"m{suffix}"
    torch.save(STATE, path, _use_new_zipfile_serialization=not legacy)
    target = open_target(path)
    assert target.loader == "torch.save file (no code run)"
    assert target.module is None
    assert target.build is None
    assert "name the model's factory" in target.reason_not_runnable
    lazy = target.tensors["a.weight"]
    assert (lazy.shape, lazy.dtype) == ((2, 3), "float32")
    assert torch.equal(lazy.load(), STATE["a.weight"])
    assert target.tensors["b"].dtype == "bfloat16"
    assert target.sha256 is not None
    assert len(target.sha256) == 64


@pytest.mark.parametrize("key", ["model", "state_dict", "module", "model_state_dict"])
def test_a_training_checkpoint_is_looked_into(tmp_path: Path, key: str) -> None:
    held = {"optimizer": {"state": {0: {"step": torch.ones(1)}}}, key: dict(STATE), "epoch": 3}
    torch.save({**held, "model_args": {"n_layer": 2, "block_size": 64}}, tmp_path / "m.pt")
    target = open_target(tmp_path / "m.pt")
    assert set(target.tensors) == set(STATE)
    assert target.config is not None
    assert target.config.get("block_size") == 64


def test_doubly_nested_and_grouped_state_dicts(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": dict(STATE)}}, tmp_path / "m.pt")
    assert set(open_target(tmp_path / "m.pt").tensors) == set(STATE)
    torch.save({"encoder": dict(STATE), "decoder": {"c": torch.ones(1)}}, tmp_path / "n.pt")
    assert set(open_target(tmp_path / "n.pt").tensors) == {"encoder.a.weight", "encoder.b", "decoder.c"}


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_would_run_code_runs_nothing(tmp_path: Path, legacy: bool) -> None:
    mark = tmp_path / "ran"
    held = {"a": torch.ones(2), "evil": Runs(mark)}
    torch.save(held, tmp_path / "m.pt", _use_new_zipfile_serialization=not legacy)
    text = refused("m.pt")
    assert f"it asks for {os.mkdir.__module__}.mkdir;" in text
    assert "--trust" in text
    assert not mark.exists()
    assert open_target("m.pt", trust=True).notes == ["--trust was used: code in m.pt ran"]
    assert mark.exists()


def test_every_class_that_is_asked_for_is_listed(tmp_path: Path) -> None:
    for older in (False, True):
        torch.save(
            nn.Sequential(nn.Linear(2, 2), nn.GELU()), "m.pt", _use_new_zipfile_serialization=not older
        )
        text = refused("m.pt")
        for name in ("container.Sequential", "linear.Linear", "activation.GELU"):
            assert f"torch.nn.modules.{name}" in text


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_bare_pickles_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    Path("m.pt").write_bytes(pickle.dumps({"e": Runs(mark)}, protocol=protocol))
    assert "m.pt: " in refused("m.pt")
    assert not mark.exists()


def test_a_trusted_whole_module_is_live() -> None:
    torch.save(nn.Linear(3, 2), "m.pt")
    target = open_target("m.pt", trust=True)
    assert isinstance(target.module, nn.Linear)
    assert target.notes == ["--trust was used: code in m.pt ran"]
    torch.save({"model": nn.Linear(3, 2), "epoch": 1}, "n.pt")
    assert isinstance(open_target("n.pt", trust=True).module, nn.Linear)


def test_trust_changes_nothing_for_plain_tensors() -> None:
    torch.save(STATE, "m.pt")
    target = open_target("m.pt", trust=True)
    assert target.loader == "torch.save file (no code run)"
    assert target.notes == []


def test_a_trusted_pickle_whose_classes_are_missing_says_so(tmp_path: Path) -> None:
    code = "import torch\nclass Net(torch.nn.Module): pass\n"
    save = "torch.save(Net(), 'm.pt')\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code + save], check=True)
    assert "__main__.Net" in refused("m.pt")
    text = refused("m.pt", trust=True)
    assert "AttributeError" in text
    assert text.endswith(
        "; it was saved by a script that defines its classes: give the Python model as file.py:name"
    )
    (tmp_path / "vanished_nets.py").write_text(code)
    made = "import torch, vanished_nets\ntorch.save(vanished_nets.Net(), 'm.pt')\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", made], check=True, cwd=tmp_path)
    (tmp_path / "vanished_nets.py").unlink()
    assert refused("m.pt", trust=True).endswith("; run where the code of its classes can be imported")


def test_damaged_files() -> None:
    torch.save(STATE, "m.pt")
    whole = Path("m.pt").read_bytes()
    for size in (5, len(whole) // 2, len(whole) - 3):
        Path("t.pt").write_bytes(whole[:size])
        assert "t.pt: damaged or cut short" in refused("t.pt")
    torch.save(STATE, "l.pt", _use_new_zipfile_serialization=False)
    legacy = Path("l.pt").read_bytes()
    for size in (1, 3, len(legacy) // 2, len(legacy) - 2):
        Path("t.pt").write_bytes(legacy[:size])
        assert "t.pt: " in refused("t.pt")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty file"),
        (b"hello", "not a file that torch.save wrote"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "HTML page"),
        (b"GGUF\x03\x00", "GGUF"),
    ],
)
def test_files_that_are_something_else(content: bytes, says: str) -> None:
    Path("m.pt").write_bytes(content)
    assert says in refused("m.pt")


def test_archives_that_are_something_else() -> None:
    with zipfile.ZipFile("m.pt", "w") as archive:
        archive.writestr("readme", "x")
    assert "not one that torch.save wrote" in refused("m.pt")
    with zipfile.ZipFile("m.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"\0" * 10_000)
    assert "compressed" in refused("m.pt")


def test_contents_without_tensors() -> None:
    torch.save({"epoch": 3}, "m.pt")
    assert "a mapping without tensors (keys: epoch)" in refused("m.pt")
    torch.save("text", "m.pt")
    assert "holds one str" in refused("m.pt")


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.json"])
def test_a_file_that_may_not_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    Path(name).write_bytes(b"content")
    monkeypatch.setattr(Path, "open", denied)
    assert refused(name) == f"{name}: permission denied"


def test_unknown_kinds_of_file() -> None:
    for name, says in (
        ("m.onnx", "ONNX"),
        ("m.safetensor", "did you mean .safetensors?"),
        ("m", "without extension"),
    ):
        Path(name).write_bytes(b"content")
        assert says in refused(name)
    Path("folder").mkdir()
    assert "a directory without config.json" in refused("folder")


def test_names_of_wrapped_models() -> None:
    torch.save({f"module.{name}": tensor for name, tensor in STATE.items()}, "m.pt")
    target = open_target("m.pt")
    found = tensor_for(target, "a.weight")
    assert found is not None
    assert found.name == "module.a.weight"
    assert tensor_for(target, "absent.weight") is None


def test_huge_shapes_in_a_pickle_cost_nothing() -> None:
    class Huge:
        def __reduce__(self) -> tuple[Any, Any]:
            storage = torch.ones(1).untyped_storage()
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
            return torch._utils._rebuild_tensor_v2, (typed, 0, (10**9, 10**6), (10**6, 1), False, {})

    torch.save({"a": Huge()}, "m.pt")
    assert "m.pt: damaged or cut short" in refused("m.pt")


# -- what torch.save writes, against torch.load ---------------------------------------------------------------

BASE = torch.arange(60.0).reshape(3, 4, 5)
KINDS: dict[str, Any] = {
    **{
        str(kind): torch.arange(6).to(kind)
        for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    },
    **{
        str(kind): torch.randn(6).to(kind)
        for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    },
    **{str(kind): torch.randn(6, dtype=kind) for kind in (torch.complex64, torch.complex128)},
    "bool": torch.tensor([True, False]),
    "parameter": nn.Parameter(torch.randn(2, 3)),
    "buffer": nn.Buffer(torch.randn(2, 3)),
    "part": BASE[1],
    "permuted": BASE.permute(2, 0, 1),
    "strided": BASE[:, ::2, 1:],
    "expanded": torch.arange(4).expand(3, 4),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 7),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch._neg_view(torch.randn(3)),
    "whole": BASE,
}
NEW = {"uint16": torch.arange(6).to(torch.uint16), "fp8": torch.randn(6).to(torch.float8_e4m3fn)}
ARRAYS = {
    "array": np.arange(6.0).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3)),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("older", [False, True])
def test_every_tensor_is_what_torch_load_makes_of_it(older: bool, protocol: int) -> None:
    state = {**KINDS, **ARRAYS, **({} if older else NEW)}
    torch.save(state, "m.pt", _use_new_zipfile_serialization=not older, pickle_protocol=protocol)
    expected = torch.load("m.pt", weights_only=False)
    tensors = open_target("m.pt").tensors
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        tensor = torch.as_tensor(value)
        loaded = tensors[name].load()
        assert tensors[name].shape == tuple(tensor.shape) == tuple(loaded.shape), name
        assert f"torch.{tensors[name].dtype}" == str(tensor.dtype) == str(loaded.dtype), name
        assert torch.equal(loaded.to(torch.complex128), tensor.detach().to(torch.complex128)), name


def test_a_checkpoint_of_another_byte_order() -> None:
    data = struct.pack(">3f", 1.5, -2.0, 3.25)
    pickled = with_tensor(rebuilt(3, 0, (3,), (1,)))
    with zipfile.ZipFile("m.pt", "w") as archive:
        for name, content in (("data.pkl", pickled), ("byteorder", b"big"), ("data/0", data)):
            archive.writestr(f"m/{name}", content)
    assert open_target("m.pt").tensors["a"].load().tolist() == [1.5, -2.0, 3.25]


def test_numbers_are_mapped_and_writing_to_them_leaves_the_file() -> None:
    for older in (False, True):
        torch.save({"a": torch.ones(1000)}, "m.pt", _use_new_zipfile_serialization=not older)
        before = Path("m.pt").read_bytes()
        lazy = open_target("m.pt").tensors["a"]
        lazy.load().zero_()
        assert lazy.load().sum() == 1000
        assert Path("m.pt").read_bytes() == before
        os.truncate("m.pt", 500)
        with pytest.raises(LoadError, match="changed or vanished"):
            lazy.load()


def test_tensors_without_plain_numbers_are_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {
            "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "sparse": torch.eye(3).to_sparse(),
            "rows": torch.eye(3).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        }
    torch.save({**STATE, **odd, "meta": torch.empty(3, device="meta")}, "m.pt")
    target = open_target("m.pt")
    assert set(target.tensors) == set(STATE)
    assert target.notes == [
        "quantised tensors are not read: quantised",
        "sparse tensors are not read: sparse, rows",
        "nested tensors are not read: nested",
        "tensors on the meta device are not read: meta",
    ]
    torch.save({"meta": torch.empty(3, device="meta")}, "m.pt")
    assert "holds no tensors of a model: tensors on the meta device are not read: meta" in refused("m.pt")


def test_one_tensor_and_a_list_of_them() -> None:
    torch.save(torch.ones(2, 3), "m.pt")
    assert open_target("m.pt").tensors["tensor"].shape == (2, 3)
    torch.save([torch.ones(2), "text", torch.ones(3)], "m.pt")
    assert {name: lazy.shape for name, lazy in open_target("m.pt").tensors.items()} == {"0": (2,), "2": (3,)}


# -- which tensors are the model's ----------------------------------------------------------------------------

MOMENTS = {
    "state": {0: {"exp_avg": torch.ones(2, 3), "step": torch.tensor(5.0)}},
    "param_groups": [{"lr": 0.1}],
}


@pytest.mark.parametrize(
    ("held", "taken", "left"),
    [
        (
            {"model": STATE, "optimizer": MOMENTS, "rng_state": torch.ones(8, dtype=torch.uint8)},
            "model",
            "optimizer, rng_state",
        ),
        (
            {
                "state_dict": STATE,
                "optimizer_states": [MOMENTS],
                "epoch": 3,
                "pytorch-lightning_version": "2",
            },
            "state_dict",
            "",
        ),
        ({"module": STATE, "ds_config": {"zero": 1}, "optimizer": None}, "module", ""),
        ({"model": {"module": STATE}, "ema": STATE}, "model.module", "ema"),
        ({"ema": STATE, "model": STATE}, "model", "ema"),
        (
            {"ema_state_dict": STATE, "optimizer_state_dict": MOMENTS},
            "ema_state_dict",
            "optimizer_state_dict",
        ),
        ({"generator": STATE, "discriminator": {"d": torch.ones(1)}}, "generator", "discriminator"),
        ({"net": STATE, "scaler": {"scale": torch.ones(1)}}, "net", "scaler"),
        ({"params_ema": STATE, "params": STATE}, "params", "params_ema"),
    ],
)
def test_which_key_was_taken_is_said(held: dict[str, Any], taken: str, left: str) -> None:
    torch.save(held, "m.pt")
    target = open_target("m.pt")
    assert set(target.tensors) == set(STATE)
    assert target.notes == [
        f"the tensors under {taken!r} were read" + (f"; left out: {left}" if left else "")
    ]


def test_megatron_nests_by_part() -> None:
    language = {
        "embedding": {
            "word_embeddings": {"weight": torch.ones(8, 4)},
            "position_embeddings": {"weight": torch.ones(6, 4)},
        },
        "transformer": {"layers.0.input_norm.weight": torch.ones(4)},
    }
    torch.save(
        {"model": {"language_model": language}, "args": argparse.Namespace(seq_length=6), "iteration": 1},
        "m.pt",
    )
    target = open_target("m.pt")
    assert "language_model.embedding.position_embeddings.weight" in target.tensors
    assert target.config is not None
    assert target.config.get("seq_length") == 6


def test_parts_beside_an_optimiser() -> None:
    torch.save({"encoder": dict(STATE), "optim": MOMENTS}, "m.pt")
    target = open_target("m.pt")
    assert set(target.tensors) == {"encoder.a.weight", "encoder.b"}
    assert target.notes == ["left out: optim"]
    torch.save({"optimizer_state_dict": MOMENTS, "epoch": 3}, "m.pt")
    assert "holds no tensors of a model: left out: optimizer_state_dict" in refused("m.pt")


@dataclasses.dataclass
class Arguments:
    n_layer: int = 2
    block_size: int = 64


VALUES = {"n_layer": 2, "block_size": 64}


@pytest.mark.parametrize("key", ["config", "model_args", "hyper_parameters", "hparams", "args", "cfg"])
@pytest.mark.parametrize("older", [False, True])
def test_a_config_inside(key: str, older: bool) -> None:
    for value in (VALUES, argparse.Namespace(**VALUES), {"model": VALUES}, collections.OrderedDict(VALUES)):
        torch.save({"model": STATE, key: value}, "m.pt", _use_new_zipfile_serialization=not older)
        config = open_target("m.pt").config
        assert config is not None
        assert config.get("block_size") == 64
    torch.save({"model": STATE, key: {"lr": 0.1}}, "m.pt")
    assert open_target("m.pt").config is None


def test_a_config_of_a_class_is_read_when_trusted() -> None:
    torch.save({"model": STATE, "config": Arguments()}, "m.pt")
    assert "Arguments" in refused("m.pt")
    config = open_target("m.pt", trust=True).config
    assert config is not None
    assert config.get("block_size") == 64


def test_plain_values_of_every_kind_are_no_code() -> None:
    values = {
        "namespace": argparse.Namespace(a=1, b=argparse.Namespace(c=(1, 2))),
        "default": collections.defaultdict(list, {1: [2]}),
        "counter": collections.Counter("abca"),
        "deque": collections.deque([1, 2], 3),
        "path": Path("/a/b"),
        "pure": PurePosixPath("a"),
        "scalar": np.float32(2.5),
        "array": np.arange(3),
        "text array": np.array(["a", "b"]),
        "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        "span": datetime.timedelta(1),
        "set": {1, "a"},
        "frozen": frozenset({1}),
        "complex": 1 + 2j,
        "bytes": b"\x00\xff",
        "array of bytes": bytearray(b"ab"),
        "range": range(3),
        "dtype": torch.float16,
        "size": torch.Size([1]),
        "device": torch.device("cpu"),
        "version": torch.__version__,
        "storage": torch.ones(2).untyped_storage(),
        "random": np.random.RandomState(0).get_state(),
    }
    for older in (False, True):
        for protocol in (2, 4, 5):
            held = {
                "model": STATE,
                **{key: value for key, value in values.items() if not (older and key == "storage")},
            }
            torch.save(held, "m.pt", _use_new_zipfile_serialization=not older, pickle_protocol=protocol)
            assert set(open_target("m.pt").tensors) == set(STATE)
    torch.save({"model": STATE, "config": {**VALUES, **values}}, "m.pt")
    config = open_target("m.pt").config
    assert config is not None
    assert config.get("namespace.b.c") == [1, 2]
    assert (config.get("path"), config.get("pure"), config.get("scalar")) == ("/a/b", "a", 2.5)
    assert config.get("counter") == {"a": 2, "b": 1, "c": 1}
    assert (config.get("dtype"), config.get("version")) == ("torch.float16", str(torch.__version__))


# -- names ------------------------------------------------------------------------------------------------------

WRAPPED = [
    ("module.{}", "{}"),
    ("_orig_mod.{}", "{}"),
    ("module._orig_mod.{}", "{}"),
    ("_orig_mod.module.{}", "{}"),
    ("model.{}", "{}"),
    ("model.module.{}", "{}"),
    ("module.model.{}", "{}"),
    ("_forward_module.module.{}", "{}"),
    ("_forward_module.model.{}", "{}"),
    ("_fsdp_wrapped_module.{}", "{}"),
    ("base_model.model.{}", "{}"),
    ("net._orig_mod.{}", "{}"),
    ("layers.0._orig_mod.{}", "layers.0.{}"),
    ("layers.0._checkpoint_wrapped_module.{}", "layers.0.{}"),
    ("{}", "_orig_mod.{}"),
    ("module.layers.0.{}", "_orig_mod.layers.0._orig_mod.{}"),
]


@pytest.mark.parametrize(("stored", "asked"), WRAPPED)
@pytest.mark.parametrize("prefix", ["", "bert"])
def test_names_are_matched_past_wrappers_and_shown_as_stored(stored: str, asked: str, prefix: str) -> None:
    torch.save({stored.format(name): tensor for name, tensor in STATE.items()}, "m.pt")
    target = open_target("m.pt")
    target.prefix = prefix
    for name in ("a.weight", "b"):
        found = tensor_for(target, asked.format(name))
        if name == "b" and not prefix and found is None:
            continue  # a single component tells too little
        assert found is not None
        assert found.name == stored.format(name)
    assert tensor_for(target, asked.format("absent.weight")) is None


def test_only_some_names_carry_the_prefix() -> None:
    torch.save(
        {
            "module.a.weight": torch.ones(1),
            "c.weight": torch.ones(2),
            "module._orig_mod.d.weight": torch.ones(3),
        },
        "m.pt",
    )
    target = open_target("m.pt")
    shapes = [found.shape for name in "acd" if (found := tensor_for(target, f"{name}.weight")) is not None]
    assert shapes == [(1,), (2,), (3,)]


def test_the_name_itself_comes_before_one_without_a_wrapper() -> None:
    torch.save({"module.a.weight": torch.ones(1), "a.weight": torch.ones(2)}, "m.pt")
    target = open_target("m.pt")
    for name, shape in (("a.weight", (2,)), ("module.a.weight", (1,))):
        found = tensor_for(target, name)
        assert found is not None
        assert found.shape == shape


# -- absurd claims ----------------------------------------------------------------------------------------------

FOUR = struct.pack("<4f", 1, 2, 3, 4)


def test_a_tensor_written_opcode_by_opcode() -> None:
    """What the refusals below are changed from."""
    pickled = with_tensor(rebuilt(4, 1, (2,), (2,)))
    archived(pickled, Path("m.pt"), s0=FOUR)
    assert open_target("m.pt").tensors["a"].load().tolist() == [2.0, 4.0]
    legacy(pickled, Path("m.pt"), ("0",), struct.pack("<Q", 4) + FOUR)
    assert open_target("m.pt").tensors["a"].load().tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (rebuilt(2**60, 0, (2**60,), (1,)), "would need more than the 16 bytes of storage 0"),
        (rebuilt(5, 0, (5,), (1,)), "would need more than the 16 bytes of storage 0"),
        (rebuilt(4, 0, (5,), (1,)), "would reach element 4 of 4"),
        (rebuilt(4, 2, (3,), (1,)), "would reach element 4 of 4"),
        (rebuilt(4, 2**62, (1,), (1,)), "would reach element"),
        (rebuilt(4, 0, (2, 2), (2**61, 1)), "would reach element"),
        (rebuilt(4, 0, (2**62, 2**62), (0, 0)), "repeats 4 stored numbers"),
        (rebuilt(4, 0, (2**40,), (0,)), "repeats 4 stored numbers"),
        (rebuilt(4, -1, (1,), (1,)), "malformed storage, shape or stride"),
        (rebuilt(4, 3, (2,), (-1,)), "malformed storage, shape or stride"),
        (rebuilt(4, 0, (2, 2), (1,)), "malformed storage, shape or stride"),
        (rebuilt(4, 0, (1,) * 65, (1,) * 65), "malformed storage, shape or stride"),
        (rebuilt(-4, 0, (1,), (1,)), "refers to data in a way that torch.save does not"),
        (rebuilt(4, 0, (1,), (1,), key="1"), "has no data in the file (storage 1)"),
        (rebuilt(4, 0, (1,), (1,), key="../../0"), "has no data in the file"),
    ],
)
def test_claims_that_the_file_does_not_hold(tensor: bytes, says: str) -> None:
    archived(with_tensor(tensor), Path("m.pt"), s0=FOUR)
    assert says in refused("m.pt")


def test_claims_in_the_older_layout() -> None:
    pickled = with_tensor(rebuilt(2**60, 0, (2**60,), (1,)))
    for storages in (b"", struct.pack("<Q", 2**60) + FOUR, struct.pack("<Q", 2**64 - 1) + FOUR):
        legacy(pickled, Path("m.pt"), ("0",), storages)
        assert "damaged or cut short: it ends before its tensors do" in refused("m.pt")
    legacy(pickled, Path("m.pt"), ("0",), struct.pack("<Q", 4) + FOUR)
    assert "would need more than the 16 bytes" in refused("m.pt")
    legacy(pickled, Path("m.pt"), ("9",), b"")
    assert "it ends before its tensors do" in refused("m.pt")


def test_empty_tensors_of_absurd_shape() -> None:
    archived(with_tensor(rebuilt(4, 0, (0, 2**40), (1, 1))), Path("m.pt"), s0=FOUR)
    assert open_target("m.pt").tensors["a"].load().shape == (0, 2**40)


DEEP = 200_000
BOMBS = {
    "deep lists": b"]" * DEEP + b"a" * (DEEP - 1),
    "deep dicts": (b"}" + text("k")) * DEEP + b"}" + b"s" * DEEP,
    "deep tuples": b")" + b"\x85" * DEEP,
    "doubled tuples": b")q\x000" + b"h\x00h\x00\x86q\x000" * 20_000 + b"h\x00",
    "doubled tuples as keys": b"}" + b")q\x000" + b"h\x00h\x00\x86q\x000" * 200 + b"h\x00Ns",
    "doubled dicts": b"}q\x000"
    + (b"}q\x01" + b"(" + text("a") + b"h\x00" + text("b") + b"h\x00u0h\x01q\x000") * 200
    + b"h\x00",
    "wide dicts in dicts": (
        b"}q\x00("
        + b"".join(number(at) + b"N" for at in range(20_000))
        + b"u0"
        + b"}q\x01(" * 1
        + b"".join(number(at) + b"h\x00" for at in range(20_000))
        + b"u0}q\x02("
        + b"".join(number(at) + b"h\x01" for at in range(20_000))
        + b"u0h\x02"
    ),
    "a name of names": b"(" + b")q\x000" + b"h\x00h\x00\x86q\x000" * 100 + b"h\x00h\x00\x93t",
    "a long integer as a key": b"}\x8b"
    + struct.pack("<I", 10**6)
    + b"\x7f" * 10**6
    + b"q\x000"
    + b"("
    + b"h\x00N" * 50_000
    + b"u",
    "a long decimal": b"L" + b"9" * 100_000 + b"L\n",
    "nested rebuilding": b"ctorch._tensor\n_rebuild_from_type_v2\n" * DEEP + b"NNNN(NNNNt" + b"R" * 3,
    "sets of a set": b"cbuiltins\nset\nq\x010("
    + b"".join(map(number, range(5000)))
    + b"lq\x000"
    + b"h\x01h\x00\x85R0" * 20_000,
    "copies of a string": (
        b"c_codecs\nencode\nq\x010" + text("x" * 10**6) + b"q\x000](" + b"h\x01h\x00\x85R" * 20_000 + b"e"
    ),
    "millions of keys": b"}("
    + b"".join(b"J" + struct.pack("<i", at) + b"N" for at in range(5_000_000))
    + b"u",
}


def test_bombs_are_bounded() -> None:
    """A child process with 4 GB of address space and two minutes of processor time; most bombs take a blink."""
    names = [f"{at}.pt" for at, _ in enumerate(BOMBS)]
    for name, pickled in zip(names, BOMBS.values(), strict=True):
        archived(b"\x80\x02" + pickled + b".", Path(name))
    child = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (120, 120))\n"
        "from pediag.cli import main\n"
        "print(*[main(['check', name]) for name in sys.argv[1:]])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", child, *names], capture_output=True, text=True, check=False, env=environment
    )
    lines = done.stderr.splitlines()
    assert done.stdout.split() == ["2"] * len(BOMBS), done.stderr
    assert [line.split(": ")[2] for line in lines] == names, lines
    assert max(map(len, lines)) < 500
    assert "internal error" not in done.stderr


def test_compressed_overlapping_and_repeated_entries() -> None:
    def raw(*entries: tuple[str, bytes]) -> bytearray:
        with zipfile.ZipFile("z.pt", "w") as archive:
            for name, content in entries:
                archive.writestr(name, content)
        return bytearray(Path("z.pt").read_bytes())

    pickled = with_tensor(rebuilt(4, 0, (4,), (1,)))
    with zipfile.ZipFile("m.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", pickled)
        archive.writestr("m/data/0", bytes(50 * 2**20))
    assert "compressed" in refused("m.pt")
    whole = raw(("m/data.pkl", pickled), ("m/data/0", FOUR), ("m/data/1", FOUR))
    directory = whole.find(b"PK\x01\x02")
    second, third = (whole.find(f"m/data/{key}".encode(), directory) - 46 for key in (0, 1))
    changed = bytearray(whole)
    changed[third + 42 : third + 46] = whole[second + 42 : second + 46]
    Path("m.pt").write_bytes(changed)
    assert "is not where the directory says" in refused("m.pt")
    changed = bytearray(whole)
    changed[second + 20 : second + 28] = struct.pack("<2L", 2**31, 2**31)
    Path("m.pt").write_bytes(changed)
    assert "'m/data/0' would lie outside the file" in refused("m.pt")
    changed[second + 20 : second + 28] = struct.pack("<2L", 60, 60)
    Path("m.pt").write_bytes(changed)
    assert "claim the same bytes" in refused("m.pt")
    changed = bytearray(whole)
    at = whole.find(b"PK\x05\x06")
    changed[at + 12 : at + 16] = struct.pack("<L", 2**31)
    Path("m.pt").write_bytes(changed)
    assert "its directory would lie outside the file" in refused("m.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Path("m.pt").write_bytes(raw(("m/data.pkl", pickled), ("m/data/0", FOUR), ("m/data/0", FOUR)))
    assert "two of its entries are called" in refused("m.pt")


def test_a_directory_of_absurd_length() -> None:
    with Path("m.pt").open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(2**28)
        file.seek(2**28)
        file.write(struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 60000, 60000, 2**27, 2**26, 0))
    assert "above the limit of" in refused("m.pt")


def test_names_and_extents_beyond_four_gigabytes() -> None:
    """An archive that is mostly a hole on the disk, with the 64-bit records that such a size takes."""
    hole = 5 * 2**30
    pickled = with_tensor(rebuilt(4, 0, (4,), (1,)))
    with zipfile.ZipFile("m.pt", "w") as archive:
        archive.writestr("m/data.pkl", pickled)
        archive.fp.seek(hole)  # type: ignore[union-attr]
        archive.start_dir = hole
        archive.writestr("m/data/0", FOUR)
    assert Path("m.pt").stat().st_size > hole
    assert open_target("m.pt").tensors["a"].load().tolist() == [1.0, 2.0, 3.0, 4.0]


def test_what_wrote_files_before_the_older_layout() -> None:
    import tarfile

    Path("storages").write_bytes(b"x")
    with tarfile.open("m.pt", "w") as archive:
        archive.add("storages")
    assert "written by PyTorch before 0.1.10 (a tar archive)" in refused("m.pt")


def test_a_plain_pickle_is_told_apart() -> None:
    Path("m.pt").write_bytes(pickle.dumps({"epoch": 3}, protocol=2))
    assert "a plain pickle, not a file that torch.save wrote" in refused("m.pt")
    Path("m.pt").write_bytes(pickle.dumps(STATE, protocol=2))
    assert "it asks for torch.storage._load_from_bytes" in refused("m.pt")
