#!/usr/bin/env python
"""Train from one JSON file; what every process runs, read top to bottom.

    python scripts/train_hf.py --config configs/code_search.json                    # one process, or as the JSON says
    accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml scripts/train_hf.py --config run.json
    python scripts/train_hf.py --config run.json --learning_rate 2e-5 --max_steps 100     # any field, over the JSON

(1) read the run, and hand it over to accelerate's launcher when it asks for several processes
(2) build data, tokenizer, model, loss and trainer
(3) evaluate, train, evaluate
(4) save the model, metrics.json and a line that says how to load it

A mistake in the run file ends it with one message from one process and exit code 2; HF_DIST_DEBUG=1 shows where.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

from hf_dist_ext.config import Run, exit_on_usage_error, load_run
from hf_dist_ext.errors import UsageError
from hf_dist_ext.launch import hand_over_if_needed

METRICS = ("mrr@10", "ndcg@10", "recall@1", "recall@10")


def main(argv: list[str] | None = None) -> None:
    with exit_on_usage_error():
        run = load_run(sys.argv[1:] if argv is None else argv)
        hand_over_if_needed(run)  # (1)
        train(run)


def train(run: Run) -> None:
    import torch
    from transformers import set_seed

    from hf_dist_ext.data import ContrastiveCollator, load_datasets
    from hf_dist_ext.losses import InfoNCELoss
    from hf_dist_ext.trainer import DistTrainer
    from hf_dist_ext.training_args import DistTrainingArguments

    # (2)
    if importlib.util.find_spec("tensorboard"):
        run.training.setdefault("report_to", ["tensorboard"])
    run.training.setdefault("dataloader_pin_memory", torch.accelerator.is_available())
    try:
        args = DistTrainingArguments(**run.training)
    except ValueError as error:  # transformers checks its fields against each other here
        raise UsageError(str(error)) from error
    is_main = args.process_index == 0
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for line in run.echo if is_main else ():
        print(line)
    config = run.run
    train_dataset, eval_dataset = load_datasets(config)
    args.eval_on_start = eval_dataset is not None
    set_seed(args.seed)  # every process builds the same weights
    tokenizer = build_tokenizer(run, train_dataset)
    model = build_model(run, tokenizer)
    loss = None if config.loss is None else InfoNCELoss(**{name: getattr(config, name) for name in LOSS_OPTIONS})
    trainer = DistTrainer(
        model,
        args,
        data_collator=ContrastiveCollator(
            tokenizer, columns_of(train_dataset, config), config.prompts, config.max_length, config.id_column
        ),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        loss=loss,
    )

    # (3)
    # The first evaluation is the training loop's own: outside of it, FSDP2 has no optimizer to shard the model with.
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate() if eval_dataset is not None else {}

    # (4)
    trainer.save_model()
    if not is_main:
        return
    before = next((line for line in trainer.state.log_history if f"eval_{METRICS[0]}" in line), {})
    report = {
        "before": {name: before.get(f"eval_{name}") for name in METRICS},
        "after": {name: after.get(f"eval_{name}") for name in METRICS},
        "train_seconds": round(result.metrics["train_runtime"], 2),
        "world_size": args.world_size,
        "contrastive_batch_size": trainer.meter.largest_batch,
        "num_chunks": trainer.meter.most_chunks,
    }
    output_dir = Path(args.output_dir)
    (output_dir / "metrics.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (output_dir / "run.json").write_text(json.dumps(run.flat(), indent=2) + "\n", encoding="utf-8")
    print_report(report, output_dir, config.dataset_name)


LOSS_OPTIONS = (
    "temperature", "learnable_temperature", "symmetric", "matryoshka_dims", "matryoshka_weights",
    "mask_false_negatives", "false_negative_margin", "cross_device_negatives",
)  # fmt: skip


def columns_of(dataset, config) -> list[str]:
    from hf_dist_ext.data import column_names

    return column_names(config, dataset)


def build_tokenizer(run: Run, train_dataset):
    """The tokenizer that is named, the model's own, or for the built-in dataset one trained on its train split."""
    from transformers import AutoTokenizer

    from hf_dist_ext.code_search import train_tokenizer

    config = run.run
    name = config.tokenizer_name or config.model_name_or_path
    if name is not None:
        options = {"revision": config.model_revision} if name == config.model_name_or_path else {}
        try:
            return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code, **options)
        except (OSError, ValueError) as error:
            raise UsageError(f"no tokenizer can be loaded from {name!r}: {error}") from error
    if config.dataset_name != "code-search":
        raise UsageError(
            "a model built from model_config needs a tokenizer: set tokenizer_name to a folder or hub id."
        )
    return train_tokenizer(text for column in ("query", "positive") for text in train_dataset[column])


def build_model(run: Run, tokenizer):
    from hf_dist_ext.modeling import EmbeddingModel

    config = run.run
    options = {
        "pooling": config.pooling, "projection_dim": config.projection_dim, "normalize": config.normalize,
        "max_length": config.max_length, "prompts": config.prompts, "matryoshka_dims": config.matryoshka_dims,
        "dtype": config.dtype, "attn_implementation": config.attn_implementation,
    }  # fmt: skip
    if config.model_config is not None:
        vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        return EmbeddingModel.from_config(vocabulary | config.model_config, **options)
    return EmbeddingModel.from_pretrained(
        config.model_name_or_path,
        revision=config.model_revision,
        trust_remote_code=config.trust_remote_code,
        # What is not given is as the folder says, but for the precision: trained weights are kept in float32.
        **{name: value for name, value in options.items() if name in run.given} | {"dtype": config.dtype or "float32"},
    )


def print_report(report: dict, output_dir: Path, dataset_name: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="held-out retrieval")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in METRICS:
        cells = [report[when][name] for when in ("before", "after")]
        table.add_row(name, *["-" if value is None else f"{value:.4f}" for value in cells])
    if report["after"][METRICS[0]] is not None:
        Console().print(table)
    print(f"{report['train_seconds']} s of training, {report['num_chunks']} chunks per step")
    print(f'load it:  EmbeddingModel.from_pretrained("{output_dir}")      # from hf_dist_ext import EmbeddingModel')
    if dataset_name == "code-search":
        print(f'try it:   hf-dist search --model {output_dir} "parse a date string"')


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
