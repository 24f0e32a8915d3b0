"""A checkpoint -> a complete Hugging Face model folder, which `from_pretrained` alone loads.

    hf-dist merge outputs/run/checkpoint-40 --output merged

(1) the checkpoint is verified; its manifest says which model it is of and where the rest of the weights is
(2) the model: the base with what was trained put into it, or what the checkpoint holds complete
(3) adapters are merged; with them the model must give other outputs than its base
(4) the folder: weights, configs, and every file of the processor
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

from hf_dist_ext.checkpoints import manifest, model_names, safe_reading, sentence_model, trainable, weights
from hf_dist_ext.checkpoints.folder import require_new
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import CONFIG, adapters_of, base_of, merge_inside, put_in, why_not_by_weights
from hf_dist_ext.models.embedder import is_of_sentence_transformers
from hf_dist_ext.models.folders import resolve_folder
from hf_dist_ext.strategies.base import Strategy


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
    if adapters_of(model):
        model = _without_adapters(model)  # (3)
    if is_of_sentence_transformers(model):  # (4)
        sentence_model.write(model, output)
    else:
        model.save_pretrained(output)
        _copy_processor(checkpoint, source, output)


def is_part(folder: Path) -> bool:
    """Whether a checkpoint or run's folder holds what was trained alone, which no other program loads."""
    has_part = trainable.has_trainable_weights(folder) or (folder / CONFIG).is_file()
    return has_part and not (folder / "modules.json").is_file()


def folders_behind(folder: Path) -> list[Path]:
    """The folders whose weights make the model: this one, and the base's where it holds a part alone."""
    if (folder / "modules.json").is_file() and (folder / CONFIG).is_file():
        base, revision = base_of(folder)
    elif trainable.has_trainable_weights(folder) or (folder / CONFIG).is_file():
        facts = _verified(folder)
        base, revision = facts["base_model"], facts["base_revision"]
    else:
        return [folder]
    return [folder, *folders_behind(resolve_folder(base, revision))]


# (1) ---------------------------------------------------------------------------------------------------------------


def _verified(checkpoint: Path) -> dict[str, Any]:
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is no folder. Give a checkpoint-N folder, or the output_dir of a run.")
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
    path = folder / CONFIG
    if not path.is_file():
        return None
    kind = json.loads(path.read_text(encoding="utf-8")).get("auto_mapping") or {}
    if "base_model_class" not in kind and not (folder / "modules.json").is_file():
        return None
    base, revision = base_of(folder)
    facts = {"model": kind.get("base_model_class"), "base_model": base, "base_revision": revision, "dtype": "float32"}
    return facts | {"embedder": None, "files": {}}


# (2) ---------------------------------------------------------------------------------------------------------------


def _complete_model(checkpoint: Path, facts: dict, base: str | None, options: dict, trust: bool) -> tuple[Any, Path]:
    """The model with the checkpoint's weights, and the folder that its processor's files may be taken from."""
    if facts.get("embedder") is not None or (checkpoint / "modules.json").is_file():
        return _complete_embedder(checkpoint, facts, base, options, trust).eval(), checkpoint
    is_partial = trainable.has_trainable_weights(checkpoint)
    has_adapters = (checkpoint / CONFIG).is_file()
    if not is_partial and not has_adapters and _has_whole_weights(checkpoint):
        return _load(facts, checkpoint, options), checkpoint
    if not is_partial and not has_adapters:
        return _from_shards(checkpoint, facts, options, trust), checkpoint
    folder = resolve_folder(_base(checkpoint, base or facts["base_model"]), facts["base_revision"])
    model = _load(facts, folder, options, is_base=True)
    if has_adapters:
        from peft import PeftConfig, PeftModel, get_peft_model

        if not is_partial:
            shards = _sharded_adapters(checkpoint, trust)
            if shards is not None:
                model = put_in(model, checkpoint, shards)
            else:
                model = PeftModel.from_pretrained(model, checkpoint)
            trainable.check_base(checkpoint, model)
            return model, folder
        model = get_peft_model(model, PeftConfig.from_pretrained(checkpoint))
    trainable.load_on_base(model, checkpoint, trust)
    return model.eval(), folder


def _base(checkpoint: Path, base: str | None) -> str:
    if base is None:
        raise UsageError(
            f"{checkpoint} holds only what was trained, and its model was built from a configuration: the rest is "
            "nowhere. Give --base FOLDER, or train with save_full_model=true."
        )
    return base


def _complete_embedder(checkpoint: Path, facts: dict, base: str | None, options: dict, trust: bool) -> Any:
    """Of a SentenceTransformer or MultiVectorEncoder. Where the checkpoint is a folder of it, with or without
    adapters, it is read as such; else it is built as the run has built it."""
    from hf_dist_ext.models import from_run

    if (checkpoint / "modules.json").is_file():
        model = from_run.build(checkpoint, merges_adapters=False, **options)
        if adapters_of(model):
            trainable.check_base(checkpoint, model)
        return model
    known = facts["embedder"]
    if known["built"] is None:
        raise UsageError(
            f"{checkpoint} holds a part of a {facts['model']} that a script of yours has made, and only the script "
            "knows its modules. Give the script's DistTrainer resume_from_checkpoint, and call save_model()."
        )
    built = {**known["built"], **options, "dtype": facts["dtype"]}
    if built.pop("has_tokenizer", False):
        built["tokenizer"] = str(checkpoint)
    is_partial = trainable.has_trainable_weights(checkpoint)
    if base is not None:
        built |= {"model_name_or_path": base, "model_config": None, "revision": None}
    if built["model_config"] is not None:
        if is_partial:
            _base(checkpoint, None)
        built["tokenizer"] = str(checkpoint)
    model = from_run.build(**built)
    from_run.take_settings(model, known["settings"])
    if model.transformers_model is not None and (checkpoint / "config.json").is_file():
        own = model.transformers_model.config
        text = type(own).from_pretrained(checkpoint).get_text_config()
        if hasattr(text, "is_causal"):  # of a run with that field (models/embedder.py)
            own.get_text_config().is_causal = text.is_causal
    if (checkpoint / CONFIG).is_file():
        from peft import PeftConfig

        model.transformers_model.add_adapter(PeftConfig.from_pretrained(checkpoint))
    if is_partial:
        trainable.load_on_base(model, checkpoint, trust)
    else:
        weights.load(model, checkpoint, trust, Strategy())
    return model


