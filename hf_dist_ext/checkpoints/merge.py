"""A checkpoint -> a complete Hugging Face model folder, which `from_pretrained` alone loads.

    hf-dist merge outputs/run/checkpoint-40 --output merged

(1) the checkpoint is verified; its manifest says which model it is of and where the rest of the weights is
(2) the model: the base with what was trained put into it, or what the checkpoint holds complete
(3) adapters are merged; the weights must then differ from the base's and give the outputs they gave before
(4) the folder: weights, configs, and every file of the processor
(5) it is read back as a user would: the same weights, the same outputs, every processor file unchanged
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from hf_dist_ext.checkpoints import facts as run_facts
from hf_dist_ext.checkpoints import manifest, model_names, safe_reading, trainable
from hf_dist_ext.checkpoints.folder import require_new
from hf_dist_ext.checkpoints.resume import SHARDED_BY_FSDP, load_whole
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import adapter_folder
from hf_dist_ext.models.embedding_model import EmbeddingModel, can_keep_adapters_alone
from hf_dist_ext.models.model_folder import read_model_folder, resolve_folder
from hf_dist_ext.models.router_folder import is_router, read_routes
from hf_dist_ext.models.towers import TowerModel, class_of_tower, load_route, load_tower
from hf_dist_ext.models.weights import load_weights
from hf_dist_ext.strategies import consensus
from hf_dist_ext.strategies.tensors import gathered

ADAPTER_FILES = [adapter_folder.CONFIG, adapter_folder.WEIGHTS]
TOLERANCE = 1e-4  # between outputs before and after merging adapters, of their size: float32 sums in another order


def merge(
    checkpoint: Path, output: Path, base: str | None = None, trust_remote_code: bool = False, trust: bool = False
) -> None:
    """Write the complete model of a checkpoint, or of the folder that a run with frozen parts ended with.

    `base`: where the frozen weights are, when not where the run had them.
    """
    facts = _verified(checkpoint)  # (1)
    require_new("--output", output)
    options = {"trust_remote_code": trust_remote_code}
    model, source = _complete_model(checkpoint, facts, base, options, trust)  # (2)
    before = _outputs(model)
    if hasattr(model, "merge_and_unload"):
        model = _without_adapters(model, before)  # (3)
    model.save_pretrained(output)  # (4)
    processor_files = _copy_processor(checkpoint, source, output)
    for name in getattr(model, "towers", {}):
        _copy_files(_processor_files(checkpoint / name), output / name)
    _check(output, model, before, processor_files, options)  # (5)


def is_part(folder: Path) -> bool:
    """Whether a checkpoint or run's folder holds what was trained alone, which no other program loads."""
    has_part = trainable.has_trainable_weights(folder) or (folder / adapter_folder.CONFIG).is_file()
    return has_part and not (folder / "modules.json").is_file()


def folders_behind(folder: Path) -> list[Path]:
    """The folders whose weights make the model: this one, and the base's where it holds a part alone."""
    if (folder / "modules.json").is_file() and (folder / adapter_folder.CONFIG).is_file():
        base, revision = adapter_folder.base_of(folder)
    elif trainable.has_trainable_weights(folder) or (folder / adapter_folder.CONFIG).is_file():
        facts = _verified(folder)
        base, revision = facts["base_model"], facts["base_revision"]
    else:
        return [folder]
    return [folder, *folders_behind(resolve_folder(base, revision))]


# (1) ---------------------------------------------------------------------------------------------------------------


def _verified(checkpoint: Path) -> dict[str, Any]:
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} does not exist. Give a checkpoint-N folder, or the output_dir of a run.")
    facts = manifest.read(checkpoint) or _facts_of_adapters(checkpoint)
    if facts is None:
        raise UsageError(
            f"{checkpoint} is no checkpoint with a {manifest.MANIFEST}: its save did not end, another program wrote "
            "it, or it is a complete model already, which from_pretrained loads. Give a complete checkpoint, or the "
            "output_dir of a run of adapters or of frozen parts."
        )
    if broken := manifest.problems(checkpoint, facts):
        raise UsageError(f"{checkpoint} is incomplete: {', '.join(broken)}. Use another checkpoint.")
    return facts


