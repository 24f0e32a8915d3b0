"""From a run file to a model of sentence-transformers.

    build("intfloat/e5-small-v2", dtype="float32")  # a folder or hub name, as SentenceTransformer(...) reads it
    build(model_config={"model_type": "bert", ...}, tokenizer=tokenizer, pooling="cls", projection_dim=64)

The result is a `SentenceTransformer`, or a `MultiVectorEncoder` where pooling is "tokens". Its modules have the names
by which `trainable_modules` calls them: backbone, pooling, projection (dense_2, ... where a folder has several Dense
modules), mask, normalize. A model of other modules, such as a Router, keeps its own names.

One thing to know: sentence-transformers has no public way to give its `Transformer` a model that is already there. So
while `build` runs, `Transformer._load_model` is replaced: it leaves out the pooler, which no embedding depends on,
refuses files that lack weights, and makes models that are split over processes, cut into stages or in 4 bits. On
torch's meta device it reads no weights. The module's class and its other methods are theirs.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import cached_file

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import CONFIG, base_of, merge_inside, put_in
from hf_dist_ext.models.backbones import (
    NOTHING_IS_RAISED,
    build_backbone,
    check_complete,
    loading_errors,
    parse_config,
    parse_dtype,
    pooler_left_out,
    split_options,
    warn_of_own_code,
    without_pooler,
)
from hf_dist_ext.models.folders import read_json, resolve_folder
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.strategies.pipeline.stages import put_back

NAMES = {Pooling: "pooling", MultiVectorMask: "mask", Normalize: "normalize"}
STATES = "token_embeddings"  # what sentence-transformers calls the vectors of tokens between its modules
# options of `_load` beside those of sentence-transformers -> what a run file calls them
SPECIAL = {
    "quantization_config": "load_in_4bit",
    "in_stages": "a pipeline",
    "distributed_config": "tensor parallelism",
}
OF_TOKENS = ("MultiVectorEncoder", "ColBERT", "HF_ColBERT")
STATIC = "static_embedding"  # a `model_type` of ours: a table of vectors without layers


def build(
    model_name_or_path: str | Path | None = None,
    *,
    model_config: Mapping[str, Any] | PreTrainedConfig | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    distributed_config: Any = None,
    in_stages: Callable[[type[PreTrainedModel]], type[PreTrainedModel]] | None = None,
    pooling: str | None = None,
    projection_dim: int | None = None,
    projection_bias: bool = False,
    normalize: bool | None = None,
    merges_adapters: bool = True,
) -> SentenceTransformer | MultiVectorEncoder:
    """The model of a folder or hub name, or one with random weights of a configuration. It lies where transformers
    puts it: on the CPU, but for a split or quantized one.

    Args:
        model_config: a transformers config, or a dict of "model_type" and that config's fields.
        tokenizer: tokenizer or processor, or the folder of one. None: the folder's own; with `model_config` one that
            reads no texts, for whoever counts what a model computes.
        dtype: None is what the files hold, and float32 for random weights.
        quantization_config: transformers' one, for a backbone that stays frozen.
        distributed_config: transformers' DistributedConfig splits the backbone over processes while it is read; those
            of a `model_config` must have drawn the same weights.
        in_stages: makes of the backbone's class one that reads this process's stages of a pipeline; the others are on
            the meta device then. A model of a `model_config` is whole, and cut later.
        pooling: "mean", "cls", "last", another mode of sentence-transformers' Pooling, or "tokens" (a vector for every
            real token). None: as the folder says; "mean" for a `model_config`.
        projection_dim: width of one linear map after pooling. None: as the folder says.
        projection_bias: of a new map.
        normalize: divides by the L2 norm. None: as the folder says; true for a `model_config`.
        merges_adapters: those of a folder become a part of the weights, all of which train. False: they stay.

    Raises:
        UsageError: what cannot be loaded or built, or does not go with the model.
    """
    if (model_name_or_path is None) == (model_config is None):
        raise UsageError("Give model_name_or_path or model_config, one of them.")
    built = _as_facts(model_name_or_path, model_config, revision) | {
        "attn_implementation": attn_implementation, "pooling": pooling, "projection_dim": projection_dim,
        "projection_bias": projection_bias, "normalize": normalize,
    }  # fmt: skip
    if tokenizer is not None and model_config is None:  # which a checkpoint's folder has
        built["has_tokenizer"] = True
    options: dict[str, Any] = {"dtype": parse_dtype(dtype), "attn_implementation": attn_implementation}
    options = {name: value for name, value in options.items() if value is not None}
    if model_config is not None:
        if quantization_config is not None:
            raise UsageError("load_in_4bit needs trained weights: give model_name_or_path instead of model_config.")
        first = _first_of(model_config, tokenizer, options, trust_remote_code, distributed_config)
        with _as_made():
            model = SentenceTransformer(modules=[first])
        pooling, normalize = pooling or ("mean" if _gives_tokens(first) else None), normalize is not False
    else:
        given = zip(SPECIAL, (quantization_config, in_stages, distributed_config), strict=True)
        special = {name: value for name, value in given if value is not None}
        model = _load(str(model_name_or_path), revision, trust_remote_code, options, special, merges_adapters)
        if tokenizer is not None:
            _give(model, _processor(tokenizer, trust_remote_code))
    modules = list(model)
    if (pooling, projection_dim, normalize) != (None, None, None):
        modules = _chain(modules, pooling, projection_dim, projection_bias, normalize)
        if pooling == TOKENS and isinstance(model, SentenceTransformer):
            prompts = {"prompts": model.prompts, "default_prompt_name": model.default_prompt_name}
            with _as_made():
                model = MultiVectorEncoder(modules=modules[:1], **prompts)
        elif normalize is not None and isinstance(model, SentenceTransformer):
            model.similarity_fn_name = "cosine" if normalize else "dot"  # in the folder too
    model = put_back(_put(modules, model))
    model._built_from = built
    return model


def _as_facts(name: str | Path | None, model_config: Any, revision: str | None) -> dict[str, Any]:
    """What of a model's origin a manifest holds."""
    if name is not None and Path(name).is_dir():
        name = Path(name).resolve()
    config = model_config.to_dict() if isinstance(model_config, PreTrainedConfig) else model_config
    return {"model_name_or_path": None if name is None else str(name), "model_config": config, "revision": revision}


