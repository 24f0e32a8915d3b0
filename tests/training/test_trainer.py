"""What DistTrainer refuses, logs and writes, in this process."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from hf_dist_ext.engine import tiled_infonce
from hf_dist_ext.engine.combined_losses import SumOfLosses
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training import checks
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_losses import SentenceTransformersLoss
from hf_dist_ext.training.trainer import DistTrainer
from tests.tiny_models import tiny_tokenizer


def collate(rows: list[int]) -> dict:
    def features(shift: int) -> dict:
        width = 3 + shift + max(rows) % 4
        mask = torch.stack([(torch.arange(width) < 2 + (row + shift) % (width - 1)).long() for row in rows])
        return {
            "input_ids": (torch.arange(width) * (torch.tensor(rows)[:, None] + shift)) % 49 * mask,
            "attention_mask": mask,
        }

    ids = torch.tensor(rows)
    return {"query": features(1), "positive": features(5), "ids": {"query": ids, "positive": ids}}


class Tiny(nn.Module):
    def __init__(self, middle: nn.Module | None = None):
        super().__init__()
        self.tokens, self.middle = nn.Embedding(50, 8), middle or nn.Linear(8, 8)

    def forward(self, input_ids, attention_mask):
        hidden = self.tokens(input_ids) * attention_mask[..., None]
        return self.middle(hidden.sum(1) / attention_mask.sum(1, keepdim=True))


class NoEmbeddings(Tiny):
    def forward(self, input_ids, attention_mask):
        return {"logits": super().forward(input_ids, attention_mask)}


def trainer(folder, model=None, num_rows=32, loss=None, collator=collate, **more) -> DistTrainer:
    torch.manual_seed(0)
    arguments = dict(gradient_cache_chunk_size=3, per_device_train_batch_size=8, max_steps=3, logging_steps=1) | more
    arguments = dict(save_strategy="no") | arguments
    args = DistTrainingArguments(output_dir=str(folder), report_to=[], disable_tqdm=True, use_cpu=True, **arguments)
    return DistTrainer(
        model or Tiny(), args, data_collator=collator, train_dataset=list(range(num_rows)),
        eval_dataset=list(range(20)), loss=loss or InfoNCELoss(learnable_temperature=True),
    )  # fmt: skip


def test_a_batch_norm_is_refused_by_name_unless_it_stays_in_eval(tmp_path):
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(UsageError, match="'middle.1'"):
        trainer(tmp_path, Tiny(norm))
    trainer(tmp_path, Tiny(norm), gradient_cache_chunk_size=None)

    class Frozen(Tiny):
        def train(self, mode: bool = True):
            super().train(mode)
            self.middle[1].eval()
            return self

    trainer(tmp_path, Frozen(norm))


def test_objects_of_other_trainers_are_refused_with_what_to_give_instead(tmp_path):
    from datasets import Dataset, DatasetDict
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    theirs = SentenceTransformer(modules=[StaticEmbedding(tiny_tokenizer(), embedding_dim=4)], device="cpu")
    texts, loss = Dataset.from_dict({"question": ["a"], "answer": ["b"]}), InfoNCELoss()
    given = {
        "loss is CoSENTLoss, .*loss=InfoNCELoss": {"loss": CoSENTLoss(theirs)},
        "loss is InfoNCELoss, .*loss=InfoNCELoss": {"loss": InfoNCELoss},
        "loss is 'infonce', .*in a run file": {"loss": "infonce"},
        r"DatasetDict of train, test.*train_dataset\['train'\]": {
            "loss": loss, "train_dataset": DatasetDict(train=texts, test=texts), "data_collator": list,
        },
        r"data_collator is missing.*ContrastiveCollator\(tokenizer, \['question', 'answer'\]\)": {
            "loss": loss, "train_dataset": texts,
        },
    }  # fmt: skip
    for words, options in given.items():
        with pytest.raises(UsageError, match=words):
            DistTrainer(args=DistTrainingArguments(tmp_path, use_cpu=True), **{"model": nn.Linear(2, 2)} | options)


def test_what_a_model_is_wrapped_in_is_looked_through_once(tmp_path, monkeypatch):
    made = trainer(tmp_path)
    calls, unwrap = [], made.accelerator.unwrap_model
    monkeypatch.setattr(
        made.accelerator, "unwrap_model", lambda *given, **more: calls.append(1) or unwrap(*given, **more)
    )
    made.train()
    assert made.state.global_step == 3 and len(calls) <= 1
    first, made.model = made.bare_model, nn.DataParallel(Tiny())
    assert made.bare_model is made.model.module is not first


@pytest.mark.parametrize("build, words", [
    (lambda path: trainer(path, NoEmbeddings()).train(), "does not return embeddings"),
    (lambda path: trainer(path, num_rows=7).train(), "fewer than one global batch of 8"),
    (lambda path: trainer(path, collator=lambda rows: {"input_ids": torch.ones(2, 2)}).train(), "column -> features"),
    (lambda path: trainer(path, collator=lambda rows: {"query": collate(rows)["query"]}).train(), "positive column"),
    (lambda path: trainer(path, no_duplicates_in_batch=True).train(), "ContrastiveCollator"),
])  # fmt: skip
def test_bad_setups_are_one_clear_error(tmp_path, build, words):
    with pytest.raises(UsageError, match=words):
        build(tmp_path)


def test_arguments_of_transformers_become_ours_where_a_loss_is_given(tmp_path):
    given = TrainingArguments(str(tmp_path), learning_rate=3e-3, prediction_loss_only=True, use_cpu=True)
    made = DistTrainer(Tiny(), given, loss=InfoNCELoss(), data_collator=collate).args
    assert isinstance(made, DistTrainingArguments) and made.learning_rate == 3e-3 and made.prediction_loss_only
    assert made.batch_sampler is None and not made.uses_gradient_cache


@pytest.mark.parametrize("name, value", [
    ("gradient_cache_chunk_size", 0), ("gradient_cache_chunk_size", -3), ("gradient_cache_chunk_size", 2.5),
    ("gradient_cache_chunk_size", "big"), ("gradient_cache_chunk_size", True), ("gradient_cache_chunk_tokens", 0),
    ("gradient_cache_keep_graph", -1), ("gradient_cache_fsdp", "fast"), ("gradient_cache_memory_gib", 0.0),
])  # fmt: skip
def test_arguments_out_of_range_name_themselves(tmp_path, name, value):
    with pytest.raises(UsageError, match=name):
        DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize("given, is_said", [
    ({"warmup_steps": 500}, True), ({"warmup_steps": 3}, True), ({"warmup_steps": 9, "max_steps": -1}, False),
    ({"warmup_steps": 2}, False), ({"warmup_steps": 0.9}, False),
    ({"warmup_steps": 500, "lr_scheduler_type": "constant"}, False),
])  # fmt: skip
def test_a_warm_up_longer_than_the_run_is_said(tmp_path, monkeypatch, given, is_said):
    """Three steps, or three epochs of four."""
    said = []
    monkeypatch.setattr("hf_dist_ext.training.learning_rate.logger.warning", said.append)
    trainer(tmp_path, **given).train()
    assert any("and the run has 3 steps: the learning rate" in text for text in said) is is_said


def test_every_logged_line_is_in_the_metrics_file(tmp_path):
    trained = trainer(tmp_path, eval_strategy="steps", eval_steps=3, gradient_cache_keep_graph=2)
    trained.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(trained.state.log_history) == 5
    step = lines[0]
    assert step["num_chunks"] == 6 and step["contrastive_batch_size"] == 8
    assert step["kept_graphs"] == 2 and step["tokens_per_chunk"] > 3, "chunks of three rows"
    assert step["rows_per_second"] > 0 and step["tokens_per_second"] > 0
    assert 0 < step["padding_share"] < 1 and 0 <= step["accuracy"] <= 1
    assert step["temperature"] == pytest.approx(0.05)
    assert {"eval_loss", "eval_mrr@10", "eval_ndcg@10", "eval_recall@1", "eval_recall@10"} <= lines[3].keys()


@pytest.mark.parametrize("repeats", [False, True])
def test_texts_are_compared_only_where_some_are_equal(tmp_path, monkeypatch, repeats):
    compared, compare = [], tiled_infonce.compare_keys
    monkeypatch.setattr(tiled_infonce, "compare_keys", lambda *given: compared.append(1) or compare(*given))

    def with_repeats(rows: list[int]) -> dict:
        batch = collate(rows)
        if repeats:
            batch["ids"]["positive"] = torch.tensor(rows) // 2
        return batch

    trained = trainer(tmp_path, collator=with_repeats, num_rows=8)
    trained.train()
    masked = [line["masked_share"] for line in trained.state.log_history if "masked_share" in line]
    assert len(masked) == 3 and all((share > 0) is repeats for share in masked)
    assert bool(compared) is repeats


def test_the_hub_token_reaches_no_file(tmp_path):
    saved = trainer(tmp_path, save_steps=1, hub_token="hf_SECRET")
    saved.args.save_strategy = "steps"
    saved.train()
    saved.save_model()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert not [path for path in files if b"hf_SECRET" in path.read_bytes()]
    assert saved.args.hub_token == "hf_SECRET"


def test_a_user_loss_is_any_callable_over_embeddings(tmp_path):
    def loss(own, everyone=None, row_offset=0, ids=None):
        return nn.functional.mse_loss(own["query"], (everyone or own)["positive"])

    trained = trainer(tmp_path, loss=loss)
    before = trained.evaluate()["eval_loss"]
    trained.train()
    assert trained.evaluate()["eval_loss"] < before


def test_a_training_begins_without_the_gradients_of_an_interrupted_one(tmp_path):
    """Also of a temperature: a first training is stopped in the middle of an update, and another one begins."""

    class Watch(TrainerCallback):
        def __init__(self, must_stop: bool):
            self.must_stop, self.gradients = must_stop, []

        def on_substep_end(self, *arguments, **others):
            if self.must_stop:
                self.must_stop = False
                raise KeyboardInterrupt

        def on_pre_optimizer_step(self, *arguments, **others):
            self.gradients = [p.grad.clone() for p in [*run.model.parameters(), *run.loss.parameters()]]

    found = []
    for must_stop in (False, True):
        run = trainer(tmp_path, gradient_accumulation_steps=2, max_steps=1, max_grad_norm=0)
        run.add_callback(watch := Watch(must_stop))
        if must_stop:
            with pytest.raises(KeyboardInterrupt):
                run.train()
            assert not watch.gradients
        run.train()
        found.append(watch.gradients)
    assert all(gradient.any() for gradient in found[0])
    torch.testing.assert_close(found[1], found[0])


def test_a_run_that_gets_no_better_ends_and_a_resumed_one_goes_on_counting(tmp_path):
    def run(folder, resume=None, **more):
        steps = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=9)
        of = trainer(tmp_path / folder, metric_for_best_model="loss", learning_rate=0.0, **steps, **more)
        of.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return of.state.global_step

    assert run("patient", early_stopping_patience=3) == 4, "the first is the best, and three are no better"
    assert run("resumed", "patient/checkpoint-3", early_stopping_patience=3) == 4
    assert run("looked", "patient/checkpoint-2", early_stopping_patience=3, eval_on_start=True) == 4
    assert run("again", "patient/checkpoint-4", early_stopping_patience=3) == 4, "it had ended"
    assert run("longer", "patient/checkpoint-4", early_stopping_patience=5) == 6
    assert run("plain") == 9
    assert run("later", "plain/checkpoint-3", early_stopping_patience=3) == 6


@pytest.mark.parametrize("given, words", [
    ({}, "Set eval_strategy and metric_for_best_model"),
    ({"eval_strategy": "steps", "eval_steps": 1}, "Set metric_for_best_model"),
])  # fmt: skip
def test_a_patience_that_nothing_is_counted_for_is_refused(given, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        trainer(tmp_path, early_stopping_patience=2, **given)


class Centered(nn.Module):
    """An average of embeddings that goes on while it trains, dropout, and no parameter."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.dropout, self.fixed, self.fails = nn.Dropout(0.5), nn.Dropout(0.5).eval(), fails

    def forward(self, own, everyone=None, row_offset=0, ids=None):
        if self.training:
            self.center.mul_(0.9).add_(0.1 * own["positive"].detach().mean(0))
            self.seen += 1
        elif self.fails:
            raise RuntimeError("in the evaluation")
        rows = self.fixed(self.dropout(own["query"])) - self.center
        return nn.functional.mse_loss(rows, own["positive"])