def _facts_of_adapters(folder: Path) -> dict[str, Any] | None:
    """Of a folder of adapters that peft alone has written: its class and base, in the precision of our runs."""
    path = folder / adapter_folder.CONFIG
    kind = (json.loads(path.read_text(encoding="utf-8")).get("auto_mapping") or {}) if path.is_file() else {}
    if "base_model_class" not in kind or kind["base_model_class"] in (EmbeddingModel.__name__, TowerModel.__name__):
        return None
    base, revision = adapter_folder.base_of(folder)
    facts = {"model": kind["base_model_class"], "base_model": base, "base_revision": revision, "dtype": "float32"}
    return facts | {"embedding": None, "towers": None, "files": {}}


# (2) ---------------------------------------------------------------------------------------------------------------


def _complete_model(checkpoint: Path, facts: dict, base: str | None, options: dict, trust: bool) -> tuple[Any, Path]:
    """The model with the checkpoint's weights, and the folder that its processor's files may be taken from."""
    is_partial = trainable.has_trainable_weights(checkpoint)
    has_adapters = (checkpoint / "adapter_config.json").is_file()
    if facts["model"] == TowerModel.__name__:
        if not has_adapters:
            return _complete_towers(checkpoint, facts, base, is_partial, trust)
        raise UsageError(f"{checkpoint} has adapters on a TowerModel, which are not merged here.")
    if not is_partial and not has_adapters and _has_whole_weights(checkpoint):
        return _load(facts, checkpoint, options), checkpoint
    if not is_partial and not has_adapters:
        return _from_shards(checkpoint, facts, options, trust), checkpoint
    base = base or facts["base_model"]
    if base is None:
        raise UsageError(
            f"{checkpoint} holds only what was trained, and its model was built from a configuration: the rest is "
            "nowhere. Give --base FOLDER, or train with save_full_model=true."
        )
    folder = resolve_folder(base, facts["base_revision"])
    model = _load(facts, folder, options, is_base=True)
    if has_adapters:
        from peft import PeftConfig, PeftModel, get_peft_model

        if not is_partial:
            shards, is_embedding = _sharded_adapters(checkpoint, trust), isinstance(model, EmbeddingModel)
            if is_embedding:
                _take_projection(model, checkpoint, folder)
            if is_embedding or shards is not None:
                model = adapter_folder.with_adapters(model, checkpoint, shards)
            else:
                model = PeftModel.from_pretrained(model, checkpoint)
            trainable.check_base(checkpoint, model)
            return model, folder
        model = get_peft_model(model, PeftConfig.from_pretrained(checkpoint))
    trainable.load_on_base(model, checkpoint, trust)
    return model.eval(), folder


def _sharded_adapters(checkpoint: Path, trust: bool) -> dict[str, torch.Tensor] | None:
    """Adapters that FSDP saved in shards, under peft's names."""
    folder = checkpoint / SHARDED_BY_FSDP
    if not folder.is_dir():
        return None
    entries = safe_reading.read_entries(folder, trust)
    weights = {name: torch.empty(tuple(one.size), dtype=one.properties.dtype) for name, one in entries.items()}
    safe_reading.load(weights, folder, trust)
    return {name.removeprefix("model."): value for name, value in weights.items()}


def _take_projection(model: EmbeddingModel, checkpoint: Path, base: Path) -> None:
    """A projection that the run began with: the folder at its end has it, a checkpoint does not."""
    if model.projection is None:
        return
    projection = read_model_folder(checkpoint if (checkpoint / "modules.json").is_file() else base).projection
    if projection is None:
        raise UsageError(
            f"{checkpoint} has no projection, which the run made and did not train: it is in the folder that the run "
            "ends with. Give that one."
        )
    load_weights(model.projection, projection, source=str(checkpoint))


