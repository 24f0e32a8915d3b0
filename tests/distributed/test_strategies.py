"""Every knob of sharding and of DDP's communication on a tiny encoder: what it changes, or why it is refused."""

import copy
import functools
import gc
import logging
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies import ddp, sparse
from hf_dist_ext.strategies.collectives import rank
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import look
from tests.distributed.test_trainer import weights_of
from tests.parity.exactness_worker import BATCH, BERT, Case, collate
from tests.tiny_models import CHECKPOINTING, embedding_model

CASES = {
    "fsdp": {
        "preset": {},
        "FULL_SHARD": {"sharding": "FULL_SHARD"},
        "SHARD_GRAD_OP": {"sharding": "SHARD_GRAD_OP"},
        "SHARD_GRAD_OP, no cache": {"sharding": "SHARD_GRAD_OP", "gradient_cache_chunk_size": None},
        "NO_SHARD": {"sharding": "NO_SHARD"},
        "HYBRID_SHARD": {"sharding": "HYBRID_SHARD"},
        "cpu_offload": {"cpu_offload": True},
        "min_num_params": {"min_num_params": 10**9},
        "reduce_dtype": {"reduce_dtype": "bfloat16"},
        "activation_checkpointing": {CHECKPOINTING: True},
        "comm hook": {"ddp_comm_hook": "fp16"},
    },
    "hybrid": {"HYBRID_SHARD": {"sharding": "HYBRID_SHARD", "sharding_group_size": 2}},
    "ddp": {
        "preset": {},
        "fp16": {"ddp_comm_hook": "fp16"},
        "bf16": {"ddp_comm_hook": "bf16"},
        "power_sgd": {"ddp_comm_hook": "power_sgd", "ddp_power_sgd_rank": 2, "ddp_power_sgd_warmup_steps": 2},
        "batched_power_sgd": {"ddp_comm_hook": "batched_power_sgd", "ddp_power_sgd_warmup_steps": 2},
        "top_k": {"ddp_comm_hook": "top_k", "ddp_compression_ratio": 0.05},
        "random_k": {"ddp_comm_hook": "random_k", "ddp_compression_ratio": 0.05},
        "top_k, unused": {"ddp_comm_hook": "top_k", "ddp_find_unused_parameters": True},
        "random_k, all": {"ddp_comm_hook": "random_k", "ddp_compression_ratio": 1.0},
        "ddp_gradient_as_bucket_view": {"ddp_gradient_as_bucket_view": True},
        "ddp_static_graph": {"ddp_static_graph": True, "gradient_cache_chunk_size": None},
        "ddp_static_graph, cache": {"ddp_static_graph": True},
        "reduce_dtype": {"reduce_dtype": "bfloat16"},
        "NO_SHARD": {"sharding": "NO_SHARD"},
        "FULL_SHARD": {"sharding": "FULL_SHARD"},
        "lr linear": {"lr_scale_rule": "linear", "lr_base_batch_size": 2 * BATCH, "gradient_accumulation_steps": 3},
    },
}
NUM_STEPS = 4


class Sent(TorchDispatchMode):
    """Counts collectives with their dtype and elements."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.name()
        if name.startswith("c10d::"):
            flat = torch.utils._pytree.tree_leaves(arguments)
            tensor = max((a for a in flat if isinstance(a, torch.Tensor)), key=torch.Tensor.numel, default=None)
            if tensor is not None:
                key = f"{name.removeprefix('c10d::')} {tensor.dtype}"
                self.collectives[key] += 1
                self.elements[key] += tensor.numel()
        return function(*arguments, **(options or {}))


class Recorder(TrainerCallback):
    """Keeps the first step's gradients, whole."""

    gradients = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        if self.gradients is None:
            found = [p.grad for p in model.parameters() if p.requires_grad]
            whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
            self.gradients = torch.cat([g.detach().double().flatten() for g in whole])


