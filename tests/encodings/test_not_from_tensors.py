"""Tensors without positions are no encodings: weights, statistics, schedules, filters, models at initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pediag.encodings.from_tensors import read
from tests.encodings._lazy import lazy

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def model(width: int = 64) -> dict[str, Tensor]:
    """A vocabulary and three layers, so that the width of content is known."""
    state = {"embed": noise(1000, width) * 0.02}
    for layer in range(3):
        state |= {f"l.{layer}.in": noise(4 * width, width), f"l.{layer}.out": noise(width, 4 * width)}
        state[f"l.{layer}.norm"] = torch.ones(width)
    return state


def plain_tensors() -> dict[str, Tensor]:
    """Constants, statistics, kernels, and dtypes that hold no numbers to read."""
    return {
        "ones": torch.ones(64),
        "zeros": torch.zeros(64),
        "nan": torch.full((64,), math.nan),
        "infinite": torch.full((64,), math.inf),
        "nan matrix": torch.full((64, 64), math.nan),
        "zero matrix": torch.zeros(64, 64),
        "one matrix": torch.ones(64, 64),
        "constant rows": torch.full((512, 64), 0.3),
        "equal rows": noise(1, 64).expand(512, 64),
        "empty": torch.zeros(0, 64),
        "no axes": torch.tensor(3.0),
        "num_batches_tracked": torch.tensor(5),
        "one number": torch.ones(1, 1),
        "vector": noise(64),
        "sorted": noise(64).sort(descending=True).values,
        "variances": noise(64).abs(),
        "kernel": noise(64, 3, 7, 7),
        "pointwise": noise(64, 32, 1, 1),
        "depthwise": noise(64, 1, 31),
        "five axes": noise(2, 3, 4, 5, 6),
        "token types": noise(2, 64),
        "class token": noise(1, 1, 64),
        "registers": noise(1, 4, 64),
        "experts": noise(8, 64),
        "identity": torch.eye(64),
        "orthogonal": torch.linalg.qr(noise(64, 64))[0],
        "covariance": torch.cov(noise(64, 200)),
        "boolean": noise(64, 64) > 0,
        "boolean vector": noise(64) > 0,
        "bytes": torch.randint(0, 255, (64, 64), dtype=torch.uint8),
        "int8": torch.randint(-128, 127, (512, 64), dtype=torch.int8),
        "float8": noise(512, 64).to(torch.float8_e4m3fn),
        "sparse": noise(512, 64).to_sparse(),
        "rows of a sparse matrix": noise(64, 64).to_sparse_csr(),
        "meta": torch.empty(512, 64, device="meta"),
        "complex": torch.complex(noise(64, 64), noise(64, 64)),
        "conjugate": torch.complex(noise(64, 64), noise(64, 64)).conj(),
        "complex vector": torch.polar(torch.ones(64), -2 * math.pi * torch.arange(64.0) / 64),
        "permutation": torch.randperm(64, generator=torch.Generator().manual_seed(0)),
        "indices": torch.tensor([3, 4, 5, 6, 7, 8, 10, 11]),
        "counting in floats": torch.arange(64.0),
    }


def schedules() -> dict[str, Tensor]:
    """What falls or rises and turns nothing: diffusion, learning rates, dilations, temperatures, state spaces."""
    beta = torch.linspace(1e-4, 0.02, 1000)
    kept = (1 - beta).cumprod(0)
    short = (1 - torch.linspace(1e-4, 0.2, 64)).cumprod(0)
    time = torch.linspace(0, 1, 129).double()
    cosine = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    sigma = torch.linspace(math.log(80), math.log(0.002), 64).exp()
    index = torch.arange(64.0)
    return {
        "betas": beta,
        "alphas": 1 - beta,
        "kept": kept,
        "root kept": kept.sqrt(),
        "root lost": (1 - kept).sqrt(),
        "short kept": short,
        "root short kept": short.sqrt(),
        "cosine": (cosine / cosine[0])[:128].float(),
        "sigmas": sigma,
        "sigmas from one": sigma / sigma[0],
        "karras": (80 ** (1 / 7) + index / 63 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7,
        "decades": torch.tensor([1e-3, 1e-4, 1e-5, 1e-6]),
        "halves": 0.5 ** torch.arange(16.0),
        "few halves": 0.5 ** torch.arange(10.0),
        "decay": 0.95 ** torch.arange(100.0),
        "slow decay": 0.99 ** torch.arange(500.0),
        "logspace": torch.logspace(0, -4, 50),
        "logspace 64": torch.logspace(0, -4, 64),
        "steps": torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat_interleave(16),
        "dilations": 2 ** torch.arange(10),
        "float dilations": 2.0 ** torch.arange(10),
        "octaves": 2.0 ** torch.arange(10) * math.pi,
        "harmonics": 1 / (index + 1),
        "line": torch.linspace(1, 0, 64),
        "temperatures": torch.full((12,), math.log(10.0)),
        "A_log": torch.arange(1, 17.0).repeat(128, 1).log(),
        "trained A_log": torch.arange(1, 17.0).repeat(128, 1).log() + 0.01 * noise(128, 16),
        "A_log of heads": torch.arange(1, 25.0).log(),
        "retention": 1 - 2.0 ** (-5 - torch.arange(8.0)),
        "rwkv decay": -5 + 8 * (index / 63) ** 0.9,
        "rwkv mix": 1 - index / 64,
        "s4 imaginary": math.pi * torch.arange(32.0).repeat(64, 1),
        "s4": torch.complex(torch.full((64, 32), -0.5), math.pi * torch.arange(32.0).repeat(64, 1)),
        "hippo": -torch.outer((1 + 2 * index).sqrt(), (1 + 2 * index).sqrt()).tril(-1)
        - torch.diag(index + 1),
    }


def filters() -> dict[str, Tensor]:
    """Sinusoids over time, and what is smooth without being a table of positions."""
    state: dict[str, Tensor] = {"hann": torch.hann_window(400), "gaussians": noise(2, 128) * 10}
    for name, shape in (("windowed", torch.hann_window(400).double()), ("plain", torch.ones(400).double())):
        phase = 2 * math.pi * torch.outer(torch.arange(201).double(), torch.arange(400).double()) / 400
        cos, sin = (phase.cos() * shape).float(), (phase.sin() * shape).float()
        state |= {
            f"{name} real": cos,
            f"{name} imaginary": -sin,
            f"{name} kernel": torch.cat([cos, -sin])[:, None],
            f"{name} both": torch.cat([cos, -sin]),
            f"{name} first axis": torch.cat([cos, -sin])[None],
            f"{name} stacked": torch.stack([cos, sin], -1),
            f"{name} sideways": cos.T.contiguous(),
            f"{name} complex": torch.complex(cos, sin),
        }
    square = 2 * math.pi * torch.outer(torch.arange(64.0), torch.arange(64.0)) / 64
    state |= {
        "dft": torch.polar(torch.ones(64, 64), -square),
        "dft cos": square.cos(),
        "dft sin": square.sin(),
    }
    dct = torch.cos(math.pi / 80 * (torch.arange(80.0) + 0.5)[None] * torch.arange(40.0)[:, None])
    state |= {"dct": dct, "dct sideways": dct.T.contiguous(), "mfcc": dct[:13].T.contiguous()}
    centres = torch.linspace(0, 8000, 82)
    rise = (torch.linspace(0, 8000, 257)[:, None] - centres[None, :-2]) / (centres[1] - centres[0])
    mel = torch.minimum(rise, 2 - rise).clamp(min=0)
    state |= {"mel": mel, "mel sideways": mel.T.contiguous(), "mel of a width": mel[:, :64].contiguous()}
    time = torch.linspace(-1, 1, 65)
    gabor = [torch.cos(2 * math.pi * f * time) * torch.exp(-4 * time**2) for f in torch.linspace(1, 20, 64)]
    state |= {
        "gabor": torch.stack(gabor),
        "resize": torch.nn.functional.interpolate(torch.eye(16)[None], 64)[0],
    }
    state["chebyshev"] = torch.cos(torch.arange(16.0)[:, None] * torch.acos(torch.linspace(-0.99, 0.99, 64)))
    return state


def cast(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floats in another dtype."""
    return {
        name: t.to(dtype) if t.dtype == torch.float32 and t.layout == torch.strided else t
        for name, t in state.items()
    }