def _complete_towers(
    checkpoint: Path, facts: dict, base: str | None, is_partial: bool, trust: bool
) -> tuple[TowerModel, Path]:
    """A `TowerModel`: every tower whole in the checkpoint; or from its base, which may be a folder of towers, a dual
    encoder or a tower of its own; or built from its config, for weights in shards."""
    folders: dict[str, Path] = {}

    def from_base(name: str, kind: str) -> Any:
        known = (facts["towers"] or {}).get(name, {"base": None, "embedding": None})
        source = base or known["base"]
        if source is None:
            raise UsageError(
                f'{checkpoint} holds only what was trained, and its tower "{name}" was built from a configuration: '
                "the rest is nowhere. Give --base FOLDER."
            )
        folder = folders[name] = resolve_folder(source)
        options = {key: value for key, value in (known["embedding"] or {}).items() if value is not None}
        if (folder / "towers.json").is_file():
            folder = folder / name
        elif is_router(folder):
            return load_route(folder, read_routes(folder)[name], dtype=facts["dtype"], **options)
        elif not options:  # of a dual encoder's folder only the tower's own part
            options = {"config": class_of_tower(kind, folder).config_class.from_pretrained(checkpoint / name)}
        return load_tower(folder, kind, facts["dtype"], **options)

    def from_config(name: str, kind: str) -> Any:
        model_class = class_of_tower(kind, checkpoint)
        if model_class is EmbeddingModel:
            config = transformers.AutoConfig.from_pretrained(checkpoint / name)
            return EmbeddingModel.from_config(config, **facts["towers"][name]["embedding"])
        return model_class(model_class.config_class.from_pretrained(checkpoint / name))

    if is_partial:
        model = TowerModel.from_description(checkpoint, from_base)
        trainable.load_on_base(model, checkpoint, trust)
        return model.eval(), next(iter(folders.values()))
    if all(_has_whole_weights(path.parent) for path in checkpoint.glob("*/config.json")):
        return TowerModel.from_pretrained(checkpoint), checkpoint
    model = TowerModel.from_description(checkpoint, from_config)
    load_whole(model, checkpoint, trust)
    return model.eval(), checkpoint


def _has_whole_weights(folder: Path) -> bool:
    return any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _model_class(facts: dict) -> Any:
    own = EmbeddingModel if facts["model"] == EmbeddingModel.__name__ else None
    model_class = own or getattr(transformers, facts["model"], None)
    if model_class is None:
        raise UsageError(f"{facts['model']} is neither an EmbeddingModel nor a class of transformers.")
    return model_class


def _load(facts: dict, folder: Path, options: dict, is_base: bool = False) -> Any:
    if is_base:  # as the run had it, to compare the frozen weights bit for bit
        embedding = {name: value for name, value in (facts["embedding"] or {}).items() if value is not None}
        options = options | embedding | {"dtype": facts["dtype"]}
    return _model_class(facts).from_pretrained(folder, **({"dtype": "auto"} | options)).eval()


def _from_shards(checkpoint: Path, facts: dict, options: dict, trust: bool) -> Any:
    config = transformers.AutoConfig.from_pretrained(checkpoint, **options)
    if facts["embedding"] is not None:
        model = _model_class(facts).from_config(config, **facts["embedding"])
    else:
        model = _model_class(facts)(config)
    load_whole(model, checkpoint, trust)
    return model.eval()


# (3) ---------------------------------------------------------------------------------------------------------------


def has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "merge_and_unload")


def can_stand_alone(model: nn.Module) -> bool:
    """Whether a folder of its adapters says all about an `EmbeddingModel`: its base lies somewhere."""
    return can_keep_adapters_alone(model) and run_facts.base_model(model) is not None


def check_can_save_merged(model: nn.Module, will_be_split: bool) -> None:
    """Before training: the copy that is merged would have to be whole on one process."""
    if will_be_split and has_adapters(model):
        raise UsageError(
            "save_full_model=true with adapters does not work under FSDP, ZeRO-3 and in a pipeline. Turn it off; "
            "hf-dist merge makes the complete model of what the run ends with. It is on by itself for dual "
            "encoders and for models built from model_config, whose adapters nothing else could load: use "
            "multi_gpu_ddp for these."
        )


def save_merged(model: nn.Module, processor: Any, folder: Path) -> None:
    """The complete model at the end of a run with adapters: merged in a copy, on the process that writes."""
    model = copy.deepcopy(model).eval()
    _without_adapters(model, _outputs(model)).save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)


