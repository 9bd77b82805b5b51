"""Folders: weights in every layout, spellings of configs, what is no model, and files that must not be opened."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pediag
from pediag.cli import main
from pediag.errors import LoadError
from pediag.targets import Target, open_target, tensor_for
from tests.fixture_files import FIXTURES
from tests.targets.files._pickles import config
from tests.targets.files.test_safetensors import entry, write

FORMATS = FIXTURES / "formats"


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(spec: str | Path, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def built(target: Target) -> nn.Module:
    assert target.build is not None
    with FakeTensorMode():
        return target.build()


def tensors(path: Path, *names: str) -> Path:
    header = {name: entry("F32", [2], 8 * at, 8 * at + 8) for at, name in enumerate(names)}
    return write(path, header, b"\0" * 8 * len(names))


def folder(name: str = "f", **files: Any) -> Path:
    path = Path(name)
    path.mkdir(exist_ok=True)
    for file, content in files.items():
        path.joinpath(file.replace("__", ".")).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return path


# -- fixtures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors_in", "says"),
    [
        ("tiny.pt", 4, ""),
        ("tiny_legacy.pt", 4, ""),
        ("tiny_training.pt", 4, "the tensors under 'model' were read; left out: optimizer"),
        ("tiny_lightning.ckpt", 4, "the tensors under 'state_dict' were read"),
        ("tiny_llama", 12, ""),
        ("tiny_gpt2", 16, ""),
        ("tiny_adapter", 16, "taken from the adapter: wpe.weight"),
        ("tiny_original", 3, "rope.freqs is left out"),
        ("tiny_own_code", 2, "was not run"),
    ],
)
def test_the_small_files_open(name: str, tensors_in: int, says: str) -> None:
    target = open_target(FORMATS / name)
    assert len(target.tensors) == tensors_in
    assert says in " ".join(target.notes)
    for tensor in target.tensors.values():
        assert tensor.load().shape == tensor.shape


def test_both_layouts_hold_the_same() -> None:
    newer, older = (open_target(FORMATS / name).tensors for name in ("tiny.pt", "tiny_legacy.pt"))
    for name, expected in torch.load(FORMATS / "tiny_legacy.pt").items():
        assert torch.equal(newer[name].load(), expected)
        assert torch.equal(older[name].load(), expected)


def test_the_whole_module_is_refused() -> None:
    text = refused(FORMATS / "tiny_module.pt")
    for name in ("container.Sequential", "linear.Linear", "sparse.Embedding"):
        assert f"torch.nn.modules.{name}" in text


def test_the_small_checkpoints_are_made_anew_with_the_same_bytes(tmp_path: Path) -> None:
    from fixtures.formats import make_checkpoints

    for path in make_checkpoints.make(tmp_path):
        assert path.read_bytes() == (FORMATS / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_every_parameter_of_the_small_models_is_found(name: str) -> None:
    pytest.importorskip("transformers")
    report = pediag.check(FORMATS / name)
    assert report.notes == []
    target = open_target(FORMATS / name)
    for parameter, part in built(target).named_parameters():
        found = tensor_for(target, parameter)
        if found is None:
            assert (name, parameter) == ("tiny_gpt2", "lm_head.weight"), "tied"
        else:
            assert found.shape == tuple(part.shape)


# -- weights ------------------------------------------------------------------------------------------------


def test_safetensors_come_first_and_the_others_are_named() -> None:
    path = folder(config__json=config())
    torch.save({"from": torch.ones(1)}, path / "pytorch_model.bin")
    assert open_target(path).notes == []
    tensors(path / "model.safetensors", "a")
    target = open_target(path)
    assert set(target.tensors) == {"a"}
    assert target.notes == ["model.safetensors was read; the weights beside it were not: pytorch_model.bin"]


def test_an_index_of_pickled_shards() -> None:
    path = folder()
    torch.save({"a": torch.ones(2)}, path / "s-1.bin")
    torch.save({"b": torch.ones(3)}, path / "s-2.bin", _use_new_zipfile_serialization=False)
    index = path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "s-1.bin", "b": "s-2.bin"}}))
    target = open_target(index)
    assert target.loader == "torch.save index"
    assert {name: lazy.shape for name, lazy in target.tensors.items()} == {"a": (2,), "b": (3,)}
    (path / "s-2.bin").unlink()
    assert open_target(index).notes == ["1 of 2 weight files are missing: s-2.bin"]
    (path / "s-1.bin").unlink()
    assert "none of the 2 files that it names is there" in refused(index)


@pytest.mark.parametrize(("listed", "there"), [(True, [1]), (False, [1]), (False, [2, 3])])
def test_a_shard_that_may_hold_the_table_is_missing(listed: bool, there: list[int]) -> None:
    """Told with an index, and by the count in the names without one; then no rule passes for having found nothing."""
    path = folder()
    names = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    for k in there:
        tensors(path / names[k - 1], f"t{k}")
    index = path / "model.safetensors.index.json"
    if listed:
        index.write_text(json.dumps({"weight_map": {f"t{k}": names[k - 1] for k in (1, 2, 3)}}))
        target = open_target(index)
    else:
        (path / "config.json").write_text(config())
        target = open_target(path)
    absent = [names[k - 1] for k in (1, 2, 3) if k not in there]
    assert target.missing == f"{len(absent)} of 3 weight files are missing: {', '.join(absent)}"
    assert target.missing in target.notes
    if listed:
        for code in ("PE502", "PE209", "PE210"):
            (outcome,) = pediag.check(index, select=code, seq_len=64).outcomes
            assert outcome.status == "could-not-check" and absent[0] in outcome.reason


def test_an_index_that_names_the_wrong_file() -> None:
    path = folder()
    tensors(path / "a.safetensors", "a", "extra")
    tensors(path / "b.safetensors", "b")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "c": "b.safetensors"}}))
    target = open_target(index)
    assert set(target.tensors) == {"a", "extra", "b"}
    assert target.notes == [
        "1 of the tensors that the index names are not in the file it says: c (in b.safetensors)"
    ]


@pytest.mark.parametrize("name", ["/etc/passwd", "../a.bin", "", "a\0b", 3, None])
def test_an_index_that_names_no_file_of_its_folder(name: Any) -> None:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        Path(f"{stem}.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        assert "which is no file in this folder" in refused(f"{stem}.index.json")


def test_shards_without_their_index() -> None:
    path = folder(config__json=config())
    for at in (1, 2):
        tensors(path / f"model-0000{at}-of-00002.safetensors", f"t{at}")
    assert set(open_target(path).tensors) == {"t1", "t2"}


def test_weights_under_the_wrong_suffix() -> None:
    tensors(Path("m.bin"), "a")
    assert open_target("m.bin").loader == "safetensors"
    torch.save({"a": torch.ones(1)}, "m.safetensors")
    assert open_target("m.safetensors").loader.startswith("torch.save")
    torch.save({"a": torch.ones(1)}, "checkpoint.pth.tar")
    torch.save({"a": torch.ones(1)}, "nothing", _use_new_zipfile_serialization=False)
    for name in ("checkpoint.pth.tar", "nothing"):
        assert set(open_target(name).tensors) == {"a"}
    path = folder(config__json=config())
    tensors(path / "pytorch_model.bin", "a")
    assert set(open_target(path).tensors) == {"a"}


@pytest.mark.parametrize("name", ["lit_model.pth", "model.fp16.safetensors", "last.ckpt"])
def test_weights_under_another_name_are_told_of(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config())
    tensors(tmp_path / name, "a")
    (note,) = open_target(tmp_path).notes
    assert note.endswith(f"to check another file, name it: {name}")
    assert "no weights in the folder" not in note


def test_weights_that_are_not_read_are_told_of() -> None:
    path = folder(config__json=config(), tf_model__h5="x")
    assert "tf_model.h5 holds TensorFlow weights: convert them" in open_target(path).notes[0]
    inner = folder("g", config__json=config())
    (inner / "original").mkdir()
    torch.save({"a": torch.ones(1)}, inner / "original" / "consolidated.00.pth")
    assert open_target(inner).notes[0].endswith("there are some in g/original")


# -- spellings ----------------------------------------------------------------------------------------------

GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _bases(report: Any) -> list[float]:
    return sorted(e.parameters["base"] for e in report.encodings if e.scheme == "rotary")


def test_rope_parameters_by_the_type_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frequencies of the running model are those of the two bases, as are those read off the config alone."""
    pytest.importorskip("transformers")
    path = folder(config__json={**GEMMA, "rope_parameters": BY_TYPE})
    report = pediag.inspect(path)
    found = [e.frequencies for e in report.encodings if e.scheme == "rotary"]
    expected = [
        1e4 ** -(torch.arange(0, 8, 2).double() / 8),
        1e6 ** -(torch.arange(0, 8, 2).double() / 8) / 8,
    ]
    for frequencies in expected:
        assert any(torch.allclose(torch.as_tensor(w), frequencies, rtol=1e-6) for w in found), found
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    declared = pediag.inspect(path)
    assert [e.origin for e in declared.encodings] == ["config", "config"]
    assert _bases(declared) == [1e4, 1e6]


