"""Frozen-part training of a tiny LLaVA whose projector alone trains, half of the rows without an image: one process,
DDP, FSDP2 with frozen parts replicated and sharded."""

import functools
import os
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from hf_dist_ext import launched
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import look
from tests.tiny_models import CHECKPOINTING
from tests.tiny_vision_language import BlankPictures, collate, row, tiny_llava

STEPS, GLOBAL_BATCH = 3, 4


class Observe(TrainerCallback):
    """Bytes that DDP reduces per step, and what FSDP shards."""

    def __init__(self) -> None:
        self.trainer: DistTrainer | None = None
        self.reduced_bytes = 0
        self.dtypes: dict[str, str] = {}

    def on_step_begin(self, args, state, control, **more) -> None:
        wrapped = self.trainer.model_wrapped
        if state.global_step == 0 and hasattr(wrapped, "register_comm_hook"):
            wrapped.register_comm_hook(None, self._reduce)
        self.dtypes = {n: str(p.dtype) for n, p in self.trainer.model.named_parameters()}

    def _reduce(self, _, bucket):
        self.reduced_bytes += bucket.buffer().nbytes
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / torch.distributed.get_world_size())


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found[name] = full.detach().float().cpu().clone()
    return found


def train(folder: Path, name: str, **options) -> dict:
    model = tiny_llava()
    if options.get("bf16"):
        model = model.bfloat16()
    before = whole(model)
    # consecutive pairs go to one rank: (image, image), (text, text), ...
    rows = [row(has_image=i // 2 % 2 == 0, seed=i) for i in range(STEPS * GLOBAL_BATCH)]
    args = DistTrainingArguments(
        output_dir=str(folder / name), per_device_train_batch_size=GLOBAL_BATCH // launched.processes(),
        max_steps=STEPS, logging_steps=1, save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant",
        report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False, dataloader_pin_memory=False,
        train_sampling_strategy="sequential", trainable_modules=["projector"], max_grad_norm=0.0, **options,
    )  # fmt: skip
    observe = Observe()
    trainer = DistTrainer(
        model, args, train_dataset=rows, data_collator=collate, processing_class=BlankPictures(), callbacks=[observe]
    )
    observe.trainer = trainer
    trainer.train()
    after = whole(trainer.model)
    trained = {n for n in after if "multi_modal_projector" in n}
    parameters = dict(trainer.model.named_parameters())
    return {
        "moved": max((after[n] - before[n]).abs().max().item() for n in trained),
        "frozen_equal": all(torch.equal(after[n], before[n]) for n in after if n not in trained),
        "projector": torch.cat([after[n].flatten() for n in sorted(trained)]).tolist(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "reduced_bytes_per_step": observe.reduced_bytes / STEPS,
        "trainable_bytes": sum(4 * before[n].numel() for n in trained),
        "trained_dtypes": sorted({observe.dtypes[n] for n in trained}),
        "frozen_dtypes": sorted({dtype for n, dtype in observe.dtypes.items() if n not in trained}),
        "sharded_frozen": [n for n, p in parameters.items() if n not in trained and hasattr(p, "device_mesh")],
    }


def all_cases(folder: Path) -> dict:
    features = {"frozen_feature_cache": str(folder / "features")}
    cases = {"plain": {}, "bf16": {"bf16": True}, "features": features}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        cases["sharded"] = {"frozen_parts_fsdp": "shard"}
        cases["features, sharded"] = features | cases["sharded"]
    else:
        cases["checkpointing"] = {CHECKPOINTING: True}
    return {name: train(folder, name, **more) for name, more in cases.items()}


PRESET = "multi_gpu_fsdp_frozen_replicated"
RUNS = {"single": ("python", 1), "DDP": ("multi_gpu_ddp", 2), "FSDP2": ("multi_gpu_fsdp", 2), PRESET: (PRESET, 2)}


@functools.cache
def found(run: str) -> dict:
    return look(*RUNS[run], all_cases)


ALL_RUNS = [pytest.param(run, marks=[pytest.mark.slow] * (run == PRESET)) for run in RUNS]


@pytest.mark.parametrize("run", ALL_RUNS)
def test_only_the_projector_moves_though_one_rank_never_sees_an_image(run):
    for name, case in found(run).items():
        assert case["moved"] > 0.01 and case["frozen_equal"], name


@pytest.mark.parametrize("run", ["DDP", "FSDP2"])
def test_weights_equal_those_of_one_process(run):
    alone = found("single")["plain"]
    for name in set(found(run)) - {"bf16"}:
        assert found(run)[name]["projector"] == pytest.approx(alone["projector"], abs=1e-6), name
        assert found(run)[name]["losses"] == pytest.approx(alone["losses"], abs=1e-5), name


@pytest.mark.parametrize("run", ALL_RUNS)
def test_frozen_weights_stay_bf16_and_trainable_ones_are_float32_masters(run):
    case = found(run)["bf16"]
    assert case["trained_dtypes"] == ["torch.float32"] and case["frozen_dtypes"] == ["torch.bfloat16"]


def test_ddp_sends_the_gradients_of_what_trains_and_no_more():
    for name in ("plain", "bf16", "checkpointing"):
        case = found("DDP")[name]
        assert case["reduced_bytes_per_step"] == case["trainable_bytes"] > 0, name


def test_fsdp_replicates_small_frozen_parts_and_shards_them_when_asked():
    assert found("FSDP2")["plain"]["sharded_frozen"] == []
    assert any("vision_tower" in name for name in found("FSDP2")["sharded"]["sharded_frozen"])


@pytest.mark.slow
def test_the_preset_for_replicated_frozen_parts_shards_none_of_them():
    assert found(PRESET)["plain"]["sharded_frozen"] == []
