"""No option is taken and then ignored: it has its effect, or an error names it."""

import json

import pytest
import torch
from datasets import IterableDataset

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import from_run
from hf_dist_ext.tasks.parts import Parts
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.run.test_stages import plan  # noqa: F401, a fixture
from tests.test_train_script import main, run_file  # noqa: F401, fixtures
from tests.tiny_models import embedding_model, model_config, tiny_tokenizer
from tests.training.test_trainer import Tiny, collate, trainer

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def rates(of) -> list[float]:
    return [line["learning_rate"] for line in of.state.log_history if "learning_rate" in line]


def test_a_resumed_run_goes_on_with_the_rate_and_the_decay_that_are_given_now(tmp_path, caplog):
    options = dict(save_strategy="steps", save_steps=2, lr_scheduler_type="linear", learning_rate=1e-3)
    trainer(tmp_path, **options, max_steps=4).train()
    (tmp_path / "checkpoint-4").rename(tmp_path / "other")
    resumed = trainer(tmp_path, **options | {"learning_rate": 1e-5, "weight_decay": 0.3}, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert rates(resumed) == pytest.approx([1e-3, 0.75e-3, 0.5e-5, 0.25e-5])
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups[1:]] == [0.0, 0.0], "biases, the loss"
    assert "learning_rate 0.001 -> 1e-05" in caplog.text and "weight_decay 0.0 -> 0.3" in caplog.text

    caplog.clear()
    unchanged = trainer(tmp_path / "same", **options, max_steps=4)
    unchanged.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rates(unchanged) == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert "those given hold" not in caplog.text


def own_optimizer(folder):
    model = Tiny()
    args = DistTrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], learning_rates={"middle": 1e-2})
    own = (torch.optim.SGD(model.parameters(), 0.1), None)
    return DistTrainer(
        model=model, args=args, data_collator=collate, train_dataset=[0], loss=InfoNCELoss(), optimizers=own
    )


def stream(folder):
    made = trainer(folder, no_duplicates_in_batch=True, max_steps=1)
    made.train_dataset = IterableDataset.from_generator(lambda: iter([{"a": 1}]))
    made.get_train_dataloader()


def without_loss(folder, pipeline_parallel_size=None, **options):
    args = DistTrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **options)
    args.pipeline_parallel_size = pipeline_parallel_size  # refused in one process
    return DistTrainer(Tiny(), args, train_dataset=[0])


@pytest.mark.parametrize("build, words", [
    (lambda path: without_loss(path, gradient_cache_chunk_size=4), "gradient_cache_chunk_size=4 needs a loss"),
    (lambda path: without_loss(path, no_duplicates_in_batch=True), "no_duplicates_in_batch=True needs a loss"),
    (lambda path: without_loss(path, pipeline_parallel_size=2, gradient_cache_chunk_size=4),
     "pipeline_parallel_size=2 needs a loss over embeddings"),
    (lambda path: trainer(path, label_smoothing_factor=0.1), "label_smoothing_factor=0.1"),
    (lambda path: trainer(path, auto_find_batch_size=True), "the batch is part of the loss"),
    (lambda path: trainer(path, optim="lomo"), "optim='lomo' updates weights inside of backward"),
    (lambda path: trainer(path, optim="galore_adamw_layerwise"), "updates weights inside of backward"),
    (lambda path: trainer(path, gradient_cache_chunk_size=None, gradient_cache_keep_graph="auto"),
     "gradient_cache_keep_graph='auto' needs a gradient cache"),
    (lambda path: trainer(path, gradient_cache_chunk_size=None, gradient_cache_packing=True),
     "gradient_cache_packing=true packs the chunks of a gradient cache"),
    (lambda path: trainer(path, gradient_cache_memory_gib=1.0), "nothing is automatic"),
    (lambda path: trainer(path, no_duplicates_in_batch=True, train_sampling_strategy="sequential").train(),
     "an order of its own"),
    (lambda path: trainer(path, preemptible=True, save_only_model=True), "none that could be"),
    (stream, "a stream can not be reordered"),
    (own_optimizer, "learning_rates makes groups of the optimizer that Trainer builds"),
])  # fmt: skip
def test_what_would_have_no_effect_is_refused(tmp_path, build, words):
    with pytest.raises(UsageError, match=words):
        build(tmp_path)


