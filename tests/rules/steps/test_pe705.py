"""PE705: what is left behind, by the formulas of what is left; and dynamic scaling of the transformers library."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.rules._fixtures import load
from tests.rules.entry._judge import assert_points_at_mark, cases, findings, outcome

FIXTURE = load("pe705_history_dependent")
CODE = "PE705"
W = 1e4 ** (-torch.arange(0, 24, 2, dtype=torch.float64) / 24)


def _rounded() -> float:
    """Largest change of a cosine or sine below 58 tokens when positions and frequencies are bfloat16."""
    places = torch.arange(58)
    exact = torch.outer(places.float(), (1e4 ** (-torch.arange(0, 24, 2) / 24)).float())
    coarse = torch.outer(places.bfloat16(), (1e4 ** (-torch.arange(0, 24, 2) / 24)).bfloat16()).float()
    return float(torch.stack((exact.cos() - coarse.cos(), exact.sin() - coarse.sin())).abs().max())


def _moved() -> float:
    """The same for sinusoids 768 tokens later: 1,024 were read, 256 are the trained length."""
    w = 1e4 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    places = torch.arange(58, dtype=torch.float64)[:, None]
    before, after = places * w, (places + 768) * w
    return float(torch.stack((after.cos() - before.cos(), after.sin() - before.sin())).abs().max())


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY"))
def test_faulty(factory):
    assert_points_at_mark(FIXTURE, CODE, factory)
    (finding,) = findings(factory(), CODE, FIXTURE.SEQ_LEN)
    assert finding.severity == "error"
    expected = {
        "faulty": FIXTURE.EXPECTED["measured"],
        "faulty_rebuilt": _rounded(),
        "faulty_left": _moved(),
    }[factory.__name__]
    # A complex number is compared part by part, and so is a sinusoid.
    assert finding.evidence.measured == pytest.approx(expected, rel=2e-3)
    assert (finding.evidence.expected, finding.evidence.seq_len) == (0.0, 58)


@pytest.mark.parametrize("factory", cases(FIXTURE, "FAULTY") + cases(FIXTURE, "HEALTHY"))
def test_in_real_numbers(factory):
    """Short, long, short: the outputs of the short input are equal or not as the finding says."""
    model = factory()
    short = torch.randint(0, 99, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(short)
        model(torch.randint(0, 99, (1, 600)))
        after = model(short)
    assert torch.equal(before, after) == factory.__name__.startswith("healthy")


@pytest.mark.parametrize("factory", cases(FIXTURE, "HEALTHY"))
def test_healthy(factory):
    assert outcome(factory(), CODE, FIXTURE.SEQ_LEN).status == "pass"


def test_below_the_switch_nothing_is_left():
    """At 100 tokens asked about the longest input is one of 200, within the trained 256."""
    assert outcome(FIXTURE.faulty(), CODE, 100).status == "pass"


def test_the_model_comes_out_as_it_went_in():
    model = FIXTURE.faulty()
    before, names = model.w, sorted(vars(model))
    assert findings(model, CODE, FIXTURE.SEQ_LEN)
    assert model.w is before
    assert (model.longest, sorted(vars(model))) == (FIXTURE.TRAINED, names)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_scaling_of_the_library_falls_back(scaling):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": scaling, "rope_theta": 1e4, "factor": 4.0}
    if scaling == "longrope":
        lists = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
        rope |= {**lists, "original_max_position_embeddings": 128}
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    assert outcome(transformers.LlamaForCausalLM(config).eval(), CODE, 512).status == "pass"


def test_growing_needs_no_history_when_it_is_pinned():
    assert math.isclose(float(W[0]), 1.0)
    assert findings(load("pe507_length_switch").healthy_pinned(), CODE, 512) == []


class Remade(torch.nn.Module):
    """A table of sinusoids that is a parameter, made anew by ``wave`` when an input is longer (FSMT's does so)."""

    def __init__(self, wave) -> None:
        super().__init__()
        self.tokens, self.wave = torch.nn.Embedding(97, 24), wave
        self.table = torch.nn.Parameter(self.made(300, 1.0))

    @staticmethod
    def made(rows: int, scale: float) -> torch.Tensor:
        angle = torch.outer(torch.arange(rows, dtype=torch.float32), W.float()) * scale
        return torch.cat((angle.sin(), angle.cos()), -1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(self.table):
            self.table = torch.nn.Parameter(self.made(ids.shape[1], self.wave))
        return self.tokens(ids) + self.table[: ids.shape[1]]


def test_a_table_made_anew_with_the_numbers_that_it_had_changes_nothing() -> None:
    assert findings(Remade(1.0).eval(), CODE, 512) == []
    assert findings(Remade(0.5).eval(), CODE, 512)


class MadeOnce(torch.nn.Module):
    """A rotation whose cosines are made for the first text, and again for a longer one where ``again``."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.tokens, self.project, self.again = torch.nn.Embedding(97, 24), torch.nn.Linear(24, 72), again
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        if self.kept is None or (self.again and len(self.kept[0]) < n):
            angle = torch.outer(torch.arange(n, dtype=torch.float32), W.float()).repeat(1, 2)
            self.kept = angle.cos(), angle.sin()
        cos, sin = (part[:n] for part in self.kept)
        q, k, v = self.project(self.tokens(ids)).chunk(3, -1)
        q, k = (x * cos + torch.cat((-x[..., 12:], x[..., :12]), -1) * sin for x in (q, k))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_table_made_for_the_first_text_refuses_a_longer_one() -> None:
    assert outcome(MadeOnce(again=True).eval(), CODE, 128).status == "pass"
    (finding,) = findings(MadeOnce(again=False).eval(), CODE, 128)
    assert (finding.evidence.measured, finding.evidence.expected) == (58, 128)
    assert "of 128 tokens is refused" in finding.message
    model = MadeOnce(again=False).eval()
    model(torch.zeros(1, 58, dtype=torch.long))
    with pytest.raises(RuntimeError, match="must match"):
        model(torch.zeros(1, 128, dtype=torch.long))


class Patches(torch.nn.Module):
    """An image of 32 x 32 in patches of 8 x 8, with a trained row for each, and attention among them."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=32, patch_size=8, num_channels=3)
        self.patches = torch.nn.Conv2d(3, 24, 8, stride=8)
        self.places = torch.nn.Parameter(torch.randn(1, 16, 24))
        self.project = torch.nn.Linear(24, 72)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.places
        q, k, v = self.project(x).chunk(3, -1)
        return x + torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_an_image_has_no_longer_input() -> None:
    found = outcome(Patches().eval(), CODE, 64)
    assert found.status == "not-applicable"
    assert "one size" in found.reason
