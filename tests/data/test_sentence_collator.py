"""Batches of rows as sentence-transformers reads them: features and labels are those of its own collators."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict
from sentence_transformers.multi_vector_encoder.data_collator import MultiVectorEncoderDataCollator
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator

from hf_dist_ext.data.mixture import SOURCE
from hf_dist_ext.data.sentence_collator import SentenceCollator, tiles_of_rows
from hf_dist_ext.engine.flat import unfolded
from hf_dist_ext.errors import UsageError
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.sentence_data import prepare_sentence_data
from tests.sentence_models import chat_model, picture_model, pictures, routed_model, static_model, text_model
from tests.tiny_models import WORDS


def text(start: int, words: int) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(words))


def rows(count: int = 5, **more) -> list[dict]:
    return [
        {"anchor": text(i, 1 + i), "positive": text(i, 4), "negative": text(2 * i, 1 + i % 3)}
        | {name: value(i) for name, value in more.items()}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "text": text_model(folder / "text"),
        "chat": chat_model(folder / "chat"),
        "pictures": picture_model(folder / "pictures"),
        "routed": routed_model(folder / "routed"),
    }


def by_column(batch: dict, columns: list[str]) -> dict[str, dict]:
    """Theirs, whose keys begin with the column."""
    return {
        name: {k.removeprefix(f"{name}_"): v for k, v in batch.items() if k.startswith(f"{name}_")} for name in columns
    }


def assert_same(found: dict, theirs: dict, columns: list[str]) -> None:
    assert [name for name in found if name not in ("ids", "targets", "constants")] == columns
    for name, expected in by_column(theirs, columns).items():
        constants = found.get("constants", {}).get(name, {})
        both = {**found[name], **constants}
        assert both.keys() == expected.keys()
        for key, value in expected.items():
            is_tensor = isinstance(value, torch.Tensor)
            assert is_tensor == (key in found[name]), key
            assert torch.equal(both[key], value) if is_tensor else both[key] == value, key
    assert ("label" in theirs) == ("targets" in found)
    if "label" in theirs:
        label = found["targets"]["label"]
        assert torch.equal(label, theirs["label"]) and label.dtype == theirs["label"].dtype


PROMPTS = {
    "none": None,
    "for all": "search : ",
    "by column": {"anchor": "search : ", "positive": "text from "},
    "by dataset": {"code": "search : ", "other": "text from "},
    "by dataset and column": {"code": {"anchor": "search : "}, "other": {"positive": "text "}},
    "by dataset or column": {"code": {"anchor": "search : "}, "other": "text "},
}


@pytest.mark.parametrize("source", [None, "code", "other", "unknown"])
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("model", ["text", "chat"])
def test_prompts_in_every_form_give_the_features_of_theirs(models, model, prompts, source):
    given = rows() if source is None else rows(**{SOURCE: lambda i: source})
    theirs = SentenceTransformerDataCollator(models[model].preprocess, prompts=prompts)
    ours = SentenceCollator(models[model].preprocess, prompts=prompts)
    try:
        expected = theirs(given)
    except ValueError:
        with pytest.raises(UsageError, match="prompts are by dataset and column .*the rows name no dataset"):
            ours(given)
        return
    found = ours(given)
    assert_same(found, expected, ["anchor", "positive", "negative"])
    assert found["ids"].get(SOURCE) == source


ROUTES = {
    "by column": {"anchor": "query", "positive": "document", "negative": "document"},
    "by dataset": {"code": {"anchor": "document", "positive": "query", "negative": "query"}},
}


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
def test_routes_in_both_forms_give_the_features_and_tasks_of_theirs(models, routes):
    given = rows(**{SOURCE: lambda i: "code"})
    options = {"router_mapping": routes, "prompts": {"anchor": "search : "}}
    expected = SentenceTransformerDataCollator(models["routed"].preprocess, **options)(given)
    found = SentenceCollator(models["routed"].preprocess, routes=routes, prompts={"anchor": "search : "})(given)
    assert_same(found, expected, ["anchor", "positive", "negative"])


@pytest.mark.parametrize("length", [None, 5, {"query": 4, "document": 6}])
@pytest.mark.parametrize("routes", [None, {"anchor": "document"}])
def test_columns_of_token_vectors_have_tasks_by_their_place_and_lengths_by_task(models, length, routes):
    preprocess = models["text"].preprocess
    theirs = MultiVectorEncoderDataCollator(preprocess, max_length=length, router_mapping=routes)
    ours = SentenceCollator(preprocess, max_length=length, routes=routes, has_positions=True)
    assert_same(ours(rows()), theirs(rows()), ["anchor", "positive", "negative"])


@pytest.mark.parametrize("name", ["label", "labels", "score", "scores"])
@pytest.mark.parametrize("value", [
    lambda i: i + 2**40, lambda i: i / 7, lambda i: [i, 1], lambda i: [i / 7, 1.0],
    lambda i: torch.full((2, 3), i / 3),
])  # fmt: skip
def test_labels_are_those_of_theirs_exactly_and_of_their_type(models, name, value):
    preprocess = models["text"].preprocess
    given = rows(**{name: value})
    found = SentenceCollator(preprocess)(given)
    assert_same(found, SentenceTransformerDataCollator(preprocess)(given), ["anchor", "positive", "negative"])


def test_labels_of_different_lengths_are_an_error_in_words(models):
    with pytest.raises(UsageError, match='Column "scores": a label must be a number'):
        SentenceCollator(models["text"].preprocess)(rows(scores=lambda i: [1.0] * (1 + i)))


VALUES = {
    "pictures": ("pictures", lambda: [{"photo": one, "text": text(i, 3)} for i, one in enumerate(pictures(4))]),
    "messages": ("chat", lambda: [{"talk": [{"role": "user", "content": text(i, 3)}], "text": "a"} for i in range(4)]),
    "texts by modality": ("pictures", lambda: [{"one": {"text": text(i, 3)}, "other": "a"} for i in range(4)]),
    "pairs": ("text", lambda: [{"pair": (text(i, 3), text(i, 2)), "other": text(i, 2)} for i in range(4)]),
    "one column": ("text", lambda: [{"text": text(i, 3), "label": i % 2} for i in range(4)]),
}  # fmt: skip


@pytest.mark.parametrize("model, given", VALUES.values(), ids=VALUES)
def test_whatever_the_model_reads_becomes_the_features_of_theirs(models, model, given):
    given, preprocess = given(), models[model].preprocess
    columns = [name for name in given[0] if name != "label"]
    found = SentenceCollator(preprocess)(given)
    assert_same(found, SentenceTransformerDataCollator(preprocess)(given), columns)
    assert len(set(found["ids"][columns[0]].tolist())) == 4, "ids tell values apart"


def test_several_negatives_of_a_row_follow_each_other_and_rows_may_have_none(models):
    given = rows(4)
    for row, negatives in zip(given, (["a date"], None, [], ["read file", "", "numbers"]), strict=True):
        row["negative"] = negatives
    found = SentenceCollator(models["text"].preprocess)(given)
    expected = models["text"].preprocess(["a date", "read file", "numbers"])
    assert torch.equal(found["negative"]["input_ids"], expected["input_ids"])
    assert len(found["ids"]["negative"]) == 3
    for row in given:
        row["negative"] = []
    empty = SentenceCollator(models["text"].preprocess)(given)["negative"]
    assert empty["input_ids"].shape[0] == 0 == empty["attention_mask"].shape[0]


def test_a_reserved_column_is_an_error(models):
    with pytest.raises(UsageError, match='a column "ids", a name that batches need'):
        SentenceCollator(models["text"].preprocess)(rows(ids=str))


# ---- a list of prompts ----

DRAWN = ["search : ", "text from ", "a ", ""]


def drawn(collator: SentenceCollator, model, given: list[dict]) -> list[str]:
    """The prompt of every row's anchor, found by the tokens it gave."""
    found = collator(given)["anchor"]
    prompts = []
    for number, row in enumerate(given):
        own = found["input_ids"][number][found["attention_mask"][number].bool()]
        each = [model.preprocess([prompt + row["anchor"]])["input_ids"][0] for prompt in DRAWN]
        prompts.append(next(p for p, ids in zip(DRAWN, each, strict=True) if ids.tolist() == own.tolist()))
    return prompts


