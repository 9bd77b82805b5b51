"""Wrapped and sharded models in two real processes: what each rank reports, and that none waits for the other."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.targets.code._decoder import (
    CHECKED_AT,
    HEADS,
    WORDS,
    Attention,
    Decoder,
    decoder,
    ratio_of_deviations,
    state,
)

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this build of torch has no gloo", allow_module_level=True)
pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP2")

RANKS = 2
ENDS_AFTER = 240.0
"""Seconds after which two processes that wait for each other are taken for a deadlock."""

CASES: dict[str, Callable[[Any], dict[str, Any]]] = {}
Case = Callable[[Any], dict[str, Any]]


def case(function: Case) -> Case:
    """Run the function on every rank, in the order of this file; its result goes to the tests."""
    CASES[function.__name__] = function
    return function


def told(model: Any, **options: Any) -> dict[str, Any]:
    """The report of a check, as JSON values."""
    import pediag

    return pediag.check(model, seq_len=CHECKED_AT, **options).to_dict()


def ids() -> Tensor:
    return torch.arange(32).view(2, 16) % WORDS


def sharded(mesh: Any, model: Decoder | None = None, **options: Any) -> Decoder:
    from torch.distributed.fsdp import fully_shard

    model = model if model is not None else decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def flat(strategy: str, use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "use_orig_params": use_orig_params,
        "device_id": torch.device("cpu"),
    }
    model = decoder()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def parallel(mesh: Any, heads: int) -> Decoder:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = decoder()
    columns = ("attention.query", "attention.key", "attention.value", "up")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "down")}
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        block.attention.heads = heads
        parallelize_module(block, mesh, dict(plan))
    words, head = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"words": words, "head": head})
    return model


# -- what runs on every rank -------------------------------------------------------------------------------


@case
def data_parallel(mesh: Any) -> dict[str, Any]:
    return told(nn.parallel.DistributedDataParallel(decoder()))


@case
def data_parallel_of_a_compiled_model(mesh: Any) -> dict[str, Any]:
    return told(torch.compile(nn.parallel.DistributedDataParallel(torch.compile(decoder()))))


@case
def fully_sharded(mesh: Any) -> dict[str, Any]:
    return told(sharded(mesh))


@case
def fully_sharded_and_gathered(mesh: Any) -> dict[str, Any]:
    return told(sharded(mesh), gather=True)


@case
def fully_sharded_tied_and_gathered(mesh: Any) -> dict[str, Any]:
    return told(sharded(mesh, decoder(tied=True)), gather=True)


@case
def fully_sharded_with_large_rows_and_gathered(mesh: Any) -> dict[str, Any]:
    return told(sharded(mesh, decoder(deviation=100.0)), gather=True)


@case
def fully_sharded_frequencies(mesh: Any) -> dict[str, Any]:
    return told(sharded(mesh, decoder(frequencies="parameter")))


@case
def fully_sharded_frequencies_gathered(mesh: Any) -> dict[str, Any]:
    return told(sharded(mesh, decoder(frequencies="parameter")), gather=True)


@case
def fully_sharded_between_backward_and_step(mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(ids()).float().square().mean().backward()
        before, kept = state(model), [id(parameter) for parameter in optimiser.state]
        report = told(model)
        assert state(model) == before
        assert [id(parameter) for parameter in optimiser.state] == kept
        optimiser.step()
        optimiser.zero_grad()
    return report


@case
def one_rank_of_a_fully_sharded_model(mesh: Any) -> dict[str, Any]:
    model = sharded(mesh)
    report = told(model) if dist.get_rank() == 0 else {}
    model(ids()).sum().backward()
    dist.barrier()
    return report


@case
def a_check_that_stops(mesh: Any) -> dict[str, Any]:
    from pediag.errors import TraceError

    model = sharded(mesh, Stops()).train()
    before = state(model)
    with pytest.raises(TraceError, match="as it does"):
        told(model)
    assert state(model) == before
    return {}


class Stops(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.words(ids))
        raise TypeError(f"as it does with {tuple(x.shape)}")


@case
def replicated(mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor import distribute_module

    return told(distribute_module(decoder(), mesh))


@case
def mesh_of_one_rank(mesh: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh

    alone = [DeviceMesh("cpu", [rank]) for rank in range(RANKS)]
    return told(sharded(alone[dist.get_rank()]))


@case
def tensor_parallel(mesh: Any) -> dict[str, Any]:
    model = parallel(mesh, heads=HEADS // RANKS)
    model(ids())
    before = state(model)
    report = told(model)
    assert state(model) == before
    return report


@case
def tensor_parallel_gathered(mesh: Any) -> dict[str, Any]:
    return told(parallel(mesh, heads=HEADS // RANKS), gather=True)


@case
def collectives_of_the_models_own(mesh: Any) -> dict[str, Any]:
    report = told(Exchanges()) if dist.get_rank() == 0 else {}
    dist.barrier()
    return report


class Exchanges(Decoder):
    """A forward that waits for other ranks, in the ways of torch.distributed."""

    def forward(self, ids: Tensor) -> Tensor:
        import torch.distributed._functional_collectives as functional

        x = self.words(ids) + self.rows(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
            dist.all_reduce(x)
            parts = [torch.empty_like(x) for _ in range(RANKS)]
            dist.all_gather(parts, x)
            dist.broadcast(parts[0], 0, async_op=True).wait()
            joined = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(joined, x)
            dist.barrier()
            x = functional.all_reduce(x + parts[0] + joined[: x.shape[0]], "sum", list(range(RANKS)))
        return self.head(self.norm(x))


@case
def positions_of_another_rank(mesh: Any) -> dict[str, Any]:
    from pediag.errors import TraceError

    with pytest.raises(TraceError, match="positions go through c10d::allreduce_"):
        told(Shifted())
    return {}


class Shifted(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        dist.all_reduce(places)
        return self.head(self.words(ids) + self.rows(places))


@case
def flat_with_parameters(mesh: Any) -> dict[str, Any]:
    return told(flat("FULL_SHARD", use_orig_params=True))


@case
def flat_without_parameters(mesh: Any) -> dict[str, Any]:
    return told(flat("FULL_SHARD", use_orig_params=False))


@case
def flat_after_a_step(mesh: Any) -> dict[str, Any]:
    model = flat("FULL_SHARD", use_orig_params=True).train()
    model(ids()).sum().backward()
    before = state(model)
    report = told(model)
    assert state(model) == before
    model(ids()).sum().backward()
    return report


@case
def flat_and_not_sharded(mesh: Any) -> dict[str, Any]:
    return told(flat("NO_SHARD", use_orig_params=True))


@case
def flat_not_sharded_without_parameters(mesh: Any) -> dict[str, Any]:
    return told(flat("NO_SHARD", use_orig_params=False))


@case
def flat_and_summoned(mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = flat("FULL_SHARD", use_orig_params=False)
    with FullyShardedDataParallel.summon_full_params(model):
        return told(model)


@case
def flat_and_summoned_with_parameters(mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = flat("FULL_SHARD", use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model):
        return told(model)


def _run(rank: int, folder: str) -> None:
    """One rank: every case, its result or its error written to a file of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, function in CASES.items():
        try:
            result = {"report": function(mesh)}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        (Path(folder) / f"{name}.{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# -- what is expected ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank told of each case. Fails where the ranks wait for each other."""
    folder = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.spawn(_run, (str(folder),), nprocs=RANKS, join=False)
    end = time.monotonic() + ENDS_AFTER
    while not context.join(timeout=1.0):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            done = sorted(path.stem for path in folder.glob("*.json"))
            pytest.fail(f"the ranks wait for each other; done were {done}")
    return folder


def _reports(folder: Path, function: Case) -> list[dict[str, Any]]:
    found = []
    for rank in range(RANKS):
        result = json.loads((folder / f"{function.__name__}.{rank}.json").read_text())
        assert "error" not in result, result
        found.append(result["report"])
    return found


def _bare(model: Decoder | None = None) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(json.dumps(told(model if model is not None else decoder())))
    assert [encoding["scheme"] for encoding in report["encodings"]] == ["mask", "learned", "rotary"]
    assert report["encodings"][2]["parameters"]["base"] == 10000.0
    return report


def _without(report: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: item for key, item in report.items() if key not in ("notes", *keys)}


@pytest.mark.parametrize(
    "function",
    [
        data_parallel,
        data_parallel_of_a_compiled_model,
        fully_sharded_and_gathered,
        replicated,
        mesh_of_one_rank,
        tensor_parallel_gathered,
        flat_and_not_sharded,
        flat_not_sharded_without_parameters,
        flat_and_summoned,
        flat_and_summoned_with_parameters,
    ],
    ids=lambda function: function.__name__,
)
def test_the_report_is_that_of_the_bare_model(results: Path, function: Case) -> None:
    bare = _bare()
    for report in _reports(results, function):
        assert _without(report) == _without(bare)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (fully_sharded, "is sharded over 2 ranks: call pediag.check(model, gather=True) on every rank"),
        (fully_sharded_between_backward_and_step, "is sharded over 2 ranks: call pediag.check"),
        (tensor_parallel, "is sharded over 2 ranks: call pediag.check"),
        (flat_with_parameters, "check it under FullyShardedDataParallel.summon_full_params(model)"),
        (flat_without_parameters, "check it under FullyShardedDataParallel.summon_full_params(model)"),
        (flat_after_a_step, "check it under FullyShardedDataParallel.summon_full_params(model)"),
    ],
    ids=lambda item: item.__name__ if callable(item) else "",
)
def test_numbers_of_other_ranks_are_unknown(results: Path, function: Case, remedy: str) -> None:
    bare = _bare()
    for report in _reports(results, function):
        assert _without(report, "rules", "summary") == _without(bare, "rules", "summary")
        differing = [one for one, other in zip(report["rules"], bare["rules"], strict=True) if one != other]
        assert {one["status"] for one in differing} == {"could-not-check"}
        (scale,) = [one for one in differing if one["code"] == "PE301"]
        assert "words.weight" in scale["reason"]
        assert all(remedy in one["reason"] for one in differing)
        assert any("are spread over ranks" in note for note in report["notes"])


