"""pediag.watch beside real trainings: what it measures, what it warns of, and that it leaves them as they are."""

# ruff: noqa: PT012, PT031, SIM117

from __future__ import annotations

import copy
import dataclasses
import json
import math
import warnings
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import pediag
from pediag.errors import PediagWarning, UsageError
from tests.watching._models import Learned, Several, Turned, batch, made, train

SCHEMA = json.loads((Path(pediag.__file__).parent / "watching" / "schema_version_1.json").read_text())


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def adamw(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **{"weight_decay": 0.0, **options})


def run(model, optimizer, steps, **options):
    """Train beside a watch; the watch, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pediag.watch(model, optimizer, **options) as watch:
            for _ in train(model, optimizer, steps):
                pass
    return watch, [str(item.message) for item in caught if issubclass(item.category, PediagWarning)]


def records(path: Path) -> list[dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for record in found:
        jsonschema.validate(record, SCHEMA)
    return found


def hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A watched training of four steps, and one without a watch."""
    torch.manual_seed(0)
    log = tmp_path_factory.mktemp("log") / "run.jsonl"
    model, alone = made(Learned), made(Learned)
    start = model.where.detach().clone()
    optimizer = adamw(model)
    watch, warned = run(model, optimizer, 4, every=2, log=log, attention=True)
    for _ in train(alone, adamw(alone), 4):
        pass
    return {
        "model": model, "alone": alone, "start": start, "log": log, "watch": watch, "warned": warned,
        "optimizer": optimizer,
    }  # fmt: skip


def test_the_first_and_every_second_step_is_measured(healthy):
    found = records(healthy["log"])
    assert [record["kind"] for record in found] == ["start", "step", "step", "step", "end"]
    assert [record["step"] for record in found] == [0, 1, 2, 4, 4]
    assert found[0]["tables"] == ["where"] and found[0]["encodings"][0]["scheme"] == "learned"
    assert healthy["warned"] == []


def test_training_beside_it_is_the_same_training(healthy):
    ours, theirs = healthy["model"].state_dict(), healthy["alone"].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_no_hook_is_left(healthy):
    assert hooks(healthy["model"]) == 0
    assert not healthy["optimizer"]._optimizer_step_pre_hooks
    assert not healthy["optimizer"]._optimizer_step_post_hooks


def test_drift_is_that_of_the_table_now(healthy):
    start, now = healthy["start"].double(), healthy["model"].where.detach().double()
    (table,) = healthy["watch"].last["tables"].values()
    assert table["drift"] == pytest.approx(float((now - start).norm() / start.norm()), rel=1e-5)
    assert table["moved"] is True and 1 < table["rank"] <= 16


def test_scale_ratio_is_that_of_the_operands(healthy):
    """At step 1: the table as it was drawn, and the tokens of the first batch."""
    fresh = made(Learned)
    tokens = fresh.tok(batch(1)[:, :-1]).detach().double().reshape(-1, 16)
    rows = fresh.where[:20].detach().double()
    expected = math.sqrt(rows.var(0, unbiased=False).mean() / tokens.var(0, unbiased=False).mean())
    (ratio,) = records(healthy["log"])[1]["scale"].values()
    assert ratio == pytest.approx(expected, rel=1e-4)


def test_gradient_share_and_attention_are_those_of_the_model(healthy):
    fresh = made(Learned)
    for _ in train(fresh, adamw(fresh), 1):
        given = {name: item.grad for name, item in fresh.named_parameters() if item.grad is not None}
        squares = {name: float(gradient.double().square().sum()) for name, gradient in given.items()}
    first = records(healthy["log"])[1]
    assert first["gradient"]["share"] == pytest.approx(squares["where"] / sum(squares.values()), rel=1e-4)
    assert first["gradient"]["norm"] == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-4)
    assert set(first["attention"]) == {"body"}
    assert 0 < first["attention"]["body"]["first"] < 1


def test_the_position_is_told_from_another_term_of_one_sum(tmp_path):
    model = made(Several)
    fresh = made(Several)
    watch, _ = run(model, adamw(model), 1, every=100)
    ids = batch(1)[:, :-1]
    content = (fresh.tok(ids) + fresh.kind(ids % 2)).detach().double().reshape(-1, 16)
    rows = fresh.where[:20].detach().double()
    expected = math.sqrt(rows.var(0, unbiased=False).mean() / content.var(0, unbiased=False).mean())
    (ratio,) = watch.last["scale"].values()
    assert ratio == pytest.approx(expected, rel=1e-4)