def test_a_row_draws_its_prompt_by_seed_epoch_and_itself_alone(models):
    model = models["text"]
    collator = SentenceCollator(model.preprocess, prompts={"anchor": DRAWN, "positive": "text "})
    given = [{"anchor": f"date {text(i, 2)}", "positive": f"{i} {text(i, 3)}"} for i in range(40)]
    first = drawn(collator, model, given)
    assert set(first) == set(DRAWN)
    split = drawn(collator, model, given[31:]) + drawn(collator, model, given[:7])
    assert split == first[31:] + first[:7], "other batches, other processes"
    collator.set_epoch(1)
    second = drawn(collator, model, given)
    assert second != first
    collator.set_epoch(0)
    assert drawn(collator, model, given) == first, "after a resume"
    other = SentenceCollator(model.preprocess, prompts={"anchor": DRAWN}, seed=1)
    assert drawn(other, model, given) != first
    batch = collator(given)
    assert batch["constants"]["anchor"] == {"modality": "text"}
    assert batch["constants"]["positive"] == {"modality": "text", "prompt_length": 2}


# ---- tokens ----


def padded(features: dict) -> dict:
    whole = unfolded(features)
    if whole is features:
        return features
    ids = whole["input_ids"]
    return {key: one.piece(slice(None), 0, ids.shape[1]) for key, one in whole.items()}


