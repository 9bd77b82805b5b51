"""``pediag attribute``: inputs of all kinds, outputs of all kinds, one line for what cannot be meant."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import pediag
from pediag.attributing.model import AttentionMap, HeadMap
from pediag.attributing.tokens import Reader, single
from pediag.cli import main
from pediag.errors import TraceError, UsageError
from pediag.report import attribution as report
from pediag.report import attribution_drawing as drawing
from pediag.report.html import attribution as page

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads(Path(report.__file__).with_name("attribution_schema_version_1.json").read_text())
ENCODER = f"{ROOT}/fixtures/documents/learned.py:model"
DECODER = f"{ROOT}/fixtures/documents/rotary.py:model"


@pytest.fixture(scope="module")
def ids(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "ids.json"
    path.write_text(json.dumps([{"ids": [[5, 9, 11, 7, 3]]}, {"ids": [4, 8, 15, 16]}]))
    return path


def argument(spec: str) -> str:
    """The first argument of the model's forward."""
    import inspect

    from pediag.targets import open_target

    module = open_target(spec).module
    assert module is not None
    return next(iter(inspect.signature(module.forward).parameters))


@pytest.fixture(scope="module")
def found(ids):
    name = argument(DECODER)
    inputs = [{name: torch.tensor(one["ids"]).reshape(1, -1)} for one in json.loads(ids.read_text())]
    return pediag.attribute(DECODER, inputs)


def test_json_is_what_the_schema_says(found):
    value = json.loads(json.dumps(found.to_dict()))
    jsonschema.Draft202012Validator(SCHEMA).validate(value)
    assert [len(one["tokens"]) for one in value["inputs"]] == [5, 4]
    assert [one["code"] for one in value["rules"]] == ["PE801", "PE802"]
    first = value["inputs"][0]
    assert first["share"] == pytest.approx(sum(layer["share"] for layer in first["layers"]))
    sizes = [sum(map(abs, first[side]["by_token"])) for side in ("position", "token")]
    for place, value_there in enumerate(first["position"]["by_token"]):
        assert sum(layer["by_token"][place] for layer in first["layers"]) == pytest.approx(
            value_there, abs=1e-9
        )
    assert len(first["layers"]) == 2 and 0 < first["share"] < 1 and min(sizes) > 0
    assert value["share"] == pytest.approx(sum(one["share"] for one in value["inputs"]) / 2)


def test_the_page_needs_nothing_else(found):
    text = page.render(found)
    # For each of two inputs the sides, the modules and the heads.
    assert text.count("<svg") == 6 and "<script" not in text and "http:" not in text and "https:" not in text
    assert "default-src 'none'" in text
    assert text == page.render(found)


def test_names_of_the_user_are_text_on_the_page(found):
    head = HeadMap("<b>layer</b>", 0, 0.5, None, 1.0, 1.0, 1.0, [1.0], [1.0])
    made = report.Attribution(
        found.target, [], [], [AttentionMap(["<i>a</i>", "b"], [head], [(0, 0)], [])], [], ["<u>note</u>"]
    )
    text = page.render(made)
    assert (
        "&lt;b&gt;layer" in text and "&lt;u&gt;note" in text and "<b>layer" not in text and "<u>" not in text
    )


def test_the_terminal_shows_bars_and_shades(found):
    text = str(found)
    # Of two modules nothing is ranked.
    assert "share of position" in text and "rank agreement of attribution and ablation over tokens" in text
    assert (
        drawing.bar(1.0, 1.0, 4) == "████" and drawing.bar(-0.5, 1.0, 4) == "██" and drawing.bar(0, 0) == ""
    )
    assert drawing.strip([0.0, 0.3, 1.0]) == "·░█"
    assert drawing.plain_ascii(text).isascii()