def test_the_older_spelling_of_the_same() -> None:
    pytest.importorskip("transformers")
    older = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    report = pediag.inspect(folder(config__json={**GEMMA, **older}))
    slowest = sorted(float(e.frequencies[-1]) for e in report.encodings if e.scheme == "rotary")
    assert slowest == pytest.approx([1e6**-0.75 / 8, 1e4**-0.75], rel=1e-6)


def test_a_text_model_inside_a_vision_model() -> None:
    transformers = pytest.importorskip("transformers")
    text = json.loads(config())
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 8, "patch_size": 4, "intermediate_size": 24, "projection_dim": 16}
    values = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 31,
    }
    path = folder(config__json={**values, "text_config": text, "vision_config": vision})
    target = open_target(path)
    assert type(built(target)) is transformers.LlavaForConditionalGeneration
    report = pediag.inspect(path)
    assert "rotary" in {e.scheme for e in report.encodings}


# -- what is no model ---------------------------------------------------------------------------------------


def test_layouts_that_are_something_else() -> None:
    diffusers = folder("diffusers", model_index__json={"_class_name": "StableDiffusionPipeline"})
    (diffusers / "unet").mkdir()
    (diffusers / "unet" / "config.json").write_text("{}")
    assert "a diffusers pipeline: name one of its parts: diffusers/unet" in refused(diffusers)
    sentences = folder("sentences", modules__json=[{"path": "0_Transformer"}])
    (sentences / "0_Transformer").mkdir()
    (sentences / "0_Transformer" / "config.json").write_text(config())
    assert "name the folder of its transformer: sentences/0_Transformer" in refused(sentences)
    distributed = folder("distributed", __metadata="x", __0_0__distcp="x")
    assert "a distributed checkpoint: gather it" in refused(distributed)
    deepspeed = folder("deepspeed")
    (deepspeed / "global_step9").mkdir()
    torch.save({"module": {"a": torch.ones(1)}}, deepspeed / "global_step9" / "mp_rank_00_model_states.pt")
    assert "name deepspeed/global_step9/mp_rank_00_model_states.pt" in refused(deepspeed)
    assert "TensorFlow weights" in refused(folder("keras", tf_model__h5="x"))
    assert "an ONNX graph" in refused(folder("onnx", model__onnx="x"))
    assert "as MLX keeps them" in refused(folder("mlx", weights__npz="x"))
    outer = folder("outer")
    folder("outer/original", params__json={"dim": 8, "n_heads": 2})
    assert "a model is in outer/original: name that folder" in refused(outer)
    assert "a directory without config.json" in refused(folder("empty"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("m.onnx", "an ONNX graph is not read: give the Python model"),
        ("m.h5", "an HDF5 file (TensorFlow or Keras) is not read: convert its weights to safetensors"),
        ("m.msgpack", "a Flax checkpoint is not read: convert it"),
        ("m.npz", "an archive of NumPy arrays is not read: save its arrays with safetensors.numpy.save_file"),
        ("m.distcp", "one file of a distributed checkpoint is not read: name its folder"),
        ("m.tflite", "a TensorFlow Lite graph is not read"),
        ("m.pkl", "a plain pickle is not read: save model.state_dict() with torch.save"),
    ],
)
def test_files_that_are_not_read(name: str, says: str) -> None:
    Path(name).write_bytes(b"content of some kind")
    assert says in refused(name)


