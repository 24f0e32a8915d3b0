"""Checkpoints and folders of a SentenceTransformer are its own, and a resumed run is the run that did not stop."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, get_peft_model
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import set_seed

from hf_dist_ext import DistTrainer, DistTrainingArguments
from hf_dist_ext.checkpoints import merge, sentence_model, weights
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import from_run
from hf_dist_ext.models.adapters import merge_inside, merged_weights
from hf_dist_ext.strategies.base import Strategy
from tests.sentence_models import bert, chat_model, routed_model

WORDS = "parse a date from text read file into list of lines search sort the numbers by key".split()
ROWS = Dataset.from_list(
    [
        {"question": " ".join(WORDS[i % 9 : i % 9 + 1 + i % 4]), "answer": " ".join(WORDS[i * 3 % 8 :][: 3 + i % 5])}
        for i in range(24)
    ]
)


ADAPTERS = LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.1)


def model_of(folder: Path, adapters: Sequence[str] = (), wrapped: Sequence[str] = ()) -> SentenceTransformer:
    """`wrapped`: the adapters of a PeftModel inside."""
    modules = [bert(folder), Pooling(32, "mean"), Dense(32, 8, bias=False), Normalize()]
    torch.manual_seed(1)
    torch.nn.init.normal_(modules[2].linear.weight)
    model = SentenceTransformer(modules=modules, device="cpu")
    if adapters:
        set_seed(2)
        for name in adapters:
            model.add_adapter(ADAPTERS, name)
    if wrapped:
        set_seed(2)
        model[0].model = get_peft_model(model[0].model, ADAPTERS, adapter_name=wrapped[0])
        for name in wrapped[1:]:
            model[0].model.add_adapter(name, ADAPTERS)
    return model


def train(folder: Path, model: SentenceTransformer, resume: bool = False, **options) -> DistTrainer:
    args = DistTrainingArguments(
        folder / "out", **{"max_steps": 5, "save_steps": 3, **options}, save_strategy="steps", learning_rate=1e-2,
        per_device_train_batch_size=8, gradient_cache_chunk_size=3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = DistTrainer(model, args, ROWS, loss=MultipleNegativesRankingLoss(model))
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save_async": True},
        {"trainable_modules": ["2"]},
        {"trainable_modules": ["0"]},
        {"frozen_modules": ["embeddings"]},
        {"adapters": ["default"]},
        {"adapters": ["other", "trained"]},
        {"wrapped": ["default"]},
        {"wrapped": ["default", "other"]},
    ],
    ids=str,
)
def test_a_resumed_run_ends_with_the_weights_of_one_that_did_not_stop(tmp_path, options):
    options = dict(options)
    of_model = {name: options.pop(name) for name in ("adapters", "wrapped") if name in options}

    def build():
        return model_of(tmp_path / "base", **of_model)

    whole = train(tmp_path / "whole", build(), **options)
    before, expected = weights_of(build()), weights_of(whole.bare_model)
    assert any(not torch.equal(before[name], expected[name]) for name in before)
    stopped = train(tmp_path / "parts", build(), max_steps=5, **options)
    for checkpoint in (tmp_path / "parts" / "out").glob("checkpoint-5"):
        (checkpoint / "manifest.json").unlink()  # as if the run had been killed while it was written
    assert stopped.state.global_step == 5
    resumed = train(tmp_path / "parts", build(), resume=True, **options)
    assert resumed.state.global_step == 5
    for name, value in weights_of(resumed.bare_model).items():
        assert torch.equal(value, expected[name]), name


def test_adapters_that_no_folder_would_hold_are_refused_before_training(tmp_path):
    model = model_of(tmp_path / "base", ["one", "two"])
    model.set_adapter(["one", "two"])
    with pytest.raises(UsageError, match="adapters one, two are active.*set_adapter"):
        train(tmp_path, model)
    model = model_of(tmp_path / "base")
    get_peft_model(model[0].model, ADAPTERS)  # and its result is not given to the model
    with pytest.raises(UsageError, match="folder would lose them.*add_adapter"):
        train(tmp_path, model)


@pytest.mark.parametrize(
    "adapters, active", [("trained", "trained"), ("default trained", "trained"), ("default b",) * 2]
)
def test_a_peft_model_inside_is_refused_before_training_where_its_folder_would_open_without_what_trains(
    tmp_path, adapters, active
):
    model = model_of(tmp_path / "base", wrapped=adapters.split())
    model[0].model.base_model.set_adapter(active.split())
    with pytest.raises(UsageError, match=f"active adapters {', '.join(active.split())} .*opens with.*add_adapter"):
        train(tmp_path, model)


@pytest.mark.parametrize(
    "kind, names",
    [
        ("adapters", ["default"]),
        ("adapters", ["other", "trained"]),
        ("wrapped", ["default"]),
        ("wrapped", ["default", "other"]),
    ],
    ids=str,
)
def test_the_adapters_of_a_script_are_merged_and_not_into_a_base_that_changed(tmp_path, kind, names):
    trained = train(tmp_path, model_of(tmp_path / "base", **{kind: names}))
    trained.save_model()
    model = trained.bare_model.eval()
    for number, source in enumerate([tmp_path / "out", tmp_path / "out" / "checkpoint-5"]):
        merge.merge(source, tmp_path / f"merged-{number}")
        merged = SentenceTransformer(str(tmp_path / f"merged-{number}"), device="cpu")
        torch.testing.assert_close(torch.as_tensor(merged.encode(WORDS)), torch.as_tensor(model.encode(WORDS)))
    bert(tmp_path / "base", seed=5)
    with pytest.raises(UsageError, match="[0-9]+ with other values"):
        merge.merge(tmp_path / "out", tmp_path / "merged-2")


def test_a_peft_model_inside_is_refused_before_training_where_it_would_be_merged_at_the_end(tmp_path):
    with pytest.raises(UsageError, match="can not be merged.*add_adapter"):
        train(tmp_path, model_of(tmp_path / "base", wrapped=["default"]), save_full_model=True)


@pytest.mark.parametrize("pooling", ["mean", "lasttoken", ("cls", "mean"), ("mean", "cls")], ids=str)
def test_a_folder_has_the_keys_of_older_readers_and_opens_the_same(tmp_path, pooling):
    width = 32 if isinstance(pooling, str) else 64
    modules = [bert(tmp_path / "base"), Pooling(32, pooling), Dense(width, 8, activation_function=torch.nn.Identity())]
    model = SentenceTransformer(modules=[*modules, Normalize()], device="cpu", prompts={"query": "search : "})
    sentence_model.save(sentence_model.empty_copy(model), model.state_dict(), tmp_path / "saved")

    found = {path.relative_to(tmp_path / "saved").as_posix(): path for path in (tmp_path / "saved").rglob("*.json")}
    kept = {name: json.loads(path.read_text()) for name, path in found.items()}
    kinds = [module["type"].removeprefix("sentence_transformers.models.") for module in kept["modules.json"]]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert kept["sentence_bert_config.json"] == {"max_seq_length": 24, "do_lower_case": False}
    assert set(kept["2_Dense/config.json"]) == {"in_features", "out_features", "bias", "activation_function"}
    flags = {
        key.removeprefix("pooling_mode_") for key, value in kept["1_Pooling/config.json"].items() if value is True
    }
    names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    assert flags == {names[mode] for mode in ([pooling] if isinstance(pooling, str) else pooling)} | {"include_prompt"}
    assert kept["1_Pooling/config.json"]["word_embedding_dimension"] == 32
    assert kept["config.json"]["architectures"] == ["BertModel"] and "tokenizer.json" in found

    opened = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert opened[1].pooling_mode == pooling and opened.prompts["query"] == "search : "
    assert torch.equal(opened.encode(WORDS, convert_to_tensor=True), model.encode(WORDS, convert_to_tensor=True))


@pytest.mark.parametrize("kind", ["chat", "tokens", "routes"])
def test_what_only_release_6_can_say_stays_said(tmp_path, kind):
    if kind == "tokens":
        model = MultiVectorEncoder(modules=[bert(tmp_path / "base"), MultiVectorMask()], device="cpu")
    else:
        model = {"chat": chat_model, "routes": routed_model}[kind](tmp_path / "base")
    model.save_pretrained(str(tmp_path / "saved"))
    before = type(model)(str(tmp_path / "saved"), device="cpu")
    sentence_model.for_older_readers(tmp_path / "saved")
    opened = type(model)(str(tmp_path / "saved"), device="cpu")
    assert opened.modalities == before.modalities and len(opened) == len(before)
    for one, other in zip(opened.encode(WORDS), before.encode(WORDS), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_the_folder_of_a_run_opens_and_gives_what_the_model_gives(tmp_path):
    trainer = train(tmp_path, model_of(tmp_path / "base"))
    trainer.save_model(str(tmp_path / "final"))
    opened = SentenceTransformer(str(tmp_path / "final"), device="cpu")
    texts = ROWS["answer"][:5]
    torch.testing.assert_close(
        opened.encode(texts, convert_to_tensor=True), trainer.model.eval().encode(texts, convert_to_tensor=True)
    )
    assert "MultipleNegativesRankingLoss" in (tmp_path / "final" / "README.md").read_text()
    for folder in (tmp_path / "final", tmp_path / "out" / "checkpoint-5"):
        modules = json.loads((folder / "modules.json").read_text())
        assert all(module["type"].startswith("sentence_transformers.models.") for module in modules)  # older readers'
    other = model_of(tmp_path / "base")
    weights.load(other, tmp_path / "out" / "checkpoint-5", False, Strategy())
    for name, value in other.state_dict().items():
        assert torch.equal(value, opened.state_dict()[name]), name
    with pytest.raises(UsageError, match="does not fit this"):
        another = SentenceTransformer(modules=list(other)[:2] + [Dense(32, 4)])
        weights.load(another, tmp_path / "final", False, Strategy())


def test_a_checkpoint_of_all_weights_is_refused_where_adapters_train(tmp_path):
    train(tmp_path, model_of(tmp_path))
    with pytest.raises(UsageError, match="checkpoint-5 holds no adapters"):
        train(tmp_path, model_of(tmp_path, ["default"]), resume=True)


def test_a_card_that_somebody_wrote_stays(tmp_path):
    trainer = train(tmp_path, model_of(tmp_path / "base"), max_steps=1)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "README.md").write_text("mine")
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "README.md").read_text() == "mine"


def test_saving_leaves_the_model_and_its_kind_as_they_were(tmp_path):
    model = model_of(tmp_path / "base")
    kinds, before = [type(module) for module in model.modules()], {id(p) for p in model.parameters()}
    trainer = train(tmp_path, model, max_steps=1)
    trainer.save_model(str(tmp_path / "final"))
    assert trainer.model is model and [type(module) for module in model.modules()] == kinds
    assert {id(p) for p in model.parameters()} == before and not any(p.is_meta for p in model.parameters())


def test_a_folder_has_the_settings_that_the_model_has_when_it_is_saved(tmp_path):
    for options in ({}, {"save_async": True}):
        model, out = model_of(tmp_path / "base"), tmp_path / str(len(options))
        given = DistTrainingArguments(
            out, max_steps=2, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, **options
        )  # fmt: skip
        trainer = DistTrainer(model, given, ROWS, loss=MultipleNegativesRankingLoss(model))
        model.max_seq_length, model.similarity_fn_name = 7, "dot"
        trainer.train()
        saved = SentenceTransformer(str(out / "checkpoint-1"), device="cpu")
        assert (saved.max_seq_length, saved.similarity_fn_name) == (7, "dot"), options
        model.max_seq_length, model.prompts = 9, {"query": "search "}
        trainer.save_model(str(out / "final"))
        saved = SentenceTransformer(str(out / "final"), device="cpu")
        assert (saved.max_seq_length, saved.prompts["query"]) == (9, "search "), options


def test_weights_that_are_parts_of_one_long_tensor_are_saved(tmp_path):
    """As DeepSpeed's ZeRO-1 and 2 keep them."""
    model = model_of(tmp_path / "base")
    trainer = train(tmp_path, model, max_steps=1)
    long = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), long.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    trainer.save_model(str(tmp_path / "final"))
    found = SentenceTransformer(str(tmp_path / "final"), device="cpu").state_dict()
    own = {name: p for name, p in model.named_parameters() if ".pooler." not in name}
    assert all(torch.equal(found[name], p) for name, p in own.items()) and len(own) > 10


