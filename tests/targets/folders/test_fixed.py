"""Tables that no training moves are filled by the model's own initialisers; all else stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pediag.targets.folders.fixed import fill_fixed

transformers = pytest.importorskip("transformers")
init = pytest.importorskip("transformers.initialization")


class Sinusoids(nn.Embedding):
    """A table of an embedding class of its own."""


class Holder(nn.Module):
    """Holds a frozen plain table, which its owner fills, a trained one, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(9, 4).requires_grad_(False)
        self.trained = nn.Embedding(9, 4)
        self.own = Sinusoids(9, 4)
        self.gain = nn.Parameter(torch.full((4,), 7.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Sinusoids):
            init.copy_(module.weight, torch.arange(36.0).view(9, 4))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        if isinstance(module, Holder):
            init.copy_(module.frozen.weight, torch.arange(36.0).view(9, 4) + 100)
            init.zeros_(module.gain)


def test_only_fixed_tables_are_filled() -> None:
    model = Holder()
    before = model.trained.weight.detach().clone()
    fill_fixed(model)
    assert torch.equal(model.own.weight, torch.arange(36.0).view(9, 4))
    assert torch.equal(model.frozen.weight, torch.arange(36.0).view(9, 4) + 100)
    assert torch.equal(model.trained.weight, before)
    assert torch.equal(model.gain, torch.full((4,), 7.0))
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in model.parameters())


def test_an_initialiser_that_fails_leaves_its_tables() -> None:
    class Failing(Holder):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Holder):
                raise ValueError("no such table")
            super()._init_weights(module)

    model = Failing()
    fill_fixed(model)
    assert torch.equal(model.own.weight, torch.arange(36.0).view(9, 4))
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("MarianModel", {"d_model": 16, "max_position_embeddings": 40, "vocab_size": 50, "pad_token_id": 49}),
        (
            "RoFormerModel",
            {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9},
        ),
    ],
)
def test_the_numbers_are_those_of_a_model_with_weights(architecture: str, config: dict[str, Any]) -> None:
    from pediag.targets.folders.pretrained import build_recipe
    from pediag.targets.target import Target
    from pediag.trace import Evaluator, Session

    cls = getattr(transformers, architecture)
    made = cls.config_class(**config, **dict.fromkeys(("encoder_layers", "decoder_layers"), 1))
    made.num_hidden_layers = 1
    made.architectures = [architecture]
    target = Target(spec="model", loader="transformers")
    target.build = build_recipe(target, made)
    leaves = Session(target).leaves
    tables = {name: leaf for name, leaf in leaves.items() if name.endswith("embed_positions.weight")}
    assert tables
    expected = dict(cls(made).named_parameters())
    for name, leaf in tables.items():
        assert torch.equal(Evaluator()(leaf), expected[name].detach())