def test_a_mismatch_of_scale_is_warned_of_once():
    model = made(Learned, 60.0)
    watch, warned = run(model, torch.optim.SGD(model.parameters(), lr=1e-6), 3, every=1)
    assert [finding.code for finding in watch.findings] == ["PE301"]
    assert len(warned) == 1 and "PE301" in warned[0]
    assert watch.findings[0].evidence.measured == pytest.approx(60, rel=0.2)
    assert watch.findings[0].where.line is not None


def test_a_cast_of_frequencies_is_told_at_its_step():
    model = made(Turned)
    optimizer = adamw(model)
    exact = model.w.double()
    with pytest.warns(PediagWarning, match=r"PE602.*float32 to bfloat16 at step 3\b"):
        with pediag.watch(model, optimizer, every=100, seq_len=4096) as watch:
            for step in train(model, optimizer, 6):
                if step == 3:
                    model.to(torch.bfloat16).to(torch.float32)
                    model.w = model.w.bfloat16()
    (finding,) = watch.findings
    phase = float((exact - exact.float().bfloat16().double()).abs().max()) * 4096
    assert finding.evidence.measured == pytest.approx(phase, rel=1e-6)


def test_numbers_that_went_through_a_half_format_and_came_back_are_told_at_a_measured_step():
    model = made(Turned)
    optimizer = adamw(model)
    with pytest.warns(PediagWarning, match=r"PE602.*rounded to bfloat16"):
        with pediag.watch(model, optimizer, every=4, seq_len=4096) as watch:
            for step in train(model, optimizer, 4):
                if step == 2:
                    model.w = model.w.bfloat16().float()
    assert watch.last["constants_changed"] == ["w"]


def test_other_changes_of_a_constant_are_told():
    model = made(Turned)
    optimizer = adamw(model)
    with pytest.warns(PediagWarning, match="PE705"), pediag.watch(model, optimizer, every=2) as watch:
        for _ in train(model, optimizer, 2):
            model.w *= 0.5
    assert watch.findings[0].evidence.measured == pytest.approx(0.5)  # the first is measured


def test_a_table_in_no_optimiser_is_told_with_the_reason():
    model = made(Learned)
    rest = [item for item in model.parameters() if item is not model.where]
    watch, _ = run(model, torch.optim.SGD(rest, lr=0.1), 20, every=20)
    (finding,) = watch.findings
    assert finding.code == "PE805" and "the first is in no group of the optimiser" in finding.message


def test_a_table_that_does_not_move_is_told_after_twenty_steps():
    model = made(Learned)
    model.where.requires_grad_(False)
    watch, warned = run(model, adamw(model), 20, every=10)
    assert [finding.code for finding in watch.findings] == ["PE805"]
    assert "`where`" in warned[0] and "frozen" in warned[0]


def test_adapters_leave_tables_alone_on_purpose():
    model = made(Learned).requires_grad_(False)
    model.body.qkv.weight.requires_grad_(True)
    watch, warned = run(model, adamw(model), 20, every=10)
    assert watch.findings == [] and warned == []


def test_decay_of_positions_is_told_at_the_start():
    model = made(Learned)
    with (
        pytest.warns(PediagWarning, match="PE803"),
        pediag.watch(model, adamw(model, weight_decay=0.1)) as watch,
    ):
        pass
    assert watch.findings[0].evidence.measured == 0.1


def test_steps_without_an_optimiser_are_counted_by_hand():
    model = made(Learned)
    optimizer = adamw(model)
    with pediag.watch(model, every=2) as watch:
        for _ in train(model, optimizer, 4):
            watch.step()
    assert watch.steps == 4 and watch.last["gradient"]["share"] > 0


def test_accumulation_counts_steps_of_the_optimiser_and_a_resume_goes_on():
    model = made(Learned)
    optimizer = adamw(model)
    with pediag.watch(model, [optimizer, adamw(made(Turned))], every=2, first_step=7) as watch:
        for at in range(6):
            model(batch(at)).logsumexp(-1).mean().backward()
            if at % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert watch.steps == 10 and watch.last["step"] == 10


def test_an_exception_goes_through_and_leaves_no_hook():
    model = made(Learned)
    optimizer = adamw(model)
    with pytest.raises(ZeroDivisionError), pediag.watch(model, optimizer, every=1):
        for _ in train(model, optimizer, 3):
            raise ZeroDivisionError
    assert hooks(model) == 0 and not optimizer._optimizer_step_post_hooks


