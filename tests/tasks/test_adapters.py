"""LoRA from the run file: what trains, what stays, what a folder holds, on one process and FSDP ranks."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from hf_dist_ext import cli
from hf_dist_ext.checkpoints import commit, manifest, resume
from hf_dist_ext.checkpoints.merge import merge
from hf_dist_ext.data.digits import build_processor
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import RunError, UsageError
from hf_dist_ext.models.adapters import merged_weights
from hf_dist_ext.run.config import RunConfig
from hf_dist_ext.tasks.adapters import adapt, add_adapters
from hf_dist_ext.tasks.image_text import build_model
from hf_dist_ext.training import final_model
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed import forked
from tests.distributed.forked import Run
from tests.launching import ROOT, launch
from tests.tasks.test_stages import CONFIG, main, weights, write_config
from tests.tiny_models import WORDS, embedding_model, loaded, model_config, write_fields
from tests.tiny_vision_language import tiny_llava

LLAVA = json.loads(CONFIG.read_text())["model_config"]


@pytest.fixture
def run_file(tmp_path):
    draw = torch.Generator().manual_seed(0)
    text = lambda n: " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=draw))  # noqa: E731
    rows = [{"query": f"{text(3)} {i}", "positive": f"{text(6)} {i}"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    torch.manual_seed(0)
    config = model_config("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    embedding_model(config).save_pretrained(str(tmp_path / "base"))

    def write(**more) -> Path:
        fields = {
            "model_name_or_path": str(tmp_path / "base"), "dataset_name": str(tmp_path / "rows.jsonl"),
            "eval_holdout": 8, "per_device_train_batch_size": 8, "gradient_cache_chunk_size": 3, "max_steps": 4,
            "save_steps": 2, "learning_rate": 1e-2, "output_dir": str(tmp_path / "out"), **LORA,
        }  # fmt: skip
        return write_fields(tmp_path, **fields | more)

    return write


LORA = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.1}
NO_LORA = dict.fromkeys(LORA, ...)


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_adapters_train_with_a_gradient_cache_and_resume_bit_for_bit(run_file, tmp_path):
    path = run_file()
    main(path)
    out = tmp_path / "out"
    whole = adapters(out)
    assert whole and all("lora_" in name for name in whole)
    assert all(value.abs().sum() > 0 for name, value in whole.items() if "lora_B" in name), "they start at zero"
    report = json.loads((out / "metrics.json").read_text())
    assert 0 < report["trained_share"] < 0.2 and report["num_chunks"] > 3 and report["after"] != report["before"]
    shutil.rmtree(out / "checkpoint-4")
    main(path, "--resume_from_checkpoint", "true")
    again = adapters(out)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_a_folder_that_another_run_ended_in_holds_the_new_model_alone(run_file, tmp_path):
    """Whole weights below adapters of an earlier run, or adapters beside another base's weights, load as neither."""

    def train(folder: Path, has_adapters: bool) -> torch.Tensor:
        more = {} if has_adapters else NO_LORA
        main(run_file(output_dir=str(folder), save_strategy="no", overwrite_output_dir=True, **more))
        return SentenceTransformer(str(folder), device="cpu").encode(["a b"])[0]

    twice = tmp_path / "twice"
    (twice / "theirs").mkdir(parents=True)
    (twice / "theirs" / "model.safetensors").write_text("of somebody")
    for has_adapters in (True, False):
        expected = train(tmp_path / str(has_adapters), has_adapters)
        train(twice, not has_adapters)
        assert train(twice, has_adapters) == pytest.approx(expected, abs=1e-6)
    assert (twice / "theirs" / "model.safetensors").read_text() == "of somebody"