def test_the_devices_cache_is_emptied_as_often_as_asked(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("hf_dist_ext.training.trainer.clear_device_cache", lambda: calls.append(1))
    trainer(tmp_path, torch_empty_cache_steps=2, max_steps=4).train()
    assert len(calls) == 2


@pytest.mark.parametrize("options, words", [
    ({"model_revision": "main"}, "model_revision"),
    ({"image_folder": "."}, "image_folder"),
    ({"is_causal": False, "use_lora": True}, "is_causal=false with use_lora: adapters"),
    ({"is_causal": True}, "is_causal=true, and BertModel of the installed"),
    ({"bf16_full_eval": True}, "would round the weights that are saved behind it"),
    ({"loss": None, "pipeline_parallel_size": 2}, "needs a loss over embeddings, but loss is null"),
    ({"eval_steps": 2}, "eval_steps=2 has no effect without eval_strategy"),
    ({"eval_strategy": "steps", "save_strategy": "epoch", "load_best_model_at_end": True},
     "requires the save and eval strategy to match, except when --save_strategy=\"best\", but found - Evaluation"),
    ({"tokenizer_name": ...}, "a model built from model_config needs a tokenizer: set tokenizer_name"),
    ({"tokenizer_name": "./no/such"}, 'tokenizer_name="./no/such": there is no such folder'),
    ({"tokenizer_name": "no-such"}, 'Tokenizer "no-such" is neither a folder here nor available from the hub'),
    ({"tokenizer_name": "tests/task"}, 'available from the hub (OfflineModeIsEnabled). Closest: "tests/tasks". Check'),
    ({"tokenizer_name": "./tests/task"}, 'there is no such folder. Closest: "tests/tasks". Paths start at'),
    ({"model_name_or_path": "tests/task", "model_config": ..., "tokenizer_name": ...},
     'Model "tests/task" is neither a folder here nor available from the hub (OfflineModeIsEnabled). Closest: "te'),
    ({"model_config": model_config("bert") | {"vocab_size": 20}}, "model_config has vocab_size 20, and the tokenizer"),
    ({"per_device_train_batch_size": 1,
    "columns": {"query": "question", "positive": "answer"}}, "the batch of all devices is one row"),
    ({"columns": {"query": "question"}}, 'columns={"query": "question"} names 1 column. A query and its positive'),
    ({"load_best_model_at_end": True, "eval_strategy": "no", "save_strategy": "no"},
     'load_best_model_at_end=true, but eval_strategy is "no"'),
    ({"fp16": True}, "fp16=true, and this process computes on a CPU"),
    ({"lr_scheduler_kwargs": {"num_cycle": 2}, "lr_scheduler_type": "cosine"},
     'lr_scheduler_kwargs has "num_cycle", and takes num_cycles, last_epoch'),
    ({"lr_scheduler_kwargs": {"num_cycles": 2}, "lr_scheduler_type": "constant"},
     'lr_scheduler_kwargs has "num_cycles", and takes last_epoch'),
    ({"accelerator_config": {"split_batch": True}}, "AcceleratorConfig.__init__() got an unexpected keyword argument"),
    ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrnt": False}},
     'gradient_checkpointing_kwargs has "use_reentrnt", and takes use_reentrant, '),
    ({"optim_args": "beta1=0.9"}, 'optim_args has "beta1", and optim="adamw_torch_fused" takes none: adam_beta1'),
    ({"optim_args": "momentum=0.9,nestrov=true", "optim": "sgd"}, 'optim_args has "nestrov", and optim="sgd" takes '),
    ({"optim_args": "momentum"}, '"momentum" is no name=value'),
    ({"output_dir": " "}, 'output_dir=" " is no folder\'s path: it is empty'),
    ({"output_dir": "x" * 300}, "is no folder's path: File name too long"),
    ({"output_dir": "a\0b"}, "is no folder's path: embedded null"),
    ({"max_steps": 0}, "max_steps=0 is no number of updates"),
    ({"max_steps": ..., "num_train_epochs": 0}, "num_train_epochs=0 trains on nothing"),
    ({"dataloader_prefetch_factor": 10**12, "dataloader_num_workers": 2},
     "dataloader_prefetch_factor=1000000000000 must be at least 1 and below 65536"),
    ({"model_config": {"model_type": "bert", "num_hidden_layers": -1}},
     "model_config: num_hidden_layers=-1 must be at least 1"),
    ({"ddp_timeout": 10**22}, "ddp_timeout=10000000000000000000000 must be at least 1 and below 2147483648"),
    ({"temperature": 1e-30}, "temperature=1e-30: scores are divided by it"),
    ({"seed": 2**32}, "seed=4294967296 must be at least 0 and below 4294967296"),
    ({"max_length": 2}, 'max_length=2 leaves nothing of the texts of column "query": its prompt and the special'),
    ({"max_length": 5, "prompts": {"positive": "parse a date from a string"}}, 'texts of column "positive"'),
    ({"model_config": model_config("bert") | {"hidden_act": "gellu"}}, "model_config cannot be built: there is no '"),
    pytest.param({"bf16": True, "use_cpu": False}, "bf16=true, but no GPU that computes in bfloat16", marks=NO_GPU),
    pytest.param({"tf32": True, "use_cpu": False}, "tf32=true, but no GPU that computes in TF32", marks=NO_GPU),
    ({"dataset_config_name": "x"}, "has no configurations"),
    ({"eval_holdout": ..., "max_eval_samples": 3}, "max_eval_samples=3, but there are no rows to evaluate on"),
    ({"eval_holdout": ..., "eval_strategy": "steps"}, "no rows to evaluate on"),
])  # fmt: skip
def test_fields_of_a_run_file_that_nothing_reads_are_refused(main, run_file, monkeypatch, capsys, options, words):  # noqa: F811
    with pytest.raises(SystemExit) as left:
        main(["--config", run_file(**options)])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ") or words in line]
    assert left.value.code == 2 and words in line


