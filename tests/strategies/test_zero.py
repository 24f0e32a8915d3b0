"""A step of DeepSpeed's engine, without one."""

from types import SimpleNamespace

import torch
from torch import nn

from hf_dist_ext.strategies.zero import ZeRO


def test_a_parameter_of_a_loss_of_other_sources_has_a_gradient_of_zero():
    zero, own = SimpleNamespace(loss_scale=1.0, scaled_global_norm=lambda: 3.0), nn.Parameter(torch.ones(1))
    answers = {"was_step_applied": lambda: True, "gradient_clipping": lambda: 0.0, "get_global_grad_norm": lambda: 3.0}
    strategy, engine = ZeRO(), SimpleNamespace(optimizer=zero, **answers)
    strategy.accelerator = SimpleNamespace(deepspeed_engine_wrapped=SimpleNamespace(engine=engine))
    strategy.loss_parameters, strategy.optimizer = [own], torch.optim.SGD([own], 1.0)
    with strategy._with_loss_parameters():
        assert zero.scaled_global_norm() == 3.0
    assert own.item() == 1.0