OF_READING = ("max_seq_length", "query_length", "document_length", "do_lower_case", "processing_kwargs")


def settings_of(model: Any) -> dict[str, Any]:
    """What a model says of itself that is in no weights, and that a run may change: prompts, lengths."""
    reads = {name: getattr(model[0], name) for name in OF_READING if hasattr(model[0], name)}
    own = {"prompts": dict(model.prompts), "default_prompt_name": model.default_prompt_name}
    return {"model": own, "reads": reads, "normalizes": normalizes(model)}


def take_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Those of `settings_of` another one."""
    if settings["normalizes"] != normalizes(model):
        set_normalize(model, settings["normalizes"])
    for holder, values in ((model, settings["model"]), (model[0], settings["reads"])):
        for name, value in values.items():
            if getattr(holder, name) != value:
                setattr(holder, name, value)


def describe(
    model: SentenceTransformer | MultiVectorEncoder,
    max_length: int | Mapping[str, int | None] | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt_name: str | None = None,
    matryoshka_dims: Iterable[int] | None = None,
) -> None:
    """What was trained, for the model's folder and its `encode`. None leaves what the model says.

    Args:
        max_length: tokens of a row, or of each column: queries first, then documents; a column of None has the
            tokenizer's own limit.
        prompts: column or name -> text before every row.
        matryoshka_dims: widths that embeddings may be cut to, which vLLM reads in config.json.
    """
    if max_length is not None:
        _cut_at(model, list(max_length.values()) if isinstance(max_length, Mapping) else [max_length] * 2)
    # encode_document of 6.2 says that it looks for "passage" and "corpus" too, but finds its own "document" first.
    of_documents = [name for name in ("document", "positive", "passage", "corpus") if name in (prompts or {})]
    model.prompts |= dict(prompts or {}) | ({"document": prompts[of_documents[0]]} if of_documents else {})
    if default_prompt_name is not None:
        if default_prompt_name not in model.prompts:
            raise UsageError(
                f'default_prompt_name="{default_prompt_name}" is none of the prompts {", ".join(model.prompts)}.'
            )
        model.default_prompt_name = default_prompt_name
    if matryoshka_dims is not None and model.transformers_model is not None:
        model.transformers_model.config.update({"is_matryoshka": True, "matryoshka_dimensions": list(matryoshka_dims)})


def normalizes(model: Any) -> bool:
    """Whether the last thing that the model does is to divide by the L2 norm."""
    return any(isinstance(module, Normalize) for module in list(model)[-1:])


def set_normalize(model: Any, normalize: bool) -> None:
    """The model with or without a normalization at its end."""
    if normalizes(model):
        name = next(reversed(model._modules))
    else:
        name = "normalize" if "backbone" in model._modules else str(len(model._modules))
    model._modules.pop(name, None)
    if normalize:
        model._modules[name] = Normalize(STATES) if isinstance(model, MultiVectorEncoder) else Normalize()
    if model.module_kwargs is not None:
        model.module_kwargs = {**model.module_kwargs, name: []} if normalize else model.module_kwargs
    if isinstance(model, SentenceTransformer):
        model.similarity_fn_name = "cosine" if normalize else "dot"


def _cut_at(model: Any, lengths: list[int | None]) -> None:
    if isinstance(model[0], Router):
        for route, length in zip(("query", "document"), (*lengths, None), strict=False):
            reads = model[0].sub_modules[route][0] if route in model[0].sub_modules else None
            if length is not None and isinstance(reads, Transformer):
                reads.max_seq_length = length
        return
    if not isinstance(model[0], Transformer):
        raise UsageError(
            f"max_length: a {type(model[0]).__name__} reads texts by lengths of its own. Remove max_length, or "
            "cut the texts of the data."
        )
    query, document, *_ = *lengths, None
    model[0].query_length, model[0].document_length = (None, None) if query == document else (query, document)
    known = [length for length in lengths if length is not None]
    if len(known) == len(lengths) > 1:
        model.max_seq_length = max(known)


# ---- the backbone ----


def _first_of(
    model_config: Mapping[str, Any] | PreTrainedConfig, tokenizer: Any, options: Mapping[str, Any],
    trust_remote_code: bool, distributed_config: Any,
) -> nn.Module:  # fmt: skip
    """The module that reads texts, with random weights."""
    config = model_config if isinstance(model_config, PreTrainedConfig) else parse_config(model_config)
    processor = _nothing() if tokenizer is None else _processor(tokenizer, trust_remote_code)
    if config.model_type == STATIC:
        table = nn.Embedding(config.vocab_size, config.hidden_size, dtype=options.get("dtype")).weight.detach()
        module = StaticEmbedding(processor, embedding_weights=table.normal_(std=config.initializer_range))
        module.tokenizer.no_truncation()
        return module

    own_code = {"trust_remote_code": trust_remote_code}

    def load_model(self: Transformer, name: str, task: str, read: PreTrainedConfig, *rest: Any, **given: Any) -> Any:
        read.name_or_path = config.name_or_path  # not the folder below, which adapters would name as their base
        return build_backbone(read, **options, **own_code, distributed_config=distributed_config)

    with tempfile.TemporaryDirectory() as folder, _as_made(load_model):
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
        with loading_errors(folder):
            return Transformer(folder, processor_kwargs=own_code, config_kwargs=own_code)


def _load(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    options: Mapping[str, Any],
    special: Mapping[str, Any],
    merges_adapters: bool,
) -> SentenceTransformer | MultiVectorEncoder:
    """`special`: values of options in SPECIAL."""
    theirs, made, which = Transformer._load_model, [], ", ".join(SPECIAL[name] for name in special)

    def load_model(
        self: Transformer, place: str, task: Any, config: Any, backend: str, has_adapters: bool, **given: Any
    ) -> PreTrainedModel:
        if _is_meta():
            wanted = options.get("dtype", "auto")
            whole = {**options, "dtype": getattr(config, "dtype", None) if wanted == "auto" else wanted}
            return build_backbone(config, **whole, trust_remote_code=trust_remote_code)
        where = {key: given[key] for key in ("revision", "subfolder") if given.get(key)}
        read, folder, base = theirs, place, None
        if special:
            if has_adapters:
                raise UsageError(
                    f"{place} holds adapters, which {which} does not go with: such a model is not split, "
                    "nor cut or loaded in 4 bits. Merge them."
                )
            given |= {key: value for key, value in special.items() if key == "quantization_config"}
            given |= split_options(config, special.get("distributed_config"))
            if "in_stages" in special:
                read = partial(_read_stages, special["in_stages"](MODEL_MAPPING[type(config)]))
        elif has_adapters:
            from peft import PeftConfig

            base = PeftConfig.from_pretrained(place, **where)
            folder = str(resolve_folder(base.base_model_name_or_path, base.revision))
            given |= {"subfolder": "", "revision": base.revision}
        warn_of_own_code(place, config, trust_remote_code)
        is_pooler_read = "pooler_output" in str(self.load_config(place, **where).get("modality_config"))
        with contextlib.nullcontext({}) if is_pooler_read else pooler_left_out(config) as without:
            given |= {"output_loading_info": True} | without
            found, report = read(self, folder, task, config, backend, False, **given)
        check_complete(found, report["missing_keys"], folder)
        found = found if is_pooler_read else without_pooler(found)
        if special:
            found.config.use_cache = False  # a decoder would keep keys and values that nobody reads
        if base is not None:  # they would stay, and nothing beside them train
            put_in(found, resolve_folder(place, where.get("revision")) / where.get("subfolder", ""), inside=True)
            if merges_adapters:
                merge_inside(found)
                found.requires_grad_(True)
        made.append(found)
        return found

    _check_is_whole(Path(name))
    for module in read_json(Path(name, "modules.json"), missing_is_empty=True):
        if Path(name, module["path"], CONFIG).is_file():
            resolve_folder(*base_of(Path(name, module["path"])))  # its error says what is missing
    kind = MultiVectorEncoder if _is_of_tokens(name, revision) else SentenceTransformer
    with _as_made(load_model), loading_errors(name):
        model = kind(name, revision=revision, trust_remote_code=trust_remote_code, model_kwargs=dict(options))
    if special and len(made) != 1:
        raise UsageError(
            f"{name} has {len(made)} transformers models, and {which} needs one. Use multi_gpu_ddp or "
            "multi_gpu_fsdp, without load_in_4bit."
        )
    for module in list(model)[1:] if special else ():
        module.to(made[0].device)
    for module in model.modules():
        if isinstance(module, StaticEmbedding) and isinstance(options.get("dtype"), torch.dtype):
            module.to(options["dtype"])
    return (model.to("meta") if _is_meta() else model).eval()


def _read_stages(
    kind: Any, self: Transformer, folder: str, task: Any, config: Any, backend: str, has_adapters: bool, **given: Any
) -> Any:
    """As Transformer's `_load_model`, of a class that reads this process's stages."""
    return kind.from_pretrained(folder, config=config, **given)


def _is_meta() -> bool:
    return torch.get_default_device().type == "meta"


@contextlib.contextmanager
def _as_made(load_model: Callable[..., PreTrainedModel] = Transformer._load_model) -> Iterator[None]:
    """While inside, a Transformer's model comes from `load_model` and stays on the device where it was made."""
    # sentence-transformers 6.2 moves a model to one device at once, which one in stages or in 4 bits does not survive.
    before = Transformer._load_model, BaseModel.to
    Transformer._load_model, BaseModel.to = load_model, lambda self, *arguments, **options: self
    try:
        yield
    finally:
        Transformer._load_model, BaseModel.to = before


