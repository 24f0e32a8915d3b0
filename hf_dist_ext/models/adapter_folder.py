"""A folder of LoRA adapters that says everything about its embedding model but the base's weights.

    adapter_config.json, adapter_model.safetensors   peft's, under the backbone's own names: AutoModel finds them
    modules.json, 1_Pooling/, 2_Dense/, ...          as in models/model_folder.py
    tokenizer.json, ...                              the tokenizer's

(1) writing: peft names modules as in the model it wrapped, an `EmbeddingModel`, whose backbone is a part. AutoModel
    and sentence-transformers load the backbone alone, and would leave out adapters with that part's name in front
(2) reading: the adapters on an `EmbeddingModel` of the base, all of them or an error

peft itself finds its way too (`PeftModel.from_pretrained(EmbeddingModel..., folder)`, and so a run that is resumed):
`EmbeddingModel.load_state_dict` takes the backbone's own names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.model_folder import ADAPTERS as CONFIG
from hf_dist_ext.models.model_folder import write_model_folder

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"
PEFT, BACKBONE = "base_model.model.", "backbone."  # in front of names: what peft adds, and EmbeddingModel

# (1) ---------------------------------------------------------------------------------------------------------------


def write(
    model: PeftModel,
    state_dict: dict[str, torch.Tensor] | None,
    folder: Path,
    base: str,
    dtype: str,
    projection: dict[str, torch.Tensor],
    tokenizer: Any,
) -> None:
    """Turn peft's folder of an `EmbeddingModel` into the one above. `state_dict`: whole weights of the model, None for
    its own; `base`, `dtype`: the folder or hub id of the base, and what it was loaded in; `projection`: its whole
    weights, empty for none."""
    from peft import get_peft_model_state_dict

    bare, config = model.get_base_model(), json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    inner = PEFT + BACKBONE
    weights = get_peft_model_state_dict(model, state_dict)  # peft may not have written its file yet
    weights = {PEFT + name.removeprefix(inner): value.contiguous() for name, value in weights.items()}
    # The names of the modules themselves: a pattern may be written for the names before, and a process may have some.
    config["target_modules"] = sorted({name.partition(".lora_")[0].removeprefix(PEFT) for name in weights})
    config["exclude_modules"] = None
    config["base_model_name_or_path"] = base
    kind = type(bare.backbone)
    config["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    contents = bare.description(projection, tokenizer)
    contents.has_adapters, contents.dtype = True, dtype
    write_model_folder(folder, contents, bare.config.get_text_config().hidden_size)


# (2) ---------------------------------------------------------------------------------------------------------------


def base_of(folder: Path) -> tuple[str, str | None]:
    """The base that adapters were trained on, and its revision."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not config.get("base_model_name_or_path"):
        raise UsageError(f"{folder / CONFIG} names no base model, so its adapters have nothing to be put into.")
    return config["base_model_name_or_path"], config.get("revision")


def with_adapters(model: PreTrainedModel, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> PeftModel:
    """The model with the adapters of `folder`, as `write` or peft has written it, not merged. `weights`: those of a
    folder that holds them in another form."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(folder)
    weights = load_file(folder / WEIGHTS) if weights is None else weights
    if (folder / "modules.json").is_file():
        config.target_modules = {BACKBONE + name for name in config.target_modules}
        weights = {PEFT + BACKBONE + name.removeprefix(PEFT): value for name, value in weights.items()}
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise UsageError(f"{folder}: its adapters do not fit {type(model).__name__}: {error}") from error
    wanted, given = ({(k, v.shape) for k, v in of.items()} for of in (get_peft_model_state_dict(adapted), weights))
    if differing := sorted({name for name, _ in wanted ^ given}):
        raise UsageError(
            f"{folder}: {len(differing)} of its adapters do not fit the base model, such as {differing[0]}. Use the "
            "base that adapter_config.json names, as it was when the adapters were trained."
        )
    set_peft_model_state_dict(adapted, weights)
    return adapted.eval()