def test_an_evaluation_neither_trains_the_loss_nor_draws_from_it(tmp_path):
    made = trainer(tmp_path, loss=Centered())
    made.train()
    modes = {name: module.training for name, module in made.loss.named_modules()}
    assert modes == {"": True, "dropout": True, "fixed": False} and made.loss.seen == 3
    assert len({made.evaluate()["eval_loss"] for _ in range(3)}) == 1
    made.loss.fails = True
    with pytest.raises(RuntimeError, match="in the evaluation"):
        made.evaluate()
    assert made.loss.seen == 3 and {name: m.training for name, m in made.loss.named_modules()} == modes


@pytest.mark.parametrize("save_only_model", [False, True])
def test_the_buffers_of_a_loss_without_a_parameter_are_saved_and_resumed(tmp_path, save_only_model):
    steps = dict(save_strategy="steps", save_steps=1, save_only_model=save_only_model)
    whole = trainer(tmp_path / "whole", loss=Centered(), **steps)
    whole.train()
    assert whole.loss.center.any() and whole.loss.seen == 3
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = trainer(tmp_path / "resumed", loss=Centered(), resume_weights_only=save_only_model, max_steps=3)
    resumed.train(resume_from_checkpoint=checkpoint)
    if save_only_model:
        assert resumed.loss.seen == 2 + 3, "weights alone, and three steps more"
    else:
        assert resumed.loss.seen == 3 and torch.equal(resumed.loss.center, whole.loss.center)