def test_an_exception_in_forward_leaves_no_mode():
    model = made(Learned)
    optimizer = adamw(model)
    with pediag.watch(model, optimizer, every=1) as watch:
        with pytest.raises(IndexError):
            model(torch.full((1, 5), 99))
        for _ in train(model, optimizer, 2):
            pass
    assert torch._C._len_torch_dispatch_stack() == 0
    assert watch.steps == 2 and watch.last["scale"]


def test_an_interrupt_in_forward_leaves_no_mode():
    """torch calls no hook after a KeyboardInterrupt."""

    class Interrupted(Learned):
        def forward(self, ids):
            out = super().forward(ids)
            if self.training and int(ids.shape[0]) == 3:
                raise KeyboardInterrupt
            return out

    model = made(Interrupted)
    with pytest.raises(KeyboardInterrupt), pediag.watch(model, adamw(model), every=1):
        model(torch.ones(3, 5, dtype=torch.long))
    assert torch._C._len_torch_dispatch_stack() == 0 and hooks(model) == 0


def test_where_optimisers_step_within_the_backward_pass_no_gradient_share_is_told(tmp_path):
    model = made(Learned)
    each = {item: torch.optim.SGD([item], lr=0.01) for item in model.parameters()}

    def step(item: torch.Tensor) -> None:
        each[item].step()
        each[item].zero_grad()

    for item in each:
        item.register_post_accumulate_grad_hook(step)
    log = tmp_path / "run.jsonl"
    with pediag.watch(model, list(each.values()), every=1, log=log) as watch:
        for _ in range(2):
            model(batch()).sum().backward()
    assert watch.steps == 2 and [record.get("gradient") for record in records(log)[1:3]] == [{}, {}]


def test_evaluation_between_steps_is_not_measured():
    model = made(Learned)
    optimizer = adamw(model)
    with pediag.watch(model, optimizer, every=2) as watch:
        for step in train(model, optimizer, 2):
            if step == 1:
                continue
        before = watch.last["scale"]
        model.eval()
        with torch.no_grad():
            model(batch())
        model.train()
    assert before == watch.last["scale"]


def test_a_log_that_fails_is_one_warning_and_training_goes_on():
    model = made(Learned)
    optimizer = adamw(model)
    with pytest.warns(PediagWarning, match="writes no more to its JsonLines: .*space"):
        with pediag.watch(model, optimizer, every=1, log="/dev/full") as watch:
            for _ in train(model, optimizer, 3):
                pass
    assert watch.steps == 3


