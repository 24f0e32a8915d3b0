"""Task "embedding": pairs of texts -> `EmbeddingModel`, of texts and pictures -> `TowerModel`, judged by retrieval."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import logging

from hf_dist_ext.data.code_search import train_tokenizer
from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS, ContrastiveCollator, label_shape_of
from hf_dist_ext.data.columns import column_names, columns_of
from hf_dist_ext.data.evaluations import read_evaluations
from hf_dist_ext.data.fingerprint import seed_of_stream
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.data.vision_language_collator import OF_OTHERS
from hf_dist_ext.engine.combined_losses import loss_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import static_backbone
from hf_dist_ext.models.backbones import load_tokenizer, one_line
from hf_dist_ext.models.embedder import set_is_causal
from hf_dist_ext.models.embedding_model import EmbeddingModel, lengths_by_role
from hf_dist_ext.models.model_folder import DOCUMENT_NAMES, read_model_folder, resolve_folder
from hf_dist_ext.models.towers import TowerModel
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.fields import show
from hf_dist_ext.run.losses import LATE, MATRYOSHKA, OWN
from hf_dist_ext.run.parts import label_column_of, takes_negatives_as_columns
from hf_dist_ext.run.sources import CODE_SEARCH, all_parts
from hf_dist_ext.strategies import choose
from hf_dist_ext.tasks import closing_lines, image_pairs, routes, vision_language
from hf_dist_ext.tasks.adapters import add_adapters, quantization_of
from hf_dist_ext.tasks.image_text import with_vocabulary
from hf_dist_ext.tasks.lengths import lengths_of, refuse_nothing_left
from hf_dist_ext.tasks.losses import build_loss
from hf_dist_ext.tasks.parts import Parts
from hf_dist_ext.tasks.sources import LoadedSources
from hf_dist_ext.tasks.unknown_tokens import refuse_unknown_ids, warn_of_unknown
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.metrics import paired_of

logger = logging.get_logger(__name__)


def build(run: Run, args: DistTrainingArguments) -> Parts:
    config = run.options
    distributed_config = _distributed_config(run, args)
    evaluations, sources = read_evaluations(config.evaluations), None
    if config.datasets is None:
        train_dataset, eval_dataset = load_datasets(
            config, max_bad_rows=args.max_bad_rows or 0, seed=seed_of_stream(args)
        )
        columns = column_names(config, train_dataset)
        kinds = {column: column_kind((train_dataset.features or {}).get(column)) for column in columns}
        pictures = [column for column, kind in kinds.items() if kind in ("image", "both")]
    else:
        image_pairs.refuse_sources(config)
        sources = LoadedSources(config, args.max_bad_rows or 0, seed_of_stream(args))
        train_dataset, eval_dataset, columns, pictures = sources.train, sources.evaluation, sources.columns, []
        if not evaluations:  # else all figures of the run are known where it is checked
            sources.check_metric(args.metric_for_best_model)
    if image_pairs.has_towers(config) or routes.has_routes(config):
        if _is_late(config):
            raise UsageError(
                f'loss="{LATE}" reads a vector of every token, and a model of two towers gives one per row. Use a '
                "text model of one."
            )
        if config.load_in_4bit:
            raise UsageError("load_in_4bit: a model of two towers ends with its adapters merged. Remove load_in_4bit.")
    if image_pairs.has_towers(config):
        texts = [column for column in columns if column not in pictures]
        processor = image_pairs.load_pair_processor(config, (text for name in texts for text in train_dataset[name]))
        model = image_pairs.build_towers(run, processor, columns, pictures)
        prompts = _prompts_for(model, config, columns)
        collator = image_pairs.pair_collator(model, processor, columns, prompts, config.max_length, config.id_column)
        tokenizer = collator.tokenizer
        args.save_full_model |= config.use_lora and not run.name
    elif routes.has_routes(config) and not pictures:
        _check_reads(config, None, pictures, is_cut=False)
        model = routes.build(run, columns)
        prompts = _prompts_for(model, config, columns)
        collator = routes.collator(model, columns, prompts, config)
        processor = tokenizer = collator.tokenizer
        args.save_full_model |= config.use_lora and not run.name
    else:
        texts = [column for column in columns if column not in pictures]
        chat = vision_language.chat_processor(
            config, bool(pictures), (text for name in texts for text in train_dataset[name])
        )
        in_stages = choose.in_stages(args)
        if in_stages is not None and config.is_causal is not None:
            raise UsageError(
                f"is_causal={show(config.is_causal)}: a process of a pipeline has some layers only, and can not try "
                "whether the model heeds it. Use DDP or FSDP."
            )
        _check_reads(config, chat, pictures, is_cut=(distributed_config or in_stages) is not None)
        processor = chat or build_tokenizer(run, train_dataset)
        tokenizer, make_collator = getattr(processor, "tokenizer", processor), ContrastiveCollator
        model = build_model(run, processor, distributed_config, in_stages, quantization_of(run, args))
        if config.is_causal is not None:
            set_is_causal(model, config.is_causal)
        if isinstance(model.backbone, static_backbone.StaticBackbone):
            _reads_whole_texts(config)
            static_backbone.without_special_tokens(tokenizer)
        if chat is not None:
            options = config.processing_kwargs or model.messages.get("processing_kwargs")
            make_collator = vision_language.collators(chat, options)
            model.messages = vision_language.messages_of(model.messages, options)
        refuse_unknown_ids(tokenizer, (config.model_config or {}).get("vocab_size"))
        warn_of_unknown(tokenizer, train_dataset, texts)
        # What is not given is as the model's folder says: the folder of this run will say so too.
        prompts = _prompts_for(model, config, columns)
        max_length = lengths_of(model, config.max_length, columns, tokenizer.model_max_length)
        if sources is None and not pictures:
            refuse_nothing_left(max_length, prompts, columns, tokenizer)
        model.max_length, model.lengths = max_length, lengths_by_role(max_length)
        if sources is None:
            collator = make_collator(tokenizer, columns, prompts, max_length, config.id_column)
        else:
            collator = sources.collator(make_collator, tokenizer, prompts, max_length)
            model.prompts |= sources.prompts_to_keep()
    parts = [part.config for part in all_parts(config)]
    normalize = _scores_cosines(run, model) if any(part.loss in (None, *OWN) for part in parts) else None
    embedding_dim, adapted = model.embedding_dim, add_adapters(model, config)
    loss = build_loss(config, embedding_dim, tokenizer, collator.max_length, normalize)
    if sources is None:
        collator.label_column = label_column_of(config, columns_of(train_dataset))
        collator.label_shape = label_shape_of(train_dataset, collator.label_column)
        collator.same_number_of_negatives = takes_negatives_as_columns(config)
    if normalize is None:
        _follow(run, model, loss)
    for part in parts:
        if part.loss == MATRYOSHKA:
            model.matryoshka_dims = list(part.loss_options["matryoshka_dims"])
    if args.train_batch_size * args.world_size == 1 and len(columns) == NUM_PAIR_COLUMNS and config.loss == "infonce":
        raise UsageError(
            "the batch of all devices is one row (per_device_train_batch_size=1), so no query has a wrong document to "
            "tell from its own. Raise per_device_train_batch_size; gradient_cache_chunk_size keeps the memory small."
        )
    is_judged = eval_dataset is not None or not evaluations
    return Parts(
        model=adapted,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=collator,
        processing_class=processor,
        loss=loss,
        evaluations=evaluations,
        metrics=_figures(loss, sources) if is_judged else (),
    )


def _figures(loss: Any, sources: LoadedSources | None) -> Sequence[str]:
    """Names of an evaluation's, as a report shows them."""
    if sources is None:
        return paired_of(loss)
    return sources.metrics(lambda name: paired_of(loss_of(loss, name)))