def test_what_a_folder_holds_of_an_earlier_model_goes_when_the_new_one_is_whole(tmp_path):
    (folder := tmp_path / "out").mkdir()
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "2_Dense"}, {"path": "../base"}]))
    told = ["config.json", "adapter_config.json", "model.safetensors", "2_Dense/model.safetensors"]
    of_others = [
        "notes.txt", "model_best.safetensors", "adapter_notes.md", "20261124_base/model.safetensors",
        "1_mine/adapter_config.json", "../base/model.safetensors", "manifest.json", "frozen.json", "model.bin",
    ]  # fmt: skip
    for name in told + of_others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("old")
    with pytest.raises(OSError), commit.replacing_model(folder, None):
        raise OSError
    with commit.replacing_model(folder / ".." / "out", str(folder)):
        pass  # the base of the new adapters lies there
    assert not [name for name in told + of_others if not (folder / name).is_file()]
    with commit.replacing_model(folder, None):
        time = os.stat(folder / "model.safetensors").st_mtime_ns
        (folder / "model.safetensors").write_text("new")
        os.utime(folder / "model.safetensors", ns=(time, time + 10**9))  # by a clock of whole seconds
    left = [name for name in told + of_others if (folder / name).exists()]
    assert left == ["model.safetensors", *of_others]
    manifest.commit(folder, {}, {})
    with commit.replacing_model(folder, None):
        pass
    assert not (folder / "manifest.json").exists(), "of a part that was trained"


def test_a_resume_with_another_scale_of_adapters_is_refused(run_file, tmp_path, capsys):
    main(run_file())
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(SystemExit):
        main(run_file(lora_alpha=64), "--resume_from_checkpoint", "true")
    assert "which multiplies them by another number" in capsys.readouterr().err


def test_checkpoints_of_adapters_are_the_same_when_they_are_written_while_training_goes_on(run_file, tmp_path):
    main(run_file())
    main(run_file(save_async=True, output_dir=str(tmp_path / "async")))
    for name in ("checkpoint-2", "checkpoint-4", ""):
        expected, found = adapters(tmp_path / "out" / name), adapters(tmp_path / "async" / name)
        assert expected.keys() == found.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_projection_that_a_run_of_adapters_made_goes_on_with_them(run_file, tmp_path):
    """It is drawn by the seed and does not train; the run that goes on has another seed."""
    run_file()
    rows = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path))["train"]

    def trainer(seed: int, **more) -> DistTrainer:
        torch.manual_seed(seed)
        base = loaded(tmp_path / "base", projection_dim=8)
        args = DistTrainingArguments(
            output_dir=str(tmp_path / "out"), seed=seed, data_seed=0, max_steps=1, use_cpu=True, report_to=[],
            disable_tqdm=True, per_device_train_batch_size=4, **more,
        )  # fmt: skip
        adapt(base, RunConfig(use_lora=True))
        return DistTrainer(base, args, loss=InfoNCELoss(), train_dataset=rows)

    def projection(of: DistTrainer) -> torch.Tensor:
        return of.model.projection.linear.weight

    first = trainer(0, save_strategy="steps", save_steps=1)
    first.train()
    for more in ({}, {"resume_weights_only": True}):
        again = trainer(1, save_strategy="no", **more)
        assert not torch.equal(projection(again), projection(first))
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
        assert torch.equal(projection(again), projection(first)) and not projection(again).requires_grad


SAID = ["parse a date from text read file into list of lines", "sort the numbers", "key"]


def embeddings(model, role: str = "query") -> torch.Tensor:
    return getattr(model.eval(), f"encode_{role}")(SAID, convert_to_tensor=True)