def _check_is_whole(folder: Path) -> None:
    """sentence-transformers would take what is left of a folder for a plain model, and pool it as such."""
    if not folder.is_dir() or (folder / "modules.json").is_file():
        return
    if any((folder / name).exists() for name in ("trainable.safetensors", "adapter_config.json")):
        raise UsageError(
            f"{folder} holds what was trained, not a whole model: hf-dist merge {folder} --output DIR makes one."
        )
    if lone := [path.name for path in sorted(folder.glob("[0-9]_*"))]:
        raise UsageError(f"{folder} holds {', '.join(lone)} but no modules.json. Copy the whole folder again.")


def _is_of_tokens(name: str, revision: str | None) -> bool:
    """Whether it is a folder of MultiVectorEncoder, or of a model that this one reads: ColBERT, ColPali."""

    def read(file: str) -> dict[str, Any]:
        path = cached_file(name, file, revision=revision, **NOTHING_IS_RAISED)
        return {} if path is None else json.loads(Path(path).read_text(encoding="utf-8"))

    own = read("config_sentence_transformers.json")
    kinds = [str(own.get("model_type"))] if own else read("config.json").get("architectures") or []
    return any(kind in OF_TOKENS or kind.endswith("ForRetrieval") for kind in kinds)


# ---- what reads texts ----


