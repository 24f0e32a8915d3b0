"""`hf-dist merge`: the folder it writes is complete, loads alone, and says what the checkpoint's model said."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.merge import _copy_processor, merge
from hf_dist_ext.cli import main
from hf_dist_ext.data.digits import build_processor
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.from_run import describe
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.checkpoints.test_trainable import base, make
from tests.tiny_models import WORDS, embedding_model, loaded, model_config, tiny_tokenizer, write_fields
from tests.tiny_vision_language import collate, row, tiny_llava

TOKENS = torch.tensor([[5, 6, 7, 8]])


def said(model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))[0]


def train_embedding(folder: Path, **options) -> DistTrainer:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    embedding_model(model_config("bert")).save_pretrained(str(folder / "base"))
    model = loaded(folder / "base", projection_dim=8, pooling="cls")
    describe(model, prompts={"query": "read "}, default_prompt_name="query")
    texts = ["parse a date", "read file", "sort numbers by key", "list of lines"]
    args = DistTrainingArguments(
        output_dir=str(folder / "run"), max_steps=3, save_steps=3, learning_rate=1e-2, per_device_train_batch_size=4,
        report_to=[], disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip
    trainer = DistTrainer(
        model, args, train_dataset=Dataset.from_dict({"query": texts, "positive": texts[::-1]}), loss=InfoNCELoss(),
        data_collator=ContrastiveCollator(tokenizer, ["query", "positive"]), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{"trainable_modules": ["projection"]}, {}], ids=["frozen", "full"])
def test_an_embedding_model_keeps_its_embeddings_pooling_prompts_and_tokenizer(tmp_path, options, capsys):
    trainer = train_embedding(tmp_path, **options)
    main(["merge", str(tmp_path / "run" / "checkpoint-3"), "--output", str(tmp_path / "merged")])
    assert "complete model" in capsys.readouterr().out
    merged, text = SentenceTransformer(str(tmp_path / "merged"), device="cpu"), "parse a date"
    vector = torch.from_numpy(merged.encode([text]))
    assert torch.equal(vector, torch.from_numpy(trainer.model.encode([text]))) and vector.shape == (1, 8)
    assert merged[1].pooling_mode == "cls"
    assert merged.prompts["query"] == "read " and merged.default_prompt_name == "query"
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")(text).input_ids == tiny_tokenizer()(text).input_ids
    assert not (tmp_path / "merged" / "manifest.json").exists()


def test_a_vision_language_model_has_its_processor_and_its_projector(tmp_path):
    tiny_llava().save_pretrained(tmp_path / "base")
    processor = build_processor(4, 16)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    args = DistTrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        per_device_train_batch_size=2, trainable_modules=["projector"], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    rows = [row(True, seed) for seed in range(4)]
    trainer = DistTrainer(model, args, train_dataset=rows, data_collator=collate, processing_class=processor)
    trainer.train()
    merge(tmp_path / "run" / "checkpoint-2", tmp_path / "merged")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    again = AutoProcessor.from_pretrained(tmp_path / "merged")
    processor.save_pretrained(tmp_path / "expected")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    assert len(expected) >= 3
    assert all((tmp_path / "merged" / name).read_bytes() == content for name, content in expected.items())
    assert again.chat_template == processor.chat_template
    batch = collate([row(True, 9)])
    with torch.no_grad():
        ours, theirs = model.eval()(**batch).logits, loaded.eval()(**batch).logits
        before = AutoModelForImageTextToText.from_pretrained(tmp_path / "base").eval()(**batch).logits
    assert torch.equal(ours, theirs) and not torch.allclose(before, theirs, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"trainable_modules": ["lm_head"]}], ids=["stock", "frozen"])
def test_adapters_are_merged_and_the_outputs_stay(tmp_path, options):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base(tmp_path))
    untrained = said(model)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    trainer = make(tmp_path / "run", adapted, learning_rate=5e-2, **({"trainable_modules": None} | options))
    trainer.train()
    merge(tmp_path / "run" / "checkpoint-4", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(said(merged), said(trainer.model), atol=1e-4)
    assert (said(merged) - untrained).abs().max() > 1e-2
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    if options:
        trainer.args.save_full_model = True
        trainer.save_model(str(tmp_path / "full"))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
        assert torch.allclose(said(loaded), said(trainer.model), atol=1e-4)


def test_adapters_that_learned_nothing_are_not_passed_off_as_trained(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base(tmp_path))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    make(tmp_path / "run", adapted, trainable_modules=None, learning_rate=0.0).train()
    with pytest.raises(UsageError, match="adapters change nothing"):
        merge(tmp_path / "run" / "checkpoint-4", tmp_path / "merged")


def test_what_can_not_be_merged_is_refused_with_the_reason(tmp_path):
    folder = base(tmp_path)
    make(tmp_path / "run", folder).train()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    with pytest.raises(UsageError, match="is not empty"):
        merge(checkpoint, tmp_path / "run")
    with pytest.raises(UsageError, match="config.json is a file. Give a new folder"):
        merge(checkpoint, folder / "config.json")
    with pytest.raises(UsageError, match="frozen weights .* other values"):
        merge(checkpoint, tmp_path / "merged", base=str(base(tmp_path, seed=3)))
    merge(checkpoint, tmp_path / "elsewhere", base=str(folder))
    with pytest.raises(UsageError, match="no checkpoint with a manifest.json"):
        merge(folder, tmp_path / "merged")
    embedding_model(model_config("bert")).save_pretrained(str(tmp_path / "sentence_transformer"))
    with pytest.raises(UsageError, match="it is a complete model already"):
        merge(tmp_path / "sentence_transformer", tmp_path / "merged")
    with pytest.raises(UsageError, match="config.json is no folder"):
        merge(folder / "config.json", tmp_path / "merged")
    torn = tmp_path / "run" / "checkpoint-12"
    shutil.copytree(checkpoint, torn)
    (torn / "manifest.json").unlink()
    with pytest.raises(UsageError) as refusal:
        merge(torn, tmp_path / "merged")
    assert "its save did not end" in str(refusal.value) and "checkpoint-N" not in str(refusal.value)
    weights = checkpoint / "trainable.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UsageError, match="trainable.safetensors was altered"):
        merge(checkpoint, tmp_path / "merged")
    content = json.loads((tmp_path / "run" / "checkpoint-2" / "manifest.json").read_text()) | {"base_model": None}
    manifest.commit(tmp_path / "run" / "checkpoint-2", content["files"], {"base_model": None, **content})
    with pytest.raises(UsageError, match="--base FOLDER"):
        merge(tmp_path / "run" / "checkpoint-2", tmp_path / "merged")


def test_a_checkpoint_without_a_processor_gets_that_of_its_base(tmp_path):
    """Whatever other files in JSON it holds."""
    base, checkpoint, output = (tmp_path / name for name in ("base", "checkpoint-3", "merged"))
    for folder in (checkpoint, output):
        folder.mkdir()
    tiny_tokenizer().save_pretrained(base)
    for name in ("stream_position.json", "config.json", "trainer_state.json", "of_a_later_version.json"):
        (checkpoint / name).write_text("{}")
    _copy_processor(checkpoint, base, output)
    assert AutoTokenizer.from_pretrained(output)("parse a date") == tiny_tokenizer()("parse a date")
    assert {path.name for path in output.iterdir()} == {path.name for path in base.iterdir()}


@pytest.mark.parametrize("field", ["is_causal", "tokenizer_name"])
def test_a_merged_checkpoint_reads_and_sees_as_the_run_did(tmp_path, field):
    embedding_model(model_config("qwen3")).save_pretrained(str(tmp_path / "base"))
    content = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    words = [word for word in content["model"]["vocab"] if not word.startswith("[")]
    ids = [content["model"]["vocab"][word] for word in words]
    content["model"]["vocab"] |= dict(zip(words, ids[::-1], strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_max_length=24,
    ).save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"query": f"{WORDS[i % 9]} {WORDS[i * 3 % 8]}", "positive": " ".join(WORDS[i % 5 : i % 5 + 4])}
        for i in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = {"is_causal": False} if field == "is_causal" else {"tokenizer_name": str(tmp_path / "tokenizer")}
    main(
        [
            "train",
            str(
                write_fields(
                    tmp_path,
                    model_name_or_path=str(tmp_path / "base"),
                    dataset_name=str(tmp_path / "rows.jsonl"),
                    per_device_train_batch_size=4,
                    max_steps=2,
                    save_steps=2,
                    output_dir=str(tmp_path / "out"),
                    trainable_modules=["layers.0"],
                    **more,
                )
            ),
        ]
    )
    main(["merge", str(tmp_path / "out" / "checkpoint-2"), "--output", str(tmp_path / "merged")])
    ended, merged = (
        SentenceTransformer(str(tmp_path / name), device="cpu").encode([" ".join(WORDS[:5])])
        for name in ("out", "merged")
    )
    assert (ended == merged).all()
