"""What a word of the command line stands for. Files are made as torch and transformers write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pediag.errors import LoadError
from pediag.targets import naming
from pediag.targets.naming import Listing, named
from pediag.targets.opening import open_target

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 10000.0}
# Each as transformers writes it, shortened.
CLUTTER = {
    "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "max_length": 4096},
    "tokenizer_config.json": {"model_max_length": 4096, "tokenizer_class": "LlamaTokenizer"},
    "tokenizer.json": {"version": "1.0", "truncation": None, "model": {"type": "BPE", "vocab": {}}},
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"},
    "trainer_state.json": {"epoch": 1.0, "global_step": 500, "max_steps": 1000, "log_history": []},
    "all_results.json": {"eval_loss": 2.0},
    "vocab.json": {"hello": 0, "world": 1},
    "added_tokens.json": {"<pad>": 32000},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def declare(path: str, values: object = LLAMA) -> None:
    """Write JSON, and the folders that it takes."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(values))


def weights(path: str, **changes: object) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"place.weight": torch.zeros(8, 4), **changes}, path)


def touch(*paths: str) -> None:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"GGUF or what else")


def specs(*words: str) -> list[str]:
    listing = named(words)
    assert not [str(item.error) for item in listing.targets if item.error]
    return [item.spec for item in listing.targets]


def only(listing: Listing) -> LoadError:
    (item,) = listing.targets
    assert item.error is not None
    return item.error


@pytest.mark.parametrize("word", ["model.py:net", "package.module:build", "nowhere", "a b", "C:\\x.pt", ""])
def test_a_word_without_a_pattern_stays(word):
    listing = named([word])
    assert [(item.spec, item.found) for item in listing.targets] == [(word, False)]
    assert (listing.several, listing.notes) == (False, [])


def test_a_name_with_brackets_that_exists_is_no_pattern():
    weights("model[1].pt")
    weights("model1.pt")
    touch("net[1].py")
    assert specs("model[1].pt", "net[1].py:build") == ["model[1].pt", "net[1].py:build"]


def test_patterns_match_models_in_natural_order():
    for step in (1, 2, 10, 9):
        weights(f"runs/{step}/model-{step}.pt")
        declare(f"runs/{step}/config.json")
    touch("runs/notes.txt", "runs/1/.hidden.pt", ".git/x.pt", "code.py")
    steps = ["1", "2", "9", "10"]
    assert specs("runs/*/config.json") == [f"runs/{step}/config.json" for step in steps]
    assert specs("runs/*/*.pt") == [f"runs/{step}/model-{step}.pt" for step in steps]
    assert specs("runs/[19]/model-?.pt") == ["runs/1/model-1.pt", "runs/9/model-9.pt"]
    assert specs("**/model*.pt") == specs("runs/*/*.pt")
    assert specs("./runs/**/model*.pt") == [f"./runs/{step}/model-{step}.pt" for step in steps]
    assert specs(f"{os.getcwd()}/runs/1?/*.pt") == [f"{os.getcwd()}/runs/10/model-10.pt"]
    assert named(["runs/*/config.json"]).several


def test_a_model_folder_and_what_is_in_it_are_one_target():
    for name in "ab":
        declare(f"runs/{name}/config.json")
        weights(f"runs/{name}/pytorch_model.bin")
        declare(
            f"runs/{name}/1_Pooling/config.json", {"word_embedding_dimension": 64, "pooling_mode": "mean"}
        )
    declare("runs/a/checkpoint-5/config.json")
    assert specs("runs/*") == ["runs/a", "runs/b"]
    assert specs("runs/**") == ["runs/a", "runs/a/checkpoint-5", "runs/b"]
    assert specs("runs/a*", "runs/b", "./runs/b") == ["runs/a", "runs/b"]


def test_a_pattern_of_code_takes_a_name():
    touch("models/a.py", "models/b.py", "models/c.txt")
    assert specs("models/*.py:build") == ["models/a.py:build", "models/b.py:build"]
    assert "none of which is a model; name code as file.py:name" in str(only(named(["models/*.py"])))
    assert "none of which is a .py file" in str(only(named(["models/*.txt:build"])))


@pytest.mark.parametrize("word", ["*.gguf", "no/[a-z]*/**", "model[0].py:net", "**/x?"])
def test_a_pattern_without_a_match_says_so_in_its_place(word):
    weights("model.pt")
    assert str(only(named([word]))) == f"no such file: {word} (as a pattern it matches nothing)"
    assert [item.spec for item in named(["model.pt", word, "other"]).targets] == ["model.pt", word, "other"]


def test_a_pattern_that_matches_no_model_says_what_it_matches():
    touch("a.txt", "b.txt")
    assert str(only(named(["*.txt"]))) == "*.txt: matches a.txt, b.txt, none of which is a model"