def _processor(tokenizer: Any, trust_remote_code: bool) -> Any:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    with loading_errors(tokenizer):
        return AutoProcessor.from_pretrained(tokenizer, trust_remote_code=trust_remote_code)


def _nothing() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")))


def _give(model: SentenceTransformer | MultiVectorEncoder, processor: Any) -> None:
    """Another tokenizer than the folder's, which cuts texts where the model ends."""
    if not isinstance(model[0], Transformer):
        raise UsageError(
            f"a tokenizer of its own does not go with a {type(model[0]).__name__}, which comes with the one that "
            "it was made for. Remove tokenizer_name."
        )
    limit = model.max_seq_length
    model[0].processor = processor
    if limit is not None:
        model.max_seq_length = min(limit, model.max_seq_length)


# ---- what follows ----


def _chain(
    modules: list[nn.Module], pooling: str | None, projection_dim: int | None, bias: bool, normalize: bool | None
) -> list[nn.Module]:
    """The modules with what is given in place of their own."""
    first, *rest = modules
    own = {kind: [module for module in rest if type(module) is kind] for kind in (Dense, *NAMES)}
    usual = [*own[Pooling], *own[Dense], *own[MultiVectorMask], *own[Normalize]]
    if not isinstance(first, (Transformer, StaticEmbedding)) or rest != usual:
        raise UsageError(
            f"the model is a chain of {', '.join(type(module).__name__ for module in modules)}: pooling, "
            "projection_dim and normalize say what follows one backbone. Remove them."
        )
    if own[MultiVectorMask] and pooling not in (None, TOKENS):
        raise UsageError(f'pooling="{pooling}": the model gives a vector for every token. Remove pooling.')
    if pooling is not None and not _gives_tokens(first):
        raise UsageError(
            f'pooling="{pooling}": a {type(first).__name__} of this model gives one vector per row. Remove pooling.'
        )
    has_tokens = pooling == TOKENS or bool(own[MultiVectorMask])
    if has_tokens:
        middle = own[MultiVectorMask] or [MultiVectorMask()]
        for module in own[Dense] + own[Normalize]:
            module.module_input_name = module.module_output_name = STATES
    else:
        middle = own[Pooling] if pooling is None else [_pooling(first, pooling)]
    before = next((one.pooling_output_dimension for one in middle if isinstance(one, Pooling)), None)
    if own[Dense] and projection_dim not in (None, own[Dense][-1].out_features):
        raise UsageError(
            f"the model has a trained projection to {own[Dense][-1].out_features} dimensions, not {projection_dim}. "
            "Leave projection_dim out, or start from the backbone that it was made from."
        )
    if projection_dim is not None and not own[Dense]:
        own[Dense] = [_projection(first, before, projection_dim, bias, has_tokens)]
    last = own[Normalize] if normalize is None else [Normalize(STATES) if has_tokens else Normalize()] * normalize
    order = [*own[Dense], *middle] if has_tokens else [*middle, *own[Dense]]
    return [first, *order, *last]


