"""Frozen features are computed once, found by content, and train to the same weights."""

import os
import time
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Dense

from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.errors import UsageError
from hf_dist_ext.frozen import feature_cache, feature_store
from hf_dist_ext.frozen.feature_store import FeatureStore, part_digest, row_keys
from hf_dist_ext.frozen.leading_part import FrozenVectors
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.retrieval_data import texts
from tests.sentence_models import text_model
from tests.tiny_models import (
    CHECKPOINTING,
    OF_DUAL,
    WORDS,
    dual_encoder,
    embed,
    embedding_model,
    model_config,
    tiny_tokenizer,
)
from tests.tiny_vision_language import BlankPictures, Calls, collate, row, tiny_llava


def arguments(folder, **options) -> DistTrainingArguments:
    return DistTrainingArguments(
        output_dir=str(folder / "run"), per_device_train_batch_size=4, max_steps=6,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
        remove_unused_columns=False, max_grad_norm=0.0, **{"per_device_eval_batch_size": 3} | options,
    )  # fmt: skip


ROWS = [row(i % 3 != 2, i) for i in range(8)]
ENCODER = "model.vision_tower"


def llava_run(folder, cache: bool, rows=ROWS, model=None, collator=collate, **options) -> tuple[DistTrainer, Calls]:
    model = model or tiny_llava()
    calls = Calls(model, [f"{ENCODER}.encoder"])
    more = {"frozen_feature_cache": str(folder / "features")} if cache else {}
    args = arguments(folder, **{"trainable_modules": ["projector"]} | options | more)
    trainer = DistTrainer(model, args, train_dataset=rows, data_collator=collator, processing_class=BlankPictures())
    trainer.train()
    return trainer, calls


def projector_of(trainer: DistTrainer) -> torch.Tensor:
    return projector_of_model(trainer.model)


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {CHECKPOINTING: True}])
def test_an_image_encoder_runs_once_per_picture_and_the_weights_are_the_same(tmp_path, options):
    start = projector_of_model(tiny_llava())
    plain, plain_calls = llava_run(tmp_path, False, **options)
    cached, calls = llava_run(tmp_path, True, **options)
    assert (projector_of(plain) - start).abs().max() > 1e-2
    assert torch.allclose(projector_of(cached), projector_of(plain), atol=2e-3 if options.get("bf16") else 1e-5)
    assert plain_calls.forward[f"{ENCODER}.encoder"] == 6  # every step
    # three batches of rows, the first of them twice, and the blank picture
    assert calls.forward[f"{ENCODER}.encoder"] == 5
    again, calls = llava_run(tmp_path, True, **options)
    assert torch.equal(projector_of(again), projector_of(cached))
    assert calls.forward[f"{ENCODER}.encoder"] == 3  # one batch, once more as a check, and the blank picture


def projector_of_model(model) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.model.multi_modal_projector.parameters()])


def test_other_weights_or_pictures_are_never_answered_with_old_features(tmp_path):
    llava_run(tmp_path, True)
    folders = set((tmp_path / "features").iterdir())
    assert len(folders) == 1
    other = tiny_llava(seed=1)
    llava_run(tmp_path, True, model=other)
    assert len(set((tmp_path / "features").iterdir())) == 2
    (folder,) = folders
    stored = len(FeatureStore(folder))
    assert stored == sum("pixel_values" in one for one in ROWS)
    changed = [{**one} for one in ROWS]
    changed[0]["pixel_values"] = changed[0]["pixel_values"] + 1e-3
    llava_run(tmp_path, True, rows=changed)
    assert len(FeatureStore(folder)) == stored + 1


class Scaled(torch.nn.Module):
    """A tower of the user's own, with neither weights nor a configuration that tell one from another."""

    def __init__(self, scale: float):
        super().__init__()
        self._scale, self.linear = scale, torch.nn.Linear(3, 3)


def small(change) -> SentenceTransformer:
    torch.manual_seed(0)
    model = embedding_model(model_config("bert"), projection_dim=8)
    model.add_module("own", Scaled(1.0))
    change(model)
    return model


def layer_of(model: SentenceTransformer) -> torch.nn.Module:
    return model.transformers_model.encoder.layer[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.pooling, "pooling_mode", ("cls",)),
        lambda model: model._modules.pop("normalize"),
        lambda model: setattr(model.projection, "activation_function", torch.nn.ReLU()),
        lambda model: setattr(layer_of(model).intermediate, "intermediate_act_fn", torch.nn.ReLU()),
        lambda model: setattr(model.transformers_model.config, "layer_norm_eps", 1e-3),
        lambda model: setattr(layer_of(model).output.LayerNorm, "eps", 1e-3),
        lambda model: setattr(model.own, "_scale", 2.0),
        lambda model: setattr(model.own, "__class__", type("Scaled", (Scaled,), {})),
    ],
)  # fmt: skip
def test_another_setting_of_a_frozen_part_has_features_of_its_own(change):
    """The weights are the same."""
    one, again, other = (part_digest(small(how).children(), small(how)) for how in (bool, bool, change))
    assert one == again != other