def cosine(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(ours.double(), theirs.double()).min().item()


SERVED = {
    "pooling": "last", "prompts": {"query": "search : ", "positive": "file : "}, "lora_alpha": 32, "max_steps": 3,
    "max_length": {"query": 6, "positive": 9}, "learning_rate": 5e-2,
}  # fmt: skip


def load_as_printed(printed: str, saves: str, folder: Path) -> None:
    """The line that a run ends with, in a process of its own, then `saves`."""
    (line,) = [line for line in printed.splitlines() if line.startswith(("load it:", "use it:"))]
    forked.run_python(f"{line.partition(':')[2].strip()}\n{saves}", cwd=folder)


@pytest.mark.parametrize("more", [{}, {"projection_dim": 8, "lora_target_modules": "all-linear"}], ids=["", "dense"])
def test_every_reader_of_the_folder_at_the_end_has_the_model_that_was_trained(run_file, tmp_path, capsys, more):
    loaded(tmp_path / "base")[0].save(str(tmp_path / "plain"))
    main(run_file(**SERVED, **more, model_name_or_path=str(tmp_path / "plain")))
    out, merged = tmp_path / "out", tmp_path / "merged"
    saves = "import torch; torch.save(model.encode_query(['parse a date'], convert_to_tensor=True), 'printed.pt')"
    load_as_printed(capsys.readouterr().out, saves, tmp_path)
    cli.main(["merge", str(out), "--output", str(merged)])
    expected = loaded(merged)
    assert expected.pooling.pooling_mode == "lasttoken"
    assert (expected[0].query_length, expected[0].document_length) == (6, 9)
    assert expected.get_embedding_dimension() == more.get("projection_dim", 32)
    assert (expected.prompts["query"], expected.prompts["document"]) == ("search : ", "file : ")
    printed = torch.load(tmp_path / "printed.pt")
    torch.testing.assert_close(printed, expected.encode_query(["parse a date"], convert_to_tensor=True))
    untrained = loaded(tmp_path / "plain", pooling="last", normalize=True)
    for role in ("query", "document"):
        served = SentenceTransformer(str(out))
        assert cosine(embeddings(served, role), embeddings(expected, role)) > 1 - 1e-6
    if "projection_dim" not in more:
        assert cosine(embeddings(untrained), embeddings(expected)) < 0.999
    cli.main(["merge", str(out / "checkpoint-3"), "--output", str(tmp_path / "again")])
    again = loaded(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in expected.state_dict().items())


def test_the_folder_of_a_vision_language_model_with_adapters_loads_as_printed_and_is_merged(tmp_path, capsys):
    torch.manual_seed(0)
    processor = build_processor()
    build_model(RunConfig(task="image-text-to-text", model_config=LLAVA), processor).save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    more = {"use_lora": True, "max_steps": 2, "learning_rate": 1e-2, "eval_on_start": False}
    start = {"model_name_or_path": str(tmp_path / "base"), "model_config": ..., "stages": ...}
    main(write_config(tmp_path, **start, **more))
    saves = "import torch; torch.save({k: v for k, v in model.named_parameters() if 'lora_B' in k}, 'printed.pt')"
    load_as_printed(capsys.readouterr().out, saves, tmp_path)
    printed = torch.load(tmp_path / "printed.pt")
    assert printed and all(weight.abs().sum() > 0 for weight in printed.values())
    cli.main(["merge", str(tmp_path / "out"), "--output", str(tmp_path / "merged")])
    merged, before = weights(tmp_path / "merged"), weights(tmp_path / "base")
    assert {name for name in merged if not torch.equal(merged[name], before[name])}
    assert all("self_attn" in name for name in merged if not torch.equal(merged[name], before[name]))


def in_half_precision(folder: Path) -> dict[str, torch.Tensor]:
    """The base of `run_file` as most decoders' files are."""
    loaded(folder).bfloat16().save_pretrained(str(folder))
    return load_file(folder / "model.safetensors")


def test_a_base_stays_in_the_precision_of_its_files_and_adapters_are_float32(run_file, tmp_path):
    path, out = run_file(bf16=True, lora_dropout=0.0), tmp_path / "out"
    before = in_half_precision(tmp_path / "base")
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    main(path)
    assert manifest.read(out / "checkpoint-4")["dtype"] == "bfloat16"
    whole = adapters(out)
    assert {value.dtype for value in whole.values()} == {torch.float32}
    cli.main(["merge", str(out), "--output", str(tmp_path / "merged")])
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    scaling = RunConfig().lora_alpha / 4
    for name, value in merged.items():  # rounded once, as the sum of both
        sides = [whole.get(f"base_model.model.{name.replace('weight', f'lora_{side}.weight')}") for side in "BA"]
        delta = 0 if None in sides else scaling * (sides[0] @ sides[1])
        assert value.dtype == torch.bfloat16 and torch.equal(value, (before[name].float() + delta).bfloat16()), name
    assert sum(not torch.equal(value, before[name]) for name, value in merged.items()) == len(whole) / 2
    shutil.rmtree(out / "checkpoint-4")
    with pytest.raises(SystemExit):
        main(path, "--resume_from_checkpoint", "true", "--dtype", "float32")
    main(path, "--resume_from_checkpoint", "true")
    assert all(torch.equal(value, whole[name]) for name, value in adapters(out).items())


def test_what_counts_of_a_base_is_what_an_engine_makes_of_it(tmp_path):
    given = tmp_path, {"dtype": "bfloat16"}, SimpleNamespace(peft_config={"default": None})
    resume.check_base(*given, "bfloat16", None)
    resume.check_base(*given, "float32", "bfloat16")
    for cast_to in (None, "float16"):
        with pytest.raises(UsageError, match='Set "dtype": "bfloat16", or resume_weights_only to start anew'):
            resume.check_base(*given, "float32", cast_to)


@pytest.mark.parametrize("preset", ["multi_gpu_fsdp", pytest.param("multi_gpu_ddp", marks=pytest.mark.slow)])
def test_adapters_over_a_half_precision_base_are_those_of_one_process(run_file, tmp_path, preset):
    more = {"bf16": True, "lora_dropout": 0.0, "save_strategy": "no", "max_steps": 2, "no_duplicates_in_batch": False}
    path = run_file(output_dir=str(tmp_path / "two"), per_device_train_batch_size=4, **more)
    in_half_precision(tmp_path / "base")
    forked.launch(preset, 2, forked.train_hf, "--config", path)
    main(run_file(output_dir=str(tmp_path / "alone"), **more))
    two, alone = adapters(tmp_path / "two"), adapters(tmp_path / "alone")
    assert {value.dtype for value in two.values()} == {torch.float32}
    moved = torch.cat([value.flatten() for name, value in alone.items() if "lora_B" in name])
    found = torch.cat([two[name].flatten() for name in alone if "lora_B" in name])
    assert moved.norm() > 0 and (found - moved).norm() < 0.1 * moved.norm()


@pytest.mark.parametrize("mode", ["fsdp-sharded", "fsdp-full"])
def test_folder_and_checkpoint_of_sharded_adapters_are_merged_into_the_model_at_the_end(run_file, tmp_path, mode):
    run_file()
    texts = ["parse a date", "read file", "sort numbers by key", "list of lines"] * 4

    def train(say) -> str:
        torch.set_num_threads(1)
        base = loaded(tmp_path / "base", pooling="cls")
        args = DistTrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=2, save_steps=2, learning_rate=1e-2, report_to=[],
            per_device_train_batch_size=4, disable_tqdm=True, use_cpu=True, gradient_cache_chunk_size=2,
        )  # fmt: skip
        adapt(base, RunConfig(use_lora=True, lora_r=4))
        base._built_from["model_name_or_path"] = str(tmp_path / "base")
        rows = Dataset.from_dict({"query": texts, "positive": texts[::-1]})
        trainer = DistTrainer(base, args, loss=InfoNCELoss(), train_dataset=rows)
        trainer.train()
        trainer.save_model()
        trainer.args.save_full_model = True
        trainer.save_model(str(tmp_path / "whole"))
        trainer.accelerator.wait_for_everyone()
        return str(trainer.is_fsdp_enabled)

    assert Run(mode, tmp_path / "log", train).result() == "True"
    expected = loaded(tmp_path / "run")
    base = loaded(tmp_path / "base").state_dict()
    assert expected.pooling.pooling_mode == "cls"
    assert not (tmp_path / "whole" / "adapter_config.json").exists()
    whole = loaded(tmp_path / "whole").state_dict()
    assert all(torch.allclose(whole[name], value, atol=1e-7) for name, value in expected.state_dict().items())
    assert any(not torch.equal(base[name], value) for name, value in expected.state_dict().items())
    for name in ("", "checkpoint-2"):
        cli.main(["merge", str(tmp_path / "run" / name), "--output", str(tmp_path / f"merged{name}")])
        merged = loaded(tmp_path / f"merged{name}")
        assert merged.pooling.pooling_mode == "cls"
        assert all(torch.equal(merged.state_dict()[k], v) for k, v in expected.state_dict().items())