def test_tied_tables_are_gathered_as_one(results: Path) -> None:
    bare = _bare(decoder(tied=True))
    for report in _reports(results, fully_sharded_tied_and_gathered):
        assert _without(report) == _without(bare)


def test_what_is_gathered_are_the_true_numbers(results: Path) -> None:
    expected = ratio_of_deviations(decoder(deviation=100.0))
    for report in _reports(results, fully_sharded_with_large_rows_and_gathered):
        (finding,) = report["findings"]
        assert finding["code"] == "PE301"
        assert finding["evidence"]["measured"] == pytest.approx(expected, rel=1e-6)
        assert "read from all ranks: rows.weight, words.weight" in report["notes"]


def test_frequencies_of_other_ranks_leave_no_rule_inapplicable(results: Path) -> None:
    applicable = {rule["code"] for rule in _bare()["rules"] if rule["status"] == "pass"}
    for report in _reports(results, fully_sharded_frequencies):
        statuses = {rule["code"]: rule["status"] for rule in report["rules"] if rule["code"] in applicable}
        assert "not-applicable" not in statuses.values()
        reasons = [rule["reason"] for rule in report["rules"] if rule["code"] == "PE501"]
        assert "blocks.0.attention.inverse is sharded over 2 ranks: call pediag.check" in reasons[0]
    for report in _reports(results, fully_sharded_frequencies_gathered):
        assert _without(report) == _without(_bare(decoder(frequencies="parameter")))


