"""The callbacks in real trainings of transformers and Lightning."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pediag.errors import UsageError
from tests.watching._models import Learned, batch, made


def kinds(path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in map(json.loads, path.read_text().splitlines())]


def test_the_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from pediag.watching.transformers import WatchCallback

    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row} for row in batch().repeat(4, 1)]
    options = {
        "output_dir": str(tmp_path / "out"), "max_steps": 4, "per_device_train_batch_size": 2,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    callback = WatchCallback(every=2, log=tmp_path / "run.jsonl")
    arguments = transformers.TrainingArguments(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert kinds(tmp_path / "run.jsonl") == [("start", 0), ("step", 1), ("step", 2), ("step", 4), ("end", 4)]
    (table,) = callback.watch.last["tables"].values()
    assert table["moved"] and 0 < callback.watch.last["gradient"]["share"] < 1
    assert callback.watch.last["scale"]


def lightning():
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return __import__(name, fromlist=["Trainer"])
        except ImportError:
            continue
    return pytest.skip("lightning is not installed")


def module(pl, *, forward: bool, stops: int = -1):
    class Training(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = made(Learned)
            self.small = nn.Linear(2, 2)

        def training_step(self, ids, index):
            if index == stops:
                raise ZeroDivisionError
            return F.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if forward:
        Training.forward = lambda self, ids: self.net(ids)
    return Training()


@pytest.mark.parametrize("forward", [True, False])
def test_the_trainer_of_lightning(tmp_path, forward):
    pl = lightning()
    from pediag.watching.lightning import WatchCallback

    callback = WatchCallback(every=2, log=tmp_path / "run.jsonl")
    data = torch.utils.data.DataLoader(batch().repeat(4, 1), batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", callbacks=[callback],
        )  # fmt: skip
        trainer.fit(module(pl, forward=forward), data)
    assert kinds(tmp_path / "run.jsonl") == [("start", 0), ("step", 1), ("step", 2), ("end", 3)]
    assert callback.watch.last["scale"] and callback.watch.last["gradient"]["share"] > 0


def test_a_training_of_lightning_that_fails_ends_the_watch(tmp_path):
    pl = lightning()
    from pediag.watching.lightning import WatchCallback

    callback = WatchCallback(every=2, log=tmp_path / "run.jsonl", model="net")
    data = torch.utils.data.DataLoader(batch().repeat(4, 1), batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accelerator="cpu", callbacks=[callback],
        )  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module(pl, forward=False, stops=1), data)
    assert kinds(tmp_path / "run.jsonl")[-1] == ("end", 1)


def test_a_part_that_is_not_there():
    pl = lightning()
    from pediag.watching.lightning import network

    made_of = module(pl, forward=True)
    assert network(made_of) is made_of and network(made_of, "net") is made_of.net
    with pytest.raises(UsageError, match="has no part of this name"):
        network(made_of, "body")


def test_an_optimiser_that_tells_nothing_is_counted_by_the_callback(tmp_path):
    pytest.importorskip("transformers")
    from types import SimpleNamespace

    from pediag.watching.transformers import WatchCallback

    model, callback = made(Learned), WatchCallback(every=1, log=tmp_path / "run.jsonl")
    state = SimpleNamespace(global_step=3)
    callback.on_train_begin(None, state, None, model=model, optimizer=SimpleNamespace(param_groups=[]))
    model(batch()).logsumexp(-1).mean().backward()
    callback.on_pre_optimizer_step(None, state, None)
    callback.on_optimizer_step(None, state, None)
    callback.on_train_end(None, state, None)
    assert kinds(tmp_path / "run.jsonl") == [("start", 3), ("step", 4), ("end", 4)]
    assert callback.watch.last["gradient"]["share"] > 0
