"""Exported programs: traced as the live model is, and none of their text is run."""

from __future__ import annotations

import contextlib
import linecache
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pediag
from pediag.errors import LoadError, UsageError
from pediag.targets import open_target
from tests.targets.files._corruption import ends
from tests.targets.files._hostile import (
    LOADED_BY_TORCH,
    OPENED,
    REFUSED,
    UNTRACED,
    pickled_weight,
    program,
    rewritten,
)
from tests.targets.files._models import Alibi, Learned, Plain, Rotary, Sinusoidal

EXAMPLE = torch.arange(24).reshape(2, 12)
N = torch.export.Dim("n", max=512)


def saved(
    model: nn.Module, path: Path, dims: Any = None, example: torch.Tensor = EXAMPLE, **options: Any
) -> Path:
    """The model exported and saved at ``path``; both axes open by default."""
    shapes = {"ids": {0: torch.export.Dim("b"), 1: N}} if dims is None else dims
    program = torch.export.export(model.eval(), (example,), dynamic_shapes=shapes or None, **options)
    torch.export.save(program, path)
    return path


def described(report: Any) -> list[tuple[Any, ...]]:
    """Scheme, parameters, module paths and source file of every encoding."""
    return sorted(
        (
            encoding.scheme,
            repr(sorted(encoding.parameters.items(), key=repr)),
            sorted({(site.module, site.frame.file) for site in encoding.sites}),
        )
        for encoding in report.encodings
    )


def lines(report: Any, scheme: str) -> set[tuple[str, str]]:
    """The text of the source lines that apply an encoding of ``scheme``, with the function around them."""
    sites = [site for encoding in report.encodings if encoding.scheme == scheme for site in encoding.sites]
    return {
        (linecache.getline(site.frame.file, site.frame.line).strip(), site.frame.function) for site in sites
    }