def test_what_a_module_remembers_of_earlier_texts_is_no_setting():
    model = embedding_model(model_config("bert"))
    before = part_digest(model.children(), model)
    embed(model, **model.preprocess(["sort"], prompt="search : "))
    assert model[0]._prompt_length_mapping and part_digest(model.children(), model) == before


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def one_of_two_jobs(say, folder: Path, name: str, rows: list) -> str:
    """Both have named their shards before either writes one; `late`'s comes second, before `early` reads."""
    save, replace = feature_store.save_file, os.replace

    def save_in_turn(*arguments):
        (folder / f"{name} is named").touch()
        wait_for(folder / {"early": "late is named", "late": "early is there"}[name])
        save(*arguments)

    def replace_in_turn(*paths):
        replace(*paths)
        if "features-" in str(paths[1]):
            (folder / f"{name} is there").touch()
            wait_for(folder / "late is there")

    feature_store.save_file, os.replace = save_in_turn, replace_in_turn
    trainer, _ = llava_run(folder / name, False, rows, frozen_feature_cache=str(folder / "features"))
    torch.save(projector_of(trainer), folder / f"{name}.pt")
    return "done"


def test_two_jobs_that_fill_one_folder_at_once_train_on_their_own_rows(tmp_path):
    rows = {"early": [row(True, i) for i in range(8)], "late": [row(True, 100 + i) for i in range(8)]}
    jobs = {}
    for name in rows:
        (tmp_path / name).mkdir()
        job = partial(one_of_two_jobs, folder=tmp_path, name=name, rows=rows[name])
        jobs[name] = Run("single", tmp_path / f"{name}-job", job)
    for job in jobs.values():
        job.lines.read()
    logs = [log.read_text()[-3000:] for job in jobs.values() for log in job.logs]
    assert all((tmp_path / f"{name}.pt").exists() for name in rows), "\n".join(logs)
    start, ends = projector_of_model(tiny_llava()), []
    for name in rows:
        ends.append(projector_of(llava_run(tmp_path / "plain", False, rows[name])[0]))
        assert torch.allclose(torch.load(tmp_path / f"{name}.pt"), ends[-1], atol=1e-5), name
    assert all((end - start).abs().max() > 1e-2 for end in ends) and not torch.allclose(*ends, atol=1e-3)


def key(*numbers: int) -> bytes:
    return bytes(numbers).ljust(16, b"\0")


def test_a_shard_that_was_replaced_by_another_is_never_read_as_the_old_one(tmp_path):
    store = FeatureStore(tmp_path)
    store.add([key(1, 2), key(3, 4)], torch.ones(2, 3))
    store.flush()
    (shard,) = tmp_path.glob("features-*")
    other = FeatureStore(tmp_path / "other")
    other.add([key(5, 6), key(7, 8)], torch.zeros(2, 3))
    other.flush()
    os.replace(next((tmp_path / "other").glob("features-*")), shard)
    with pytest.raises(UsageError, match="features-.* no longer holds"):
        store.get([key(3, 4)])


def test_the_sorted_table_of_keys_answers_as_a_dictionary_would(tmp_path):
    """Keys that begin alike or end with zeros, and rows that several shards hold."""
    draw, value_of = np.random.default_rng(0), {}
    stores = [FeatureStore(tmp_path) for _ in range(3)]
    for turn in range(12):
        writer = stores[turn % 3]
        keys = [key(*pair) for pair in draw.integers(0, 7, size=(int(draw.integers(1, 9)), 2)).tolist()]
        for one in keys:
            value_of.setdefault(one, torch.tensor([float(len(value_of))] * 2))
        writer.add(keys, torch.stack([value_of[key] for key in keys]))
        assert all(one in writer for one in keys)
        writer.flush()
        assert all(one in writer for one in keys) and torch.equal(writer.get(keys[:1])[0], value_of[keys[0]])
    reader = FeatureStore(tmp_path)
    for store in (*stores, reader):
        store.load()
        assert len(store) == len(value_of) and key(9, 9) not in store and key(0, 9) not in store
        assert torch.equal(store.get([*value_of]), torch.stack([*value_of.values()]))
        own = [(store.shards[shard], row) for shard, row in map(store._place, value_of)]
        assert own == [(reader.shards[shard], row) for shard, row in map(reader._place, value_of)]
    assert sum(len(load_file(path)["keys"]) for path in tmp_path.glob("*.safetensors")) > len(value_of)
    assert min(value_of).endswith(b"\0") and reader.get([]).shape == (0, 2)
    assert len(FeatureStore(tmp_path / "empty")) == 0 and key(1, 2) not in FeatureStore(tmp_path / "empty")