def test_an_error_of_its_own_is_one_warning_and_training_goes_on(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("no rank today")

    monkeypatch.setattr("pediag.watching.measures.effective_rank", broken)
    model = made(Learned)
    watch, warned = run(model, adamw(model), 3, every=1)
    assert warned == ["pediag.watch: a measured step is not watched any more: RuntimeError: no rank today"]
    assert watch.steps == 3


def test_where_warnings_are_errors_training_goes_on():
    model = made(Learned, 60.0)
    optimizer = adamw(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pediag.watch(model, optimizer, every=1) as watch:
            for _ in train(model, optimizer, 2):
                pass
    assert watch.steps == 2 and [finding.code for finding in watch.findings] == ["PE301"]


def test_a_model_that_cannot_be_looked_at_trains_all_the_same():
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(50, 50)

        def forward(self, ids):
            return self.tok(ids) * (1 if int(ids.sum()) else 2)

    model = Reading()
    watch, warned = run(model, adamw(model), 2, every=1)
    assert watch.steps == 2 and len(warned) == 1 and "the model could not be looked at" in warned[0]


def test_of_a_model_that_could_not_be_looked_at_nothing_is_said_that_is_not_so(tmp_path):
    class Raising(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(50, 50)

        def forward(self, ids):
            raise OSError("no file")

    model = made(Raising)
    log = tmp_path / "run.jsonl"
    with pytest.warns(PediagWarning, match="could not be looked at"), pediag.watch(model, log=log):
        pass
    assert records(log)[0]["notes"] == ["the model could not be looked at"]


def test_ranks_at_different_steps_are_not_compared():
    class Other:
        """Another rank, one step ahead, whose table is another one too."""

        rank, position_ids, sequence = 0, None, ()

        def gather(self, mine):
            table = {name: dataclasses.replace(one, bits="") for name, one in mine.tensors.items()}
            return [
                mine,
                dataclasses.replace(
                    mine, rank=1, step=2 * mine.step, tensors=table if mine.step else mine.tensors
                ),
            ]

    watch, warned = run(*_with_optimizer(), 3, every=1, ranks=Other())
    said = "ranks: they are at steps 1 and 2; give all the same every and first_step"
    assert warned == [f"pediag.watch: ranks are not watched any more: {said}"]
    assert watch.findings == [] and watch.steps == 3


def _with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made(Learned)
    return model, adamw(model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every must be a whole number"),
        ({"every": 2.5}, "every must be a whole number"),
        ({"first_step": -1}, "first_step"),
        ({"optimizer": 3}, "must be a torch.optim.Optimizer"),
        ({"log": "/nowhere/at/all.jsonl"}, "cannot be written"),
        ({"log": 5}, "log must be the name of a file; got a int"),
        ({"ranks": True}, "torch.distributed is not initialised"),
        ({"ranks": "all"}, "ranks must be True, False or a pediag.Ranks; got 'all'"),
        ({"optimizer": []}, "optimizer is an empty list"),
        ({"seq_len": 0}, "seq_len must be a whole number"),
        ({"inputs": "nonsense"}, "'nonsense' cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_said_at_once(options, said):
    optimizer = options.pop("optimizer", None)
    with pytest.raises(UsageError, match=said), pediag.watch(made(Learned), optimizer, **options):
        pass


def test_a_model_is_needed():
    with pytest.raises(UsageError, match="live"):
        pediag.watch("model.pt")


def test_a_wrapped_and_a_compiled_model_are_watched():
    model = made(Learned)
    optimizer = adamw(model)
    with pediag.watch(nn.DataParallel(model), optimizer, every=1) as watch:
        for _ in train(model, optimizer, 1):
            pass
    assert watch.last["tables"]["where"]["moved"] and watch.last["scale"]
    model.compile(backend="eager")
    with pediag.watch(model, optimizer, every=1) as watch:
        for _ in train(model, optimizer, 1):
            pass
    assert watch.last["tables"]["where"]["moved"] and "scale" not in watch.last


def test_gradient_scaling_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    model = made(Learned)
    forward = type(model).forward
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu")
    with pediag.watch(model, optimizer, every=1) as watch:
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(lambda ids: forward(model, ids), batch(), use_reentrant=False)
        scaler.scale(out.float().logsumexp(-1).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert watch.steps == 1 and 0 < watch.last["gradient"]["share"] < 1
    assert hooks(model) == 0


def test_a_copy_of_the_model_takes_no_hook_along(tmp_path):
    model = made(Learned)
    optimizer = adamw(model)
    with pediag.watch(model, optimizer, every=1) as watch:
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        copied(batch())
        assert watch._probe.scale == {}
        model(batch())
        assert watch._probe.scale
    assert hooks(model) == 0
    torch.load(tmp_path / "model.pt", weights_only=False)(batch())


def test_a_warning_points_at_the_line_of_the_user():
    model = made(Learned, 60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with pytest.warns(PediagWarning, match="PE301") as caught:
        with pediag.watch(model, optimizer, every=1):
            for _ in train(model, optimizer, 1):
                pass
    assert Path(caught[0].filename).name == "_models.py"


def test_a_model_that_was_not_seen_still_has_a_whole_log(tmp_path):
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(2))

    model = Nothing()
    optimizer = adamw(model)
    with pytest.warns(PediagWarning, match="could not be looked at"):
        with pediag.watch(model, optimizer, every=1, log=tmp_path / "run.jsonl"):
            model.one.grad = torch.ones(2)
            optimizer.step()
    assert [record["kind"] for record in records(tmp_path / "run.jsonl")] == [
        "start",
        "problem",
        "step",
        "end",
    ]


def test_a_table_that_starts_at_zero_has_to_grow_first():
    model = made(Learned, 0.0)
    watch, warned = run(model, torch.optim.SGD(model.parameters(), lr=1e-3), 3, every=1)
    (ratio,) = watch.last["scale"].values()
    assert 0 < ratio < 0.1 and warned == []
    assert watch.last["tables"]["where"] == {"drift": None, "rank": pytest.approx(8, abs=8), "moved": True}


def test_a_model_without_positions_is_said_to_have_none(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(PediagWarning, match="no position encoding was found"):
        with pediag.watch(model, optimizer, every=1, log=tmp_path / "run.jsonl") as watch:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert [record["kind"] for record in records(tmp_path / "run.jsonl")] == [
        "start",
        "problem",
        "step",
        "end",
    ]
    assert watch.last["gradient"]["share"] == 0