def make_trainer(folder: str, recorder, steps: int = NUM_STEPS, **arguments) -> DistTrainer:
    torch.manual_seed(0)
    model = embedding_model(BERT).double()
    defaults = {"gradient_cache_chunk_size": 4, "gradient_cache_fsdp": "auto", "learning_rate": 0.01}
    args = DistTrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, max_steps=steps, optim="sgd", report_to=[], seed=7,
        lr_scheduler_type="constant", max_grad_norm=0, disable_tqdm=True, logging_strategy="no", use_cpu=True,
        train_sampling_strategy="sequential", save_steps=2, **(defaults | arguments),
    )  # fmt: skip
    case = Case("strategies")
    return DistTrainer(
        model=model,
        args=args,
        data_collator=lambda rows: collate(case, rows, rank()),
        train_dataset=list(range(8 * NUM_STEPS * BATCH * launched.processes())),
        loss=InfoNCELoss(temperature=0.1).double(),
        callbacks=[recorder],
    )


def examine(name: str, arguments: dict) -> dict:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make_trainer(folder, recorder, save_strategy="no", **arguments)
        except UsageError as error:
            return {"refused": str(error)}
        with Sent() as sent:
            trainer.train()
    wrapped = trainer.model_wrapped
    units = [m for m in wrapped.modules() if isinstance(m, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    groups = [group for group in groups if group is not None]
    mesh = next((p.device_mesh for p in wrapped.parameters() if hasattr(p, "device_mesh")), None)
    return {
        "wrapper": type(wrapped).__name__,
        "units": len(units),
        "offloads": [type(group.offload_policy).__name__ for group in groups],
        "reshards": [bool(group.post_forward_mesh_info) for group in groups],
        "mesh": None if mesh is None else list(mesh.shape),
        "collectives": dict(sent.collectives),
        "elements": dict(sent.elements),
        "gradients": recorder.gradients,
        "weights": weights_of(trainer.model),
        "is_checkpointing": bool(getattr(trainer.bare_model.transformers_model, f"is_{CHECKPOINTING}")),
        "learning_rate": trainer.args.learning_rate,
        "is_bucket_view": bool(getattr(wrapped, "gradient_as_bucket_view", False)),
        "is_static": bool(getattr(wrapped, "static_graph", False)),
    }


def resumed_power_sgd() -> dict:
    """Four steps, then a resume of four more: PowerSGD's state as it was saved and loaded, and what it sends."""
    arguments = CASES["ddp"]["power_sgd"]
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # every rank writes into the first one's folder
        make_trainer(folder[0], Recorder(), **arguments).train()
        checkpoint = Path(folder[0], "checkpoint-4")
        saved = torch.load(checkpoint / f"ddp_comm_hook_{rank()}.pt", weights_only=True)
        loaded: dict = {}

        class Look(TrainerCallback):
            def on_train_begin(self, args, state, control, **others):
                hook = ddp.power_sgd_state(self.trainer.model_wrapped)
                errors = {k: v.clone() for k, v in hook.error_dict.items()}
                loaded.update(errors=errors, iteration=hook.iter, hook=hook)

        look = Look()
        look.trainer = make_trainer(folder[0], look, steps=8, **arguments)
        with Sent() as sent:
            look.trainer.train(resume_from_checkpoint=str(checkpoint))
        files = sorted(path.name for path in checkpoint.glob("ddp_comm_hook*"))
        dist.barrier()
    return {
        "files": files,
        "saved_error": sum(error.norm().item() for error in saved["error_dict"].values()),
        "loaded_equal": all(torch.equal(error, loaded["errors"][k]) for k, error in saved["error_dict"].items()),
        "iterations": [saved["iter"], loaded["iteration"], loaded["hook"].iter],
        "moved_on": any(not torch.equal(e, saved["error_dict"][k]) for k, e in loaded["hook"].error_dict.items()),
        "elements": sent.elements["allreduce_ torch.float64"],
    }


def resumed_sparse(hook: str) -> dict:
    """Eight steps, and the last four of them once more from a checkpoint."""
    weights = []
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for checkpoint in (None, str(Path(folder[0], "checkpoint-4"))):
            trainer = make_trainer(folder[0], Recorder(), steps=8, **CASES["ddp"][hook])
            trainer.train(resume_from_checkpoint=checkpoint)
            weights.append(weights_of(trainer.model))
        trainer.train()  # once more, which has nothing to say
        saved = torch.load(Path(folder[0], "checkpoint-4", f"ddp_comm_hook_{rank()}.pt"), weights_only=True)
        dist.barrier()
    left_out = sum(error.norm().item() for error in saved["errors"].values())
    return {"is_equal": torch.equal(*weights), "left_out": left_out, "updates": saved["updates"]}


def examine_all(folder: Path, cases: str) -> dict:
    gc.freeze()  # or every end of a training looks at all that was imported
    logging.disable(logging.WARNING)
    found = {name: examine(name, copy.deepcopy(arguments)) for name, arguments in CASES[cases].items()}
    base = found.get("preset")
    for entry in found.values():
        gradients, weights = entry.pop("gradients", None), entry.pop("weights", None)
        if base is not None and gradients is not None:
            entry["gradient_norm"] = gradients.norm().item()
            reference = base.setdefault("_gradients", gradients)
            entry["gradient_difference"] = ((gradients - reference).norm() / reference.norm()).item()
            reference = base.setdefault("_weights", weights)
            entry["weight_difference"] = (weights - reference).norm().item()
    if base is not None:
        del base["_gradients"], base["_weights"]
    if cases == "ddp":
        found["resumed"] = resumed_power_sgd()
        found["resumed sparse"] = {hook: resumed_sparse(hook) for hook in sparse.HOOKS}
    return found


PRESETS = {"fsdp": ("multi_gpu_fsdp", 2), "ddp": ("multi_gpu_ddp", 2), "hybrid": ("multi_gpu_fsdp", 4)}
GRADIENTS = "allreduce_ torch.float64"


@functools.cache
def found(cases: str) -> dict:
    return look(*PRESETS[cases], examine_all, cases)


def sent(cases: str, name: str, key: str, what: str = "collectives") -> int:
    return found(cases)[name][what].get(key, 0)


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP, no cache", "NO_SHARD", "cpu_offload"])
def test_sharding_changes_no_gradient(name):
    entry = found("fsdp")[name]
    assert entry["gradient_norm"] > 1
    assert entry["gradient_difference"] < 1e-12 and entry["weight_difference"] < 1e-12


def test_full_shard_gathers_weights_for_every_chunk_and_shard_grad_op_once():
    often, once = (sent("fsdp", n, "_allgather_base_ torch.float64") for n in ("FULL_SHARD", "SHARD_GRAD_OP"))
    assert often > 3 * once > 0
    assert sum(found("fsdp")["FULL_SHARD"]["reshards"]) == 3 and not any(found("fsdp")["SHARD_GRAD_OP"]["reshards"])


def test_no_shard_is_ddp():
    entry = found("fsdp")["NO_SHARD"]
    assert entry["wrapper"] == "DistributedDataParallel" and entry["units"] == 0
    assert entry["collectives"] == found("ddp")["preset"]["collectives"] == found("ddp")["NO_SHARD"]["collectives"]


def test_offload_moves_every_unit():
    assert set(found("fsdp")["cpu_offload"]["offloads"]) == {"CPUOffloadPolicy"}
    assert set(found("fsdp")["preset"]["offloads"]) == {"OffloadPolicy"}


def test_layers_below_min_num_params_are_no_units():
    assert (found("fsdp")["preset"]["units"], found("fsdp")["min_num_params"]["units"]) == (4, 2)
    gathers = [sent("fsdp", name, "_allgather_base_ torch.float64") for name in ("preset", "min_num_params")]
    assert gathers[1] < gathers[0]


def test_reduce_dtype_is_what_gradients_are_added_up_in():
    key = "_reduce_scatter_base_ torch.bfloat16"
    assert sent("fsdp", "reduce_dtype", key) == 4 * 4 and sent("fsdp", "preset", key) == 0  # steps x units
    assert 1e-6 < found("fsdp")["reduce_dtype"]["gradient_difference"] < 0.02


def test_activation_checkpointing_changes_no_gradient():
    entry = found("fsdp")["activation_checkpointing"]
    assert entry["is_checkpointing"] and entry["gradient_difference"] < 1e-12


@pytest.mark.slow
def test_hybrid_shard_shards_inside_a_group_and_averages_between_groups():
    entry = found("hybrid")["HYBRID_SHARD"]
    assert entry["mesh"] == [2, 2] and entry["collectives"][GRADIENTS] == 4 * 4  # steps x units


def test_fp16_halves_what_is_sent_and_rounds_it():
    whole, half = sent("ddp", "preset", GRADIENTS, "elements"), "allreduce_ torch.float16"
    assert sent("ddp", "fp16", half, "elements") == whole > 10_000 and sent("ddp", "fp16", GRADIENTS) == 0
    assert 1e-6 < found("ddp")["fp16"]["gradient_difference"] < 1e-2


def test_power_sgd_sends_less_after_its_warm_up():
    whole, less = (sent("ddp", name, GRADIENTS, "elements") for name in ("preset", "power_sgd"))
    assert whole / 2 < less < 0.6 * whole  # two of four steps are whole
    assert found("ddp")["power_sgd"]["gradient_difference"] == 0.0 < found("ddp")["power_sgd"]["weight_difference"]


def test_power_sgds_state_is_in_the_checkpoint_of_every_process():
    resumed, whole = found("ddp")["resumed"], sent("ddp", "preset", GRADIENTS, "elements")
    assert resumed["files"] == ["ddp_comm_hook_0.pt", "ddp_comm_hook_1.pt"]
    assert resumed["saved_error"] > 0 and resumed["loaded_equal"] and resumed["moved_on"]
    assert resumed["iterations"] == [4, 0, 4]  # two steps after a resume are warm-up again
    assert whole / 2 < resumed["elements"] < 0.6 * whole  # the two steps after a resume are whole


def test_sparse_hooks_send_their_share_of_the_elements():
    whole = sent("ddp", "preset", GRADIENTS, "elements")
    values = sent("ddp", "random_k", GRADIENTS, "elements")
    assert 0.05 * whole < values < 0.06 * whole  # of each parameter one element at least
    of_two_processes = sent("ddp", "top_k", "_allgather_base_ torch.uint8", "elements")
    assert sent("ddp", "top_k", GRADIENTS) == 0 and 24 * values <= of_two_processes < 24.2 * values  # 8 + 4 bytes each
    assert found("ddp")["random_k, all"]["gradient_difference"] < 1e-12
    assert 0.1 < found("ddp")["top_k"]["gradient_difference"] < found("ddp")["random_k"]["gradient_difference"] <= 1.1


@pytest.mark.parametrize("hook", ["top_k", "random_k"])
def test_a_run_that_sends_a_part_resumes_bit_for_bit(hook):
    resumed = found("ddp")["resumed sparse"][hook]
    assert resumed["is_equal"] and resumed["left_out"] > 0 and resumed["updates"] == 4


@pytest.mark.parametrize("name, field", [
    ("ddp_gradient_as_bucket_view", "is_bucket_view"), ("ddp_static_graph", "is_static")
])  # fmt: skip
def test_bucket_options_reach_ddp_and_change_no_gradient(name, field):
    entry = found("ddp")[name]
    assert entry[field] and not found("ddp")["preset"][field] and entry["gradient_difference"] < 1e-12


def test_the_rate_follows_the_effective_batch():
    assert found("ddp")["lr linear"]["learning_rate"] == pytest.approx(0.01 * 3)  # 3 accumulated, base of 2 devices


@pytest.mark.parametrize("cases, name, words", [
    ("fsdp", "HYBRID_SHARD", "2 processes in groups of 2"), ("fsdp", "comm hook", "reduce_dtype"),
    ("ddp", "bf16", "NCCL"), ("ddp", "batched_power_sgd", "torch 2.13"), ("ddp", "FULL_SHARD", "multi_gpu_fsdp"),
    ("ddp", "top_k, unused", "ddp_find_unused_parameters"),
    ("ddp", "ddp_static_graph, cache", "number of chunks"), ("ddp", "reduce_dtype", "ddp_comm_hook"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused_with_the_reason(cases, name, words):
    assert words in found(cases)[name]["refused"]