def _pooling(first: Transformer, mode: str) -> Pooling:
    try:
        return Pooling(first.get_embedding_dimension(), {"last": "lasttoken"}.get(mode, mode))
    except ValueError as error:
        modes = ", ".join(("last", TOKENS, *Pooling.POOLING_MODES))
        raise UsageError(f'pooling="{mode}" does not exist. Choose one of {modes}.') from error


def _projection(first: Any, before: int | None, dim: int, bias: bool, of_tokens: bool) -> Dense:
    """A new map, drawn in the precision and on the device of the backbone."""
    if dim < 1:
        raise UsageError(f"projection_dim={dim} must be at least 1; leave it out for no projection.")
    like = next(weight for weight in first.parameters() if weight.is_floating_point())
    width = before or first.get_embedding_dimension()
    with torch.device("meta"):
        made = Dense(width, dim, bias, nn.Identity(), **({"module_input_name": STATES} if of_tokens else {}))
    made.linear = nn.Linear(width, dim, bias, like.device, like.dtype)
    return made


def _gives_tokens(first: nn.Module) -> bool:
    return getattr(first, "module_output_name", "") == STATES


def _put(modules: list[nn.Module], model: Any) -> Any:
    """The model with these modules, called by their names where all are known, and else by those that they have."""
    first, *rest = modules
    kinds = [type(module) for module in rest]
    several = iter(["projection", *(f"dense_{number}" for number in range(2, len(kinds) + 1))])
    names = ["backbone", *(NAMES.get(kind) or next(several) for kind in kinds)]
    is_known = isinstance(first, (Transformer, StaticEmbedding)) and {*kinds} <= {Dense, *NAMES}
    if is_known and len({*names}) == len(names):
        given = {id(module): (model.module_kwargs or {}).get(name, []) for name, module in model.named_children()}
        model._modules = OrderedDict(zip(names, modules, strict=True))
        model.module_kwargs = {name: given.get(id(module), []) for name, module in model.named_children()}
    return model
