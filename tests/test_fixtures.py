"""The fixtures are what they claim: healthy ones run and agree with the literature, faulty ones do not.

Every expected number is a closed form written here or a published one; none comes from pediag's own theory.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1] / "fixtures"
LENGTHS = (13, 96)
SCHEMES = {"sinusoidal", "learned", "rotary", "alibi", "t5-buckets", "clipped"}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fixture_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


def document(name: str) -> ModuleType:
    return load(ROOT / "documents" / f"{name}.py")


def mistake(name: str) -> ModuleType:
    return load(ROOT / "mistakes" / f"{name}.py")


def rule(prefix: str) -> ModuleType:
    (path,) = (ROOT / "rules").glob(f"{prefix}_*.py")
    return load(path)


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    """The model; its factory must not touch the global generator, and must give the same weights again."""
    before = torch.get_rng_state()
    model, again = factory(), factory()
    assert torch.equal(before, torch.get_rng_state())
    for (name, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one.nan_to_num(), two.nan_to_num()), name
    return model


LONGEST_RUN = 1024
"""Tokens of the longest real pass: attention of 8,192 tokens would take gigabytes."""


def run(module: ModuleType, model: nn.Module, seq_len: int) -> Any:
    if hasattr(module, "example_inputs"):
        inputs = module.example_inputs(seq_len)
    else:
        inputs = (torch.randint(0, 101, (3, seq_len), generator=torch.Generator().manual_seed(0)),)
    with torch.no_grad():
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def tensor_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.logits


@pytest.mark.parametrize("path", files("documents") + files("healthy"), ids=lambda path: path.stem)
def test_healthy_model_runs_at_two_lengths(path: Path) -> None:
    if path.stem == "llama":
        pytest.importorskip("transformers")
    module = load(path)
    assert set(module.SCHEMES) <= SCHEMES
    model = build(module.model)
    for seq_len in LENGTHS:
        output = tensor_of(run(module, model, seq_len))
        assert output.isfinite().all()
        assert output.dim() == 2 or output.shape[1] >= seq_len


@pytest.mark.parametrize("path", files("mistakes"), ids=lambda path: path.stem)
def test_mistake_runs_without_complaint(path: Path) -> None:
    module = load(path)
    assert hasattr(module, "CAUGHT_BY") != hasattr(module, "NOT_YET")
    model = build(module.model)
    for seq_len in (module.SEQ_LEN,) if hasattr(module, "SEQ_LEN") else LENGTHS:
        assert tensor_of(run(module, model, seq_len)).isfinite().all()


@pytest.mark.parametrize("path", files("rules"), ids=lambda path: path.stem)
def test_rule_fixture_has_its_variants(path: Path) -> None:
    module = load(path)
    assert module.FAULTY[0] is module.faulty
    assert module.HEALTHY[0] is module.healthy
    assert min(len(module.FAULTY), len(module.HEALTHY)) >= 3
    assert {"measured", "unit"} <= set(module.EXPECTED)
    code = path.stem.partition("_")[0].upper()
    assert set(re.findall(r"# <- (PE\d+)$", path.read_text(), re.MULTILINE)) <= {code}


@pytest.mark.parametrize("path", files("rules"), ids=lambda path: path.stem)
def test_rule_variants_run(path: Path) -> None:
    module = load(path)
    if isinstance(module.faulty(), dict):
        return  # a declaration, with nothing to run
    for factory in module.HEALTHY:
        output = tensor_of(run(module, build(factory), min(module.SEQ_LEN, LONGEST_RUN)))
        assert output.isfinite().all(), factory.__name__
    for factory in module.FAULTY + getattr(module, "NOTED", []):
        run(module, build(factory), 13)


# The documents' encodings against closed forms.


def sinusoid(positions: np.ndarray, width: int, base: float = 1e4) -> np.ndarray:
    """sin in the even channels, cos in the odd ones; float64."""
    angle = positions[:, None] * base ** (-np.arange(0, width, 2) / width)
    return np.stack((np.sin(angle), np.cos(angle)), -1).reshape(len(positions), width)


def first_negative(frequencies: np.ndarray, longest: int = 4096) -> int:
    """First distance at which sum cos(m w) < 0, ``longest`` when there is none."""
    below = np.cos(np.arange(longest)[:, None] * frequencies).sum(1) < 0
    return int(below.argmax()) if below.any() else longest


def plain(base: float, width: int) -> np.ndarray:
    return base ** (-np.arange(0, width, 2) / width)


def test_sinusoidal_table_is_the_formula() -> None:
    table = document("sinusoidal").model().positions.table[0].numpy()
    np.testing.assert_allclose(table, sinusoid(np.arange(2048), 64), atol=5e-4)


def test_lazy_rows_beyond_the_first_are_the_formula() -> None:
    module = document("lazy_sinusoidal")
    model = module.model()
    assert model.table.rows.shape[0] == 64
    run(module, model, 300)
    np.testing.assert_allclose(model.table.rows[:300].numpy(), sinusoid(np.arange(300), 32), atol=1e-4)


def test_shaw_depends_on_clipped_distance_only() -> None:
    attention = document("shaw_relative").model().mixers[0]
    assert attention.key_table.num_embeddings == 2 * attention.clip + 1
    m = torch.arange(40)
    index = (m[None] - m[:, None]).clamp(-16, 16) + 16
    assert (index[0, 16:] == 32).all()
    assert (index.diagonal() == 16).all()


def t5_bucket(distance: int) -> int:
    """Published first distances of the 32 bidirectional buckets to 128 (key minus query)."""
    firsts = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    number = max(i for i, first in enumerate(firsts) if first <= abs(distance))
    return number + (16 if distance > 0 else 0)


def test_t5_buckets_are_the_published_ones() -> None:
    distances = torch.arange(-300, 301)
    assert document("t5_bias").bucket(distances).tolist() == [t5_bucket(int(m)) for m in distances]


def test_t5_decoder_buckets_are_the_published_ones() -> None:
    firsts = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    bucket = load(ROOT / "healthy" / "t5_decoder.py").T5Attention.bucket
    expected = [max(i for i, first in enumerate(firsts) if first <= m) for m in range(300)]
    assert bucket(-torch.arange(300)).tolist() == expected
    assert bucket(torch.arange(1, 50)).eq(0).all()


def test_rotary_products_depend_on_distance_only() -> None:
    assert document("rotary").verify_relative_property() < 1e-6
    module = document("rotary")
    table = module.RotaryTable(24, 64, 1e5)
    x = torch.ones(24)
    turned = module.turn(x, table.cos[1], table.sin[1])
    angle = plain(1e5, 24)
    np.testing.assert_allclose(turned[:12].numpy(), np.cos(angle) - np.sin(angle), rtol=1e-5)


ALIBI_12 = [2.0**-h for h in range(1, 9)] + [2.0 ** -(h + 0.5) for h in range(4)]


def test_alibi_slopes_are_the_published_ones() -> None:
    slopes = document("alibi").slopes
    assert slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    np.testing.assert_allclose(slopes(12).numpy(), ALIBI_12, rtol=1e-6)


def test_absolute_key_form_is_the_relative_one_up_to_row_constants() -> None:
    module = load(ROOT / "healthy" / "alibi_absolute_key.py")
    bias = module.build_alibi(20, 6, torch.device("cpu"))[0].expand(-1, 20, -1)
    relative = bias - bias.diagonal(dim1=1, dim2=2)[..., None]
    m = torch.arange(20)
    expected = -torch.tensor(module.PARAMETERS["slopes"])[:, None, None] * (m[:, None] - m)
    torch.testing.assert_close(relative, expected)


def test_interpolation_is_division_of_the_frequencies() -> None:
    rotary = document("position_interpolation").InterpolatedRotary(24)
    cos, _ = rotary(torch.zeros(1, 1024, 96))
    expected = np.cos(np.arange(1024)[:, None] * plain(1e4, 24) / 4)
    np.testing.assert_allclose(cos[0, 0, :, :12].numpy(), expected, atol=1e-4)


def test_ntk_stretches_the_slowest_pair_by_the_factor() -> None:
    module = document("ntk_aware")
    ratio = plain(1e4, 24) / module.frequencies(24, 1e4, module.FACTOR).double().numpy()
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(module.FACTOR, rel=1e-5)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    frequency = document("yarn").yarn_frequencies(24).double().numpy()
    ratio = plain(1e4, 24) / frequency
    assert ratio[0] == pytest.approx(1)
    # ceil(24 ln(256 / 2 pi) / (2 ln 1e4)) = 5: from pair 5 on everything is divided by 4.
    np.testing.assert_allclose(ratio[5:], 4, rtol=1e-5)
    assert (np.diff(ratio) >= -1e-6).all()


def test_yarn_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=rope
    )
    frequency, grow = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    module = document("yarn")
    torch.testing.assert_close(module.yarn_frequencies(24), frequency)
    assert module.PARAMETERS["attention_factor"] == pytest.approx(grow)


def test_rotation_matrices_turn_like_pairs() -> None:
    matrices = load(ROOT / "healthy" / "rotary_rotation_matrices.py").rotations(50, 12, 5e5)
    torch.testing.assert_close(matrices @ matrices.mT, torch.eye(12).expand(50, -1, -1))
    torch.testing.assert_close(matrices[7].mT @ matrices[19], matrices[12], atol=1e-5, rtol=0)


def rotary_frequencies(module: ModuleType) -> np.ndarray:
    if module.PARAMETERS.get("scaling") == "yarn":
        return module.yarn_frequencies(24).double().numpy()
    shrink = module.PARAMETERS.get("factor", 1.0)
    return plain(module.PARAMETERS["base"], module.PARAMETERS["rotary_width"]) / shrink


def test_rotary_bases_suffice_for_512_tokens() -> None:
    seen = 0
    for path in files("documents") + files("healthy"):
        module = load(path)
        if module.SCHEMES != ("rotary",) or path.stem == "interleaved_partial":
            continue
        reach = min(512, module.PARAMETERS.get("window", 512))
        assert first_negative(rotary_frequencies(module)) >= reach, path.stem
        seen += 1
    assert seen >= 12


# The mistakes, each shown to be one.


def test_mistaken_buckets_are_shared_by_past_and_future() -> None:
    bucket = mistake("t5_bucket_shared").mistaken_bucket
    past, future = (set(bucket(sign * torch.arange(1, 301)).tolist()) for sign in (-1, 1))
    assert past <= future
    assert bucket(torch.tensor([-1])).item() == bucket(torch.tensor([16])).item() == 16
    agree = sum(int(bucket(torch.tensor(m))) == t5_bucket(m) for m in range(-300, 301))
    assert agree == 189
    assert len(set(bucket(-torch.arange(1, 17)).tolist())) == 6


def test_single_series_is_not_the_published_slopes() -> None:
    slopes = mistake("slopes_single_series_12_heads").mistaken_slopes(12)
    assert slopes.max().item() == pytest.approx(0.630, abs=5e-4)
    assert max(ALIBI_12) == pytest.approx(0.707, abs=5e-4)
    assert slopes.min().item() == pytest.approx(2**-8)
    assert (slopes.sort().values - torch.tensor(ALIBI_12).sort().values).abs().max() > 0.05


def test_without_a_mask_future_keys_beat_all_past_ones() -> None:
    module = mistake("alibi_without_mask")
    model = module.model()
    bias = model.first.bias(10)
    upper = torch.ones(10, 10, dtype=torch.bool).triu(1)
    assert (bias[:, upper] == 0).all()
    assert (bias[:, upper.mT] < 0).all()
    ids = torch.arange(20)[None]
    changed = ids.clone()
    changed[0, -1] = 99
    with torch.no_grad():
        assert not torch.allclose(model(ids)[0, 0], model(changed)[0, 0])


def test_tables_on_the_head_axis_turn_heads() -> None:
    module = mistake("rotary_broadcast_heads_equal")
    model = module.model()
    x = torch.randn(12).expand(1, 8, 8, 12)
    turned = model.layers[0].rotate(x)
    assert torch.equal(turned[0, 0], turned[0, 7])
    assert not torch.allclose(turned[0, :, 0], turned[0, :, 7])
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 13, dtype=torch.long))


def test_one_head_grows_to_as_many_as_tokens() -> None:
    module = mistake("rotary_broadcast_one_head")
    layer = module.model().layers[0]
    x = torch.randn(2, 7, 1, 16)
    q, k = layer.rotate(x), layer.rotate(x)
    assert q.shape == (2, 7, 7, 16)
    score = torch.einsum("bihd,bjhd->bhij", q, k)
    torch.testing.assert_close(score, (x[:, :, 0] @ x[:, :, 0].mT)[:, None].expand(-1, 7, -1, -1))


def test_query_only_rotation_depends_on_the_step() -> None:
    module = mistake("cross_attention_query_only")
    model = module.model()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 64, generator=generator).expand(1, 51, 64)
    y = torch.randn(1, 3, 64, generator=generator)
    one, both = model.cross.scores(x, y), model.own.scores(x, x)
    assert one[0, :, :, 0].std(dim=1).max() > 0.1
    torch.testing.assert_close(both[0, :, 3, 1], both[0, :, 50, 48], atol=1e-3, rtol=1e-3)


def test_resampling_moves_every_row() -> None:
    table = mistake("resampled_table").model().table
    assert torch.equal(table.rows(256), table.pe)
    moved = np.abs(table.rows(512)[0].double().numpy() - sinusoid(np.arange(512), 64))
    assert (moved.max(axis=1) > 0.1).mean() > 0.99
    assert moved.max() > 1.8


# The numbers that the rules' fixtures expect.


def test_pe101_kinds_of_theta() -> None:
    module = rule("pe101")
    assert module.faulty()["rope_theta"] == module.EXPECTED["measured"]
    assert not module.faulty()["rope_theta"].is_integer()
    assert isinstance(module.healthy()["rope_theta"], int)


def test_pe201_garbage_and_right_values() -> None:
    module = rule("pe201")
    for factory in module.FAULTY:
        values = frequencies_of(factory())
        falling = bool((values[1:] < values[:-1]).all())
        inside = bool(((values > 0) & (values <= 1)).all())
        assert not (values.isfinite().all() and falling and inside), factory.__name__
    for factory in module.HEALTHY:
        values = frequencies_of(factory())
        assert (values[1:] < values[:-1]).all()
        assert ((values > 0) & (values <= 1)).all()


def frequencies_of(model: nn.Module) -> Tensor:
    """The buffer, or the angle of row 1 of complex tables."""
    block = model.blocks[0]
    return block.inv_freq if hasattr(block, "inv_freq") else block.freqs_cis[1].angle()


def test_pe301_ratios() -> None:
    module = rule("pe301")
    assert np.sqrt(sinusoid(np.arange(512), 64).var(0).mean()) / 0.02 == pytest.approx(
        module.EXPECTED["measured"], rel=1e-4
    )
    drowned = module.faulty_drowned_positions()
    assert drowned.factor * drowned.tokens.weight.std().item() == pytest.approx(math.sqrt(512), rel=0.02)
    learned = module.faulty_learned()
    assert (learned.wpe.weight.std() / learned.wte.weight.std()).item() == pytest.approx(100, rel=0.05)
    for factory in module.HEALTHY[1:3]:
        model = factory()
        assert 0.4 < (model.wpe.weight.std() / model.wte.weight.std()).item() < 1.1


def test_pe303_bytes() -> None:
    module = rule("pe303")
    with torch.no_grad():
        bias = module.faulty().bias(torch.zeros(1, 512, 64))
    assert bias.numel() * bias.element_size() == module.EXPECTED["measured"]
    for factory in (module.faulty_numpy, module.healthy, module.healthy_new_tensor):
        torch.testing.assert_close(factory().bias(torch.zeros(1, 40, 64)), bias[:, :40, :40])


def test_pe305_outputs_move_with_the_tokens() -> None:
    module = rule("pe305")
    ids = torch.randperm(100, generator=torch.Generator().manual_seed(0))[None, :17]
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))

    def blind(factory: Callable[[], nn.Module]) -> bool:
        model = factory()
        with torch.no_grad():
            return torch.allclose(model(ids)[:, order], model(ids[:, order]), atol=1e-4)

    assert all(blind(factory) for factory in module.FAULTY)
    assert not any(blind(factory) for factory in module.HEALTHY + module.NOTED)


def test_pe306_shapes_hide_the_axis() -> None:
    module = rule("pe306")
    same = torch.full((3, 13), 7)
    for factory in module.FAULTY:
        with torch.no_grad():
            output = factory()(same)
        assert torch.allclose(output[:, 0], output[:, -1], atol=1e-5), factory.__name__
    for factory in module.HEALTHY[:2]:
        with torch.no_grad():
            assert not torch.allclose(factory()(same)[:, 0], factory()(same)[:, -1], atol=1e-3)


def test_pe501_first_negative_sums() -> None:
    module = rule("pe501")
    assert first_negative(plain(100, 64)) == module.EXPECTED["measured"]
    assert [first_negative(plain(*of)) for of in ((1000, 16), (500, 24), (10000, 24))] == [52, 77, 223]
    assert min(first_negative(plain(*of)) for of in ((100000, 64), (1000000, 16))) > module.SEQ_LEN


def test_pe502_rows() -> None:
    module = rule("pe502")
    assert module.faulty().places.num_embeddings == module.EXPECTED["measured"]
    ids = torch.full((2, module.SEQ_LEN), 5)
    silent = {module.faulty_clamped}
    for factory in module.FAULTY:
        if factory not in silent:
            with pytest.raises((IndexError, RuntimeError)):
                factory()(ids)
    with torch.no_grad():
        clamped = module.faulty_clamped()(ids)
    assert torch.allclose(clamped[:, 255], clamped[:, 511], atol=1e-5)


def test_pe602_phase_error() -> None:
    module = rule("pe602")
    exact = plain(module.BASE, 24)
    for factory in (module.faulty, module.faulty_model_cast, module.faulty_cast_back):
        stored = factory().rotary.inv_freq.double().numpy()
        assert 511 * np.abs(stored - exact).max() == pytest.approx(module.EXPECTED["measured"], rel=1e-3)
    for factory in (module.healthy, module.healthy_bf16_weights):
        assert 511 * np.abs(factory().rotary.inv_freq.double().numpy() - exact).max() < 1e-3


def significant(x: np.ndarray, bits: int) -> np.ndarray:
    """Rounded to a number of significant bits: 8 in bfloat16, 11 in TF32 and float16."""
    significand, exponent = np.frexp(x)
    return np.ldexp(np.round(significand * 2.0**bits) / 2.0**bits, exponent)


def test_pe601_positions_left() -> None:
    module = rule("pe601")
    m = np.arange(module.SEQ_LEN, dtype=float)
    assert np.unique(significant(m, 8)).size == module.EXPECTED["measured"]
    x = torch.zeros(1, module.SEQ_LEN, 48)
    rates = plain(module.BASE, 24)
    for factory, dtype, exact in (
        (module.faulty, torch.bfloat16, False),
        (module.faulty_autocast, torch.float32, False),
        (module.healthy, torch.bfloat16, True),
        (module.healthy_dtype_of_the_model, torch.float32, True),
    ):
        with torch.no_grad():
            angle = factory().angles(x.to(dtype)).double().numpy()
        assert (np.abs(angle[:, 0] - m * rates[0]).max() < 1e-2) == exact


def test_pe603_phase_error() -> None:
    module = rule("pe603")
    exact = np.outer(np.arange(module.SEQ_LEN, dtype=float), plain(module.BASE, 24))
    assert np.abs(significant(exact, 8) - exact).max() == pytest.approx(module.EXPECTED["measured"], rel=1e-3)
    for factory in (module.faulty, *module.HEALTHY[:2]):
        with torch.no_grad():
            angle = factory().angles(torch.zeros(1, module.SEQ_LEN, 48)).double().numpy()
        assert (np.abs(angle - exact).max() < 1e-2) == (factory is not module.faulty)


def test_pe604_phase_error() -> None:
    module = rule("pe604")
    m, w = np.arange(module.SEQ_LEN, dtype=float), plain(module.BASE, 24)
    exact = np.outer(m, w)
    lowered = significant(np.outer(significant(m, 8), significant(w, 8)), 8)
    assert np.abs(lowered - exact).max() == pytest.approx(module.EXPECTED["measured"], rel=1e-3)
    x = torch.zeros(1, module.SEQ_LEN, 48)
    for factory in module.FAULTY[:3] + module.HEALTHY[:4]:
        with torch.no_grad():
            plainly = factory().angles(x).double().numpy().reshape(exact.shape)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                under = factory().angles(x).double().numpy().reshape(exact.shape)
        assert np.abs(plainly - exact).max() < 1e-2, "in float32 these agree"
        assert (np.abs(under - exact).max() < 1e-2) == (factory in module.HEALTHY)


def test_pe605_ties() -> None:
    module = rule("pe605")
    key = np.arange(module.SEQ_LEN - 64, module.SEQ_LEN, dtype=float)
    for slope in 2.0 ** -np.arange(1, 9):
        tied = (np.diff(significant(slope * key, 8)) == 0).mean()
        assert tied == pytest.approx(module.EXPECTED["measured"], rel=1e-3)


def test_pe606_overflow() -> None:
    module = rule("pe606")
    powers = module.BASE ** (np.arange(0, 24, 2) / 24)
    assert powers[powers > 65504].max() == pytest.approx(module.EXPECTED["measured"], rel=1e-3)
    x = torch.zeros(1, 8, 48, dtype=torch.float16)
    zero = [int((factory().frequencies(x) == 0).sum()) for factory in (module.faulty, module.healthy)]
    assert zero == [11, 0], "the base itself is infinite, so all powers but the zeroth are"
    ids = torch.full((1, 16), 5)
    with torch.no_grad():
        assert module.faulty_masks()(ids).isnan().any()
        assert module.healthy_masks()(ids).isfinite().all()