@pytest.mark.parametrize("mode, adapts", [("ddp", True), ("fsdp-sharded", True), ("ddp", False)])
def test_a_full_disk_at_the_end_is_met_by_all_processes(run_file, tmp_path, monkeypatch, mode, adapts):
    """Though one process alone writes."""
    run_file()

    def fails(*arguments, **options):
        if os.environ["RANK"] == "0":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def train(say) -> str:
        torch.set_num_threads(1)
        base = loaded(tmp_path / "base", pooling="cls", projection_dim=8)
        texts = {"query": ["parse a date", "read file"] * 4, "positive": ["sort numbers by key", "lines"] * 4}
        args = DistTrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            per_device_train_batch_size=4, disable_tqdm=True, gradient_cache_chunk_size=2, ddp_timeout=300,
            trainable_modules=None if adapts else ["projection"],
        )  # fmt: skip
        if adapts:
            adapt(base, RunConfig(use_lora=True, lora_r=4))
        trainer = DistTrainer(base, args, loss=InfoNCELoss(), train_dataset=Dataset.from_dict(texts))
        trainer.train()
        monkeypatch.setattr("hf_dist_ext.checkpoints.sentence_model.write", fails)
        with pytest.raises(RunError, match="is full") as found:
            final_model.save(trainer.save_model, trainer.model, args)
        trainer.accelerator.wait_for_everyone()
        return str(found.value)

    assert "the trained model was" in Run(mode, tmp_path / "log", train).result()