@pytest.mark.parametrize("model", ["text", "chat"])
def test_batches_that_travel_flat_are_the_same(models, model):
    model = models[model]
    given = rows(12, label=lambda i: i)
    for i, row in enumerate(given):
        row["negative"] = [text(i + j, 2) for j in range(i % 3)]
    options = {"prompts": {"anchor": "search : "}, "tokenizer": model.tokenizer}
    plain = SentenceCollator(model.preprocess, ["anchor", "positive", "negative"], **options)
    of_rows = [given[i] for i in (7, 1, 4, 11)]
    expected, found = plain(of_rows), plain.as_flat()(of_rows)
    assert found.keys() == expected.keys() and found["constants"] == expected["constants"]
    for name in ("anchor", "positive", "negative"):
        assert "flat" in found[name]
        assert {k: v.tolist() for k, v in padded(found[name]).items()} == {
            k: v.tolist() for k, v in expected[name].items()
        }


@pytest.mark.parametrize("is_flat", [False, True])
def test_texts_of_a_static_model_become_rows(is_flat):
    model, given = static_model(), rows()
    collator = SentenceCollator(model.preprocess, flat=is_flat)
    for name, features in collator(given).items():
        if name not in ("ids", "constants"):
            features, texts = padded(features), [row[name] for row in given]
            expected, mask = model.preprocess(texts), features["attention_mask"].bool()
            assert torch.equal(features["input_ids"][mask], expected["input_ids"])
            assert torch.equal(mask.sum(1).cumsum(0)[:-1], expected["offsets"][1:])