@pytest.mark.parametrize("build", [Rotary, Learned, Sinusoidal, Plain, Alibi])
def test_a_program_is_seen_as_its_live_model_is(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    live = pediag.inspect(model, seq_len=96)
    program = pediag.inspect(saved(model, tmp_path / "m.pt2"), seq_len=96)
    assert described(program) == described(live)
    assert len(live.encodings) >= 2  # its own, and the causal mask
    assert program.target.loader.startswith("exported program")
    if (
        build is not Rotary
    ):  # the exporter keeps frames of forward() only, and the rotation has a function of its own
        for encoding in live.encodings:
            assert lines(program, encoding.scheme) == lines(live, encoding.scheme)


def test_a_finding_points_to_the_line_and_module_of_the_author(tmp_path: Path) -> None:
    found = pediag.inspect(saved(Rotary(), tmp_path / "m.pt2"))
    assert lines(found, "rotary") == {("q, k = rotated(q, *turn), rotated(k, *turn)", "Attention.forward")}
    modules = {site.module for item in found.encodings if item.scheme == "rotary" for site in item.sites}
    assert modules == {"layers.0", "layers.1"}


@pytest.mark.parametrize("build", [Rotary, Learned, Alibi])
def test_a_program_lowered_to_core_operations(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    shapes = {"ids": {0: torch.export.Dim("b"), 1: N}}
    program = torch.export.export(model, (EXAMPLE,), dynamic_shapes=shapes)
    torch.export.save(program.run_decompositions(), tmp_path / "m.pt2")
    own = {"rotary", "learned", "alibi"}
    low, live = (
        [
            (item.scheme, item.parameters)
            for item in pediag.inspect(target, seq_len=96).encodings
            if item.scheme in own
        ]
        for target in (tmp_path / "m.pt2", model)
    )
    assert low == live
    assert len(low) == 1


class Branching(Learned):
    """Takes one of two branches by a number that it holds, in a region without gradients."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        with torch.no_grad():
            scale = torch.arange(1.0, 3.0).sum()
        return torch.cond(scale > 2, lambda y: y + 1, lambda y: y * 2, (x,))


def test_a_program_with_branches(tmp_path: Path) -> None:
    report = pediag.inspect(saved(Branching(), tmp_path / "m.pt2"))
    assert {encoding.scheme for encoding in report.encodings} == {"learned", "mask"}


def test_a_transformers_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=97, num_key_value_heads=2, max_position_embeddings=1024, rope_theta=5e5, **sizes
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    given = {"input_ids": EXAMPLE, "use_cache": False}
    shapes = {"input_ids": {0: torch.export.Dim("b"), 1: torch.export.Dim("n", max=1024)}, "use_cache": None}
    torch.export.save(torch.export.export(model, (), given, dynamic_shapes=shapes), tmp_path / "m.pt2")
    live, program = pediag.inspect(model, seq_len=256), pediag.inspect(tmp_path / "m.pt2", seq_len=256)
    assert described(program) == described(live)
    (rotary,) = [item for item in program.encodings if item.scheme == "rotary"]
    assert rotary.parameters["base"] == pytest.approx(5e5)
    assert {site.module for site in rotary.sites} == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    assert pediag.inspect(tmp_path / "m.pt2").seq_len == 1024


# -- faults -------------------------------------------------------------------------------------------------


def codes(report: Any) -> set[str]:
    return {finding.code for finding in report.findings}


def test_a_table_that_is_too_short_is_found(tmp_path: Path) -> None:
    path = saved(Learned(rows=128), tmp_path / "m.pt2")
    assert "PE502" not in codes(pediag.check(path, seq_len=128))
    (short,) = [item for item in pediag.check(path, seq_len=256).findings if item.code == "PE502"]
    assert (short.evidence.measured, short.evidence.expected) == (128, 256)
    assert short.where.module == "places"
    assert short.where.file == str(Path(__file__).with_name("_models.py"))
    assert "self.places(torch.arange" in linecache.getline(short.where.file, short.where.line)


def test_rounded_frequencies_are_found(tmp_path: Path) -> None:
    exact = pediag.check(saved(Rotary(), tmp_path / "exact.pt2"), seq_len=512, select="PE602")
    rounded = pediag.check(saved(Rotary(torch.bfloat16), tmp_path / "m.pt2"), seq_len=512, select="PE602")
    assert codes(exact) == set()
    assert codes(rounded) == {"PE602"}
    (live,) = pediag.check(Rotary(torch.bfloat16), seq_len=512, select="PE602").findings
    assert rounded.findings[0].message == live.message


def test_a_source_file_that_is_not_here_is_still_named(tmp_path: Path) -> None:
    source = tmp_path / "gone.py"
    source.write_text(
        "from tests.targets.files._models import *\n\n\nclass Own(Learned):\n"
        + "    def forward(self, ids):\n"
        "        n = ids.shape[1]\n        return self.attention(self.tokens(ids) + self.places.weight[:n])\n"
    )
    space: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    path = saved(space["Own"](64), tmp_path / "m.pt2", {"ids": {1: torch.export.Dim("n", max=64)}})
    kept = pediag.inspect(path).encodings
    source.write_text("\n" + source.read_text())
    changed = pediag.inspect(_fresh(path)).encodings
    source.unlink()
    gone = pediag.inspect(_fresh(path)).encodings
    names = [
        next((s.frame.file, s.frame.line) for e in found if e.scheme == "learned" for s in e.sites)
        for found in (kept, changed, gone)
    ]
    assert names == [(str(source), 7), (f"{source} (as exported)", 7), (str(source), 7)]


def _fresh(path: Path) -> Path:
    from pediag.targets.files.exported import places

    places._lines.cache_clear()
    return path


# -- lengths ------------------------------------------------------------------------------------------------


def test_a_length_above_the_bound_is_refused_by_the_program_and_told(tmp_path: Path) -> None:
    path = saved(Rotary(), tmp_path / "m.pt2")
    assert open_target(path).longest == 512
    assert pediag.inspect(path).seq_len == 512
    report = pediag.check(path, seq_len=2048)
    (told,) = [item for item in report.findings if item.code == "PE502"]
    assert "2,048 tokens is above the 512 that the program was exported for" in told.message


def test_multiples(tmp_path: Path) -> None:
    steps = torch.export.Dim("steps", max=50)
    path = saved(
        Rotary(), tmp_path / "m.pt2", {"ids": {0: torch.export.Dim("b"), 1: 8 * steps}}, EXAMPLE.repeat(1, 2)
    )
    target = open_target(path)
    assert target.takes is not None
    assert [n for n in range(1, 40) if target.takes(n)] == [8, 16, 24, 32]
    assert (target.takes(400), target.takes(408), target.longest) == (True, False, 400)
    report = pediag.check(path)
    assert report.seq_len == 400
    assert {encoding.scheme for encoding in report.encodings} == {"rotary", "mask"}
    assert "is no multiple of 8" in str([item.message for item in pediag.check(path, seq_len=100).findings])


@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_fixed_at_export(tmp_path: Path, batch: int) -> None:
    path = saved(Rotary(), tmp_path / "m.pt2", {"ids": {1: N}}, EXAMPLE[:batch])
    assert open_target(path).inputs[0].dims == (batch, "N")
    found = pediag.inspect(path, seq_len=100)
    assert described(found) == described(pediag.inspect(Rotary().eval(), seq_len=100))


def test_a_fixed_length_is_traced_as_it_is(tmp_path: Path) -> None:
    path = saved(Rotary(), tmp_path / "m.pt2", {}, torch.zeros(2, 23, dtype=torch.long))
    report = pediag.check(path)
    assert report.seq_len == 23
    (rotary,) = [item for item in report.encodings if item.scheme == "rotary"]
    assert rotary.parameters["base"] == pytest.approx(10000.0)
    (told,) = pediag.check(path, seq_len=64, select="PE502").findings
    assert "a fixed length of 23 tokens, not 64: export it with dynamic_shapes" in told.message


def test_a_fixed_length_that_is_a_width_is_judged_by_its_tensors(tmp_path: Path) -> None:
    path = saved(Learned(), tmp_path / "m.pt2", {}, torch.zeros(2, 32, dtype=torch.long))
    target = open_target(path)
    assert target.module is None
    assert "exported for a fixed length of 32 tokens" in target.reason_not_runnable
    assert "dynamic_shapes" in target.reason_not_runnable
    assert target.tensors["places.weight"].load().shape == (128, 32)
    assert [rule.status for rule in pediag.check(path).outcomes if rule.rule.code == "PE302"] == [
        "could-not-check"
    ]


def test_a_wrong_input_name_is_told_with_the_right_ones(tmp_path: Path) -> None:
    path = saved(Learned(), tmp_path / "m.pt2")
    with pytest.raises(UsageError, match="it takes ids"):
        pediag.inspect(path, inputs=["tokens=int64[B,N]"])


class TwoTexts(nn.Module):
    """Attends from one text to another of a length of its own, by ids that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(61, 32), nn.Embedding(512, 32)

    def forward(
        self, ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, other: torch.Tensor
    ) -> Any:
        query = self.tokens(ids) + self.places(position_ids)
        key = self.tokens(other) * mask.any()
        return torch.nn.functional.scaled_dot_product_attention(query, key, key)


def test_inputs_are_read_from_the_signature(tmp_path: Path) -> None:
    b, n, m = (torch.export.Dim(name) for name in "bnm")
    given = (EXAMPLE, torch.arange(12)[None], torch.ones(2, 12, dtype=torch.bool), EXAMPLE[:, :7].clone())
    shapes = ({0: b, 1: n}, {1: n}, {0: b, 1: n}, {0: b, 1: m})
    program = torch.export.export(TwoTexts().eval(), given, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    inputs = open_target(tmp_path / "m.pt2").inputs
    assert [(item.name, item.dtype, item.dims, item.role) for item in inputs] == [
        ("ids", "int64", ("B", "N"), "content"),
        ("position_ids", "int64", (1, "N"), "positions"),
        ("mask", "bool", ("B", "N"), "mask"),
        ("other", "int64", ("B", "M"), "content"),
    ]
    (learned,) = pediag.inspect(tmp_path / "m.pt2").encodings
    assert (learned.scheme, learned.parameters["rows"]) == ("learned", 512)


# -- safety -------------------------------------------------------------------------------------------------

WAYS = {**OPENED, **{name: make for table in (REFUSED, UNTRACED) for name, (make, _) in table.items()}}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound program outside of the folder that is worked in, where nothing may appear."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return saved(Plain(), tmp_path / "sound.pt2")


def untouched() -> None:
    assert sorted(item.name for item in Path().iterdir()) == ["m.pt2"]


@pytest.mark.parametrize("way", OPENED)
def test_text_in_a_program_is_no_code(source: Path, way: str) -> None:
    path = OPENED[way](source, Path("m.pt2"))
    report = pediag.check(path)
    assert {encoding.scheme for encoding in report.encodings} >= {"sinusoidal"}
    assert not any("trust" in note for note in report.notes)
    untouched()


@pytest.mark.parametrize("way", REFUSED)
def test_what_a_program_may_not_ask_for_is_refused(source: Path, way: str) -> None:
    make, said = REFUSED[way]
    path = make(source, Path("m.pt2"))
    with pytest.raises(LoadError, match=re.escape(said)) as caught:
        pediag.check(path)
    assert "\n" not in str(caught.value)
    untouched()


@pytest.mark.parametrize("way", UNTRACED)
def test_what_has_no_form_here_leaves_the_tensors(source: Path, way: str) -> None:
    make, said = UNTRACED[way]
    target = open_target(make(source, Path("m.pt2")))
    assert target.module is None
    assert said in target.reason_not_runnable
    assert torch.equal(target.tensors["table"].load(), Plain().table)
    assert pediag.check("m.pt2").target.spec == "m.pt2"
    untouched()


@pytest.mark.parametrize("way", LOADED_BY_TORCH)
def test_these_are_ways_in_for_the_loader_of_torch(source: Path, way: str) -> None:
    WAYS[way](source, Path("m.pt2"))
    with contextlib.suppress(Exception):
        torch.export.load("m.pt2")
    assert Path("ran").is_dir()


def test_trust_reads_a_pickled_tensor_and_says_so(source: Path) -> None:
    path = pickled_weight(source, Path("m.pt2"))
    with pytest.raises(LoadError, match="is no tensor"):
        pediag.check(path, trust=True)
    assert Path("ran").is_dir()


def test_operations_of_a_library_need_it_and_trust(tmp_path: Path) -> None:
    with torch.library._scoped_library("pediag_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("double", torch.empty_like, "Meta")

        class Own(Learned):
            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return torch.ops.pediag_test.double(super().forward(ids))

        path = saved(Own(), tmp_path / "m.pt2")
        with pytest.raises(LoadError, match=r"calls pediag_test::double, none of .* operations: add --trust"):
            pediag.inspect(path)
        report = pediag.inspect(path, trust=True)
        assert f"--trust was used: code in {path} ran: it called pediag_test::double" in report.notes
        assert {encoding.scheme for encoding in report.encodings} == {"learned", "mask"}
    assert "no library here registers pediag_test" in open_target(path).reason_not_runnable


# -- archives -----------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        open_target(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_file_is_its_content_decides(source: Path) -> None:
    assert open_target(rewritten(source, Path("m.pt"), {})).module is not None
    torch.save({"places.weight": torch.ones(8, 4)}, "m.pt2")
    assert list(open_target("m.pt2").tensors) == ["places.weight"]
    Path("n.pt2").write_text("not a zip archive")
    assert "not an exported program" in refused(Path("n.pt2"))


def test_programs_of_older_layouts_get_a_clear_line(source: Path) -> None:
    with zipfile.ZipFile("m.pt2", "w") as archive:
        archive.writestr("version", "8.4")
        archive.writestr("serialized_exported_program.json", "{}")
        archive.writestr("serialized_state_dict.pt", "")
    assert "layout of an older PyTorch" in refused(Path("m.pt2"))
    assert "layout of an older PyTorch" in refused(
        rewritten(source, Path("n.pt2"), {"data/weights/model.pt": b"PK"})
    )
    newer = program(source, Path("o.pt2"), lambda held: held["schema_version"].update(major=9))
    assert "its schema is version 9" in refused(newer)


def test_archives_without_a_program_or_with_several(source: Path) -> None:
    gone: dict[str, bytes | None] = {"models/model.json": None}
    assert "no program" in refused(rewritten(source, Path("m.pt2"), gone))
    compiled = {**gone, "data/aotinductor/model/a.so": b"\x7fELF"}
    assert "AOTInductor" in refused(rewritten(source, Path("n.pt2"), compiled))
    several = rewritten(
        source, Path("o.pt2"), {"models/draft.json": b"{}", "data/aotinductor/model/a.so": b"\x7fELF"}
    )
    notes = open_target(several).notes
    assert notes == [
        "of its programs, model is checked, not draft",
        "its compiled code (AOTInductor) was not read",
    ]


def test_a_tensor_may_not_reach_beyond_its_bytes(source: Path) -> None:
    def longer(held: dict[str, Any]) -> None:
        held["config"]["tokens.weight"]["tensor_meta"]["sizes"][0]["as_int"] = 2**40

    path = program(source, Path("m.pt2"), longer, "data/weights/model_weights_config.json")
    assert "'tokens.weight' claims more numbers than are stored" in refused(path)


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_copies_open_or_are_refused(tmp_path: Path, seed: int) -> None:
    assert ends("tiny.pt2", seed, tmp_path)["opened"] > 50
