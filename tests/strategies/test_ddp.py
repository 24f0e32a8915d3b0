"""Rules of the communication and learning-rate fields that need no second process."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from transformers import set_seed

from hf_dist_ext import policy
from hf_dist_ext.checkpoints import resume
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner.pipelines import NOT_IN_PIPELINES
from hf_dist_ext.strategies import collectives, ddp, sparse, splitting
from hf_dist_ext.strategies.base import Strategy
from hf_dist_ext.strategies.ddp import DDP
from hf_dist_ext.strategies.gathering import Rows
from hf_dist_ext.strategies.pipeline import options
from hf_dist_ext.training import learning_rate
from hf_dist_ext.training.arguments import DistTrainingArguments


def arguments(tmp_path, **more) -> DistTrainingArguments:
    return DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **more)


@pytest.mark.parametrize("given, words", [
    ({"ddp_comm_hook": "gzip"}, "power_sgd"),
    ({"ddp_power_sgd_rank": 2}, "ddp_comm_hook"),
    ({"ddp_comm_hook": "power_sgd", "ddp_power_sgd_warmup_steps": 1}, "at least 2"),
    ({"ddp_comm_hook": "batched_power_sgd"}, "AssertionError"),
    ({"ddp_compression_ratio": 0.1}, "top_k"),
    ({"ddp_comm_hook": "top_k", "ddp_compression_ratio": 0.0}, "above 0"),
    ({"ddp_comm_hook": "random_k", "ddp_compression_ratio": 1.5}, "at most 1"),
    ({"lr_scale_rule": "linear"}, "lr_base_batch_size"),
    ({"lr_base_batch_size": 8}, "lr_scale_rule"),
    ({"sharding": "ALL"}, "FULL_SHARD"),
    ({"sharding": "FULL_SHARD", "gradient_cache_fsdp": "speed"}, "Keep one"),
    ({"sharding": "NO_SHARD", "cpu_offload": True}, "cpu_offload"),
    ({"sharding": "FULL_SHARD", "sharding_group_size": 2}, "HYBRID_SHARD"),
    ({"reduce_dtype": "int8"}, "bfloat16"),
])  # fmt: skip
def test_contradictions_are_refused(tmp_path, given, words):
    with pytest.raises(UsageError, match=words):
        arguments(tmp_path, **given)


@pytest.mark.parametrize("field", policy.FSDP_FIELDS[1:])
def test_a_pipeline_and_its_plan_refuse_what_only_fsdp_reads(field, tmp_path):
    args = arguments(tmp_path, gradient_cache_chunk_size=4)
    setattr(args, field, 1)
    with pytest.raises(UsageError, match=f"a pipeline does not go with {field}=1"):
        options._check_rest(args)
    assert field in NOT_IN_PIPELINES


@pytest.mark.parametrize(
    "field, value", [*dict.fromkeys(policy.DDP_FIELDS[1:], True).items(), ("ddp_comm_hook", "fp16")]
)
def test_what_only_ddp_reads_is_refused_where_another_strategy_runs(field, value, tmp_path, monkeypatch):
    args = arguments(tmp_path, gradient_cache_chunk_size=4, **{field: value})
    monkeypatch.setattr(DistTrainingArguments, "world_size", 2)
    with pytest.raises(UsageError, match=f"a pipeline does not go with {field}="):
        options._check_rest(args)
    assert field in NOT_IN_PIPELINES
    with pytest.raises(UsageError, match=f"tensor parallelism does not go with {field}="):
        splitting.check_rest(torch.nn.Linear(1, 1), args)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(UsageError, match=f"{field}=.* has no meaning here: the run is tensor parallelism"):
        ddp.options(args, [DistributedDataParallelKwargs()], has_loss=False)


@pytest.mark.parametrize("hook", ["power_sgd", "top_k", "random_k"])
def test_what_was_not_sent_is_not_added_to_a_gradient_of_another_loss_scale(hook, tmp_path, monkeypatch):
    args = arguments(tmp_path, ddp_comm_hook=hook)
    monkeypatch.setattr(ddp, "_kind", lambda args: "MULTI_GPU")
    ddp.options(args, [DistributedDataParallelKwargs()], has_loss=True)
    args.fp16 = True
    with pytest.raises(UsageError, match="another loss scale"):
        ddp.options(args, [DistributedDataParallelKwargs()], has_loss=True)


@pytest.mark.parametrize("hook, ratio, processes, words", [
    ("top_k", None, 99, None),
    ("top_k", None, 128, "128 processes gather .* about 1.3 times .* sends 0.01 of it .* below 0.0078"),
    ("top_k", 0.5, 2, "2 processes .* about 1 times"),
    ("random_k", None, 128, None),
])  # fmt: skip
def test_a_gather_that_sends_more_than_a_reduction_is_said_at_the_start(
    tmp_path, monkeypatch, hook, ratio, processes, words
):
    said = []
    monkeypatch.setattr(ddp.logger, "warning", said.append)
    monkeypatch.setattr(ddp, "_kind", lambda args: "MULTI_GPU")
    monkeypatch.setattr(DistTrainingArguments, "world_size", processes)
    args = arguments(tmp_path, ddp_comm_hook=hook, ddp_compression_ratio=ratio)
    ddp.options(args, [DistributedDataParallelKwargs()], has_loss=True)
    assert re.search(words, said[0]) if words else not said


def test_batched_power_sgd_is_still_broken_in_torch():
    """When this fails, communication.check may let it through."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

    with pytest.raises(AssertionError):
        _orthogonalize(torch.ones(4, 1))  # what batched_powerSGD_hook hands over