def test_the_hub_is_asked_once_for_a_name_that_it_does_not_have(main, run_file, monkeypatch, capsys):  # noqa: F811
    def refuse(*asked, **options):
        raise AssertionError("a loader that asks again for minutes")

    for place in ("models.from_run.cached_file", "models.from_run.AutoProcessor.from_pretrained"):
        monkeypatch.setattr(f"hf_dist_ext.{place}", refuse)
    with pytest.raises(SystemExit):
        main(["--config", run_file(model_name_or_path="tests/task", model_config=..., tokenizer_name=...)])
    assert 'error: Model "tests/task" is neither a folder here' in capsys.readouterr().err


def test_a_precision_that_is_switched_off_is_not_switched_on_by_the_yaml(main, run_file, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(SystemExit):
        main(["--config", run_file(bf16=False)])
    assert "bf16=false, but mixed_precision of the accelerate YAML is bf16" in capsys.readouterr().err


def test_a_decoder_that_sees_both_ways_is_saved_so(main, run_file, tmp_path, monkeypatch, capsys):  # noqa: F811
    """With a cache, rows end to end, and padded ones without a cache."""
    losses = []
    for fields in ({}, {"gradient_cache_chunk_size": None}, {"is_causal": None}):
        fields = {"is_causal": False, "model_config": model_config("qwen3"), "overwrite_output_dir": True} | fields
        main(["--config", run_file(max_steps=1, save_strategy="no", **fields)])
        lines = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
        losses.append(next(line["loss"] for line in lines if "loss" in line))
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config.get("is_causal") is fields["is_causal"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and abs(losses[0] - losses[2]) > 1e-3
    monkeypatch.setattr("hf_dist_ext.tasks.embedding.choose.in_stages", lambda args: lambda kind: kind)
    with pytest.raises(SystemExit):
        main(["--config", run_file(is_causal=False, overwrite_output_dir=True)])
    assert "is_causal=false: a process of a pipeline has some layers only" in capsys.readouterr().err


def test_the_first_evaluation_can_be_switched_off(main, run_file, tmp_path):  # noqa: F811
    main(["--config", run_file(eval_on_start=False, eval_strategy="steps", eval_steps=2)])
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert set(report["before"].values()) == {None}, "that of step 2 is none before training"
    assert report["after"]["mrr@10"] is not None


def test_pushing_a_staged_run_is_refused(plan, monkeypatch):  # noqa: F811
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="push_to_hub=true with stages"):
        plan(push_to_hub=True)


def test_what_is_not_given_is_as_the_models_folder_says(main, run_file, tmp_path, monkeypatch):  # noqa: F811
    """Prompts and length, that is."""
    prompts = {"query": "search : ", "passage": "list of "}
    model = embedding_model(model_config("bert"))
    from_run.describe(model, 7, prompts)
    model.save_pretrained(str(tmp_path / "model"))
    seen, make = {}, Parts.make_trainer

    def watched(parts, args):
        collator = parts.data_collator
        seen["prompts"], seen["length"] = collator.prompts, parts.model.max_seq_length
        return make(parts, args)

    monkeypatch.setattr(Parts, "make_trainer", watched)
    start = {"model_config": ..., "model_name_or_path": str(tmp_path / "model"), "tokenizer_name": ..., "max_steps": 1}
    main(["--config", run_file(**start, prompts=...)])
    assert seen == {"prompts": {"query": "search : ", "positive": "list of ", "negative": "list of "}, "length": 7}
    main(["--config", run_file(**start, prompts={"query": ""}, max_length=9, overwrite_output_dir=True)])
    assert seen == {"prompts": {"query": ""}, "length": 9}


def test_a_prompt_for_positives_alone_is_said(caplog):
    columns = ["query", "positive", "negative"]
    ContrastiveCollator(tiny_tokenizer(), columns, {"positive": "list of ", "negative": "list of "})
    assert not caplog.text
    ContrastiveCollator(tiny_tokenizer(), columns, {"positive": "list of "})
    assert 'none for "negative"' in caplog.text


@pytest.mark.parametrize("case", [
    ({"normalize": False}, None, False),
    ({}, None, True),
    ({}, "dot", False),
    ({"normalize": True}, "dot", True),
])  # fmt: skip
def test_scores_are_of_one_kind_everywhere(main, run_file, tmp_path, monkeypatch, case):  # noqa: F811
    """In the loss, the evaluation and the folder. Of a case: what is given, similarity_fn_name of a folder without a
    normalisation, whether the run has one."""
    given, folder_says, is_normalised = case
    folder, seen, make = tmp_path / "model", {}, Parts.make_trainer
    embedding_model(model_config("bert"), normalize=False).save_pretrained(str(folder))
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"similarity_fn_name": folder_says}))

    def watched(parts, args):
        seen["loss"], seen["model"] = parts.loss.normalize, from_run.normalizes(parts.model)
        return make(parts, args)

    monkeypatch.setattr(Parts, "make_trainer", watched)
    start = {"model_config": ..., "model_name_or_path": str(folder), "tokenizer_name": ..., "projection_dim": ...}
    main(["--config", run_file(**start, **given, max_steps=1, save_strategy="no")])
    assert seen == {"loss": is_normalised, "model": is_normalised}
    saved = json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())
    assert saved["similarity_fn_name"] == ("cosine" if is_normalised else "dot")