def _sharded_adapters(checkpoint: Path, trust: bool) -> dict[str, torch.Tensor] | None:
    """Adapters that FSDP saved in shards, under peft's names."""
    folder = checkpoint / weights.SHARDED_BY_FSDP
    if not folder.is_dir():
        return None
    entries = safe_reading.read_entries(folder, trust)
    found = {name: torch.empty(tuple(one.size), dtype=one.properties.dtype) for name, one in entries.items()}
    safe_reading.load(found, folder, trust)
    return {name.removeprefix("model."): value for name, value in found.items()}


def _has_whole_weights(folder: Path) -> bool:
    return any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _model_class(facts: dict) -> Any:
    model_class = getattr(transformers, facts["model"] or "", None)
    if model_class is None:
        raise UsageError(f"{facts['model']} is no class of transformers.")
    return model_class


def _load(facts: dict, folder: Path, options: dict, is_base: bool = False) -> Any:
    if is_base:  # as the run had it, to compare the frozen weights bit for bit
        options = options | {"dtype": facts["dtype"]}
    return _model_class(facts).from_pretrained(folder, **({"dtype": "auto"} | options)).eval()


def _from_shards(checkpoint: Path, facts: dict, options: dict, trust: bool) -> Any:
    model = _model_class(facts)(transformers.AutoConfig.from_pretrained(checkpoint, **options))
    weights.load(model, checkpoint, trust, Strategy())
    return model.eval()


# (3) ---------------------------------------------------------------------------------------------------------------


def check_can_save_merged(model: nn.Module, will_be_split: bool) -> None:
    """Before training: the copy that is merged would have to be whole on one process, but for LoRA in a model of
    sentence-transformers, whose weights are gathered and merged."""
    if not will_be_split or not adapters_of(model):
        return
    if is_of_sentence_transformers(model):
        others = [f'one is called "{name}", not "default"' for name in adapters_of(model) if name != "default"]
        if (why := next(iter(others), None) or why_not_by_weights(model)) is not None:
            raise UsageError(
                f"this run's adapters can not be merged at its end: {why}, and under FSDP, ZeRO-3 and in "
                "a pipeline only plain LoRA is merged. Train a base that lies in a folder, and leave save_full_model "
                "off."
            )
    else:
        raise UsageError(
            "save_full_model=true with adapters does not work under FSDP and ZeRO-3. Turn it off; hf-dist merge makes "
            "the complete model of what the run ends with."
        )


def save_merged(model: nn.Module, processor: Any, folder: Path) -> None:
    """The complete model at the end of a run with adapters: merged in a copy, on the process that writes."""
    if is_of_sentence_transformers(model):
        model = copy.deepcopy(model, {id(model.model_card_data): model.model_card_data}).eval()
        sentence_model.write(_without_adapters(model), folder)
        return
    model = copy.deepcopy(model).eval()
    _without_adapters(model).save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)


def _without_adapters(model: Any) -> nn.Module:
    outputs = _outputs(model)
    if is_of_sentence_transformers(model):
        model.transformers_model.disable_adapters()
        of_base = _outputs(model)
        model.transformers_model.enable_adapters()
        merge_inside(model.transformers_model)
        merged = model.eval()
    else:
        with model.disable_adapter():
            of_base = _outputs(model)
        merged = model.merge_and_unload().eval()
    if outputs is not None and torch.equal(outputs, of_base):
        raise UsageError("the adapters change nothing: the merged model would be the base model. Train them first.")
    return merged


@torch.no_grad()
def _outputs(model: Any) -> torch.Tensor | None:
    """What the model says to a few tokens; None for one that needs more than tokens."""
    tokens = torch.tensor([[5, 6, 7, 8], [8, 7, 6, 5]], device=next(model.parameters()).device)
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    try:
        if not is_of_sentence_transformers(model):
            return model.eval()(**given)[0].float()
        output = model.eval()({**given, "modality": "text"})
        return output.get("sentence_embedding", output.get("token_embeddings")).float()
    except (TypeError, ValueError, NotImplementedError, AttributeError, KeyError):
        return None


# (4) ---------------------------------------------------------------------------------------------------------------


def _copy_processor(checkpoint: Path, source: Path, output: Path) -> None:
    """The checkpoint's own files, or else those of the base."""
    found: dict[str, Path] = {}
    for folder in (source, checkpoint):
        inside = {p.name: p for p in folder.iterdir() if p.is_file() and model_names.is_processors(p.name)}
        found = inside or found
    for name, path in found.items():
        shutil.copyfile(path, output / name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, output / templates.name)
