"""The arguments of sentence-transformers: theirs become ours with every value, and rates by pattern are theirs."""

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.multi_vector_encoder.training_args import MultiVectorEncoderTrainingArguments
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from sentence_transformers.sentence_transformer.training_args import BatchSamplers, MultiDatasetBatchSamplers
from transformers import HfArgumentParser, Trainer

from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen.freeze import split_by_pattern
from hf_dist_ext.training import learning_rate
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_data import arguments_from
from tests.planner.test_run_files import as_word
from tests.sentence_models import text_model
from tests.training.test_trainer import trainer

GIVEN = {
    "per_device_train_batch_size": 7, "learning_rate": 3e-4, "weight_decay": 0.1, "num_train_epochs": 2.5,
    "lr_scheduler_type": "cosine", "optim": "sgd", "seed": 5, "data_seed": 6, "dataloader_drop_last": True,
    "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 9, "save_total_limit": 2,
    "gradient_checkpointing": True, "adam_beta2": 0.95, "dataloader_num_workers": 1, "run_name": "x",
    "metric_for_best_model": "loss", "prompts": {"a": {"anchor": "x: "}}, "router_mapping": {"a": {"anchor": "query"}},
    "learning_rate_mapping": {"embeddings": 1e-4}, "bf16": True,
}  # fmt: skip


def theirs(folder, kind=SentenceTransformerTrainingArguments, **options):
    return kind(output_dir=str(folder), use_cpu=True, report_to=[], **options)


def ours(folder, **options) -> DistTrainingArguments:
    return DistTrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **options)


def test_every_value_of_theirs_is_kept(tmp_path):
    given = theirs(tmp_path, **GIVEN, batch_sampler="no_duplicates", multi_dataset_batch_sampler="round_robin")
    made = arguments_from(given)
    assert {name: getattr(made, name) for name in GIVEN} == {name: getattr(given, name) for name in GIVEN}
    assert (made.batch_sampler, made.multi_dataset_batch_sampler) == ("no_duplicates", "round_robin")
    assert made.output_dir == given.output_dir and made.use_cpu and made.report_to == []
    assert not made.prediction_loss_only and made.ddp_broadcast_buffers is None, "which they set by themselves"


def test_without_values_theirs_are_ours_but_for_the_order_of_rows(tmp_path):
    made, expected = arguments_from(theirs(tmp_path)), ours(tmp_path, batch_sampler="batch_sampler")
    assert made.to_dict() == expected.to_dict()
    long = arguments_from(theirs(tmp_path, MultiVectorEncoderTrainingArguments, max_length={"query": 32}))
    assert long.max_length == {"query": 32}


def test_a_command_line_says_what_a_script_says(tmp_path):
    given = {
        "prompts": {"anchor": "query: "}, "router_mapping": {"a": {"anchor": "query"}}, "max_length": {"query": 9},
        "learning_rate_mapping": {"embeddings": 1e-4}, "batch_sampler": "no_duplicates",
    }  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name}", as_word(value))]
    parser = HfArgumentParser(DistTrainingArguments)
    (made,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), *words])
    assert {name: getattr(made, name) for name in given} == given
    (made,) = parser.parse_args_into_dataclasses(["--prompts", "query: ", "--max_length", "9"])
    assert (made.prompts, made.max_length) == ("query: ", 9)


@pytest.mark.parametrize("given", [{"warmup_ratio": 0.1}, {"warmup_steps": 0.1}])
def test_a_share_of_warm_up_means_what_it_means_there(tmp_path, given):
    for made in (arguments_from(theirs(tmp_path, **given)), ours(tmp_path, **given)):
        assert made.get_warmup_steps(200) == theirs(tmp_path, **given).get_warmup_steps(200) == 20


def test_samplers_may_be_given_as_there(tmp_path):
    for value in (BatchSamplers.NO_DUPLICATES_HASHED, "no_duplicates_hashed"):
        made = ours(tmp_path, batch_sampler=value, multi_dataset_batch_sampler=MultiDatasetBatchSamplers.PROPORTIONAL)
        assert (made.batch_sampler, made.multi_dataset_batch_sampler) == ("no_duplicates_hashed", "proportional")
    made = ours(tmp_path, batch_sampler=lambda rows, **more: None)
    assert "lambda" in made.to_dict()["batch_sampler"] and made.to_json_string()


