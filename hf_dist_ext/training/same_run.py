"""What must be the same on all ranks, and is compared before they train: nothing else would say that it is not.

A rank with another learning rate, other rows or another tokenizer trains on, and the weights are those of no run. Left
out is what may differ between machines: paths (what lies there is compared instead), secrets, what shows in logs
alone, and what saving writes into a model's configuration on the rank that saves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_dist_ext.data.fingerprint import content_digest
from hf_dist_ext.run.fields import is_secret
from hf_dist_ext.strategies import collectives, consensus
from hf_dist_ext.strategies.tensors import is_split

OF_A_MACHINE = frozenset(
    "output_dir logging_dir run_name resume_from_checkpoint overwrite_output_dir local_rank log_level "
    "log_level_replica log_on_each_node disable_tqdm report_to accelerate_config num_processes "
    "dataset_name eval_dataset_name model_name_or_path tokenizer_name image_folder path _name_or_path "
    "transformers_version dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory "
    "dataloader_persistent_workers frozen_feature_cache".split()
)
WRITTEN_BY_SAVING = ("config.architectures", "config.dtype")
SAMPLED_NUMBERS = 1024  # of a tensor


def check_fields(fields: Mapping[str, Any]) -> None:
    """Of a run file. Every rank calls it, as the next one. Raises UsageError."""
    consensus.check_same(_comparable(fields))


def check(
    args: Any, data: Mapping[str, Any], collator: Any, processor: Any, loss: Any, model: nn.Module, loads_alone: bool
) -> None:
    """Of a trainer, before `train()`. `data`: rows by what they are for; `loads_alone`: the weights that a rank loads
    are those that it trains."""
    if collectives.world_size() == 1:
        return
    facts = _comparable(args.to_dict())
    facts |= {f"the content of {name}": content_digest(rows) for name, rows in data.items() if rows is not None}
    facts |= {
        f"{type(one).__name__}.{name}": value for one in (collator, loss) for name, value in _options_of(one).items()
    }
    facts["the tokenizer"] = _digest(_of_tokenizer(processor or getattr(collator, "tokenizer", None)))
    if hasattr(config := getattr(model, "config", None), "to_dict"):
        facts |= {f"config.{name}": value for name, value in _comparable(config.to_dict()).items()}
        facts = {name: value for name, value in facts.items() if name not in WRITTEN_BY_SAVING}
    if loads_alone:
        facts |= {
            f"the weight {name}": _of_tensor(tensor) for name, tensor in model.state_dict(keep_vars=True).items()
        }
    consensus.check_same(facts)


def _comparable(fields: Any) -> Any:
    if isinstance(fields, Mapping):
        return {
            str(name): _comparable(value)
            for name, value in fields.items()
            if name not in OF_A_MACHINE and not is_secret(str(name))
        }
    if isinstance(fields, list | tuple | set):
        return [_comparable(one) for one in (sorted(fields, key=repr) if isinstance(fields, set) else fields)]
    if isinstance(fields, str):
        is_path = fields.startswith((".", "~", "/")) or fields.count("/") > 1
        return "a path" if is_path else fields
    return fields if isinstance(fields, int | float | bool | None) else str(type(fields))


def _options_of(part: Any) -> dict[str, Any]:
    """Of a collator or loss of ours. One of the user's may know its rank."""
    kinds = (str, int, float, bool, list, tuple, dict)
    own = vars(part) if type(part).__module__.startswith("hf_dist_ext.") else {}
    return _comparable({k: v for k, v in own.items() if isinstance(v, kinds) and not k.startswith("_")})


def _of_tokenizer(processor: Any) -> Any:
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "get_vocab"):
        return None
    how = sorted(tokenizer.get_vocab().items())
    if getattr(tokenizer, "is_fast", False):
        of_last_call = {"padding": None, "truncation": None}
        how = json.loads(tokenizer.backend_tokenizer.to_str()) | of_last_call
    names = ("model_input_names", "truncation_side", "split_special_tokens", "chat_template")
    return [how, *(getattr(tokenizer, name, None) for name in names)]


def _digest(content: Any) -> str:
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _of_tensor(tensor: torch.Tensor) -> Any:
    """Some numbers of it, spread evenly: two models differ nearly everywhere."""
    if is_split(tensor) or tensor.is_meta or not tensor.numel():
        return list(tensor.shape)
    numbers = tensor.detach().flatten()[:: -(-tensor.numel() // SAMPLED_NUMBERS)].contiguous().cpu()
    return _digest([list(tensor.shape), str(tensor.dtype), numbers.view(torch.uint8).numpy().tobytes()])
