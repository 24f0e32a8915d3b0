"""`EmbeddingModel`: any transformers backbone, so that each row of tokens becomes one vector.

    model = EmbeddingModel.from_pretrained("intfloat/e5-small-v2")          # or any folder save_pretrained wrote
    model(**tokenizer(["parse a date"], return_tensors="pt")).embeddings    # (1, D)

(1) the backbone embeds every token, from the features it has parameters for
(2) pooling averages the real tokens, or picks the first or the last of them, padding on either side; or it leaves all
    of them, for late interaction (models/multi_vector.py)
(3) an optional projection: one linear map, or several with activations (models/dense.py)
(4) optional division by the L2 norm

One thing to know: it is a PreTrainedModel around another one and shares that one's config object, so that Trainer,
PEFT and accelerate find what they look for. The state dict's keys are `backbone.*` and `projection.*`; on disk the
backbone keeps its own names (models/model_folder.py). Shapes: B rows, T tokens, H the backbone's width, D the
embedding's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import adapter_folder, packing, static_backbone
from hf_dist_ext.models.backbones import build_backbone, hidden_size, load_backbone, parse_dtype
from hf_dist_ext.models.dense import DenseLayer, layers_of, parse
from hf_dist_ext.models.dense import build as build_projection
from hf_dist_ext.models.model_folder import (
    ModelFolder,
    matryoshka_keys,
    read_model_folder,
    resolve_folder,
    update_config,
    write_model_folder,
)
from hf_dist_ext.models.multi_vector import TokenOutput, real_in_front
from hf_dist_ext.models.weights import accept_names_of_backbone, load_weights, names_without_adapters, shortened
from hf_dist_ext.policy import TOKENS, why_many_calls
from hf_dist_ext.strategies.layers import repeated_layer_classes
from hf_dist_ext.strategies.stages import put_back
from hf_dist_ext.strategies.tensors import is_split

logger = logging.getLogger(__name__)

POOLINGS = ("mean", "cls", "last", TOKENS)


@dataclass
class EmbeddingOutput(ModelOutput):
    """What an embedding model returns: `embeddings` (B, D), at least float32."""

    embeddings: torch.Tensor | None = None


class EmbeddingModel(PreTrainedModel):
    """A transformers backbone, pooling, a projection and normalisation: each row of tokens becomes one vector.

    `model(input_ids=..., attention_mask=...).embeddings` is (B, D), at least float32; with pooling "tokens" it is a
    mapping of "vectors" (B, T, D) and "mask" (B, T), for late interaction.

    Args:
        backbone: what embeds tokens; this model shares its config.
        pooling: "mean", "cls" (first real token), "last" (last real token) or "tokens" (a vector of every real token).
        projection_dim: D of one linear map after pooling. None: no map, D is the backbone's width.
        projection_bias: of that map.
        normalize: divides by the L2 norm.
        max_length: tokens of a row, or of each column (queries first). This, `prompts` and `matryoshka_dims` change
            nothing here: `save_pretrained` tells servers about them.
        prompts: column -> text before every row.
        matryoshka_dims: widths that embeddings may be cut to.
        dense: a projection of more than one linear map: `DenseLayer`s, or mappings of their fields.
        default_prompt_name: of the prompt that sentence-transformers puts before texts unless it is told otherwise.

    Raises:
        UsageError: a pooling or a width that cannot be.
    """

    base_model_prefix = "backbone"
    # Trainer would otherwise take the **features of forward for a sign that the loss is scaled in here.
    accepts_loss_kwargs = False

    def __init__(
        self,
        backbone: PreTrainedModel,
        pooling: str = "mean",
        projection_dim: int | None = None,
        projection_bias: bool = False,
        normalize: bool = True,
        max_length: int | Mapping[str, int] | None = None,
        prompts: Mapping[str, str] | None = None,
        matryoshka_dims: Iterable[int] | None = None,
        dense: Sequence[DenseLayer | Mapping[str, Any]] | None = None,
        default_prompt_name: str | None = None,
    ):
        super().__init__(backbone.config)
        if pooling not in POOLINGS:
            raise UsageError(f'pooling="{pooling}" does not exist. Choose one of {", ".join(POOLINGS)}.')
        if projection_dim is not None and projection_dim < 1:
            raise UsageError(f"projection_dim={projection_dim} must be at least 1; leave it out for no projection.")
        if pooling != "mean" and isinstance(backbone, static_backbone.StaticBackbone):
            raise UsageError(f'pooling="{pooling}": static embeddings are the mean of their tokens. Remove pooling.')
        width = hidden_size(backbone.config)
        self.backbone = backbone
        self.pooling = pooling
        layers = [] if projection_dim is None else [DenseLayer(width, projection_dim, projection_bias)]
        layers = parse(dense) if dense else layers
        if layers and layers[0].in_features != width:
            raise UsageError(
                f"A Dense module takes {layers[0].in_features} dimensions, and the backbone gives {width}."
            )
        self.projection = build_projection(layers, backbone.device, backbone.dtype)
        self.normalize = normalize
        self.embedding_dim = layers[-1].out_features if layers else width
        self.max_length = max_length
        self.lengths = lengths_by_role(max_length)
        self.prompts = dict(prompts or {})
        self.default_prompt_name = default_prompt_name
        self.messages: dict[str, object] = {}
        self.matryoshka_dims = list(matryoshka_dims) if matryoshka_dims else None
        if self.matryoshka_dims and not all(1 <= dim <= self.embedding_dim for dim in self.matryoshka_dims):
            raise UsageError(f"matryoshka_dims={self.matryoshka_dims} must lie between 1 and {self.embedding_dim}.")

        self.register_load_state_dict_pre_hook(accept_names_of_backbone)
        self._feature_names = frozenset(inspect.signature(backbone.forward).parameters)
        # post_init() would collect these from the backbone, but it also initializes every parameter that is not marked
        # as loaded, so a backbone with adapters, or with a part made by hand, would lose weights.
        self.main_input_name = backbone.main_input_name
        self.supports_gradient_checkpointing = backbone.supports_gradient_checkpointing
        self._no_split_modules = repeated_layer_classes(backbone)
        self._keys_to_ignore_on_save = {f"backbone.{key}" for key in backbone._keys_to_ignore_on_save or ()}
        self.is_loaded_in_4bit = getattr(backbone, "is_loaded_in_4bit", False)  # peft asks
        for name in ("_is_distributed_loading_by_transformers", "_tp_size", "_fsdp_size"):  # of tensor parallelism
            setattr(self, name, getattr(backbone, name, None))
        tied_keys = getattr(backbone, "all_tied_weights_keys", None) or {}
        self.all_tied_weights_keys = {f"backbone.{key}": f"backbone.{value}" for key, value in tied_keys.items()}

    # ---- where it comes from ----

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | PreTrainedConfig,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        distributed_config: Any = None,
        **embedding_options,
    ) -> EmbeddingModel:
        """A model with random weights from a config, or from a dict with "model_type" and the fields of that config.

        `dtype` None is float32. `distributed_config` (transformers' DistributedConfig) splits the backbone over
        processes, which must have drawn the same weights. `embedding_options` are the arguments of EmbeddingModel
        after `backbone`.
        """
        return cls(build_backbone(config, dtype, attn_implementation, distributed_config), **embedding_options)

    @classmethod
    def from_backbone(
        cls,
        name_or_path: str | Path,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        distributed_config: Any = None,
        **embedding_options,
    ) -> EmbeddingModel:
        """Pretrained weights from a folder or the hub, everything after the backbone as given here.

        `dtype` None is float32, in which mixed-precision training keeps its weights; "auto" is what the files hold.
        For a sentence-transformers model this ignores its pooling and projection: see `from_pretrained`.
        """
        options = (trust_remote_code, dtype or torch.float32, attn_implementation, distributed_config)
        return cls(load_backbone(name_or_path, revision, *options), **embedding_options).eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        name_or_path: str | Path,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        distributed_config: Any = None,
        backbone_class: type[PreTrainedModel] | None = None,
        in_stages: Callable[[type[PreTrainedModel]], type[PreTrainedModel]] | None = None,
        quantization_config: Any = None,
        contents: ModelFolder | None = None,
        **embedding_options,
    ) -> EmbeddingModel:
        """The embedding model of a folder or hub name: ours, sentence-transformers', or a plain backbone.

        `embedding_options` are the arguments of EmbeddingModel after `backbone`. What is not given, or None, is as the
        folder says (a plain backbone: mean pooling, no projection, normalized); any other value wins over it, except
        that a new projection never replaces a trained one. `dtype` None is "auto". `distributed_config`
        (transformers' DistributedConfig) splits the backbone over processes while it is read.
        `backbone_class` makes the backbone instead of what the folder's configuration names. `in_stages`
        makes of the backbone's class one that reads this process's stages of a pipeline; the others are on the meta
        device then. `quantization_config`: transformers' one, for a backbone that stays frozen. `contents`: what the
        folder says, where it was read before (a route of a Router).
        """
        folder = contents or read_model_folder(resolve_folder(name_or_path, revision))
        of_backbone = cast(Path, folder.backbone_folder)
        dtype = dtype or "auto"
        options: dict[str, Any] = dict(
            trust_remote_code=trust_remote_code, dtype=dtype, attn_implementation=attn_implementation,
            distributed_config=distributed_config, backbone_class=backbone_class, in_stages=in_stages,
            quantization_config=quantization_config,
        )  # fmt: skip
        if folder.has_adapters:
            if distributed_config is not None or in_stages is not None:
                raise UsageError(
                    f"{name_or_path} holds adapters, which tensor parallelism does not split, nor a pipeline cut. "
                    "Merge them."
                )
            base, base_revision = adapter_folder.base_of(of_backbone)
            if dtype == "auto":
                options["dtype"] = folder.dtype
            backbone = cls.from_pretrained(base, revision=base_revision, **options).backbone
        elif folder.is_static:
            if distributed_config is not None or in_stages is not None or quantization_config is not None:
                raise UsageError(
                    f"{name_or_path} is a table of vectors: it has no layers to split, to cut or to load in 4 bits."
                )
            backbone = static_backbone.load(of_backbone, cast("str | torch.dtype", parse_dtype(dtype)))
        else:
            backbone = load_backbone(of_backbone, None, **options)
        given = {name: value for name, value in embedding_options.items() if value is not None}
        if folder.projection is not None:
            stored_dim = folder.dense[-1].out_features
            if given.get("projection_dim", stored_dim) != stored_dim:
                raise UsageError(
                    f"{name_or_path} has a trained projection to {stored_dim} dimensions, not "
                    f"{given['projection_dim']}. Leave projection_dim out, or use EmbeddingModel.from_backbone to "
                    "start a new one."
                )
            given |= {"dense": folder.dense}
        names = ("pooling", "normalize", "max_length", "prompts", "matryoshka_dims", "default_prompt_name")
        model = cls(backbone, **{name: getattr(folder, name) for name in names} | given)
        if folder.projection is not None:
            load_weights(
                cast(nn.Module, model.projection), folder.projection, source=f"the Dense module of {name_or_path}"
            )
        if "max_length" not in given:
            model.lengths = dict(folder.lengths)
        model.messages = dict(folder.messages)
        if folder.is_plain:
            logger.info("%s is a plain transformers model: %s", name_or_path, model.describe())
        if folder.has_adapters:
            model = cast(EmbeddingModel, adapter_folder.with_adapters(model, of_backbone).merge_and_unload())
            model.requires_grad_(True)  # peft froze the base
            model.config._name_or_path = str(name_or_path)
        return cast(EmbeddingModel, put_back(model).eval())

    @property
    def dense(self) -> list[DenseLayer]:
        """What the projection is made of; empty for none."""
        return layers_of(self.projection)

    @property
    def gives_every_token(self) -> bool:
        """Whether a row encodes to a vector for each of its real tokens, and to no others."""
        return self.pooling == TOKENS and type(self).forward is EmbeddingModel.forward

    @property
    def gives_one_vector(self) -> bool:
        """Of a row, and no vector of each of its tokens."""
        return self.pooling != TOKENS

    @property
    def why_padded(self) -> str | None:
        """Why rows can not go end to end through the backbone; None: they can (models/packing.py)."""
        if type(self).forward is not EmbeddingModel.forward:
            return f"{type(self).__name__} has a forward of its own"
        return packing.why_not(self.backbone)

    def why_many_calls(self, capability: int, is_half: bool) -> str | None:
        """Of rows that go end to end: `policy.why_many_calls`, of this backbone."""
        config, is_half = self.backbone.config, is_half or self.dtype.itemsize == 2
        return why_many_calls(
            config._attn_implementation, capability, is_half, lambda name: getattr(config, name, None)
        )

    def describe(self) -> str:
        """What follows the backbone, in words."""
        projection = f"a projection to {self.embedding_dim}" if self.dense else "no projection"
        rows = "token vectors" if self.pooling == TOKENS else f"{self.pooling} pooling"
        return f"{rows}, {projection}, {'normalized' if self.normalize else 'not normalized'}"

    # ---- what it does ----

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pooled: torch.Tensor | None = None,
        stops_at_pooled: bool = False,
        packed_rows: Any = None,
        **features,
    ) -> EmbeddingOutput | TokenOutput:
        """Features of B rows -> `embeddings` (B, D), or token vectors with their mask. Without an attention mask every
        token counts. With `packed_rows` (engine/packing.py, RowBounds) features are (1, t, ...), rows end to end.

        `stops_at_pooled` returns what (2) gives, (B, H), and `pooled` goes on from there: a frozen backbone's vectors
        are computed once and used many times, but for token vectors. A feature the backbone has no parameter for is
        left out (token_type_ids for DistilBert), and so is a None.
        """
        mask = None
        if pooled is None:
            tokens = self.tokens(input_ids, attention_mask, packed_rows, **features)  # (1): (B, T, H) or (1, t, H)
            if packed_rows is not None and self.pooling == TOKENS:
                pooled, mask = packing.padded_again(tokens.squeeze(0), packed_rows)
            elif packed_rows is not None:
                pooled = packing.pool_packed(tokens.squeeze(0), packed_rows, self.pooling)
            elif self.pooling == TOKENS:
                pooled, mask = real_in_front(tokens, attention_mask)  # (2): (B, T, H), (B, T)
            else:
                pooled = pool_tokens(tokens, attention_mask, self.pooling)  # (2): (B, H)
        vectors = pooled
        if stops_at_pooled:
            return EmbeddingOutput(embeddings=vectors)
        if self.projection is not None:
            dtype = next(self.projection.parameters()).dtype
            vectors = self.projection(vectors.to(dtype))  # (3): (B, D), (B, T, D)
        vectors = vectors.to(_at_least_float32(vectors.dtype))
        if self.normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)  # (4)
        return EmbeddingOutput(embeddings=vectors) if mask is None else TokenOutput(vectors=vectors, mask=mask)

    def tokens(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        packed_rows: Any = None,
        **features,
    ) -> torch.Tensor:
        """(1): features of B rows -> (B, T, H). A pipeline calls it for the stages before the last one."""
        features = {"input_ids": input_ids, "attention_mask": attention_mask, **features}
        taken = {name: features[name] for name in features if name in self._feature_names}
        taken = {name: value for name, value in taken.items() if value is not None}
        if packed_rows is not None:
            taken = packing.inputs_of(self.backbone, taken, packed_rows)
        if "use_cache" in self._feature_names:
            taken["use_cache"] = False  # a decoder would keep keys and values that nobody reads
        tokens = getattr(self.backbone(**taken), "last_hidden_state", None)
        if tokens is None:
            raise UsageError(
                f"{type(self.backbone).__name__} returns no last_hidden_state to pool. Use a text encoder or decoder, "
                "or TowerModel for a model with one tower per modality."
            )
        return tokens

    # ---- what is written ----

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        tokenizer=None,
        max_length: int | Mapping[str, int] | None = None,
        prompts: Mapping[str, str] | None = None,
        matryoshka_dims: Iterable[int] | None = None,
        max_shard_size: int | str = "50GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a folder that `from_pretrained`, sentence-transformers, AutoModel and the usual servers load.

        `state_dict`: this model's full (gathered) weights, written exactly as they are; None takes the live ones. No
        collective happens here, and only the main process writes. `max_length`, `prompts` and `matryoshka_dims` None
        take the model's own. With adapters added by `add_adapter`, only those are written, in PEFT's format.
        """
        if not safe_serialization:
            raise UsageError("safe_serialization=False is not supported: weights are written as safetensors only.")
        if not is_main_process:
            return
        if getattr(self, "_hf_peft_config_loaded", False):
            super().save_pretrained(save_directory, state_dict=cast("dict | None", state_dict))
            return
        state_dict = dict(self.state_dict() if state_dict is None else state_dict)
        _check_can_be_saved(self, state_dict)
        backbone_weights = _without_prefix(state_dict, "backbone.")
        self.backbone.save_pretrained(save_directory, state_dict=backbone_weights, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(save_directory)
        # The live weights may have another dtype than the gathered ones, and "auto" loads what config.json names.
        dtypes = {str(weight.dtype) for weight in state_dict.values() if weight.is_floating_point()}
        dtype_key = {"dtype": dtypes.pop().removeprefix("torch.")} if len(dtypes) == 1 else {}
        dims = list(matryoshka_dims) if matryoshka_dims else self.matryoshka_dims
        update_config(save_directory, matryoshka_keys(dims) | dtype_key)
        contents = self.description(_without_prefix(state_dict, "projection."), tokenizer, max_length)
        contents.prompts = contents.prompts if prompts is None else dict(prompts)
        contents.matryoshka_dims = dims
        write_model_folder(save_directory, contents, hidden_size=hidden_size(self.config))

    def description(
        self,
        projection: Mapping[str, torch.Tensor],
        tokenizer=None,
        max_length: int | Mapping[str, int] | None = None,
    ) -> ModelFolder:
        """What a folder says beside the backbone; `projection` holds its whole weights."""
        return ModelFolder(
            pooling=self.pooling,
            is_static=isinstance(self.backbone, static_backbone.StaticBackbone),
            projection=dict(projection) or None,
            dense=self.dense,
            normalize=self.normalize,
            max_length=served_length(max_length or self.max_length, tokenizer),
            lengths=self.lengths if max_length is None else lengths_by_role(max_length),
            prompts=dict(self.prompts),
            default_prompt_name=self.default_prompt_name,
            matryoshka_dims=self.matryoshka_dims,
            messages=dict(self.messages),
        )

    # ---- what a wrapper has to hand on ----

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def resize_token_embeddings(self, *args, **kwargs):
        return self.backbone.resize_token_embeddings(*args, **kwargs)

    def tie_weights(self, *args, **kwargs) -> None:
        self.backbone.tie_weights(*args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        return attn_implementation  # the config is the backbone's, which has checked it against what it supports

    def _check_and_adjust_experts_implementation(self, experts_implementation):
        return experts_implementation  # likewise; the parent's check would switch a mixture of experts to eager


def pool_tokens(tokens: torch.Tensor, attention_mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """(B, T, H) and (B, T) -> (B, H), at least float32; a row without any real token gives zeros.

    "cls" is the first real token and "last" the last one, so padding may be on either side.
    """
    wide = _at_least_float32(tokens.dtype)
    if attention_mask is None:
        attention_mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if attention_mask.shape != tokens.shape[:2]:
        raise UsageError(
            f"attention_mask {tuple(attention_mask.shape)} must be (rows, tokens) = {tuple(tokens.shape[:2])} to pool."
        )
    is_real = attention_mask.bool()
    if pooling == "mean":
        total = tokens.masked_fill(~is_real.unsqueeze(-1), 0).sum(dim=1, dtype=wide)  # (B, H)
        return total / is_real.sum(dim=1, keepdim=True).clamp(min=1)
    if pooling == "cls":
        position = is_real.int().argmax(dim=1)  # (B,): argmax takes the first of equals
    else:
        position = tokens.shape[1] - 1 - is_real.int().flip(1).argmax(dim=1)
    picked = tokens[torch.arange(tokens.shape[0], device=tokens.device), position]
    return picked.to(wide).masked_fill(~is_real.any(dim=1, keepdim=True), 0)


def can_keep_adapters_alone(model: Any) -> bool:
    """Whether `model` is an `EmbeddingModel` whose backbone has one set of LoRA adapters, in peft's wrapper: then
    `adapter_folder.write` makes a folder of it that holds no weights of the base."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None or config.peft_type != "LORA" or config.modules_to_save or len(model.peft_config) > 1:
        return False
    is_ours = hasattr(model, "get_base_model") and isinstance(model.get_base_model(), EmbeddingModel)
    return is_ours and all(name.startswith(adapter_folder.BACKBONE) for name in model.base_model.targeted_module_names)


def _check_can_be_saved(model: EmbeddingModel, state_dict: Mapping[str, torch.Tensor]) -> None:
    if any(map(is_split, state_dict.values())):
        raise UsageError("The weights are sharded. Pass the full ones: state_dict=accelerator.get_state_dict(model).")
    if any(".lora_" in key or ".base_layer." in key for key in state_dict):
        raise UsageError(
            "The model carries adapters, which a served folder cannot hold. Merge them: merge_and_unload()."
        )
    own = names_without_adapters(model)
    optional = {*model.all_tied_weights_keys, *(model._keys_to_ignore_on_save or ())}
    wrong = [key for key in own if key not in state_dict and key not in optional]
    wrong += [key for key in state_dict if key not in own]
    if wrong:
        raise UsageError(
            f"state_dict must hold every weight under the model's own keys; missing or surplus: {shortened(wrong)}."
        )


def _without_prefix(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def lengths_by_role(max_length: int | Mapping[str, int | None] | None) -> dict[str, int | None]:
    """Lengths per column, queries first, then documents -> those of "query" and "document"; {} when equal."""
    if not isinstance(max_length, Mapping) or not max_length:
        return {}
    query, document, *_ = *max_length.values(), None
    return {} if query == document else {"query": query, "document": document}


def served_length(max_length: int | Mapping[str, int] | None, tokenizer) -> int | None:
    """Of texts that are neither queries nor documents: the longest column's. None: there is no limit."""
    if isinstance(max_length, Mapping):
        lengths = max_length.values() if len(max_length) > 1 else [None]
        known = [length for length in lengths if length is not None]
        max_length = max(known, default=None) if len(known) == len(lengths) else None
    if max_length is not None:
        return max_length
    limit = getattr(tokenizer, "model_max_length", None)
    return int(limit) if limit is not None and limit < 1_000_000 else None  # a tokenizer without a limit says 1e30