def test_rows_end_to_end_as_with_flash_attention_become_rows(models):
    ids, lengths = torch.tensor([[2, 5, 3, 2, 6, 7, 3]]), torch.tensor([0, 3, 7], dtype=torch.int32)
    flat = {"input_ids": ids, "position_ids": ids, "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    flat |= {"max_length_q": 4, "max_length_k": 4, "modality": "text"}
    found = SentenceCollator(lambda values, **more: flat, tokenizer=models["text"].tokenizer)([{"a": "x"}, {"a": "y"}])
    assert found["a"]["input_ids"].tolist() == [[2, 5, 3, 0], [2, 6, 7, 3]]
    assert found["a"]["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert found["constants"] == {"a": {"modality": "text"}}


# ---- from their datasets ----


def arguments(tmp_path, **options) -> DistTrainingArguments:
    return DistTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **options)


def test_datasets_by_name_are_collated_each_by_its_own_options(models, tmp_path):
    code = Dataset.from_list(rows(6, label=float))
    other = Dataset.from_list([{"first": row["anchor"], "second": row["positive"]} for row in rows(4)])
    sources = DatasetDict({"code": code, "other": other})
    prompts = {"code": {"anchor": "search : "}, "other": {"second": "text "}}
    args = arguments(tmp_path, prompts=prompts)
    train, evaluation, collator = prepare_sentence_data(models["text"], args, sources, sources)
    assert args.multi_dataset_batch_sampler == "proportional" and collator.columns == [
        "anchor",
        "positive",
        "negative",
    ]
    assert collator.of_source("other").columns == ["first", "second"]
    theirs = SentenceTransformerDataCollator(models["text"].preprocess, prompts=prompts)
    for name, numbers in (("code", [0, 5]), ("other", [6, 9])):
        for of_rows in (train.__getitems__(numbers), [evaluation[name][i - 6 * (name == "other")] for i in numbers]):
            found = collator(of_rows)
            assert_same(found, theirs(of_rows), [one for one in sources[name].column_names if one != "label"])
            assert found["ids"][SOURCE] == name
    with pytest.raises(UsageError, match="a batch holds rows of the sources code and other"):
        collator([train[0], train[7]])


@pytest.mark.parametrize("change, words", [
    (lambda m: (m["routed"], {}, Dataset.from_list(rows())), "router_mapping is missing: the model has a Router"),
    (lambda m: (m["text"], {"prompts": {"ancor": "a "}}, Dataset.from_list(rows())), "prompts has ancor, which is no"),
    (lambda m: (m["text"], {"prompts": {"x": {"anchor": "a "}}}, Dataset.from_list(rows())), "rows name no dataset"),
    (lambda m: (m["chat"], {"prompts": {"anchor": ["a ", "b "]}}, Dataset.from_list(rows())), "texts as a message"),
    (lambda m: (m["text"], {}, {"a": Dataset.from_list(rows()).to_iterable_dataset()}), r"\['a'\] is a stream"),
    (lambda m: (m["text"], {}, [1]), "train_dataset is or holds a list"),
    (lambda m: (m["text"], {}, Dataset.from_dict({"id": [1], "a": ["x"]})), 'has a column "id" of int64'),
    (lambda m: (m["text"], {}, {"a": Dataset.from_dict({"a": ["x"], "rating": [0.5]})}), '"rating" of float64'),
    (lambda m: (m["text"], {}, Dataset.from_dict({"a": ["x"], "label": [1], "score": [0.5]})), '"score" of float64'),
])  # fmt: skip
def test_what_does_not_fit_is_refused(models, tmp_path, change, words):
    model, options, dataset = change(models)
    with pytest.raises(UsageError, match=words):
        prepare_sentence_data(model, arguments(tmp_path, **options), dataset, None)


def test_a_list_of_prompts_is_refused_where_pooling_leaves_the_prompt_out(models, tmp_path, monkeypatch):
    monkeypatch.setattr(models["text"][1], "include_prompt", False)
    with pytest.raises(UsageError, match="pooling leaves the prompt out"):
        args = arguments(tmp_path, prompts=["a ", "b "])
        prepare_sentence_data(models["text"], args, Dataset.from_list(rows()), None)


def test_a_conversation_is_one_negative_also_beside_a_row_without(models):
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "date"}]
    given = [row | {"negative": negative} for row, negative in zip(rows(2), (talk, None), strict=True)]
    found = SentenceCollator(models["chat"].preprocess)(given)
    assert torch.equal(found["negative"]["input_ids"], models["chat"].preprocess([talk])["input_ids"])
    assert len(found["ids"]["negative"]) == 1


def test_pictures_whose_tokens_follow_from_their_size_have_no_tiles():
    options = {"image_seq_length": 280, "tokenizer": SimpleNamespace(image_token_id=7)}
    by_size = SimpleNamespace(image_processor=SimpleNamespace(max_soft_tokens=280), **options)  # as Gemma 4
    assert tiles_of_rows([[7] * 256, [7] * 280], by_size) == {}
    always = SimpleNamespace(image_processor=SimpleNamespace(), **options)
    assert tiles_of_rows([[7] * 280, [7] * 560], always) == {"num_tiles": [1, 2]}


def test_a_list_with_a_null_is_several_negatives(models):
    given = [row | {"negative": n} for row, n in zip(rows(2), (["a", None], ["b", "c"]), strict=True)]
    assert len(SentenceCollator(models["text"].preprocess)(given)["ids"]["negative"]) == 3
