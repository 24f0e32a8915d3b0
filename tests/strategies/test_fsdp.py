"""What FSDP writes into a checkpoint is what accelerate would write, which reads it."""

from pathlib import Path

import pytest
import torch
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaConfig, LlamaForCausalLM

from tests.checkpoints.test_async_save import same
from tests.checkpoints.test_trainable import SMALL, make
from tests.distributed.forked import Run


def read(folder: Path, name: str) -> dict:
    if (folder / f"{name}.bin").is_file():
        return torch.load(folder / f"{name}.bin", weights_only=True)
    dcp_to_torch_save(folder / f"{name}_0", folder / f"{name}.whole")
    return torch.load(folder / f"{name}.whole", weights_only=False)


@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("mode", ["fsdp-full", "fsdp-sharded"])
def test_the_files_of_a_checkpoint_are_those_that_accelerate_writes(tmp_path, mode, adapts):
    theirs = tmp_path / "theirs"

    def train(say) -> str:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
        if adapts:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
        trainer = make(tmp_path / "run", model, trainable_modules=None, max_steps=2)
        trainer.train()
        accelerator = trainer.accelerator
        given = accelerator.state.fsdp_plugin, accelerator
        save_fsdp_model(*given, trainer.model, theirs, adapter_only=True)
        save_fsdp_optimizer(*given, trainer.optimizer, trainer.model, theirs)
        accelerator.wait_for_everyone()
        return ""

    Run(mode, tmp_path / "log", train).result()
    is_whole = mode == "fsdp-full" and not adapts  # weights that `save_pretrained` writes too, and once is enough
    assert is_whole == (not list((tmp_path / "run" / "checkpoint-2").glob("pytorch_model_fsdp*")))
    for name in ("optimizer",) if is_whole else ("pytorch_model_fsdp", "optimizer"):
        ours, expected = read(tmp_path / "run" / "checkpoint-2", name), read(theirs, name)
        assert same(ours, expected) and str(ours.keys()) == str(expected.keys())
        content = ours.get("model", ours.get("optimizer", ours))
        assert len(content) >= 2 and (name == "optimizer" or all("lora" in key for key in content) == adapts)
