"""What FSDP writes into a checkpoint is what accelerate would write, which reads it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.fsdp import FSDP, Scalars, keep_scalars_whole
from tests.checkpoints.test_async_save import same
from tests.checkpoints.test_trainable import SMALL, make
from tests.distributed.forked import Run
from tests.tiny_models import dual_encoder


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


def test_frozen_parameters_without_dimensions_are_left_alone_and_keep_their_names():
    """tests/distributed/test_dual_encoders.py trains such a model."""
    model, plugin = dual_encoder("clip"), SimpleNamespace(cpu_ram_efficient_loading=False, ignored_modules=None)
    inside = model.transformers_model
    inside.logit_scale.requires_grad_(False)
    inside.text_model.register_parameter("trains", torch.nn.Parameter(torch.ones(())))
    before = [name for name, _ in model.named_parameters()]
    keep_scalars_whole(plugin, model, torch.device("cpu"))
    (found,) = plugin.ignored_modules
    assert isinstance(found, Scalars) and [*found] == [inside.logit_scale]
    assert sorted(name for name, _ in model.named_parameters()) == sorted(before)
    keep_scalars_whole(plugin, torch.nn.Linear(2, 2), torch.device("cpu"))
    assert plugin.ignored_modules == [found]


@pytest.mark.parametrize("field, value", [("cpu_ram_efficient_loading", True), ("ignored_modules", ".*text_model")])
def test_lines_of_a_yaml_that_such_parameters_do_not_go_with_are_named(field, value):
    model = dual_encoder().requires_grad_(False)
    plugin = SimpleNamespace(**{"cpu_ram_efficient_loading": False, "ignored_modules": None, field: value})
    words = f'fsdp_{field}: .*SentenceTransformer: .*its parameter "backbone.model.logit_scale", a single number'
    with pytest.raises(UsageError, match=words):
        keep_scalars_whole(plugin, model, torch.device("cpu"))


def strategy_of(**of_accelerator) -> FSDP:
    strategy, plugin = FSDP(), SimpleNamespace(cpu_offload=CPUOffloadPolicy(pin_memory=False))
    more = {"device": torch.device("cpu"), "unscale_gradients": lambda: None} | of_accelerator
    strategy.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), **more)
    return strategy


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_on_the_cpu_are_clipped_with_the_losss_parameters_on_the_device(alone):
    """Where accelerate 1.15 stacks both norms, which torch refuses of two devices."""
    shards = nn.Parameter(distribute_tensor(torch.zeros(2), alone, [Shard(0)]))
    shards.grad, own = distribute_tensor(torch.tensor([3.0, 0.0]), alone, [Shard(0)]), nn.Parameter(torch.zeros(1))
    elsewhere = nn.Parameter(torch.zeros(1, device="meta"))
    elsewhere.grad = torch.zeros(1, device="meta")
    with pytest.raises(RuntimeError):  # else `FSDP.clip` can go
        Accelerator._clip_grad_norm_dtensor_aware(None, [shards, elsewhere], 1.0)
    own.grad = torch.tensor([4.0])
    assert strategy_of().clip([shards], [own], 1.0).item() == pytest.approx(5.0)
    assert shards.grad.full_tensor()[0].item() == pytest.approx(0.6) and own.grad.item() == pytest.approx(0.8)


def test_a_scaler_divides_sharded_gradients_and_those_of_the_losss_matrices(alone):
    shards, own = nn.Parameter(distribute_tensor(torch.zeros(2), alone, [Shard(0)])), nn.Parameter(torch.zeros(2, 3))
    optimizer, scaler = torch.optim.SGD([shards, own], 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    shards.grad, own.grad = distribute_tensor(torch.ones(2), alone, [Shard(0)]), torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):  # else `FSDP.start` can go
        scaler.unscale_(optimizer)
    strategy_of(scaler=scaler).start(nn.Linear(1, 1), "memory", [own], optimizer, has_towers=False)
    scaler.unscale_(optimizer)
    assert shards.grad.full_tensor().tolist() == [0.25, 0.25] and (own.grad == 0.25).all()
