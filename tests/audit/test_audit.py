"""An audit finds every fault that is planted here, reports none in a sound run, and changes nothing."""

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

from hf_dist_ext import cli
from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.engine import gradient_cache
from hf_dist_ext.engine.combined_losses import LossPerSource
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.outputs import each
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.read import load_run
from hf_dist_ext.strategies import gathering as strategy_gathering
from hf_dist_ext.strategies import splitting
from hf_dist_ext.strategies.collectives import leave_together, rank
from hf_dist_ext.strategies.fsdp import FSDP
from hf_dist_ext.strategies.zero import ZeRO
from hf_dist_ext.tasks.parts import build_parts, make_arguments
from hf_dist_ext.training import step as training_step
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.audit.test_replay import FAULTS, Noisy
from tests.distributed.forked import Run
from tests.sentence_models import picture_model, pictures, text_model
from tests.tiny_models import model_config, tiny_pairs
from tests.training.test_trainer import Tiny, collate, trainer

PASSES, ROWS, GRADIENT = "both passes give", "every rank has rows", "gradient of all parameters"


def triples(rows: list[int]) -> dict:
    """Queries, positives and a hard negative each."""
    batch, others = collate(rows), collate([row + 31 for row in rows])
    return {"query": batch["query"], "positive": batch["positive"], "negative": others["positive"]}


def wrong(report) -> set[str]:
    return {check.name for check in report.checks if check.is_right is False}


def found(report, *names: str) -> list[str]:
    """Those of the names that begin a line that is wrong."""
    return [name for name in names if any(line.startswith(name) for line in wrong(report))]


# ---- planted faults ----