def _is_late(config: RunConfig) -> bool:
    """Whether the losses of a run, all of them, read token vectors."""
    return any(part.config.loss == LATE for part in all_parts(config))


def hints(run: Run) -> list[str]:
    return closing_lines.lines(run)


def _check_reads(config: RunConfig, chat: Any, pictures: list[str], is_cut: bool) -> None:
    """UsageError for pictures, or options of a processor, with a model that embeds text only. `is_cut`: the model is
    split by tensor or pipeline parallelism."""
    if chat is not None and is_cut:
        raise UsageError(
            "tensor and pipeline parallelism cut one text decoder, and this is a vision-language model. Use "
            "multi_gpu_fsdp."
        )
    if chat is None and pictures:
        raise UsageError(
            f'column "{pictures[0]}" holds pictures, but the model embeds text only. Use a dual encoder '
            f"({', '.join(image_pairs.DUAL_ENCODERS)}) or a vision-language model whose processor has a chat template."
        )
    if others := {*(config.processing_kwargs or {})} & {*OF_OTHERS}:
        raise UsageError(
            f'processing_kwargs has "{min(others)}", and rows hold texts and pictures alone. Remove "{min(others)}".'
        )
    if chat is None and config.processing_kwargs is not None:
        raise UsageError(
            "processing_kwargs are options of a vision-language model's processor, and this model embeds text only. "
            "Remove processing_kwargs."
        )