def test_accumulation_is_said_to_add_no_negatives_where_a_batch_has_some(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(checks.logger, "warning_once", said.append)
    made = trainer(tmp_path, gradient_accumulation_steps=2, max_steps=1)
    made.train()
    (line,) = said
    assert "steps=2 adds no negatives" in line and "per_device_train_batch_size=16 with a gradient cache" in line
    without = [InfoNCELoss(in_batch_negatives=False), SentenceTransformersLoss("CosineSimilarityLoss", 8)]
    for loss in (*without, SumOfLosses(dict(zip("ab", without, strict=True)))):
        checks.warn_of_accumulation(made.args, loss)
    made.args.gradient_accumulation_steps = 1
    checks.warn_of_accumulation(made.args, made.loss)
    assert said == [line]


def test_a_state_of_the_loss_that_is_missing_or_of_another_is_said(tmp_path, caplog):
    trainer(tmp_path, loss=InfoNCELoss(), save_strategy="steps", save_steps=1).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(UsageError, match=r"can not be continued: loss.safetensors is missing"):
        trainer(tmp_path / "other", loss=Centered()).train(resume_from_checkpoint=checkpoint)
    trainer(tmp_path / "weights", loss=Centered(), resume_weights_only=True).train(resume_from_checkpoint=checkpoint)
    assert "the loss begins anew" in caplog.text
    trainer(tmp_path, save_strategy="steps", save_steps=1, overwrite_output_dir=True).train()
    with pytest.raises(UsageError, match="of another loss"):
        trainer(tmp_path / "third", loss=Centered()).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("shares", [False, True])
def test_a_given_schedule_takes_no_group_of_the_loss_and_that_is_said(tmp_path, shares):
    """Nor may a group hold parameters of both: their states lie in different files."""

    def run(groups) -> DistTrainer:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        args = DistTrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, max_steps=2, save_steps=1, disable_tqdm=True
        )
        return DistTrainer(
            model, args, data_collator=collate, train_dataset=list(range(32)), loss=loss,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        )  # fmt: skip

    model, loss = Tiny(), InfoNCELoss(learnable_temperature=True)
    with pytest.raises(UsageError, match="a group of their own"):
        run([*model.parameters(), *(loss.parameters() if shares else ())])
    before = loss.temperature
    run([{"params": model.parameters()}, {"params": loss.parameters()}]).train()
    assert loss.temperature != before
    later = trainer(tmp_path / "later", model, loss=loss)
    later.optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with pytest.raises(UsageError, match="a group of their own"):
        later.train()


