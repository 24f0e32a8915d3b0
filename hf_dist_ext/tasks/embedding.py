"""Task "embedding": pairs of texts, pictures or both -> a SentenceTransformer or MultiVectorEncoder.

(1) the data, and which of their columns hold pictures
(2) the model: of a folder or hub name, or built from model_config, with adapters where the run wants them
(3) what the model's folder will say of this run: prompts, lengths, whether it ends with a normalization
(4) the loss, which compares what the model gives
(5) the collator, which reads rows by the model's own `preprocess`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Router, Transformer
from transformers.utils import logging

from hf_dist_ext.data.collator import NUM_PAIR_COLUMNS, label_shape_of
from hf_dist_ext.data.columns import column_names, columns_of
from hf_dist_ext.data.evaluations import read_evaluations
from hf_dist_ext.data.fingerprint import seed_of_stream
from hf_dist_ext.data.image_files import require_pillow
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.data.row_check import column_kind
from hf_dist_ext.data.sentence_collator import SentenceCollator
from hf_dist_ext.engine.combined_losses import loss_of
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import from_run
from hf_dist_ext.models.embedder import set_is_causal
from hf_dist_ext.policy import TOKENS
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.fields import show
from hf_dist_ext.run.losses import LATE, MATRYOSHKA, OWN
from hf_dist_ext.run.parts import label_column_of, takes_negatives_as_columns
from hf_dist_ext.run.sources import all_parts
from hf_dist_ext.strategies import choose
from hf_dist_ext.tasks.adapters import adapt, quantization_of
from hf_dist_ext.tasks.lengths import lengths_of, refuse_nothing_left
from hf_dist_ext.tasks.losses import build_loss
from hf_dist_ext.tasks.parts import Parts
from hf_dist_ext.tasks.readers import config_for, embeds_pictures, reader_of
from hf_dist_ext.tasks.sources import LoadedSources
from hf_dist_ext.tasks.unknown_tokens import refuse_unknown_ids, warn_of_unknown
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.metrics import paired_of

logger = logging.get_logger(__name__)

EMBEDS_TEXT_ONLY = (
    'column "{column}" holds pictures, but the model embeds text only. Use a dual encoder (such as CLIP) or a '
    "vision-language model whose processor has a chat template."
)
OF_PROCESSOR, OF_OTHER_ROWS = ("text", "image", "common", "chat_template"), ("audio", "video")
QUERY, DOCUMENT = "query", "document"  # the tasks of sentence-transformers
DOCUMENT_NAMES = ("document", "passage", "corpus")  # by which its evaluators look for the prompt of documents


def build(run: Run, args: DistTrainingArguments) -> Parts:
    config = run.options
    evaluations = read_evaluations(config.evaluations)
    sources, train_dataset, eval_dataset, columns, pictures = _data(config, args)  # (1)
    if sources is not None and not evaluations:  # else all figures of the run are known where it is checked
        sources.check_metric(args.metric_for_best_model)
    if pictures:
        require_pillow()
    model = _model(run, args, train_dataset, columns, pictures)  # (2)
    tokenizer = model.tokenizer if callable(getattr(model, "tokenizer", None)) else None  # not that of static vectors
    if tokenizer is not None:
        texts = [column for column in columns if column not in pictures]
        refuse_unknown_ids(tokenizer, (config.model_config or {}).get("vocab_size"))
        warn_of_unknown(tokenizer, train_dataset, texts)
    prompts = _prompts_of(model, columns) if config.prompts is None else config.prompts  # (3)
    _refuse_lost_prompts(model, prompts)
    lengths = lengths_of(model, config.max_length, columns)
    if sources is None and not pictures and tokenizer is not None:
        refuse_nothing_left(lengths or model.max_seq_length, prompts, columns, tokenizer)
    parts = [part.config for part in all_parts(config)]
    normalize = _scores_cosines(run, model) if any(part.loss in (None, *OWN) for part in parts) else None
    loss = build_loss(  # (4)
        config, model.get_embedding_dimension(), tokenizer, lengths or model.max_seq_length, normalize
    )
    if normalize is None:
        _follow(run, model, loss)
    widths = next((part.loss_options["matryoshka_dims"] for part in parts if part.loss == MATRYOSHKA), None)
    from_run.describe(
        model,
        {column: lengths[column] for column in columns[:NUM_PAIR_COLUMNS]} if config.max_length is not None else None,
        _prompts_to_keep(model.prompts, prompts, columns) | ({} if sources is None else sources.prompts_to_keep()),
        matryoshka_dims=config.matryoshka_dims or widths,
    )
    adapt(model, config)
    make = partial(_collator, model)  # (5)
    if sources is not None:
        collator = sources.collator(make, prompts, lengths)
    else:
        collator = make(columns, prompts, lengths, config, train_dataset)
    if args.train_batch_size * args.world_size == 1 and len(columns) == NUM_PAIR_COLUMNS and config.loss == "infonce":
        raise UsageError(
            "the batch of all devices is one row (per_device_train_batch_size=1), so no query has a wrong document to "
            "tell from its own. Raise per_device_train_batch_size; gradient_cache_chunk_size keeps the memory small."
        )
    is_judged = eval_dataset is not None or not evaluations
    return Parts(
        model=model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=collator,
        processing_class=getattr(model, "processor", tokenizer),
        loss=loss,
        evaluations=evaluations,
        metrics=_figures(loss, sources) if is_judged else (),
    )


def _figures(loss: Any, sources: LoadedSources | None) -> Sequence[str]:
    """Names of an evaluation's, as a report shows them."""
    if sources is None:
        return paired_of(loss)
    return sources.metrics(lambda name: paired_of(loss_of(loss, name)))