def test_a_rank_alone_need_not_wait(results: Path) -> None:
    first, second = _reports(results, one_rank_of_a_fully_sharded_model)
    assert first["encodings"] == _bare()["encodings"]
    assert second == {}


def test_a_check_that_stops_leaves_the_shards_as_they_were(results: Path) -> None:
    _reports(results, a_check_that_stops)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (data_parallel, ["DistributedDataParallel was taken off;"]),
        (
            data_parallel_of_a_compiled_model,
            ["OptimizedModule was taken off in 2", "DistributedDataParallel was"],
        ),
        (fully_sharded, ["FSDPModule was taken off in 3 places"]),
        (flat_and_summoned, ["FullyShardedDataParallel was taken off in 3 places"]),
        (
            tensor_parallel,
            ["what torch.distributed or a training library hooked into forward was taken off in 14"],
        ),
    ],
    ids=lambda item: item.__name__ if callable(item) else "",
)
def test_each_wrapper_has_a_note(results: Path, function: Case, taken: list[str]) -> None:
    for report in _reports(results, function):
        off = [note for note in report["notes"] if "was taken off" in note]
        assert len(off) == len(taken)
        assert all(note.startswith(start) for note, start in zip(off, taken, strict=True))


def test_mixed_precision_is_told(results: Path) -> None:
    for report in _reports(results, fully_sharded_between_backward_and_step):
        assert any("give dtype='bfloat16'" in note for note in report["notes"])


def test_heads_of_one_rank_are_told(results: Path) -> None:
    for report in _reports(results, tensor_parallel):
        assert any("one rank's part of the linear layers" in note for note in report["notes"])


def test_no_collective_of_the_model_runs(results: Path) -> None:
    first, _ = _reports(results, collectives_of_the_models_own)
    schemes = [encoding["scheme"] for encoding in first["encodings"]]
    assert schemes == ["mask", "learned", "rotary"]
    assert first["findings"] == []


def test_positions_from_another_rank_are_no_guess(results: Path) -> None:
    _reports(results, positions_of_another_rank)


def test_without_a_process_group_the_error_says_to_start_one() -> None:
    from pediag.errors import TraceError

    with pytest.raises(TraceError, match="start a process group") as caught:
        told(Exchanges())
    assert "\n" not in str(caught.value)