@pytest.mark.parametrize("rule, factor", [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_is_scaled_once(tmp_path, rule, factor):
    base = None if rule == "none" else 8
    args = arguments(
        tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=1e-3,
        learning_rates={"projection": 1e-2}, lr_scale_rule=rule, lr_base_batch_size=base,
    )  # fmt: skip
    for _ in range(2):
        learning_rate.scale(args, args.world_size)
    assert args.learning_rate == pytest.approx(1e-3 * factor)
    assert args.learning_rates["projection"] == pytest.approx(1e-2 * factor)


ACCUMULATION = ("gradient_accumulation_steps", "given_accumulation_steps")


@pytest.mark.parametrize("known", [1, 2])  # an older manifest has the first alone
@pytest.mark.parametrize("before, now, kept, words", [
    ((4, 2), (2, 2), 4, "keeps the effective batch of 64"),
    ((2, 3), (1, 3), 6, "keeps the effective batch of 48"),
    ((2, 2), (4, 2), 1, "keeps the effective batch of 32"),
    ((2, 2), (2, 2), 2, None),
    ((3, 2), (5, 2), 2, "40 rows of a forward over all devices do not divide it"),
    ((4, 1), (2, 3), 3, "was changed too"),
])  # fmt: skip
def test_accumulation_keeps_the_effective_batch(monkeypatch, before, now, kept, words, known):
    """before, now: processes, and steps that were accumulated; 8 rows per device."""
    said = []
    monkeypatch.setattr(learning_rate.logger, "warning", said.append)
    sizes = {"per_device_train_batch_size": 8} | dict.fromkeys(ACCUMULATION[:known], before[1])
    args = SimpleNamespace(world_size=now[0], train_batch_size=8, gradient_accumulation_steps=now[1])
    learning_rate.keep_effective_batch(args, {"data_parallel_size": before[0], **sizes}, now[0], why_fixed="")
    assert args.gradient_accumulation_steps == kept
    assert words in said[0] if words else not said


@pytest.mark.parametrize("starts, is_same_trainer", [
    ([(2, 1, 1), (1, 1, 2), (1, 1, 2), (2, 1, 1), (1, 1, 2)], False),
    ([(2, 1, 1), (1, 1, 2), (1, 1, 2), (2, 1, 1), (1, 1, 2)], True),
    ([(1, 4, 4), (4, 4, 1), (4, 4, 1), (2, 4, 2), (2, 4, 2), (1, 4, 4)], False),
    ([(2, 1, 1), (1, 1, 2), (1, 3, 3), (1, 3, 3), (3, 3, 1)], False),  # 3 is chosen in between
])  # fmt: skip
def test_starts_in_a_row_keep_the_effective_batch_that_the_run_began_with(monkeypatch, starts, is_same_trainer):
    """starts: processes, steps given to be accumulated, and those that are."""
    monkeypatch.setattr(learning_rate.logger, "warning", lambda words: None)
    content, args = {}, None
    for processes, given, used in starts:
        if args is None or not is_same_trainer:
            args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=given)
        learning_rate.keep_effective_batch(args, content, processes, why_fixed="")
        assert args.gradient_accumulation_steps == used
        content = {"data_parallel_size": processes, "per_device_train_batch_size": 8}
        content |= zip(ACCUMULATION, (used, given), strict=True)


def test_an_update_that_is_left_out_forgets_what_its_gradients_left_out():
    strategy, model = DDP(), torch.nn.Linear(2, 2)
    strategy.left_out = sparse.LeftOut(model, "top_k", 0.5, seed=0)
    strategy.left_out.errors["weight"] = torch.full((4,), float("nan"))
    strategy.drop_update(torch.optim.SGD(model.parameters()), step=3)
    assert strategy.left_out.errors == {}


@pytest.mark.parametrize("per_layer, others", [(2, [0, 0, 1, 1]), (1, [0, 1, 2, 3])])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_ranks_with_the_same_rows_draw_alike_unless_they_have_other_layers(
    tmp_path, monkeypatch, per_layer, others, is_resumed
):
    """At a start, and at a resume with another number of processes."""
    monkeypatch.setattr(Strategy, "ranks_per_layer", per_layer)
    args, drawn, shared = SimpleNamespace(world_size=4, seed=1, device=torch.device("cpu")), [], set()
    for rank in range(4):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(collectives, "world_size", lambda: 4)
        strategy = Strategy()
        strategy.rows = Rows(shared_by=2)
        set_seed(args.seed)
        if is_resumed:
            assert resume.draws_anew(args, 7, str(tmp_path), {}, strategy)
        else:
            strategy.seed(args.seed, args.device)
        drawn.append(torch.rand(()).item())
        shared.add((random.random(), np.random.rand()))
    assert [drawn.index(number) for number in drawn] == [others.index(other) for other in others]
    assert len(shared) == 1, "a collator draws alike on all ranks"