def hints(run: Run) -> list[str]:
    kind = "MultiVectorEncoder" if _is_late(run.options) else "SentenceTransformer"
    return [f'use it:   from sentence_transformers import {kind}; model = {kind}("{{folder}}")']


# ---- (1) ----


def _data(
    config: RunConfig, args: DistTrainingArguments
) -> tuple[LoadedSources | None, Any, Any, list[str], set[str]]:
    """(sources of `datasets`, rows to train on, rows to evaluate on, columns, those that hold pictures)."""
    options = {"max_bad_rows": args.max_bad_rows or 0, "seed": seed_of_stream(args)}
    if config.datasets is not None:
        sources = LoadedSources(config, **options)
        return sources, sources.train, sources.evaluation, sources.columns, set()
    train_dataset, eval_dataset = load_datasets(config, **options)
    columns = column_names(config, train_dataset)
    kinds = {column: column_kind((train_dataset.features or {}).get(column)) for column in columns}
    pictures = {column for column, kind in kinds.items() if kind in ("image", "both")}
    return None, train_dataset, eval_dataset, columns, pictures


# ---- (2) ----


def _is_late(config: RunConfig) -> bool:
    return any(part.config.loss == LATE for part in all_parts(config))


def _model(run: Run, args: DistTrainingArguments, rows: Any, columns: list[str], pictures: set[str]) -> Any:
    config, in_stages, split = run.options, choose.in_stages(args), choose.launched_split(args)
    if in_stages is not None and config.is_causal is not None:
        raise UsageError(
            f"is_causal={show(config.is_causal)}: a process of a pipeline has some layers only, and can not try "
            "whether the model heeds it. Use DDP or FSDP."
        )
    given = {name: getattr(config, name) for name in ("projection_dim", "normalize") if name in run.given}
    pooling = TOKENS if _is_late(config) else config.pooling if "pooling" in run.given else None
    texts = (text for name in columns if name not in pictures for text in rows[name])
    if pictures and config.model_config is not None and not embeds_pictures(config):
        raise UsageError(EMBEDS_TEXT_ONLY.format(column=min(pictures)))
    reader = reader_of(config, bool(pictures), texts)
    model = from_run.build(
        config.model_name_or_path,
        model_config=config_for(config, reader),
        tokenizer=reader,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        dtype=config.dtype or "float32",  # trained weights are kept in it
        attn_implementation=config.attn_implementation,
        quantization_config=quantization_of(run, args),
        distributed_config=split,
        in_stages=in_stages,
        pooling=pooling,
        **given,
    )
    _check_reads(config, model, pictures, is_cut=(split or in_stages) is not None)
    if config.is_causal is not None:
        set_is_causal(model, config.is_causal)
    return model.train()