def test_the_adapters_of_a_run_leave_a_card_as_it_is_and_come_without_what_a_kill_left(run_file, tmp_path):
    path, out = run_file(save_strategy="no", max_steps=1, save_full_model=False), tmp_path / "out"
    (out / final_model.UNFINISHED).mkdir(parents=True)
    (out / final_model.UNFINISHED / "model.safetensors").write_text("half of one")
    (out / "README.md").write_text("by hand")
    main(path)
    assert (out / "README.md").read_text() == "by hand"
    assert (out / "adapter_model.safetensors").is_file() and not (out / "model.safetensors").exists()


def test_adapters_on_another_base_are_refused_instead_of_left_out(run_file, tmp_path):
    main(run_file(save_strategy="no", max_steps=1))
    torch.manual_seed(1)
    other = model_config("bert", num_hidden_layers=1)
    embedding_model(other).save_pretrained(str(tmp_path / "base"))
    with pytest.raises(UsageError, match="do not fit"):
        loaded(tmp_path / "out")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UsageError, match="neither a folder here"):
        loaded(tmp_path / "out")


def test_adapters_on_a_base_that_changed_are_neither_resumed_nor_merged(run_file, tmp_path, capsys):
    path, out, base = run_file(), tmp_path / "out", tmp_path / "base" / "model.safetensors"
    main(path)
    assert manifest.read(out / "checkpoint-2")["frozen_fingerprint"]
    merge(out / "checkpoint-2", tmp_path / "merged")
    content = load_file(base)
    name = next(name for name in content if name.endswith("attention.self.query.weight"))
    save_file(content | {name: content[name] * 1.001}, base, metadata={"format": "pt"})
    shutil.rmtree(out / "checkpoint-4")
    words = "frozen weights 1 with other values: .*query.base_layer.weight"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(path, "--resume_from_checkpoint", "true")
    assert re.search(words, capsys.readouterr().err)
    for folder in (out / "checkpoint-2", out):
        with pytest.raises(UsageError, match=words):
            merge(folder, tmp_path / f"merged-{folder.name}")
    save_file(content, base, metadata={"format": "pt"})
    main(path, "--resume_from_checkpoint", "true")