class Exponential(nn.Module):
    """A moving average of what a forward sees, which the forward reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden):
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.linear(hidden - self.mean.clone())


class OwnNoise(nn.Linear):
    """Noise of each row, from numpy's generator of the module's own."""

    def __init__(self):
        super().__init__(8, 8)
        self.own = np.random.default_rng(0)

    def forward(self, hidden):
        noise = self.own.standard_normal((len(hidden), *[1] * (hidden.dim() - 2), 8))
        return super().forward(hidden) + 0.3 * torch.from_numpy(noise).to(hidden)


def with_rows_swapped(passes, i, output):
    return gradient_cache.inner_product(output, each(passes._cache[i], lambda rows: rows.flip(0)))


def with_cache_in_bfloat16(passes, i, output):
    return gradient_cache.inner_product(output, passes._cache[i].bfloat16().to(passes._cache[i]))


class CastTwice(nn.Linear):
    """In bfloat16 where a graph is recorded, and in float32 where none is."""

    def forward(self, hidden):
        if not torch.is_grad_enabled():
            return super().forward(hidden)
        return nn.functional.linear(hidden.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).to(hidden)


def with_columns_swapped(self, embeddings, *more, score=training_step.EmbeddingStep._score):
    other = dict(zip(embeddings, [embeddings["query"], embeddings["negative"], embeddings["positive"]], strict=True))
    return score(self, other, *more)


def added_up_in_bfloat16(passes, *terms, run=gradient_cache.Passes._run_backward):
    run(passes, *terms)
    for parameter in passes.audited.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())


def backward_not_divided(self, loss):
    self.run.strategy.backward(loss, self._own_loss)


PLANTED = {
    "numpy noise": (dict(model=lambda: Tiny(Noisy(np.random.default_rng(0)))), [PASSES]),
    "spectral norm": (dict(model=lambda: Tiny(FAULTS["spectral norm"]())), [PASSES, GRADIENT]),
    "a moving average": (dict(model=lambda: Tiny(Exponential())), [PASSES, GRADIENT]),
    "dropout is not replayed": (
        dict(model=lambda: Tiny(nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 8))),
             patch=(gradient_cache, "replayed", lambda *given: nullcontext())), [PASSES]),
    "rows of a chunk are swapped": (
        dict(patch=(gradient_cache.Passes, "_term", with_rows_swapped)), [GRADIENT]),
    "the cache is cast to bfloat16": (
        dict(patch=(gradient_cache.Passes, "_term", with_cache_in_bfloat16)), [GRADIENT]),
    "pass 3 is cast to bfloat16": (dict(model=lambda: Tiny(CastTwice(8, 8))), [PASSES]),
    "columns are swapped": (
        dict(patch=(training_step.EmbeddingStep, "_score", with_columns_swapped)), [GRADIENT]),
    "accumulation is not divided": (
        dict(gradient_accumulation_steps=2,
             patch=(training_step.EmbeddingStep, "_backward", backward_not_divided)), [GRADIENT]),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_an_audit_finds_what_is_planted(tmp_path, fault):
    options, names = PLANTED[fault]
    options = {"collator": triples, **options}
    patch = options.pop("patch", None)
    options["model"] = options.get("model", Tiny)()
    with mock.patch.object(*patch) if patch else nullcontext():
        report = trainer(tmp_path, **options).audit()
    assert found(report, *names) == names, str(report)
    assert str(report).splitlines()[-1].startswith("WRONG: ")
    buffers = {"spectral norm": "middle.weight_u, middle.weight_v", "a moving average": "middle.mean"}
    assert ("writes " + buffers[fault] in str(report)) if fault in buffers else "writes" not in str(report)


def test_gradients_that_are_added_up_in_half_precision_are_found(tmp_path):
    """Beside what bfloat16 costs a plain step."""
    options = {"num_rows": 64, "per_device_train_batch_size": 64, "gradient_cache_chunk_size": 1, "bf16": True}
    sound, model = trainer(tmp_path, Tiny(), **options).audit(), Tiny()
    assert sound.is_right, sound
    with mock.patch.object(gradient_cache.Passes, "_run_backward", added_up_in_bfloat16):
        with mock.patch.object(gradient_cache.Passes, "audited", model, create=True):
            report = trainer(tmp_path, model, **options).audit()
    assert found(report, GRADIENT) == [GRADIENT], str(report)


def test_what_has_no_audit_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'middle\.1'"):
        trainer(tmp_path, Tiny(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))
    made = trainer(tmp_path)
    made.loss = None
    with pytest.raises(UsageError, match="loss=None"):
        made.audit()
    made.loss, made.strategy = InfoNCELoss(), ZeRO()
    with pytest.raises(UsageError, match="which DeepSpeed's engine makes inside of the last backward"):
        made.audit()


@pytest.mark.parametrize("chunk", [3, None])
def test_gradients_of_a_forward_that_is_not_deterministic_are_not_compared(tmp_path, chunk):
    """Its noise is no rounding, by which a wrong gradient could be explained."""
    report = trainer(tmp_path, Tiny(OwnNoise()), collator=triples, gradient_cache_chunk_size=chunk).audit()
    said = str(report)
    lines = [line for line in said.splitlines() if line[6:].startswith("gradient ")]
    assert [line[0] for line in lines] == ["-"] and "not deterministic: the plain step differs from itself by" in said
    assert "Nothing differs" not in said and "rounds" not in said, said
    assert found(report, PASSES) == ([PASSES] if chunk else []), said
    verdict = said.splitlines()[-1]
    assert verdict.startswith("WRONG" if chunk else "Gradients were not compared"), said


# ---- sound runs ----


@pytest.mark.parametrize("dtype", ["float64", "float32", "bf16"])
def test_a_sound_run_is_right(tmp_path, dtype):
    model = Tiny(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8)))
    model = model.double() if dtype == "float64" else model
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 1e-3, "bf16": dtype == "bf16"}
    report = trainer(tmp_path, model, collator=triples, **options).audit()
    assert report.is_right and found(report, "") == [], str(report)
    error = next(check.found for check in report.checks if check.name == GRADIENT)
    assert 0 < error < {"float64": 1e-8, "float32": 1e-5, "bf16": 2e-2}[dtype]


class Seen(Tiny):
    """Keeps a moving average that its forward does not read, below a weight that is made of two at every forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.normed = nn.utils.weight_norm(nn.Linear(2, 2))

    def forward(self, **features):
        self.seen.lerp_(torch.ones(()), 0.1)
        return super().forward(**features)


def test_buffers_that_a_forward_writes_are_named_and_a_model_that_can_not_be_copied_has_no_plain_step(tmp_path):
    report = trainer(tmp_path, Seen(), gradient_cache_chunk_size=3).audit()
    notes = {check.name: check.note for check in report.checks}
    assert report.is_right and "the forward writes seen, once per chunk and pass" in notes["buffers"]
    assert any("the model can not be copied" in note for note in notes.values()), notes


def sentence_trainer(folder, **more) -> DistTrainer:
    texts = [" ".join(["red", "green", "blue", "two"][(i * 7 + k) % 4] for k in range(2 + i % 5)) for i in range(24)]
    data = Dataset.from_dict({"anchor": texts, "positive": [f"{text} four" for text in texts]})
    args = DistTrainingArguments(
        str(folder / "run"), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=2, save_strategy="no",
        per_device_train_batch_size=12, gradient_cache_chunk_size=5, **more,
    )  # fmt: skip
    return DistTrainer(text_model(folder / "model"), args, loss=InfoNCELoss(), train_dataset=data)