KINDS = {
    "dora": LoraConfig(r=2, target_modules=["query"], use_dora=True),
    "embedding": LoraConfig(r=2, target_modules=["query", "word_embeddings"]),
    "modules_to_save": LoraConfig(r=2, target_modules=["query"], modules_to_save=["LayerNorm"]),
    "tokens": LoraConfig(r=2, target_modules=["query"], trainable_token_indices=[5, 6, 7]),
    "ia3": IA3Config(target_modules=["query", "intermediate.dense"], feedforward_modules=["intermediate.dense"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_every_kind_are_resumed_and_merged(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tests.checkpoints.test_sentence_model.ADAPTERS", KINDS[kind])

    def build() -> SentenceTransformer:
        return model_of(tmp_path / "base", ["default"])

    whole = train(tmp_path / "whole", build())
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "out" / "checkpoint-5")
    resumed = train(tmp_path / "parts", build(), resume=True)
    expected, found = weights_of(whole.bare_model), weights_of(resumed.bare_model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with torch.no_grad():  # far from the base
        for name, parameter in whole.bare_model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    vectors = torch.as_tensor(whole.bare_model.eval().encode(WORDS))
    merge.save_merged(whole.bare_model, None, tmp_path / "merged")
    sentence_model.write(whole.bare_model, tmp_path / "adapters")
    sentence_model.write(from_run.build(tmp_path / "adapters"), tmp_path / "again")  # merged while it is loaded
    for folder in ("merged", "again"):
        opened = SentenceTransformer(str(tmp_path / folder), device="cpu")
        torch.testing.assert_close(torch.as_tensor(opened.encode(WORDS)), vectors, atol=1e-4, rtol=1e-4)


def test_merged_weights_of_a_table(tmp_path):
    model = model_of(tmp_path / "base")
    model.add_adapter(KINDS["embedding"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    found = merged_weights(model, model.state_dict())
    merge_inside(model.transformers_model)
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[n], expected[n], atol=1e-6) for n in found)
