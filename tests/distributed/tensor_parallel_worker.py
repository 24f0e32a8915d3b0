"""Two processes, a Qwen3 split by transformers: its gradients after two backwards, and what DistTrainer says of it.

(1) weights written by the first process, loaded whole and split, in float64
(2) two halves of a batch backward one after the other; per parameter the distance to the whole model's gradient
(3) DistTrainer with a loss gets the split model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModel, Qwen3Config
from transformers.distributed import DistributedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_dist_ext.errors import UsageError
from hf_dist_ext.losses import InfoNCELoss
from hf_dist_ext.modeling import EmbeddingModel
from hf_dist_ext.trainer import DistTrainer
from hf_dist_ext.training_args import DistTrainingArguments

# The class rounds to float32 inside; this is about sums over processes.
Qwen3RMSNorm.forward = lambda self, x: nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


def backwards(model: nn.Module) -> None:
    rows = torch.randint(1, 99, (4, 7), generator=torch.Generator().manual_seed(0))
    for half in rows.split(2):
        model(input_ids=half).last_hidden_state.square().sum().backward()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:  # (1)
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8,
        )  # fmt: skip
        AutoModel.from_config(config).double().save_pretrained(folder / "model")
    dist.barrier()
    reference = AutoModel.from_pretrained(folder / "model", dtype=torch.float64)
    split = AutoModel.from_pretrained(
        folder / "model", dtype=torch.float64, distributed_config=DistributedConfig(tp_size=2)
    )
    backwards(reference)  # (2)
    backwards(split)
    differences = {}
    for (name, wanted), found in zip(reference.named_parameters(), split.parameters(), strict=True):
        assert wanted.grad.norm() > 0
        differences[name] = ((whole(found.grad) - wanted.grad).norm() / wanted.grad.norm()).item()
    args = DistTrainingArguments(output_dir=str(folder / "run"), use_cpu=True, report_to=[], save_strategy="no")  # (3)
    try:
        DistTrainer(EmbeddingModel(split, pooling="last"), args, loss=InfoNCELoss())
        said = "nothing"
    except UsageError as error:
        said = str(error)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps({"differences": differences, "said": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