def test_training_after_an_audit_is_training_without_one(tmp_path):
    """Of a SentenceTransformer: weights, random numbers and the order of rows; and the run's folder stays empty."""
    weights = []
    for audits in (False, True):
        made = sentence_trainer(tmp_path)
        if audits:
            before = {name: weight.clone() for name, weight in made.model.state_dict().items()}
            report = made.audit(num_rows=6)
            assert report.is_right and "6 in 1 micro-batch" in str(report), str(report)
            assert all(torch.equal(weight, before[name]) for name, weight in made.model.state_dict().items())
            assert not any((tmp_path / "run").glob("*")) and made.state.global_step == 0
        torch.manual_seed(1)
        made.train()
        weights.append({name: weight.clone() for name, weight in made.model.state_dict().items()})
        assert made.state.global_step == 2
        for file in (tmp_path / "run").glob("*.*"):
            file.unlink()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def of_source(rows: list[int]) -> dict:
    return collate(rows) | {"ids": {SOURCE: "web"}}


def test_an_audit_says_of_which_dataset_its_rows_are(tmp_path):
    several = LossPerSource({"nli": InfoNCELoss(), "web": InfoNCELoss(temperature=0.1)}, InfoNCELoss())
    report = trainer(tmp_path, collator=of_source, loss=several).audit()
    note = "the rows are of web; the rows and losses of nli, all that have no loss of their own were not looked at"
    assert report.is_right and [(c.is_right, c.note) for c in report.checks if c.name == "other datasets"] == [
        (None, note)
    ], str(report)
    assert "other datasets" not in str(trainer(tmp_path).audit())


# ---- several processes ----