@pytest.mark.parametrize("given, words", [
    ({"compute_loss_func": lambda outputs, labels, num_items_in_batch: 0.0}, "compute_loss_func"),
    ({"include_for_metrics": ["inputs"]}, "include_for_metrics"),
])  # fmt: skip
def test_what_a_loss_over_embeddings_would_never_call_is_refused(tmp_path, given, words):
    options = {name: value for name, value in given.items() if name == "compute_loss_func"}
    more = {name: value for name, value in given.items() if name not in options}
    args = DistTrainingArguments(str(tmp_path), report_to=[], use_cpu=True, **more)
    with pytest.raises(UsageError, match=words):
        DistTrainer(Tiny(), args, data_collator=collate, loss=InfoNCELoss(), **options)


@pytest.mark.parametrize("major, given, words", [
    (9, {}, 'no precision is set.* CARD .*Set "bf16": true or "tf32": true'),
    (9, {"tf32": True}, None),
    (9, {"tf32": False}, None),
    (9, {"bf16": True}, None),
    (9, {"dtype": torch.bfloat16}, "stored in bfloat16"),
    (7, {}, 'Set "fp16": true; "tf32": false'),
    (7, {"fp16": True}, None),
    (7, {"bf16": True}, 'CARD has no cores for bfloat16, .*Set "fp16": true'),
    (6, {}, None),
    (6, {"bf16": True}, None),
])  # fmt: skip
def test_a_precision_that_wastes_the_gpu_is_said_once_with_the_field(monkeypatch, major, given, words):
    said = []
    monkeypatch.setattr(checks.logger, "warning", said.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "CARD")
    for process in (0, 1):
        args = dict(device=torch.device("cuda"), process_index=process, bf16=False, fp16=False, tf32=None)
        model = nn.Linear(2, 2, dtype=given.get("dtype"))
        checks.warn_of_precision(SimpleNamespace(**args | given), model, keeps_float32=bool(process))
    assert len(said) == bool(words) and (not words or re.search(words, said[0]))
    checks.warn_of_precision(SimpleNamespace(device=torch.device("cpu")), nn.Linear(2, 2), keeps_float32=True)
    assert len(said) == bool(words)


