"""What DistTrainer overrides of Trainer has the parameters it had in the tested releases. A release that changes one
fails here first, by name."""

import inspect
import re
from pathlib import Path

import pytest
from transformers import Trainer

from hf_dist_ext.training.trainer import DistTrainer

EPOCH = (
    "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval start_time "
    "resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
)
HOOKS = {  # of Trainer -> its parameters
    "_build_accelerator_args": "**kwargs",
    "_clip_grad_norm": "model",
    "_finalize_training": "trial num_train_samples start_time",
    "_get_grad_norm": "model grad_norm",
    "_get_train_sampler": "train_dataset",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_rng_state": "checkpoint",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_run_epoch": EPOCH,
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_sync_replicated_trainable_parameters": "model",
    "_track_num_input_tokens": "inputs",
    "call_model_init": "trial",
    "create_accelerator_and_postprocess": "",
    "create_optimizer": "model",
    "create_scheduler": "num_training_steps optimizer",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "get_batch_samples": "epoch_iterator num_batches device",
    "get_eval_dataloader": "eval_dataset",
    "get_train_dataloader": "",
    "init_hf_repo": "token private",
    "log": "logs start_time",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "push_to_hub": "commit_message blocking token revision private **kwargs",
    "save_model": "output_dir _internal_call",
    "set_initial_training_values": "args dataloader",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "training_step": "model inputs num_items_in_batch",
}
BEFORE = {"init_hf_repo": "token", "push_to_hub": "commit_message blocking token revision **kwargs"}  # 5.23
CALLED = {  # by DistTrainer, and not overridden
    "_determine_best_metric": "metrics trial",
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_finish_current_push": "",
    "_get_collator_with_removed_columns": "data_collator description",
    "_get_dataloader": "dataset description batch_size sampler_fn is_training dataloader_key",
    "_get_num_items_in_batch": "batch_samples device",
    "_get_output_dir": "trial",
    "_load_best_model": "",
    "_prepare_input": "data",
    "_prepare_inputs": "inputs",
    "_save_optimizer_and_scheduler": "output_dir",
    "_save_rng_state": "output_dir",
    "_save_scaler": "output_dir",
    "_wrap_model": "model training dataloader",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
}


def parameters_of(name: str) -> str:
    found = list(inspect.signature(getattr(Trainer, name)).parameters.values())[1:]
    return " ".join(re.split("[:=]", str(parameter))[0].strip() for parameter in found)


@pytest.mark.parametrize("name", [*HOOKS, *CALLED])
def test_a_hook_has_the_parameters_it_had(name):
    assert parameters_of(name) in ((HOOKS | CALLED)[name], BEFORE.get(name)), "see DistTrainer's override or its call"


def test_every_override_is_listed():
    ours = {name for name in vars(DistTrainer) if callable(getattr(Trainer, name, None)) and name[:2] != "__"}
    assert ours == set(HOOKS)


def test_every_private_name_of_trainer_that_is_used_is_listed():
    private = {name for name in vars(Trainer) if re.match("_[a-z]", name) and callable(getattr(Trainer, name))}
    source = Path(inspect.getfile(DistTrainer)).read_text(encoding="utf-8")
    used = {name for name in private if re.search(rf"\b(self|super\(\))\.{name}\b", source)}
    assert used <= set(HOOKS) | set(CALLED)