def build_tokenizer(run: Run, train_dataset: Any) -> Any:
    """The tokenizer that is named, the model's own, or for the built-in dataset one trained on its train split."""
    config = run.options
    name = config.tokenizer_name or config.model_name_or_path
    if name is not None:
        options = {"revision": config.model_revision} if name == config.model_name_or_path else {}
        try:
            return load_tokenizer(name, trust_remote_code=config.trust_remote_code, **options)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(f"no tokenizer can be loaded from {name!r}: {one_line(error)}") from error
    if config.dataset_name != CODE_SEARCH:
        raise UsageError(
            "a model built from model_config needs a tokenizer: set tokenizer_name to a folder or hub id."
        )
    return train_tokenizer(text for column in ("query", "positive") for text in train_dataset[column])


def _reads_whole_texts(config: RunConfig) -> None:
    if config.max_length is not None:
        raise UsageError(
            f"max_length={show(config.max_length)}: static embeddings read whole texts, here and in "
            "sentence-transformers. Remove it, or cut the texts of the data."
        )


def _prompts_for(model: EmbeddingModel | TowerModel, config: RunConfig, columns: list[str]) -> Mapping[str, str]:
    """The prompts of this run by column; the model keeps them."""
    prompts = _prompts_of(model, columns) if config.prompts is None else config.prompts
    model.prompts = _prompts_to_keep(model.prompts, prompts, columns)
    return prompts


def _prompts_of(model: EmbeddingModel | TowerModel, columns: list[str]) -> dict[str, str]:
    """The model's own prompts by column, as sentence-transformers would choose them for queries and documents."""
    own, used = model.prompts, {}
    for index, column in enumerate(columns):
        names = (column, *((*DOCUMENT_NAMES, "positive") if index else ("query",)))
        used |= next(({column: own[name]} for name in names if own.get(name)), {})
    if any(own.values()):
        default = model.default_prompt_name
        kept = f' Its default_prompt_name stays "{default}": encode() puts that one before texts.' if default else ""
        logger.warning(
            f"the model has prompts {own}, of which this run uses {used or 'none'}. Give prompts to choose.{kept}"
        )
    return used


def _prompts_to_keep(own: dict[str, str], used: Mapping[str, str], columns: list[str]) -> dict[str, str]:
    """The names that the model's folder knows beside those of the columns; the names by which sentence-transformers
    encodes queries and documents mean what is trained."""
    query, document = columns[:NUM_PAIR_COLUMNS]
    roles = {"query": query} | dict.fromkeys(DOCUMENT_NAMES, document)
    trained = {name: used.get(column, "") for name, column in roles.items() if name in own}
    if used.get(query):
        trained["query"] = used[query]
    if used.get(document):
        trained["document"] = used[document]  # encode_document of sentence-transformers 6.2 finds no other
    return own | trained | dict(used)