def test_random_pictures_are_refused(tmp_path):
    def augmented(rows):
        batch = collate(rows)
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"] + torch.rand(())
        return batch

    with pytest.raises(UsageError, match="augmentation"):
        llava_run(tmp_path, True, collator=augmented)


def test_without_a_frozen_leading_part_the_cache_is_refused(tmp_path):
    with pytest.raises(UsageError, match="its image encoder trains"):
        llava_run(tmp_path, True, trainable_modules=["vision", "projector"])
    with pytest.raises(UsageError, match="needs a frozen part"):
        arguments(tmp_path, frozen_feature_cache="x")


TEXTS = datasets.Dataset.from_list(
    [{"query": " ".join(WORDS[i:][: 2 + i % 4]), "positive": " ".join(WORDS[2 * i :][: 3 + i % 3])} for i in range(8)]
)


def text_run(folder, cache: bool, **options) -> DistTrainer:
    torch.manual_seed(0)
    model = embedding_model(model_config("bert"), projection_dim=8).double()
    more = {"frozen_feature_cache": str(folder / "features")} if cache else {}
    args = arguments(folder, trainable_modules=["projection"], **options, **more)
    trainer = DistTrainer(
        model, args, train_dataset=TEXTS, loss=InfoNCELoss(0.1),
        data_collator=ContrastiveCollator(tiny_tokenizer(), ["query", "positive"], max_length=16),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("chunk", [None, 3])
def test_pooled_vectors_of_texts_train_the_projection_alike(tmp_path, chunk):
    plain = text_run(tmp_path, False, gradient_cache_chunk_size=chunk).model.projection.linear.weight
    calls = []
    cached = text_run(tmp_path, True, gradient_cache_chunk_size=chunk)
    assert torch.allclose(cached.model.projection.linear.weight, plain, atol=1e-10)
    cached.model.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    cached.train()
    assert not calls  # everything came from the folder


def sentence_run(folder, rows, loss, cache: bool = True, **options) -> DistTrainer:
    model = text_model(folder / "base").double()
    model.append(Dense(32, 8))
    torch.manual_seed(0)
    torch.nn.init.normal_(model[3].linear.weight)
    more = {"frozen_feature_cache": str(folder / "features")} if cache else {}
    args = arguments(folder, frozen_modules=["0"], gradient_cache_chunk_size=3, **options, **more)
    trainer = DistTrainer(model.double(), args, train_dataset=rows, loss=loss(model))
    trainer.train()
    return trainer


def test_batches_without_a_negative_train_from_the_cache(tmp_path):
    found = texts(24, seed=0)
    rows = {"query": found[:12], "positive": found[12:], "negative": [[]] * 6 + [[one] for one in texts(6, seed=1)]}
    weights = []
    for cache in (False, True):
        trainer = sentence_run(tmp_path, datasets.Dataset.from_dict(rows), lambda model: InfoNCELoss(0.1), cache)
        weights.append(trainer.model[3].linear.weight)
    assert torch.allclose(*weights, atol=1e-10)


def test_a_row_that_can_not_be_read_is_named_or_replaced_while_features_are_computed(tmp_path):
    found = texts(24, seed=0)

    def read(rows):
        if found[5] in rows["query"]:
            raise OSError("torn")
        return rows

    torn = datasets.Dataset.from_dict({"query": found[:12], "positive": found[12:]}).with_transform(read)
    for workers in (0, 1):
        with pytest.raises(UsageError, match=r"^the training set \(Dataset\), row 5 \(counted from 0\).*torn"):
            sentence_run(tmp_path, torn, MultipleNegativesRankingLoss, dataloader_num_workers=workers)
    weights, options = [], {"max_bad_rows": 1, "per_device_eval_batch_size": 12}  # all rows are of one batch
    for cache in (False, True):
        trainer = sentence_run(tmp_path, torn, lambda model: InfoNCELoss(), cache, **options)
        weights.append(trainer.model[3].linear.weight)
        assert trainer.health.bad_rows.count == 1
    assert torch.allclose(*weights, atol=1e-10)


def test_what_a_cache_of_features_can_not_serve_is_refused_before_it_is_filled(tmp_path):
    pairs = datasets.Dataset.from_dict({"query": texts(8, seed=0), "positive": texts(8, seed=1)})
    with pytest.raises(UsageError, match=r"does not work with several datasets \(a, b\)"):
        sentence_run(tmp_path, {"a": pairs, "b": pairs}, MultipleNegativesRankingLoss)
    with pytest.raises(UsageError, match="GISTEmbedLoss has a guide that reads the texts of every batch"):
        sentence_run(tmp_path, pairs, lambda model: GISTEmbedLoss(model, text_model(tmp_path / "guide")))
    assert not (tmp_path / "features").exists()


def test_vectors_of_a_locked_tower_train_the_other_alike(tmp_path):
    size = dual_encoder().transformers_model.config.vision_config.image_size
    rows = [{"ids": torch.randint(4, 20, (6,)), "pixels": torch.randn(3, size, size).double()} for _ in range(8)]

    def collate_pairs(batch):
        ids = torch.stack([one["ids"] for one in batch])
        pixels = torch.stack([one["pixels"] for one in batch])
        return {
            "query": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
            "positive": {"pixel_values": pixels},
            "constants": OF_DUAL,
        }

    weights = {}
    for cache in (False, True):
        torch.manual_seed(0)
        model = dual_encoder().double()
        more = {"frozen_feature_cache": str(tmp_path / "features")} if cache else {}
        args = arguments(tmp_path, frozen_modules=["image"], gradient_cache_chunk_size=3, **more)
        calls = []
        vision, text = (getattr(model.transformers_model, f"{name}_model") for name in ("vision", "text"))
        vision.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer = DistTrainer(model, args, train_dataset=rows, data_collator=collate_pairs, loss=InfoNCELoss(0.1))
        trainer.train()
        weights[cache] = torch.cat([p.detach().flatten() for p in text.parameters()])
        assert len(calls) == (4 if cache else 12)  # three batches and one again; or two chunks in each of six steps
    assert torch.allclose(weights[True], weights[False], atol=1e-5)


def test_a_key_is_the_rows_content_without_its_padding():
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    keys = row_keys({"input_ids": ids, "attention_mask": mask})
    assert keys[0] != keys[1]
    wider = {"input_ids": torch.tensor([[5, 6, 7, 0, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0]])}
    assert row_keys(wider) == keys[:1] != row_keys(wider, salt="other")
    left = {"input_ids": torch.tensor([[0, 5, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    assert row_keys(left) != keys[:1] and row_keys(left, keeps_left_padding=False) == row_keys(
        wider, keeps_left_padding=False
    )


def test_a_full_disk_leaves_what_was_complete_and_nothing_half_written(tmp_path, monkeypatch):
    store = FeatureStore(tmp_path)
    store.add([key(1, 2)], torch.ones(1, 3))
    store.flush()
    monkeypatch.setattr("hf_dist_ext.frozen.feature_store.os.replace", no_space)
    store.add([key(3, 4)], torch.zeros(1, 3))
    with pytest.raises(UsageError, match="can not be written.*make room"):
        store.flush()
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
    again = FeatureStore(tmp_path)
    assert key(1, 2) in again and key(3, 4) not in again
    assert torch.equal(again.get([key(1, 2)]), torch.ones(1, 3))


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_more_than_the_disk_holds_is_refused_before_it_is_computed(tmp_path, monkeypatch):
    class Usage:
        free = 10

    monkeypatch.setattr("hf_dist_ext.frozen.feature_cache.shutil.disk_usage", lambda folder: Usage)
    with pytest.raises(UsageError, match="are free in"):
        llava_run(tmp_path, True)
    assert not list((tmp_path / "features").rglob("*.safetensors"))


def test_a_folder_that_processes_do_not_share_is_said(tmp_path, monkeypatch):
    said, answers = [], iter([[[5], [3]], [[5], [5]], *[[[5], [3]]] * 4])
    monkeypatch.setattr(feature_cache.collectives, "exchange", lambda numbers: next(answers))
    monkeypatch.setattr(feature_cache.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(feature_cache.logger, "warning", said.append)
    cache = object.__new__(feature_cache.FeatureCache)
    cache.store = FeatureStore(tmp_path)
    cache.load_everyones()
    assert not said, "it came a little later"
    cache.load_everyones()
    assert len(said) == 1 and "from 3 to 5 stored rows" in said[0]


def test_features_depend_on_what_follows_a_frozen_route():
    digests = set()
    for seed in (0, 1, 1):
        torch.manual_seed(0)
        queries, documents = ([*embedding_model(model_config("bert"))] for _ in range(2))
        first = Router.for_query_document(queries, documents)
        torch.manual_seed(seed)
        model = SentenceTransformer(modules=[first, Dense(32, 8)], device="cpu")
        for parameter in [*model[0].sub_modules["document"].parameters(), *model[1].parameters()]:
            parameter.requires_grad_(False)
        part = FrozenVectors(model)
        assert not part.is_pooled
        digests.add(part_digest(part.modules, model))
    assert len(digests) == 2