def _check_reads(config: RunConfig, model: Any, pictures: set[str], is_cut: bool) -> None:
    """UsageError for pictures, or options of a processor, with a model that embeds text only. `is_cut`: the model is
    split by tensor or pipeline parallelism."""
    reads_pictures = "image" in getattr(model, "modalities", ("text",))
    if reads_pictures and is_cut:
        raise UsageError(
            "tensor and pipeline parallelism cut one text model, and this one reads pictures too. Use multi_gpu_fsdp."
        )
    if pictures and not reads_pictures:
        raise UsageError(EMBEDS_TEXT_ONLY.format(column=min(pictures)))
    if config.processing_kwargs is None:
        return
    if not isinstance(model[0], Transformer) or not reads_pictures:
        raise UsageError(
            "processing_kwargs are options of a vision-language model's processor, and this model embeds text only. "
            "Remove processing_kwargs."
        )
    for name in config.processing_kwargs:
        if name in OF_OTHER_ROWS:
            raise UsageError(f'processing_kwargs has "{name}", and rows hold texts and pictures alone. Remove it.')
        if name not in OF_PROCESSOR:
            raise UsageError(f'processing_kwargs has no "{name}". It takes {", ".join(OF_PROCESSOR)}.')
    model[0].processing_kwargs = {**(model[0].processing_kwargs or {}), **config.processing_kwargs}


# ---- (3) ----


def _prompts_of(model: Any, columns: list[str]) -> dict[str, str]:
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


def _prompts_to_keep(own: Mapping[str, str], used: Mapping[str, str], columns: list[str]) -> dict[str, str]:
    """The names that the model's folder knows beside those of the columns; the names by which sentence-transformers
    encodes queries and documents mean what is trained."""
    query, document = columns[:NUM_PAIR_COLUMNS]
    roles = {"query": query} | dict.fromkeys(DOCUMENT_NAMES, document)
    trained = {name: used.get(column, "") for name, column in roles.items() if name in own}
    return {**own, **trained, **used}


def _refuse_lost_prompts(model: Any, prompts: Mapping[str, Any]) -> None:
    """A chat template may leave out the message of the system, which a prompt is, and nobody else says so."""
    for column, prompt in prompts.items() if isinstance(model[0], Transformer) else ():
        if not prompt or not isinstance(prompt, str):
            continue
        without, found = model.preprocess(["a"]), model.preprocess(["a"], prompt=prompt)
        if found.get("modality") == "message" and torch.equal(without["input_ids"], found["input_ids"]):
            raise UsageError(
                f'prompts: the chat template of the model does not write the message of the system, so the prompt of "'
                f'{column}" would be lost. Use a template that does, or leave the prompt out.'
            )


def _scores_cosines(run: Run, model: Any) -> bool:
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


def _follow(run: Run, model: Any, loss: Any) -> None:
    """Let the model normalise as losses of sentence-transformers want it, where neither run nor folder says it."""
    if not loss.reads_lengths:
        if loss.normalize:
            _normalizes(run, model)
    elif run.options.model_config is not None and "normalize" not in run.given and from_run.normalizes(model):
        from_run.set_normalize(model, False)
        logger.warning("the loss compares no cosines, so embeddings keep their lengths: normalize=false.")


def _normalizes(run: Run, model: Any) -> bool:
    """Whether the model does, as it is or from now on."""
    if from_run.normalizes(model):
        return True
    if "normalize" in run.given or str(model.similarity_fn_name).startswith("dot"):
        return False
    from_run.set_normalize(model, True)
    logger.warning("the model's folder does not normalise; this run trains cosines, so its own will: normalize=true.")
    return True


# ---- (5) ----


def _collator(
    model: Any,
    columns: list[str],
    prompts: Mapping[str, str] | None = None,
    lengths: Mapping[str, int | None] | None = None,
    config: RunConfig | None = None,
    rows: Any = None,
) -> SentenceCollator:
    """`config`: of the `rows`; None: it reads none itself."""
    has_router = any(isinstance(child, Router) for child in model.children())
    tasks = {column: DOCUMENT if index else QUERY for index, column in enumerate(columns)}
    own: dict[str, Any] = {}
    if config is not None:
        label = label_column_of(config, columns_of(rows))
        own = {"id_column": config.id_column, "label_column": label, "label_shape": label_shape_of(rows, label)}
        own["same_number_of_negatives"] = takes_negatives_as_columns(config)
    return SentenceCollator(
        model.preprocess,
        columns,
        prompts=prompts,
        routes=tasks if has_router else None,
        max_length=None if lengths is None else {name: n for name, n in lengths.items() if n is not None},
        has_positions=isinstance(model, MultiVectorEncoder),
        tokenizer=getattr(model, "tokenizer", None),
        processor=getattr(model, "processor", None),
        is_of_run=True,
        **own,
    )