def test_the_cache_of_the_hub() -> None:
    blobs, snapshot = Path("models--o--n/blobs"), Path("models--o--n/snapshots/abc")
    for path in (blobs, snapshot, Path("models--o--n/refs")):
        path.mkdir(parents=True)
    tensors(blobs / "1", "a")
    (blobs / "2").write_text(config())
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    target = open_target(snapshot)
    assert set(target.tensors) == {"a"}
    assert target.config is not None
    assert "name models--o--n/snapshots/abc" in refused("models--o--n")


# -- what must not be opened --------------------------------------------------------------------------------


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL = {
    "pipe": (os.mkfifo, "a named pipe"),
    "loop": (_loop, "too many levels of symbolic links"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "a link to nowhere, which is not there"),
    "socket": (_socket, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "m.json", "m", "m.py", "m.gguf"])
def test_special_files_are_refused_and_never_opened(kind: str, name: str) -> None:
    make, says = SPECIAL[kind]
    make(Path(name))
    assert says in refused(name)


HANGS = 60
"""Seconds after which a child counts as hung; it takes two."""


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_inside_folders(kind: str, tmp_path: Path) -> None:
    """A pipe that is opened would block for ever, so a child process looks."""
    make = SPECIAL[kind][0]
    for name in ("config.json", "adapter_config.json", "params.json"):
        make(folder(name.partition(".")[0]) / name)
    weights = {"s": "model.safetensors", "p": "pytorch_model.bin", "i": "model.safetensors.index.json"}
    for name, file in weights.items():
        make(folder(name, config__json=config()) / file)
    make(folder("shards", index__json={"weight_map": {"a": "a.safetensors"}}) / "a.safetensors")
    make(Path("pediag.toml"))
    make(Path("net.py"))
    code = (
        "import sys; from pediag.cli import main\n"
        "words = [['config'], ['adapter_config'], ['params'], ['shards/index.json'], ['net.py:build']]\n"
        "words += [['s/config.json', '--config', 'config/config.json']]\n"
        "print(*[main(['inspect', *each]) for each in words])\n"
        "from pediag.targets import open_target\n"
        "print(*[len(open_target(name).tensors) for name in 'spi'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANGS,
        env=environment,
        check=False,
    )
    assert done.stdout.split() == ["2"] * 6 + ["0"] * 3, done.stderr
    assert done.stderr.count("\n") == 6, done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_permission(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = folder(config__json=config())
    monkeypatch.setattr(os, "listdir", denied)
    assert refused(path) == "f: permission denied"
    assert main(["check", "f"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- a config that fits, or does not ------------------------------------------------------------------------


def test_how_well_a_config_fits_the_weights() -> None:
    pytest.importorskip("transformers")
    Path("c.json").write_text(config())
    state = {name: lazy.load().clone() for name, lazy in open_target(FORMATS / "tiny_llama").tensors.items()}
    Path("c.json").write_text(config(num_key_value_heads=1, head_dim=8))
    torch.save(state, "m.pt")
    assert pediag.check("m.pt", config="c.json").notes == []
    del state["model.norm.weight"], state["lm_head.weight"]
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, "m.pt")
    expected = "10 of 12 parameters of the built model were found in the file; not found: "
    (note,) = pediag.check("m.pt", config="c.json").notes
    assert note.startswith(expected)
    assert "model.norm.weight" in note
    assert "lm_head.weight" in note
    Path("c.json").write_text(config(num_key_value_heads=2, head_dim=8))
    (note,) = pediag.check("m.pt", config="c.json").notes
    assert note.startswith("8 of 12 parameters")
    assert "self_attn.k_proj.weight [8, 16] for [16, 16]" in note
    torch.save({"x.weight": torch.ones(3)}, "m.pt")
    (note,) = pediag.check("m.pt", config="c.json").notes
    assert note.startswith("WARNING: none of the 12 parameters that the config builds is in the file")


# -- without transformers -----------------------------------------------------------------------------------


def test_without_transformers_the_other_rules_run() -> None:
    """In a child process where the import fails, as where it is not installed."""
    code = (
        "import json, sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name.startswith('transformers') else find(name, *a)\n"
        "sys.modules['transformers'] = None\n"
        "from pediag.cli import main\n"
        f"sys.exit(main(['check', {str(FORMATS / 'tiny_llama')!r}, '--format', 'json']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    states = {rule["code"]: (rule["status"], rule["reason"]) for rule in report["rules"]}
    assert states["PE101"][0] in ("pass", "fail")
    assert states["PE302"][0] == "could-not-check"
    assert "transformers is not installed" in states["PE302"][1]
    assert [encoding["scheme"] for encoding in report["encodings"]] == ["rotary"]