def test_the_command_reads_files_and_writes_them(ids, tmp_path, capsys):
    name = argument(DECODER)
    path = tmp_path / "in.json"
    path.write_text(ids.read_text().replace('"ids"', f'"{name}"'))
    out = tmp_path / "map.html"
    assert main(["attribute", DECODER, "--input", str(path), "--format", "html", "--output", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert main(["attribute", DECODER, "--input", str(path), "--attention", "--format", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["inputs"] == [] and len(value["attention"]) == 2


def test_without_input_random_tokens_are_taken_and_said(capsys):
    assert main(["attribute", ENCODER, "--seq-len", "6", "--no-attention"]) == 0
    assert "6 random tokens were taken" in capsys.readouterr().out


def test_a_function_reads_texts():
    made = pediag.attribute(
        nn.Sequential(nn.Embedding(128, 8)), texts=["abcd", "xyz"], tokenizer=lambda text: [ord(c) for c in text],
        of=lambda output: output.sum(), attention=False,
    )  # fmt: skip
    assert [len(text.tokens) for text in made.texts] == [4, 3]
    assert made.verdict == "nothing-measured"


def test_a_batch_is_taken_apart_and_its_padding_off():
    rows = single(
        {
            "input_ids": torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
            "use_cache": False,
        }
    )
    assert [row["input_ids"].tolist() for row in rows] == [[[5, 6, 7]], [[1, 2, 3, 4, 5]]]
    assert [row["attention_mask"].tolist() for row in rows] == [[[1, 1, 1]], [[1] * 5]]
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert [row[0].tolist() for row in single((ids,))] == [[[1, 2, 3]], [[4, 5, 6]]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text", "a text"], "--tokenizer"),
        (["--texts", "missing.txt"], "no such file"),
        (["--input", "missing.json"], "no such file"),
        (["--input", "bad.json"], "is no JSON"),
        (["--input", "words.json"], "no array of numbers"),
        (["--input", "list.json"], "write an object"),
        (["--input", "empty.json"], "empty list"),
        (["--input", "one.json"], "two or more"),
        (["--input", "large.json"], "forward raised"),
        (["--input", "name.json"], "nothing"),
        (["--input", "/dev/zero"], "is above 64 MiB"),
        (["--texts", "/dev/zero"], "is above 64 MiB"),
        (["--of", "nonsense"], "nonsense"),
        (["--of", "100000"], "numbers at its end"),
        (["--of", "mask"], "no mask token"),
        (["--steps", "3"], "from 16"),
        (["--tokenizer", "missing"], "no folder"),
        (["--format", "html", "--output", "missing/a.html"], "does not exist"),
    ],
)
def test_what_cannot_be_meant_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = argument(ENCODER)
    for file, text in {
        "bad.json": "{",
        "words.json": f'{{"{name}": ["a"]}}',
        "list.json": "[1, 2]",
        "empty.json": "[]",
        "one.json": f'{{"{name}": [[1]]}}',
        "large.json": f'{{"{name}": [[1, 99999999]]}}',
        "name.json": '{"nothing": [[1, 2, 3]]}',
    }.items():
        (tmp_path / file).write_text(text)
    assert main(["attribute", ENCODER, *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("pediag: error: ") and said in line


class Vectors(nn.Module):
    """A vector for each token, as the encoders of transformers name it; at most 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(12, 4)

    def forward(self, ids: torch.Tensor) -> Any:
        if ids.is_floating_point():
            raise TypeError("ids are whole numbers")
        return {"last_hidden_state": self.tokens(ids) + self.places(torch.arange(ids.shape[1]))}


def test_vectors_are_no_scores_of_tokens():
    for of in (2, "next", "token"):
        with pytest.raises(UsageError, match="a vector for each token, not scores: give mean, first"):
            pediag.attribute(Vectors(), (torch.tensor([[1, 2]]),), of=of)
    assert pediag.attribute(Vectors(), (torch.tensor([[1, 2]]),), of="first", attention=False).share


def test_a_text_that_is_too_long_is_told_with_the_length_that_is_not():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=9, max_position_embeddings=12, **sizes)
    with pytest.raises(TraceError, match="is meant for 12 tokens at most: give a shorter text"):
        pediag.attribute(transformers.BertModel(config), (torch.zeros(1, 20, dtype=torch.int64),))


def test_inputs_that_forward_does_not_take_are_asked_for_as_they_are_given_here():
    with pytest.raises(
        TraceError, match=r"whole numbers.*; give inputs that forward takes: --input FILE"
    ) as raised:
        pediag.attribute(Vectors(), (torch.rand(1, 5),))
    assert "dtype" not in str(raised.value)


def test_an_id_without_a_name_is_shown_as_it_is():
    def name(index: int) -> str:
        return ["a", "b"][index]

    reader = Reader(lambda text: [0, 1], name)
    assert [reader.name(index) for index in (1, 7)] == ["b", "7"]


def test_captum_is_asked_for_where_it_is_missing(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "captum"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "captum", None)
    assert main(["attribute", ENCODER]) == 2
    assert "captum is not installed" in capsys.readouterr().err
    assert main(["attribute", ENCODER, "--seq-len", "6", "--attention"]) == 0


def test_captum_is_imported_inside_of_functions_only():
    for path in (ROOT / "pediag").rglob("*.py"):
        top = ast.parse(path.read_text(encoding="utf-8")).body
        names = [getattr(node, "module", None) or "" for node in top if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in top if isinstance(node, ast.Import) for alias in node.names]
        assert not [name for name in names if name.partition(".")[0] == "captum"], path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"baseline": "median"}, "baseline 'median'"),
        ({"steps": 16.0}, "steps"),
        ({"gradients": False, "attention": False}, "nothing to measure"),
        ({"of": lambda output: output}, "one real number"),
        ({"inputs": {}}, "no tensor"),
        ({"inputs": (torch.zeros(1, 3, 8, 8),)}, "no sequence"),
        ({"texts": " ", "tokenizer": lambda text: [1]}, "empty text"),
        ({"texts": "a", "tokenizer": lambda text: [1]}, "two or more"),
        ({"texts": "a", "tokenizer": 3}, "tokenizer must be"),
        ({"texts": "a", "tokenizer": lambda text: ["a", "b"]}, "the tokenizer makes no ids: ValueError"),
        ({"texts": "a", "tokenizer": lambda text: [1, 2**70]}, "the tokenizer makes no ids"),
        ({"texts": 5, "tokenizer": list}, "texts must be a text or a list of them; got a int"),
        ({"texts": [None], "tokenizer": list}, "texts must be a text or a list of them; got a NoneType"),
        ({"inputs": (torch.zeros(1, 3, device="meta"),)}, "meta device"),
        ({"seq_len": "x"}, "seq_len must be a whole number"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], said):
    with pytest.raises(UsageError, match=said):
        pediag.attribute(
            nn.Sequential(nn.Embedding(9, 4)), **{"inputs": (torch.tensor([[1, 2]]),), **options}
        )


def test_a_forward_without_gradients_is_told():
    class Closed(nn.Sequential):
        def forward(self, ids: torch.Tensor) -> Any:
            with torch.no_grad():
                return super().forward(ids)

    with pytest.raises(UsageError, match="no_grad"):
        pediag.attribute(Closed(nn.Embedding(9, 4)), (torch.tensor([[1, 2]]),))