@pytest.mark.parametrize("options, words", [
    ({"batch_sampler": "other"}, "batch_sampler='other': choose 'batch_sampler', 'no_duplicates'"),
    ({"multi_dataset_batch_sampler": 1}, "multi_dataset_batch_sampler=1: choose 'proportional', 'round_robin'"),
    ({"batch_sampler": "group_by_label", "no_duplicates_in_batch": True}, "both say which rows share a batch"),
    ({"learning_rates": {"a": 1}, "learning_rate_mapping": {"b": 1}}, "are both given"),
    ({"router_mapping": "anchor: query"}, "router_mapping='anchor: query' is no JSON"),
    ({"learning_rate_mapping": {"(": 1}}, r"'\(' is no regular expression"),
    ({"learning_rate_mapping": {"a": -1}}, "a learning rate is 0 or more"),
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, "both say how long the rate grows"),
    ({"warmup_ratio": 1.5}, "it is a share of the steps"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        ours(tmp_path, **options)


def test_a_field_that_is_not_known_here_is_refused_when_it_is_set(tmp_path):
    @dataclass
    class More(SentenceTransformerTrainingArguments):
        extra: int = 0

    arguments_from(theirs(tmp_path, More))
    with pytest.raises(UsageError, match="extra=1 is a field of More that DistTrainer does not read"):
        arguments_from(theirs(tmp_path, More, extra=1))


@pytest.mark.parametrize("field, value", [
    ("prompts", "a: "), ("router_mapping", {"a": "query"}), ("max_length", 3),
])  # fmt: skip
def test_what_a_sentence_transformer_alone_reads_is_refused_with_another_model(tmp_path, field, value):
    with pytest.raises(UsageError, match=f"{field}=.* is read by the preprocess of a SentenceTransformer"):
        trainer(tmp_path, **{field: value})


# ---- rates by pattern ----

PATTERNS = {"word_embeddings": 1e-4, r"^model\.0\..*layer\.1": 2e-3, r"layer\.1\.output": 0.0, r"bias$": 7e-6}


def rates(optimizer) -> dict[int, tuple[float, float]]:
    return {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_every_parameter_has_the_rate_that_their_trainer_gives_it(tmp_path):
    model = text_model(tmp_path / "model")
    args = theirs(tmp_path, learning_rate_mapping=PATTERNS, weight_decay=0.1)
    rows = Dataset.from_list([{"a": "date", "b": "file", "label": 1.0}])
    expected = rates(SentenceTransformerTrainer(model, args, rows, loss=CoSENTLoss(model)).create_optimizer())
    expected = {key: value for key, value in expected.items() if value[0] != args.learning_rate}
    plain = Trainer(model, ours(tmp_path, weight_decay=0.1))
    optimizer = plain.create_optimizer()
    names = split_by_pattern(optimizer, model, {}, PATTERNS)
    found = rates(optimizer)
    assert len(found) == len(list(model.parameters())) and len(expected) > 10
    assert {key: value for key, value in found.items() if value[0] != args.learning_rate} == expected
    assert set(names) == {"default", *PATTERNS}


def test_a_run_trains_with_the_rates_of_its_patterns_and_scales_and_logs_them(tmp_path):
    options = {"learning_rate_mapping": {r"^model\.middle": 0.0}, "learning_rate": 1e-2, "weight_decay": 0.0}
    made = trainer(tmp_path, **options)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    made.train()
    moved = {name for name, p in made.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"tokens.weight"}
    assert made.state.log_history[0][r"learning_rate_^model\.middle"] == 0.0
    args = ours(tmp_path, learning_rate_mapping={"a": 1.0}, lr_scale_rule="linear", lr_base_batch_size=16)
    learning_rate.scale(args, 4)
    assert args.learning_rate_mapping == {"a": args.train_batch_size * 4 / 16}


@pytest.mark.parametrize("pattern, words", [
    ("nothing", "'nothing' is found in no name of a parameter that trains. The first is model.tokens.weight"),
    ("temperature", "'temperature' is found in 'log_inverse_temperature', a parameter of the loss"),
])  # fmt: skip
def test_a_pattern_without_effect_is_refused(tmp_path, pattern, words):
    with pytest.raises(UsageError, match=words):
        trainer(tmp_path, learning_rate_mapping={pattern: 1.0}, loss=InfoNCELoss(learnable_temperature=True)).train()