def test_a_folder_of_checkpoints_stands_for_them():
    weights("runs/step-10.pt")
    weights("runs/step-9.pt")
    touch("runs/q4.gguf", "runs/README.md", "runs/train.py", "runs/sub/deep.pt")
    declare("runs/final/config.json")
    declare("runs/lora/adapter_config.json", {"peft_type": "LORA", "r": 8})
    declare("runs/gpt2.json", {"n_positions": 1024, "n_embd": 768})
    for name, values in CLUTTER.items():
        declare(f"runs/{name}", values)
    listing = named(["runs"])
    found = ["final", "gpt2.json", "lora", "q4.gguf", "step-9.pt", "step-10.pt"]
    assert [item.spec for item in listing.targets] == [f"runs/{name}" for name in found]
    assert listing.several
    (note,) = listing.notes
    assert note.startswith(
        "runs: a folder without config.json, read as the models in it; left out, as they hold"
    )
    assert "added_tokens.json" in note
    assert specs("runs/") == [f"runs/{name}" for name in found]


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "params.json"])
def test_a_model_folder_stays(name):
    declare(f"model/{name}")
    weights("model/a.pt")
    weights("model/b.pt")
    assert specs("model") == ["model"]
    assert not named(["model"]).several


def test_a_folder_in_which_nothing_is_found_stays_for_its_opener_to_refuse():
    touch("empty/x.txt", "nested/deeper/deepest/x.pt")
    assert specs("empty", "nested") == ["empty", "nested"]
    with pytest.raises(LoadError, match="a directory without config"):
        open_target("empty")


def test_what_goes_with_training_is_left_out():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimiser = torch.optim.Adam([parameter])
    weights("run/model.pt", epoch=3)
    weights("run/half.pth", table=torch.zeros(4, dtype=torch.bfloat16))
    torch.save(
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0).state_dict(), "run/scheduler.pt"
    )
    torch.save({"cpu": torch.get_rng_state(), "python": (3, (1, 2), None)}, "run/rng_state.pth")
    torch.save(Path("arguments"), "run/training_args.bin")
    (note,) = named(["run"]).notes
    assert specs("run") == ["run/half.pth", "run/model.pt"]
    assert note.endswith("hold no model: rng_state.pth, scheduler.pt, training_args.bin")


def test_what_cannot_be_told_is_not_left_out():
    """A damaged file is an error of the run, never silence."""
    weights("run/old.pt")
    torch.save({"w": torch.zeros(2)}, "run/legacy.pt", _use_new_zipfile_serialization=False)
    touch("run/broken.pt", "run/other/config.json")
    Path("run/empty.pt").write_bytes(b"")
    Path("run/cut.pt").write_bytes(Path("run/old.pt").read_bytes()[:-40])
    Path("run/broken.json").write_text('{"model_type": ')
    assert specs("run") == [
        f"run/{name}"
        for name in ("broken.json", "broken.pt", "cut.pt", "empty.pt", "legacy.pt", "old.pt", "other")
    ]


INDEX = {
    "metadata": {},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}


def test_shards_are_one_model():
    shards = sorted(INDEX["weight_map"].values())
    touch(*(f"big/{shard}" for shard in shards), "big/other.safetensors")
    declare("big/model.safetensors.index.json", INDEX)
    index = "big/model.safetensors.index.json"
    both = [index, "big/other.safetensors"]
    assert sorted(specs("big")) == sorted(specs("big/*")) == sorted(specs("big/*.safetensors")) == both
    assert specs(f"big/{shards[0]}") == [f"big/{shards[0]}"]
    listing = named([f"big/{shard}" for shard in shards])
    assert [item.spec for item in listing.targets] == [index]
    assert listing.notes == [f"{index}: its 2 shards are one model"]


def test_parts_of_a_split_gguf_are_one_model():
    touch(
        *(f"q/llama-{part:05}-of-00003.gguf" for part in (1, 2, 3)),
        "q/small-00002-of-00002.gguf",
        "q/one.gguf",
    )
    assert specs("q") == ["q/llama-00001-of-00003.gguf", "q/one.gguf", "q/small-00002-of-00002.gguf"]
    assert specs(*sorted(map(str, Path("q").glob("llama*")))) == ["q/llama-00001-of-00003.gguf"]


def test_the_same_target_is_checked_once():
    weights("a.pt")
    touch("net.py")
    os.symlink("a.pt", "best.pt")
    listing = named(["a.pt", "./a.pt", "best.pt", "net.py:x", "./net.py:x", "net.py:y", "m:x", "m:x", "*.pt"])
    assert [item.spec for item in listing.targets] == ["a.pt", "net.py:x", "net.py:y", "m:x"]
    assert "best.pt: the same as a.pt, checked once" in listing.notes


def test_links_in_circles_end():
    weights("runs/a/model.pt")
    for name in ("one", "two", "three"):
        os.symlink("..", f"runs/a/{name}")
    assert specs("runs/**/*.pt") == ["runs/a/model.pt"]
    assert specs("**") == ["runs/a/model.pt"]


def test_more_than_was_meant_is_refused(monkeypatch):
    monkeypatch.setattr(naming, "MOST", 3)
    for step in range(5):
        weights(f"run/{step}.pt")
    assert str(only(named(["run/*"]))) == "run/*: more than 3 targets in one call: name fewer"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_folder_without_permission_stays_for_its_opener_to_refuse():
    weights("shut/a.pt")
    os.chmod("shut", 0)
    try:
        assert specs("shut") == ["shut"]
        assert only(named(["shut/*"]))
    finally:
        os.chmod("shut", 0o700)


def test_naming_imports_no_torch():
    weights("run/a.pt")
    code = (
        "from pediag.targets.naming import named; named(['run', '**'])\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