def test_adapters_of_a_model_that_is_in_no_folder_end_merged(run_file, tmp_path):
    start = {"model_config": model_config("bert"), "tokenizer_name": str(tmp_path / "base"), "max_steps": 2}
    main(run_file(**start, model_name_or_path=...))
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert loaded(tmp_path / "out").config.num_hidden_layers == 2


def test_adapters_beside_a_trained_projection_are_merged(run_file, tmp_path):
    main(run_file(trainable_modules=["projection"], projection_dim=8, max_steps=2))
    merge(tmp_path / "out", tmp_path / "merged")
    merge(tmp_path / "out" / "checkpoint-2", tmp_path / "of-checkpoint")
    ours, theirs = (embeddings(SentenceTransformer(str(tmp_path / name))) for name in ("merged", "of-checkpoint"))
    assert torch.allclose(ours, theirs, atol=1e-6)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    changed = {name: value * 1.001 for name, value in weights.items()}
    save_file(changed, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="frozen weights .* with other values"):
        merge(tmp_path / "out", tmp_path / "of-another-base")


def test_what_trains_of_the_base_beside_adapters_is_in_the_folder_at_the_end(run_file, tmp_path):
    """A folder of adapters would not hold it."""
    main(run_file(trainable_modules=["embeddings"], max_steps=2))
    merge(tmp_path / "out" / "checkpoint-2", tmp_path / "merged")
    before, end, merged = (loaded(tmp_path / name).state_dict() for name in ("base", "out", "merged"))
    name = next(name for name in end if name.endswith("word_embeddings.weight"))
    assert not torch.equal(before[name], end[name]) and not (tmp_path / "out" / "adapter_config.json").exists()
    assert all(torch.allclose(merged[name], value, atol=1e-6) for name, value in end.items())


def test_every_kind_of_stage_of_an_embedding_model_ends_with_a_whole_folder(run_file, tmp_path, capsys):
    lora, projection = {"use_lora": True, "lora_r": 4}, {"trainable_modules": ["projection"]}
    kinds = {"whole": {}, "adapters": lora, "both": lora | projection, "projection": projection, "last": lora}
    listed = [{"name": name, "max_steps": 2} | more for name, more in kinds.items()]
    served = SERVED | NO_LORA | {"lora_alpha": ...}
    main(run_file(**served, stages=listed, projection_dim=8, save_strategy="no", normalize=True))
    out = tmp_path / "out"
    folders = [out / f"stage_{i}_{name}" for i, name in enumerate(kinds)][:-1] + [out]
    states = [loaded(folder).state_dict() for folder in folders]
    parts = []
    for before, after in zip(states, states[1:], strict=False):
        assert before.keys() == after.keys()
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        parts.append({"projection" if name.startswith("projection") else "query, value" for name in changed})
        assert all(name.startswith("projection") or ".query." in name or ".value." in name for name in changed)
    assert parts == [{"query, value"}, {"query, value", "projection"}, {"projection"}, {"query, value"}]
    reports = json.loads((out / "metrics.json").read_text())["stages"]
    for before, after in zip(reports, reports[1:], strict=False):
        assert before["after"] == pytest.approx(after["before"])
    assert not list(out.glob("adapter*"))
    model = loaded(out)
    assert (model.pooling.pooling_mode, model.prompts["query"]) == ("lasttoken", "search : ")
    assert model[0].query_length == 6