def _scores_cosines(run: Run, model: EmbeddingModel | TowerModel) -> bool:
    """Whether scores are cosines or dot products: the same while training, evaluating and in the folder at the end.

    Many models of sentence-transformers end without a normalisation and are compared by cosines all the same; so they
    are here, and this run's folder then ends with one.
    """
    if _normalizes(run, model):
        return True
    scaling = {
        "infonce": f", divided by temperature={run.options.temperature}. Its default is meant for cosines.",
        "siglip": ", times the scale of loss_options. Its default is meant for cosines.",
        LATE: " of tokens, added up over a query's.",
    }
    logger.warning(f"embeddings are not normalised: scores are dot products{scaling.get(run.options.loss, '.')}")
    return False


def _follow(run: Run, model: EmbeddingModel | TowerModel, loss: Any) -> None:
    """Let the model normalise as losses of sentence-transformers want it, where neither run nor folder says it."""
    if not loss.reads_lengths:
        if loss.normalize:
            _normalizes(run, model)
        return
    config = run.options
    says_nothing = isinstance(model, EmbeddingModel) and (
        config.model_config is not None
        or read_model_folder(resolve_folder(config.model_name_or_path, config.model_revision)).is_plain
    )
    if model.normalize and "normalize" not in run.given and says_nothing:
        model.normalize = False
        logger.warning("the loss compares no cosines, so embeddings keep their lengths: normalize=false.")


def _normalizes(run: Run, model: EmbeddingModel | TowerModel) -> bool:
    """Whether the model does, as it is or from now on."""
    if model.normalize:
        return True
    is_of_texts = isinstance(model, EmbeddingModel) or model.is_routed
    if "normalize" not in run.given and is_of_texts and not _is_for_dots(run.options):
        model.normalize = True
        logger.warning(
            "the model's folder does not normalise; this run trains cosines, so its own will: normalize=true."
        )
        return True
    return False


def _is_for_dots(config: RunConfig) -> bool:
    path = resolve_folder(config.model_name_or_path, config.model_revision) / "config_sentence_transformers.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return str(content.get("similarity_fn_name")).startswith("dot")


def _distributed_config(run: Run, args: Any) -> Any:
    """How the launcher's tensor parallelism splits the model; None without."""
    config, split = run.options, choose.launched_split(args)
    if split is None:
        return None
    given = {
        "loss=null": config.loss is None,
        "towers": image_pairs.has_towers(config),
    }
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise UsageError(
            f"tensor parallelism does not go with {wrong[0]}: it splits one text model, trained by a loss over "
            "embeddings. Use multi_gpu_fsdp."
        )
    return split


def build_model(
    run: Run,
    processor: Any,
    distributed_config: Any = None,
    in_stages: Callable[[type], type] | None = None,
    quantization_config: Any = None,
) -> EmbeddingModel:
    config = run.options
    pooling = {"pooling": TOKENS} if _is_late(config) else {}  # whatever the folder says
    options = {
        "pooling": config.pooling, "projection_dim": config.projection_dim, "normalize": config.normalize,
        "matryoshka_dims": config.matryoshka_dims, "dtype": config.dtype,
        "attn_implementation": config.attn_implementation,
    }  # fmt: skip
    if config.model_config is not None:
        if hasattr(processor, "image_processor"):
            model_config = with_vocabulary(config.model_config, processor)
        else:
            vocabulary = {"vocab_size": len(processor), "pad_token_id": processor.pad_token_id}
            model_config = vocabulary | config.model_config
        return EmbeddingModel.from_config(model_config, distributed_config=distributed_config, **options | pooling)
    return EmbeddingModel.from_pretrained(
        config.model_name_or_path,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        distributed_config=distributed_config,
        in_stages=in_stages,
        quantization_config=quantization_config,
        # What is not given is as the folder says, but for the precision: trained weights are kept in float32.
        **{name: value for name, value in options.items() if name in run.given}
        | {"dtype": config.dtype or "float32"}
        | pooling,
    )