def complete_adapters(
    model: nn.Module,
    state_dict: dict[str, torch.Tensor] | None,
    folder: Path,
    tokenizer: Any,
    dtype_of_base: str,
    keep: bool,
) -> None:
    """What models/adapter_folder.py writes into peft's folder, of the weights that `Trainer._save` was given.
    `dtype_of_base`: what the base was loaded in. Every rank calls it; those that `keep` write."""
    start = f"{adapter_folder.PEFT}projection."
    tensors = trainable.named(model.named_parameters()) if state_dict is None else state_dict
    parts = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    projection = dict(gathered(parts, keep))

    def write() -> None:
        if not keep:
            return
        adapter_folder.write(
            model, state_dict, folder, run_facts.base_model(model), dtype_of_base, projection, tokenizer
        )

    consensus.together(write)


def _without_adapters(model: Any, before: torch.Tensor | None) -> nn.Module:
    with model.disable_adapter():
        of_base = _outputs(model)
    merged = model.merge_and_unload().eval()
    after = _outputs(merged)
    if before is None or after is None:
        return merged
    if torch.equal(after, of_base):
        raise UsageError("the adapters change nothing: the merged model would be the base model. Train them first.")
    scale = before.abs().max().item() or 1.0
    if (difference := (after - before).abs().max().item()) > _tolerance(merged) * scale:
        raise UsageError(
            f"merging changed the outputs by {difference:.1e} of {scale:.1e}: the adapters can not be merged."
        )
    return merged


def _tolerance(model: nn.Module) -> float:
    is_wide = all(p.dtype.itemsize >= 4 for p in model.parameters() if p.is_floating_point())
    return TOLERANCE if is_wide else 0.05


@torch.no_grad()
def _outputs(model: Any) -> torch.Tensor | None:
    """What the model says to a few tokens; None for one that needs more than tokens."""
    if isinstance(model, TowerModel):
        outputs = [_outputs_of_tower(tower) for tower in model.towers.values()]
        return None if any(output is None for output in outputs) else torch.cat(outputs)
    tokens = torch.tensor([[5, 6, 7, 8], [8, 7, 6, 5]], device=next(model.parameters()).device)
    try:
        output = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    except (TypeError, ValueError, NotImplementedError):
        return None
    return output[0].float()


@torch.no_grad()
def _outputs_of_tower(tower: Any) -> torch.Tensor | None:
    size = getattr(tower.config, "image_size", None)
    if isinstance(tower, EmbeddingModel) or tower.main_input_name != "pixel_values":
        output = _outputs(tower)
        return None if output is None else output.flatten()
    if not isinstance(size, int):  # patches with masks of their own
        return None
    pixels = torch.linspace(-1, 1, tower.config.num_channels * size**2, dtype=tower.dtype)
    return tower.eval()(pixel_values=pixels.view(1, -1, size, size))[0].float().flatten()


# (4) ---------------------------------------------------------------------------------------------------------------


def _copy_processor(checkpoint: Path, source: Path, output: Path) -> dict[str, Path]:
    """name -> where it is from; the checkpoint's own files, or else those of the base."""
    for folder in (checkpoint, source):
        files = _processor_files(folder)
        if files:
            break
    _copy_files(files, output)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, output / templates.name)
    return files


def _processor_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.is_file() and model_names.is_processors(path.name)}


def _copy_files(files: dict[str, Path], output: Path) -> None:
    for name, path in files.items():
        shutil.copyfile(path, output / name)


# (5) ---------------------------------------------------------------------------------------------------------------


def _check(output: Path, model: nn.Module, before: Any, processor_files: dict[str, Path], options: dict) -> None:
    options = {} if isinstance(model, TowerModel) else options
    again = type(model).from_pretrained(output, dtype="auto", **options).eval()
    ours, theirs = model.state_dict(), again.state_dict()
    wrong = [n for n in ours if n not in theirs or not torch.equal(ours[n].to(theirs[n].dtype), theirs[n])]
    if wrong:
        raise UsageError(f"{output} does not load as it was written ({len(wrong)} weights, such as {wrong[0]}).")
    after = _outputs(again)
    if before is not None and after is not None:
        scale = before.abs().max().item() or 1.0
        if not torch.allclose(before, after, atol=_tolerance(again) * scale, rtol=0):
            raise UsageError(f"{output} gives other outputs than the checkpoint.")
    changed = [n for n, path in processor_files.items() if (output / n).read_bytes() != path.read_bytes()]
    if changed:
        raise UsageError(f"{output}: {changed[0]} of the processor is not that of {processor_files[changed[0]]}.")