def test_after_a_stage_of_adapters_over_half_precision_all_weights_train_in_float32(run_file, tmp_path):
    stages = [{"name": "adapters", "use_lora": True, "lora_r": 4}, {"name": "whole"}]
    path = run_file(bf16=True, stages=stages, max_steps=2, save_strategy="no", **NO_LORA)
    in_half_precision(tmp_path / "base")
    main(path)
    folders = tmp_path / "out" / "stage_0_adapters", tmp_path / "out"
    found = [{value.dtype for value in load_file(folder / "model.safetensors").values()} for folder in folders]
    assert found == [{torch.bfloat16}, {torch.float32}]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_adapters_of_two_processes_are_those_of_one(run_file, tmp_path, strategy):
    more = {"lora_dropout": 0.0, "save_strategy": "no", "max_steps": 2, "no_duplicates_in_batch": False}
    more |= {"pooling": "cls", "projection_dim": 8}
    path = run_file(output_dir=str(tmp_path / "two"), per_device_train_batch_size=4, **more)
    forked.launch(f"multi_gpu_{strategy}", 2, forked.train_hf, "--config", path)
    main(run_file(output_dir=str(tmp_path / "alone"), **more))
    two, alone = adapters(tmp_path / "two"), adapters(tmp_path / "alone")
    assert two.keys() == alone.keys() and any(value.abs().sum() > 0 for name, value in alone.items() if "B" in name)
    for name, value in alone.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
    merged = [embeddings(loaded(tmp_path / name)) for name in ("two", "alone")]
    torch.testing.assert_close(*merged, rtol=1e-3, atol=1e-3)
    cli.main(["merge", str(tmp_path / "two"), "--output", str(tmp_path / "merged")])


@pytest.mark.slow
def test_adapters_under_ddp_resume_bit_for_bit(run_file, tmp_path):
    arguments = "--config", run_file(per_device_train_batch_size=4), "--accelerate_config", "ddp", "--num_processes", 2
    launch("python", 1, ROOT / "scripts" / "train_hf.py", *arguments)
    whole = adapters(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    launch("python", 1, ROOT / "scripts" / "train_hf.py", *arguments, "--resume_from_checkpoint", "true")
    again = adapters(tmp_path / "out")
    assert whole and all(torch.equal(again[name], value) for name, value in whole.items())


def test_in_a_vision_language_model_only_the_language_model_gets_adapters():
    config = RunConfig(task="image-text-to-text", model_config=LLAVA, use_lora=True)
    model = add_adapters(build_model(config, build_processor()), config)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains and all("language_model" in name and "lora_" in name for name in trains)
    config.lora_target_modules = ["fc1"]
    model = add_adapters(build_model(config, build_processor()), config)
    assert all("vision_tower" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_a_projector_trains_whole_beside_adapters(run_file, tmp_path):
    fields = {
        "task": "image-text-to-text", "model_name_or_path": None, "model_config": LLAVA, "dataset_name": "digits",
        "trainable_modules": ["projector"], "gradient_cache_chunk_size": ..., "eval_holdout": ...,
        "max_eval_samples": 4,
    }  # fmt: skip
    main(run_file(**fields))
    checkpoint = load_file(tmp_path / "out" / "checkpoint-4" / "trainable.safetensors")
    kinds = {"lora" if "lora_" in name else "projector" if "projector" in name else name for name in checkpoint}
    assert kinds == {"lora", "projector"}


@pytest.mark.parametrize("change, words", [
    ({"use_lora": False}, "lora_r=4 has no effect without use_lora"),
    ({"lora_r": 0}, "lora_r=0 must be at least 1"),
    ({"lora_dropout": 1.0}, "lora_dropout=1.0 must be"),
    ({"lora_target_modules": ["quary"]}, "lora_target_modules=['quary']"),
])  # fmt: skip
def test_mistakes_are_one_line(run_file, capsys, change, words):
    with pytest.raises(SystemExit):
        main(run_file(**change))
    assert words in capsys.readouterr().err


def test_a_model_without_the_usual_layers_says_so():
    with pytest.raises(UsageError, match="has no layer called"):
        add_adapters(torch.nn.Sequential(torch.nn.Linear(2, 2)), RunConfig(use_lora=True))


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_merged_weights_are_those_that_peft_merges_in_place(targets):
    torch.manual_seed(0)
    model = add_adapters(tiny_llava(), RunConfig(use_lora=True, lora_r=2, lora_alpha=6, lora_target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    found = merged_weights(model, model.state_dict())
    before = tiny_llava().state_dict()
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(found[name], before[name]) for name in found)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
