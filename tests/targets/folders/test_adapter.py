"""PEFT adapters: on their base model where it is here, else alone with what is missing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pediag
from pediag.errors import LoadError
from pediag.targets import Target, open_target, tensor_for
from tests.fixture_files import FIXTURES
from tests.targets.files._pickles import config
from tests.targets.files.test_safetensors import entry, write

FORMATS = FIXTURES / "formats"
WPE = "base_model.model.transformer.wpe.weight"


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """The shipped adapter, without its base model."""
    return Path(shutil.copytree(FORMATS / "tiny_adapter", tmp_path / "adapter"))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The shipped adapter's base model, where the adapter says it is."""
    return Path(shutil.copytree(FORMATS / "tiny_gpt2", tmp_path / "tiny_gpt2"))


def settings(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def table(target: Target) -> torch.Tensor:
    found = tensor_for(target, "transformer.wpe.weight")
    assert found is not None
    return found.load()


def test_an_adapter_is_opened_on_its_base(adapter: Path, base: Path) -> None:
    target = open_target("adapter")
    assert target.build is not None
    assert target.loader.startswith("PEFT adapter on ")
    assert target.config is not None
    assert target.config.get("model_type") == "gpt2"
    assert target.notes == [
        "the LoRA adapter adapter on its base model adapter/../tiny_gpt2",
        "taken from the adapter: wpe.weight",
    ]
    assert set(target.tensors) == set(open_target("tiny_gpt2").tensors)
    assert target.tensors["wpe.weight"].name == "wpe.weight"
    stored = open_target("adapter/adapter_model.safetensors").tensors[WPE].load()
    assert torch.equal(table(target), stored)
    assert not torch.equal(table(target), table(open_target("tiny_gpt2")))


def test_peft_puts_the_same_table_in_its_place(adapter: Path, base: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    os.chdir("adapter")  # peft takes the path of the base from the current folder
    model = peft.PeftModel.from_pretrained(transformers.GPT2LMHeadModel.from_pretrained("../tiny_gpt2"), ".")
    merged = model.merge_and_unload().state_dict()
    assert torch.equal(table(open_target(".")), merged["transformer.wpe.weight"])


def test_the_report_judges_the_table_of_the_adapter(adapter: Path, base: Path) -> None:
    pytest.importorskip("transformers")
    report = pediag.check("adapter")
    (learned,) = [item for item in report.encodings if item.scheme == "learned"]
    assert learned.table.rows == 64
    assert report.target.spec == "adapter"
    assert "taken from the adapter: wpe.weight" in report.notes


def test_its_config_named_directly_is_its_folder(adapter: Path, base: Path) -> None:
    by_file, by_folder = open_target("adapter/adapter_config.json"), open_target("adapter")
    assert set(by_file.tensors) == set(by_folder.tensors)
    assert by_file.loader == by_folder.loader
    assert by_file.spec == "adapter/adapter_config.json"


def test_without_its_base_it_says_what_is_missing(adapter: Path) -> None:
    target = open_target("adapter")
    assert target.loader == "PEFT adapter (LoRA)"
    assert WPE in target.tensors
    assert target.build is None
    assert target.reason_not_runnable == (
        "the base model ../tiny_gpt2 is not here: check its folder; an adapter changes no positions unless it targets "
        "a position table or replaces one"
    )
    settings(adapter, base_model_name_or_path=None)
    assert "names no base model" in open_target("adapter").reason_not_runnable
    report = pediag.check("adapter")
    assert any("names no base model" in outcome.reason for outcome in report.outcomes)


@pytest.mark.parametrize("name", ["org/model", "", 3, "a\0b", "../adapter", ".", "x" * 5000, ["a"]])
def test_bases_that_are_no_model_folder(adapter: Path, name: Any) -> None:
    settings(adapter, base_model_name_or_path=name)
    assert open_target("adapter").build is None


def test_a_base_that_is_an_adapter_itself_ends_the_search(adapter: Path, base: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / file, base / file)
    assert open_target("adapter").build is None


def test_a_model_folder_with_an_adapter_beside_is_the_model(adapter: Path, base: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / file, base / file)
    settings(base, base_model_name_or_path=".")
    target = open_target("tiny_gpt2")
    assert target.build is not None
    assert "the adapter beside it is not applied" in target.notes[-1]


def test_a_table_of_another_shape_is_not_taken(adapter: Path, base: Path) -> None:
    write(adapter / "adapter_model.safetensors", {WPE: entry("F32", [3, 2], 0, 24)}, bytes(24))
    target = open_target("adapter")
    assert table(target).shape == (64, 16)
    assert (
        target.notes[-1]
        == "not taken from the adapter, as the shape differs: wpe.weight ([3, 2] for [64, 16])"
    )


def test_changes_that_are_not_put_in_are_told_of(adapter: Path, base: Path) -> None:
    names = {
        "base_model.model.transformer.wpe.lora_embedding_A": [2, 4],
        "base_model.model.transformer.wpe.lora_embedding_B": [4, 2],
        "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta": [2, 4],
    }
    header = {
        name: entry("F32", shape, 32 * at, 32 * at + 32) for at, (name, shape) in enumerate(names.items())
    }
    write(adapter / "adapter_model.safetensors", header, bytes(96))
    settings(adapter, num_virtual_tokens=20)
    for target in (open_target("adapter"), _alone(adapter)):
        told = " | ".join(target.notes)
        assert "adds a low-rank change to transformer.wpe; it is not added here" in told
        assert "puts single rows into transformer.wte; they are not put in here" in told
        assert "puts 20 virtual tokens in front of the input, which take up positions" in told


def _alone(adapter: Path) -> Target:
    settings(adapter, base_model_name_or_path="absent")
    return open_target(adapter)


def test_pickled_weights_and_a_config_given(adapter: Path) -> None:
    pytest.importorskip("transformers")
    loaded = open_target("adapter/adapter_model.safetensors").tensors
    torch.save({name: lazy.load().clone() for name, lazy in loaded.items()}, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert WPE in open_target("adapter").tensors
    report = pediag.check("adapter", config=FORMATS / "tiny_gpt2" / "config.json")
    assert any(note.startswith("1 of 16 parameters of the built model were found") for note in report.notes)
    assert "learned" in {item.scheme for item in report.encodings}


def test_an_adapter_without_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        LoadError, match=r"an adapter without weights \(adapter_model\.safetensors\); the base model"
    ):
        open_target("adapter")


def test_the_base_is_found_from_the_current_folder(adapter: Path, base: Path) -> None:
    settings(adapter, base_model_name_or_path="tiny_gpt2")
    assert open_target("adapter").build is not None
    settings(adapter, base_model_name_or_path=str(base))
    assert open_target("adapter").build is not None


def test_a_damaged_base_is_told_of(adapter: Path, base: Path) -> None:
    (base / "config.json").write_text(config()[:40])
    with pytest.raises(LoadError, match=r"tiny_gpt2/config\.json:.*not valid JSON"):
        open_target("adapter")