class NoGradient(strategy_gathering._GatherRows):
    """A gather whose backward leaves out what other ranks say about a row."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient.split(ctx.counts)[ctx.rows.index], None, None


def of_first_rank(rows: list[int]) -> dict:
    return triples([row % 8 for row in range(len(rows))])


TOGETHER = {  # what is planted -> lines that are wrong
    "nothing": ({}, []),
    "a factor of the world size": (
        {"patch": (training_step, "row_weight", lambda own, counts: 2.0)}, [GRADIENT]),
    "a gather without gradient": ({"patch": (strategy_gathering, "_GatherRows", NoGradient)}, [GRADIENT]),
    "rows of another rank": ({"collator": of_first_rank}, [ROWS]),
    "a moving average": ({"model": "average"}, [PASSES]),
    "a rank's gradient is its own": ({"patch": "own"}, ["gradient equal"]),
}  # fmt: skip


def drawn_alike(kind: str | None = None) -> Tiny:
    torch.manual_seed(0)
    return Tiny(Exponential()) if kind else Tiny()


def trained_alike(*trainers: DistTrainer) -> bool:
    """Whether training gives the same weights, which rank 0 has."""
    weights = []
    for one in trainers:
        torch.manual_seed(1)
        one.train()
        weights.append(one.whole_weights())
    return bool(rank()) or all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def audits_of_all(folder) -> dict[str, list[str]]:
    said = {}
    for fault, (options, names) in TOGETHER.items():
        options = {"collator": triples, **options}
        patch = options.pop("patch", None)
        made = trainer(folder, drawn_alike(options.pop("model", None)), **options)
        if patch == "own":
            if isinstance(made.strategy, FSDP):
                continue
            add = made.strategy.finish_update
            patch = (made.strategy, "finish_update", lambda own, made=made, add=add: (add(own), differ(made.model)))
        with mock.patch.object(*patch) if patch else nullcontext():
            report = made.audit()
        expected = [name for name in names if not (isinstance(made.strategy, FSDP) and name == "gradient equal")]
        if fault == "nothing":
            assert trained_alike(made, trainer(folder, drawn_alike(), collator=triples))
        said[fault] = [found(report, *expected) == expected, bool(names) != report.is_right, str(report)]
    return said


def differ(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(1 + rank())


@pytest.mark.parametrize("mode", ["ddp", "fsdp-full"])
def test_an_audit_of_two_processes_compares_with_one_that_has_all_rows(tmp_path, mode):
    """And training goes on from there as without one."""

    def target(say) -> str:
        signal.alarm(600)
        said = audits_of_all(tmp_path / "run")
        leave_together()
        return json.dumps(said)

    said = json.loads(Run(mode, tmp_path / "log", target).result())
    assert len(said) >= 4
    assert [text for found_all, agrees, text in said.values() if not (found_all and agrees)] == []


LLAMA = {"model_config": model_config("llama", num_attention_heads=4, num_key_value_heads=2)}
LORA = {"use_lora": True, "lora_r": 4}
SPLIT = {  # how a model lies on processes -> fields of its run
    "multi_gpu_pp@2": {"pipeline_parallel_size": 2},
    "multi_gpu_tp@2": LLAMA,
    "multi_gpu_tp@4": LLAMA,
    "multi_gpu_3d@4": LLAMA | {"pipeline_parallel_size": 2},
    "multi_gpu_pp@4": {"pipeline_parallel_size": 2, **LORA},
}


def audited_of(path: Path) -> DistTrainer:
    run = load_run(["--config", str(path)])
    args = make_arguments(run)
    return build_parts(run, args).make_trainer(args)


def with_own_noise(trainer: DistTrainer) -> None:
    """In the last layer, from a generator that nobody can replay."""
    for name, module in trainer.bare_model.named_modules():
        if name.endswith(("encoder.layer.1.output.dense", "layers.1.mlp.down_proj")):
            module.own = np.random.default_rng(0)
            module.register_forward_hook(lambda module, given, out: out * (1 + 9 * module.own.random()))


@pytest.mark.parametrize(
    "mode", [mode if mode in ("multi_gpu_pp@2", "multi_gpu_tp@2")
             else pytest.param(mode, marks=pytest.mark.slow) for mode in SPLIT]
)  # fmt: skip
def test_an_audit_of_a_split_model_has_a_plain_step_and_changes_nothing(tmp_path, mode):
    """Of a model that no process has whole."""
    if SPLIT[mode].keys() & LLAMA.keys() and not splitting.is_supported():
        pytest.skip("tensor parallelism needs transformers 5.23")

    path = run_file(tmp_path, learnable_temperature=True, **SPLIT[mode])

    def target(say) -> str:
        signal.alarm(600)
        sound = audited_of(path)
        said = {"sound": sound.audit()}
        assert trained_alike(sound, audited_of(path))
        with mock.patch.object(training_step, "row_weight", lambda own, counts: 2.0):
            said["factor"] = audited_of(path).audit()
        with_own_noise(noisy := audited_of(path))
        said["noise"] = noisy.audit()
        leave_together()
        return json.dumps({name: [found(report, ""), str(report)] for name, report in said.items()})

    said = json.loads(Run(mode, tmp_path / "log", target).result())
    assert said["sound"][0] == [] and "ok    gradient of all parameters" in said["sound"][1], said["sound"]
    assert "WRONG gradient of all parameters" in said["factor"][1], said["factor"][1]
    assert "WRONG both passes give the same embeddings" in said["noise"][1], said["noise"][1]


# ---- the command ----


def of_pictures(folder: Path) -> dict:
    picture_model(folder / "parts").save_pretrained(str(folder / "model"))
    for number, picture in enumerate(pictures(16)):
        picture.save(folder / f"{number}.png")
    rows = [{"caption": f"read {n}", "file": f"{n}.png"} for n in range(16)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    without = dict.fromkeys(("model_config", "tokenizer_name"))
    return without | {
        "model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "pairs.jsonl"),
        "columns": {"query": "caption", "positive": "file"}, "image_columns": ["positive"],
        "image_folder": str(folder),
    }  # fmt: skip


KINDS = {  # what trains -> fields of its run
    "pictures": of_pictures,
    "token vectors": lambda folder: {"pooling": "tokens", "loss": "late_interaction"},
    "adapters": lambda folder: LORA,
    "a projection": lambda folder: {"projection_dim": 8, "trainable_modules": ["projection"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_file_trains_is_audited(tmp_path, kind, capsys, monkeypatch):
    path = str(run_file(tmp_path, **KINDS[kind](tmp_path)))
    cli.main(["audit", path])
    said = capsys.readouterr().out
    assert "ok    gradient of all parameters" in said and "Nothing differs" in said, said
    monkeypatch.setattr(gradient_cache.Passes, "_term", with_rows_swapped)
    with pytest.raises(SystemExit):
        cli.main(["audit", path])
    assert "WRONG gradient of all parameters" in capsys.readouterr().out


def run_file(folder, **more):
    fields = tiny_pairs(folder) | {
        "model_config": model_config("bert"),
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "max_steps": 3,
    }
    fields |= {"per_device_train_batch_size": 8, "gradient_cache_chunk_size": 3, "eval_strategy": "no"} | more
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "run.json").write_text(json.dumps(fields))
    return folder / "run.json"


def test_the_command_ends_with_0_or_1_and_writes_nothing_into_the_folder(tmp_path, capsys, monkeypatch):
    path = str(run_file(tmp_path, eval_holdout=4, eval_strategy="steps"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("here before")
    cli.main(["audit", path, "--json", "--rows", "6"])
    report = json.loads(capsys.readouterr().out)
    assert report["is_right"] and any(check["name"] == GRADIENT for check in report["checks"])
    monkeypatch.setattr(gradient_cache.Passes, "_term", with_rows_swapped)
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", path, "--gradient_cache_chunk_size", "2"])
    assert end.value.code == 1 and "WRONG gradient of all parameters" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["mine.txt"]