def test_a_patience_does_not_go_with_callbacks_that_are_made_anew(tmp_path):
    steps = dict(eval_strategy="steps", eval_steps=1, metric_for_best_model="loss")
    with pytest.raises(UsageError, match="Remove one of them"):
        trainer(tmp_path, early_stopping_patience=2, restore_callback_states_from_checkpoint=True, **steps)


@pytest.mark.parametrize("size", [16, 32])
def test_an_evaluation_is_of_all_rows_whatever_training_drops(tmp_path, size):
    run = lambda drops: trainer(tmp_path, dataloader_drop_last=drops, per_device_eval_batch_size=size)  # noqa: E731
    found = [run(drops).evaluate() for drops in (False, True)]
    names = [n for n in found[0] if n.startswith(("eval_loss", "eval_mrr", "eval_ndcg", "eval_recall"))]
    assert len(names) == 5 and all(found[0][name] == found[1][name] for name in names)
    made = trainer(tmp_path, dataloader_drop_last=True)
    assert made.args.dataloader_drop_last and len(made.predict(list(range(20))).label_ids) == 20


class LeavesFirstEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        control.should_epoch_stop = state.global_step == 2


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_whose_callback_leaves_an_epoch_resumes_where_it_was(tmp_path, step):
    def run(folder, resume=None):
        of = trainer(tmp_path / folder, num_train_epochs=2, max_steps=-1, save_strategy="steps", save_steps=step)
        of.add_callback(LeavesFirstEpoch())
        of.train(resume_from_checkpoint=resume)
        return of.state.global_step, [p.detach().clone() for p in of.model.parameters()]

    whole, again = run("whole"), run("again", str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert whole[0] == again[0] == 6
    torch.testing.assert_close(again[1], whole[1], rtol=0, atol=0)


def test_a_resumed_run_is_profiled_too(tmp_path):
    trainer(tmp_path / "whole", save_strategy="steps", save_steps=3, max_steps=4).train()
    of = trainer(tmp_path / "again", max_steps=8, profile_steps=1)
    of.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert (tmp_path / "again" / "profile_rank0.json").is_file()