@pytest.mark.parametrize("around", [dict, model], ids=["alone", "in a model"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [plain_tensors, schedules, filters])
def test_no_encoding(
    make: Callable[[], dict[str, Tensor]], dtype: torch.dtype, around: Callable[[], dict[str, Tensor]]
) -> None:
    made = cast(make(), dtype)
    assert [(e.title, e.leaves) for e in read(lazy({**around(), **made}))] == []
    for name, tensor in made.items() if dtype is torch.float32 else ():
        assert [(e.title, e.leaves) for e in read(lazy({**around(), name: tensor}))] == []


def test_frequencies_of_a_timestep_are_in_doubt() -> None:
    """exp(-ln(10000) i / n), as in latent diffusion, are rotary frequencies to the last bit."""
    (encoding,) = read(lazy({"freqs": torch.exp(-math.log(10000) * torch.arange(128) / 128)}))
    assert "timestep" in encoding.doubt


TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 500,
}
PAIR = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 500,
    "pad_token_id": 0,
}
AUDIO = {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
STAGES = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 2000, "bos_token_id": 0, "eos_token_id": 0}

MODELS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("BertModel", {**TEXT, "max_position_embeddings": 96}, {"embeddings.position_embeddings.weight"}),
    ("RobertaModel", {**TEXT, "max_position_embeddings": 98}, {"embeddings.position_embeddings.weight"}),
    ("GPT2LMHeadModel", {**GPT, "n_positions": 160}, {"transformer.wpe.weight"}),
    ("LlamaForCausalLM", {**TEXT, "num_key_value_heads": 2}, set()),
    ("LlamaForCausalLM", {**TEXT, "num_hidden_layers": 1, "num_key_value_heads": 1}, set()),
    ("MixtralForCausalLM", {**TEXT, "num_key_value_heads": 2, "num_local_experts": 16}, set()),
    ("Phi3Model", {**TEXT, "num_hidden_layers": 1, "pad_token_id": 0}, set()),
    (
        "T5ForConditionalGeneration",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4},
        set(),
    ),
    ("SwinModel", {"image_size": 56, "embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6]}, set()),
    ("ViTModel", {**TEXT, "image_size": 64, "patch_size": 8}, {"embeddings.position_embeddings"}),
    ("WhisperModel", {**PAIR, "max_source_positions": 200}, {"encoder.embed_positions.weight"}),
    ("BloomModel", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500}, set()),
    ("FalconModel", {**TEXT, "alibi": True}, set()),
    ("OPTModel", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 126}, set()),
    ("BartModel", {**PAIR, "max_position_embeddings": 128}, set()),
    ("Wav2Vec2Model", {**TEXT, **AUDIO}, set()),
    ("WavLMModel", {**TEXT, **AUDIO}, set()),
    ("MambaModel", {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 500}, set()),
    ("ConvNextModel", STAGES, set()),
    ("ResNetModel", {"embedding_size": 16, **STAGES}, set()),
    ("EncodecModel", {"num_filters": 4, "codebook_size": 64, "codebook_dim": 16, "hidden_size": 16}, set()),
]


@pytest.mark.parametrize(
    ("name", "values", "holders"), MODELS, ids=[f"{m[0]}-{i}" for i, m in enumerate(MODELS)]
)
def test_models_at_initialisation(name: str, values: dict[str, Any], holders: set[str]) -> None:
    """Only their tables of positions are told, and untrained ones are in doubt."""
    transformers = pytest.importorskip("transformers")
    built = getattr(transformers, name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = built(built.config_class(**values)).state_dict()
    found = read(lazy(state))
    assert {leaf for encoding in found for leaf in encoding.leaves} == holders
    assert all(bool(encoding.doubt) == (encoding.scheme == "learned") for encoding in found)
