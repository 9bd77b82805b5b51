"""The view of a declaration: lookup, lines, sections, lengths, and refusals."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path

import pytest

from pediag.errors import LoadError
from pediag.targets import Config, maximum_length, trained_length
from pediag.targets import config as config_module
from pediag.targets.config import PADDED

TEXT = """{
  "model_type": "llama", "rope_theta": 1e4,
  "name": "a \\"quoted\\" { brace, and: comma",
  "text_config": {
    "rope_parameters": {"rope_type": "yarn",
      "rope_theta": NaN,
      "factors": [1.0,
        2.0, {"deep": 1}]
    },
    "max_position_embeddings": 4096
  },
  "rope_theta": 500000
}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "config.json"
    path.write_text(text, encoding="utf-8")
    return path


def line_containing(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_lookup_follows_dots_and_keeps_what_is_written(tmp_path: Path) -> None:
    config = Config.from_file(written(tmp_path, TEXT))
    assert config.get("rope_theta") == 500000
    assert isinstance(config.get("rope_theta"), int)
    assert math.isnan(config.get("text_config.rope_parameters.rope_theta"))
    assert config.get("text_config.rope_parameters.factors.1") == 2.0
    assert config.get("text_config.absent", 7) == 7
    assert config.get("rope_theta.deeper") is None
    assert "text_config.rope_parameters" in config
    assert "absent" not in config


def test_lines_of_nested_and_repeated_keys(tmp_path: Path) -> None:
    config = Config.from_file(written(tmp_path, TEXT))
    assert config.line_of("rope_theta") == line_containing(TEXT, "500000")
    assert config.line_of("model_type") == 2
    assert config.line_of("text_config.rope_parameters.rope_theta") == line_containing(TEXT, "NaN")
    assert config.line_of("text_config.rope_parameters.factors.2.deep") == line_containing(TEXT, "deep")
    assert config.line_of("text_config.max_position_embeddings") == line_containing(TEXT, "4096")
    assert config.line_of("deep") is None
    assert config.repeated == ("rope_theta",)


def test_a_repeated_object_hides_the_keys_of_the_first(tmp_path: Path) -> None:
    config = Config.from_file(written(tmp_path, '{"a": {"x": 1},\n "a": {"y": 2}}'))
    assert config.line_of("a.x") is None
    assert config.line_of("a.y") == 2
    assert config.repeated == ("a",)


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_every_key_of_a_dumped_config_is_found_on_its_line(tmp_path: Path, indent: int | None) -> None:
    values = {"a": 1, "b": {"c": [1, {"d": "x: {\n}"}], "é\n": {}, "f": []}, "g": None}
    text = json.dumps(values, indent=indent)
    config = Config.from_file(written(tmp_path, text))
    for dotted, needle in (("a", '"a"'), ("b.c", '"c"'), ("b.c.1.d", '"d"'), ("b.f", '"f"'), ("g", '"g"')):
        assert config.line_of(dotted) == line_containing(text, needle), dotted
    assert config.line_of("b.é\n") == line_containing(text, "\\u00e9")


def test_sections_come_outermost_first(tmp_path: Path) -> None:
    config = Config.from_file(written(tmp_path, TEXT))
    assert [path for path, _ in config.sections()] == ["", "text_config", "text_config.rope_parameters"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n'a': 1}", ":2:1: not valid JSON"),
        ("[1]", "holds a JSON list"),
        ("3", "holds a JSON number"),
        ("  ", "empty file"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not usable JSON"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(LoadError) as caught:
        Config.from_file(written(tmp_path, text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_binary_and_huge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="no such file"):
        Config.from_file(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match="not UTF-8"):
        Config.from_file(tmp_path / "binary.json")
    monkeypatch.setattr(config_module, "SIZE_LIMIT", 10)
    with pytest.raises(LoadError, match="above"):
        Config.from_file(written(tmp_path, '{"a": "long enough"}'))


NUMBERS = ",".join(["1.5"] * 5_000)
ENDLESS = {
    "deep": '{"text_config":' * 60 + "{}" + "}" * 60,
    "objects": "{" + ",".join(f'"k{place}": {{}}' for place in range(110_000)) + "}",
    "objects with a base": "{" + ",".join(f'"k{place}": {{"rope_theta": 1}}' for place in range(500)) + "}",
    "types of layers": '{"rope_parameters": {'
    + ",".join(f'"k{place}": {{"a": 1}}' for place in range(500))
    + "}}",
    "keys": '{"rope_scaling": {' + ",".join(f'"k{place}": 1' for place in range(5_000)) + "}}",
    "factors": f'{{"rope_scaling": {{"rope_type": "longrope", "short_factor": [{NUMBERS}]}}}}',
    "deep in a list": f'{{"rope_scaling": {{"x": [[[{{"y": [{NUMBERS}]}}]]]}}}}',
    "long": '{"model_type": "' + "x" * 9 * 2**20 + '"}',
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_what_is_out_of_all_proportion_is_refused_before_it_is_judged(tmp_path: Path, text: str) -> None:
    with pytest.raises(LoadError, match=r"config.json: .*which no (model's )?configuration (is|has)$"):
        Config.from_file(written(tmp_path, text))


def test_what_large_models_declare_is_read(tmp_path: Path) -> None:
    experts = {f"layers.{place}.experts.{place}.up_proj": {"algo": "FP8"} for place in range(60_000)}
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 128, "long_factor": [64.0] * 128}
    text = {"rope_parameters": {"full_attention": longrope, "sliding_attention": longrope}}
    declared = {"quantization_config": {"layers": experts}, "text_config": text, "vision_config": text}
    read = Config.from_file(written(tmp_path, json.dumps(declared)))
    assert read.values == declared
    shards = {
        f"layers.{place}.experts.weight_scale_inv": "model-00001-of-00160.safetensors"
        for place in range(120_000)
    }
    index = written(tmp_path, json.dumps({"weight_map": shards}))
    assert index.stat().st_size > config_module.SIZE_LIMIT
    assert Config.from_file(index).values["weight_map"] == shards


def test_a_length_that_means_none_is_none() -> None:
    config = Config({"model_max_length": 10**30, "n_ctx": 2**62, "text_config": {"n_positions": 2048}})
    assert (maximum_length(config), trained_length(config)) == (2048, 2048)


def test_a_long_text_is_scanned_in_little_memory(tmp_path: Path) -> None:
    config = Config.from_file(
        written(tmp_path, '{"a": "' + "x" * 2**22 + '\\"",\n"b": "\\\\", "c":\n 1, "b": 2}')
    )
    tracemalloc.start()
    assert (config.line_of("a"), config.line_of("b"), config.line_of("c")) == (1, 3, 2)
    assert config.repeated == ("b",)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert Config.from_file(tmp_path / "c.json").get("a") == 1


@dataclasses.dataclass
class Inner:
    base: float = 1e4


@dataclasses.dataclass
class Outer:
    block_size: int = 128
    rope: Inner = dataclasses.field(default_factory=Inner)


class WithToDict:
    def to_dict(self) -> dict[str, object]:
        return {"n_positions": 5}


def test_objects_are_copied() -> None:
    outer = Outer()
    config = Config.from_object(outer)
    assert config.values == {"block_size": 128, "rope": {"base": 1e4}}
    assert config.source is None
    assert config.line_of("block_size") is None
    given = {"a": {"b": [1]}}
    Config.from_object(given).values["a"]["b"].append(2)
    assert given == {"a": {"b": [1]}}
    assert Config.from_object(argparse.Namespace(block_size=3)).get("block_size") == 3
    nested = types.SimpleNamespace(rope_scaling=types.SimpleNamespace(factor=2.0))
    assert Config.from_object(nested).get("rope_scaling.factor") == 2.0
    assert Config.from_object(WithToDict()).get("n_positions") == 5
    with pytest.raises(LoadError, match="a int is no configuration"):
        Config.from_object(3)


def test_a_config_that_holds_itself_ends() -> None:
    loop: dict[str, object] = {}
    loop["self"] = loop
    assert Config.from_object(loop).get("self.self") is not None


@pytest.mark.parametrize(
    ("values", "maximum", "trained"),
    [
        ({"max_position_embeddings": 4096}, 4096, 4096),
        ({"n_positions": 1024, "n_ctx": 99}, 1024, 1024),
        ({"block_size": 256}, 256, 256),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192, 8192),
        (
            {"max_position_embeddings": 131072, "rope_scaling": {"original_max_position_embeddings": 8192}},
            131072,
            8192,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"full_attention": {"original_max_position_embeddings": 32}},
            },
            64,
            32,
        ),
        ({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}, 131072, 4096),
        ({"max_position_embeddings": True}, None, None),
        ({"max_position_embeddings": -1}, None, None),
        ({"max_length": 20}, None, None),
        # Rows that fairseq's models keep aside; max_seq_length of their tokenizers is 512, and 4096 of Longformer's.
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 514, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514}, 514, 512),
        ({"model_type": "longformer", "max_position_embeddings": 4098, "pad_token_id": 1}, 4098, 4096),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1}, 514, 512),
        ({"model_type": "layoutlmv3", "max_position_embeddings": 514, "pad_token_id": 1}, 514, 512),
        ({"model_type": "esm", "max_position_embeddings": 1026, "pad_token_id": 1}, 1026, 1024),
        (
            {
                "model_type": "esm",
                "max_position_embeddings": 1026,
                "pad_token_id": 1,
                "position_embedding_type": "rotary",
            },
            1026,
            1026,
        ),
        ({"model_type": "bert", "max_position_embeddings": 512, "pad_token_id": 0}, 512, 512),
        ({"model_type": "opt", "max_position_embeddings": 2048, "pad_token_id": 1}, 2048, 2048),
        ({"model_type": "roberta", "max_position_embeddings": 1, "pad_token_id": 1}, 1, 1),
        (
            {
                "model_type": "clap",
                "text_config": {"model_type": "clap_text_model", "max_position_embeddings": 514},
            },
            514,
            512,
        ),
    ],
)
def test_lengths(values: dict[str, object], maximum: int | None, trained: int | None) -> None:
    config = Config(values)
    assert maximum_length(config) == maximum
    assert trained_length(config) == trained


def test_config_inputs_and_config_json_import_no_torch(tmp_path: Path) -> None:
    path = written(tmp_path, '{"model_type": "llama"}')
    code = (
        "import sys, pediag.targets.config, pediag.targets.inputs\n"
        "from pediag.targets import open_target\n"
        f"assert open_target({str(path)!r}).config.get('model_type') == 'llama'\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize("kind", sorted(PADDED))
def test_rows_that_are_kept_aside_are_those_of_transformers(kind: str) -> None:
    """The first real token stands at the row after padding: ``cumsum(mask) + padding_idx``."""
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]()
    assert config.pad_token_id == PADDED[kind]
    folder = Path(transformers.__file__).parent / "models"
    name = type(config).__module__.split(".")[-2]
    text = "".join(path.read_text() for path in (folder / name).glob("modeling_*.py"))
    assert "create_position_ids_from_input_ids" in text
    assert "+ padding_idx" in text
