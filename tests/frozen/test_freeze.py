"""DistTrainer's freezing fields on one process: the plan is printed, asserted, and followed by the optimizer."""

import json

import pytest
import torch
from transformers import TrainerCallback

from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.read import load_run
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_vision_language import BlankPictures, collate, row, tiny_llava


def make_trainer(folder, model=None, rows=None, callbacks=None, **options) -> DistTrainer:
    args = DistTrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=2, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
        **{"trainable_modules": ["projector"], "learning_rate": 1e-2} | options,
    )  # fmt: skip
    rows = rows or [row(True, i) for i in range(8)]
    model = model or tiny_llava()
    return DistTrainer(
        model, args, train_dataset=rows, data_collator=collate, processing_class=BlankPictures(), callbacks=callbacks
    )


def test_what_trains_is_printed_once_and_the_optimizer_holds_nothing_else(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count("group ") == 1 and "projector" in printed
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    expected = sum(p.numel() for p in trainer.model.model.multi_modal_projector.parameters())
    assert sum(p.numel() for p in held) == expected > 0
    assert sum(t.numel() for state in trainer.optimizer.state.values() for t in state.values()) >= 2 * expected


def test_without_the_fields_nothing_is_planned(tmp_path):
    assert make_trainer(tmp_path, trainable_modules=None).freeze_plan is None


class Unfreeze(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **more):
        model.model.vision_tower.requires_grad_(True)


def test_unfreezing_during_training_stops_it_at_the_next_step(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[Unfreeze()])
    with pytest.raises(UsageError, match="step 2: 'model.vision_tower"):
        trainer.train()


def test_unfreezing_before_the_optimizer_is_made_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.model.requires_grad_(True)
    with pytest.raises(UsageError, match="before the optimizer is made"):
        trainer.train()


def test_a_trainable_parameter_without_gradient_is_named_in_the_first_step(tmp_path):
    model = tiny_llava()
    model.model.multi_modal_projector.forgotten = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="received no gradient.*forgotten"):
        make_trainer(tmp_path, model).train()
    model = tiny_llava()
    model.model.multi_modal_projector.forgotten = torch.nn.Linear(2, 2)
    make_trainer(tmp_path, model, ddp_find_unused_parameters=True).train()


def test_learning_rates_reach_their_groups_and_the_log(tmp_path):
    trainer = make_trainer(
        tmp_path,
        trainable_modules=["projector", "language"],
        learning_rates={"projector": 1e-3, "lm_head": 5e-3},
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.1,
    )
    trainer.train()
    by_rate: dict[float, int] = {}
    for group in trainer.optimizer.param_groups:
        by_rate[group["lr"]] = by_rate.get(group["lr"], 0) + sum(p.numel() for p in group["params"])
    model = trainer.model
    head, projector = (
        model.lm_head.weight.numel(),
        sum(p.numel() for p in model.model.multi_modal_projector.parameters()),
    )
    rest = sum(p.numel() for p in model.model.language_model.parameters())
    assert by_rate == {1e-3: projector, 5e-3: head, 1e-4: rest}
    decays = {id(p): group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert decays[id(model.lm_head.weight)] == 0.1 and decays[id(model.model.language_model.norm.weight)] == 0.0
    line = next(line for line in trainer.state.log_history if "loss" in line)
    assert line["learning_rate_projector"] == 1e-3 and line["learning_rate_lm_head"] == 5e-3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"learning_rates": {"vision": 1e-3}}, "nothing of 'vision' trains"),
        ({"learning_rates": {"projektor": 1e-3}}, "learning_rates.*projector"),
        ({"learning_rates": {"projector": -1.0}}, "0 or more"),
        ({"trainable_modules": []}, "names nothing"),
    ],
)
def test_wrong_fields_are_refused_before_a_step(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        make_trainer(tmp_path, **options).train()


@pytest.mark.parametrize("bf16", [True, False])
def test_frozen_weights_are_loaded_in_the_precision_of_their_files(tmp_path, bf16):
    from hf_dist_ext.tasks.parts import build_parts, make_arguments
    from tests.tiny_models import embedding_model, model_config, tiny_pairs, tiny_tokenizer

    made = embedding_model(model_config("bert"), tokenizer=tiny_tokenizer(max_length=16))
    made.bfloat16().save_pretrained(str(tmp_path / "model"))
    path = tmp_path / "run.json"
    given = tiny_pairs(tmp_path) | {
        "model_name_or_path": str(tmp_path / "model"), "projection_dim": 8, "trainable_modules": ["projection"],
        "use_cpu": True, "bf16": bf16, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    path.write_text(json.dumps(given))
    run = load_run(["--config", str(path)])
    parts = build_parts(run, make_arguments(run))
    expected = torch.bfloat16 if bf16 else torch.float32
    assert {p.dtype for p in parts.model[0].parameters()} == {expected}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_half_precision_weights_train_under_the_fp16_scaler(tmp_path):
    """A stock run of the same ends with "Attempting to unscale FP16 gradients"."""
    trainer = make_trainer(tmp_path, tiny_llava().half(), use_cpu=False, fp16=True)
    before = trainer.model.model.multi_modal_projector.linear_1.weight.clone()
    trainer.train()
    after = trainer.model.model.multi_modal_projector.linear_1.weight
    assert after.dtype == torch.float32 and not torch.equal(after, before)
    assert trainer.model.lm_head.weight.dtype == torch.float16


def test_the_preset_for_replicated_frozen_parts_reaches_fsdp(caplog):
    """Its words stand where accelerate takes a regex; left there, everything would be sharded."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    from hf_dist_ext.frozen.run_mode import fully_frozen_roots
    from hf_dist_ext.run.presets import find_preset, load_preset
    from hf_dist_ext.strategies.fsdp import replicate_frozen_parts

    words = load_preset(find_preset("multi_gpu_fsdp_frozen_replicated"))["fsdp_config"]["fsdp_ignored_modules"]
    model = tiny_llava()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("projector" in name)
    for roots in (fully_frozen_roots(model), None):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=words, cpu_ram_efficient_loading=False)
        replicate_frozen_parts(plugin, roots, "replicate")
        if roots is None:
            assert plugin.ignored_modules is None and "nothing is frozen" in caplog.text
        else:
            ignored = {p for root in plugin.ignored_modules for p in root.parameters()}
            assert ignored == {p for n, p in model.named_parameters() if "projector" not in n}
