"""Texts that are tokenized once: the batches are those of tokenizing at every reading, bit for bit."""

import os
import time
from collections import Counter
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pytest
import torch

from hf_dist_ext.data import kept_files, sentence_collator, tokenized
from hf_dist_ext.data.mixture import SOURCE, Mixture
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.data.tokenized import TokenizedRows, tokenized_once
from hf_dist_ext.data.tokens import TokenizedText, threads_of_tokenizer
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.failures import activity
from hf_dist_ext.training.arguments import DistTrainingArguments
from hf_dist_ext.training.trainer import DistTrainer
from tests.distributed.forked import Run
from tests.tiny_models import WORDS, tiny_tokenizer
from tests.training.test_trainer import Tiny

ROWS = 40
TWICE = SimpleNamespace(num_train_epochs=2.0, max_steps=-1, gradient_accumulation_steps=1)
PROMPTS = {"query": "search : ", "positive": "text from ", "negative": "text from "}


def text(start: int, words: int) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(words))


def rows(count: int = ROWS) -> datasets.Dataset:
    """Longer than the limit too; some rows have an empty or blank negative among others, some none."""
    negatives = [[text(i + j, 1 + j) if j != 1 else ("", " \n")[i % 2] for j in range(i % 4)] for i in range(count)]
    query = [text(i, 1 + i % 9) for i in range(count)]
    positive = [text(i, 1 + i % 30) for i in range(count)]
    return datasets.Dataset.from_dict({"query": query, "positive": positive, "negative": negatives, "id": query})


def collator_of(tokenizer=None, kind=ContrastiveCollator, **more) -> ContrastiveCollator:
    options = {"prompts": PROMPTS, "max_length": {"query": 8, "positive": 16}, "id_column": "id"} | more
    return kind(tokenizer or tiny_tokenizer(), ["query", "positive", "negative"], **options)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "hf_dist_ext"


def with_types() -> object:
    tokenizer = tiny_tokenizer("left")
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def by_tokenizer(collator: ContrastiveCollator, column: str, texts: list[str]) -> dict:
    """What the tokenizer itself pads."""
    return dict(
        collator.tokenizer(
            [PROMPTS[column] + text for text in texts],
            padding=True,
            truncation=True,
            return_tensors="pt",
            max_length=collator.max_length.get(column) or collator.tokenizer.model_max_length,
        )  # fmt: skip
    )


def assert_same(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        else:
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("collator", [
    collator_of(), collator_of(with_types()),
], ids=["right", "left"])  # fmt: skip
def test_batches_are_those_of_the_tokenizer_bit_for_bit(collator):
    data = rows().select(range(ROWS - 1, -1, -1))
    kept = tokenized_once(data, collator, TWICE, 8)
    assert isinstance(kept, TokenizedRows) and len(kept) == ROWS and kept.column_names == data.column_names
    for numbers in ([3, 1, 39, 20], [0], list(range(ROWS))):
        plain, carried = data.__getitems__(numbers), kept.__getitems__(numbers)
        texts = [row["query"] for row in carried] + [text for row in carried for text in row["negative"]]
        assert all(isinstance(text, TokenizedText) for text in texts)
        assert_same(collator(carried), collator(plain))
        texts = {"query": [row["query"] for row in plain], "positive": [row["positive"] for row in plain]}
        texts["negative"] = [text for row in plain for text in row["negative"] if text.strip()]
        for column, of_column in texts.items():
            assert_same(collator(carried)[column], by_tokenizer(collator, column, of_column or [""]))
    assert kept[3] == data[3] | {"negative": [text for text in data[3]["negative"] if text.strip()]}


def test_a_text_that_is_changed_forgets_its_tokens():
    collator = collator_of()
    carried = tokenized_once(rows(), collator, TWICE, 8)[5]
    carried["query"] = carried["query"].upper()
    assert collator([carried])["query"]["input_ids"][0].tolist()[-2] == collator.tokenizer.unk_token_id


def counting(monkeypatch) -> Counter:
    """How often each text is tokenized from here on, but for those that tell what a tokenizer gives."""
    asked, read = Counter(), sentence_collator._TokenizerReader.__call__

    def counted(self, texts, **options):
        asked.update(text for text in texts if text not in ("", "a text", "another text than that"))
        return read(self, texts, **options)

    monkeypatch.setattr(sentence_collator._TokenizerReader, "__call__", counted)
    return asked


def test_each_text_is_tokenized_once_and_never_again_by_a_later_run(monkeypatch):
    asked = counting(monkeypatch)
    expected = Counter(rows()["query"]) + Counter(rows()["positive"])
    expected += Counter(text for of_row in rows()["negative"] for text in of_row if text.strip())
    for _ in range(2):
        collator = collator_of()
        kept = tokenized_once(rows(), collator, TWICE, 8)
        for _ in range(3):
            collator(kept.__getitems__(list(range(ROWS))))
    assert asked == expected and len(asked) > 20


def test_other_rows_prompts_lengths_or_tokenizers_have_a_file_of_their_own(folder):
    other, cased = tiny_tokenizer(max_length=12), tiny_tokenizer()
    cased.add_tokens(["lines of"])
    changed = [
        (rows(), collator_of(prompts=PROMPTS | {"query": ""})),
        (rows(), collator_of(max_length={"query": 7, "positive": 16})),
        (rows(), collator_of(other)), (rows(), collator_of(cased)), (rows(ROWS - 1), collator_of()),
    ]  # fmt: skip
    collator = collator_of()
    for _ in range(2):  # the tokenizer keeps the options of its last call
        tokenized_once(rows(), collator, TWICE, 8)
        collator.tokenizer(["a date"], padding="max_length", max_length=20, truncation=True)
    assert len([*folder.glob("*.arrow")]) == 1
    for number, (data, collator) in enumerate(changed):
        tokenized_once(data, collator, TWICE, 8)
        assert len([*folder.glob("*.arrow")]) == number + 2


def test_what_is_read_once_or_may_change_is_tokenized_as_it_is_read(folder, monkeypatch):
    once = SimpleNamespace(num_train_epochs=3.0, max_steps=ROWS // 8, gradient_accumulation_steps=1)
    data, collator = rows(), collator_of()
    assert tokenized_once(data, collator, once, 8) is data
    stream, transformed = data.to_iterable_dataset(), data.with_transform(lambda row: row)
    assert tokenized_once(stream, collator, TWICE, 8) is stream
    assert tokenized_once(transformed, collator, TWICE, 8) is transformed
    assert tokenized_once(data, lambda rows: rows, TWICE, 8) is data

    class OfTheUser(type(collator.tokenizer)):
        pass

    own = tiny_tokenizer()
    own.__class__ = OfTheUser
    assert tokenized_once(data, collator_of(own), TWICE, 8) is data
    from tokenizers import Tokenizer, models

    drops = tiny_tokenizer()
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4}
    drops._tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]", dropout=0.1))
    assert tokenized_once(data, collator_of(drops), TWICE, 8) is data
    monkeypatch.setattr(datasets, "is_caching_enabled", lambda: False)
    assert tokenized_once(data, collator, TWICE, 8) is data
    assert not folder.exists()


def test_each_source_of_a_mixture_has_the_tokens_of_its_own_collator():
    collator = collator_of().with_sources({"one": collator_of(), "other": collator_of(with_types(), prompts={})})
    sources = {"one": rows(), "other": rows(20)}
    plain = Mixture(sources, [0.5, 0.5])
    kept = tokenized_once(plain, collator, TWICE, 8)
    assert len(kept) == ROWS + 20 and kept.shares == plain.shares
    for numbers in ([4, 2], [ROWS + 4, ROWS + 19]):
        found, expected = collator(kept.__getitems__(numbers)), collator(plain.__getitems__(numbers))
        assert found["ids"].pop(SOURCE) == expected["ids"].pop(SOURCE)
        assert_same(found, expected)


def test_columns_that_a_format_leaves_out_are_left_out():
    data = rows().with_format(columns=["query", "id"])
    kept = tokenized_once(data, collator_of(), TWICE, 8)
    row = kept.__getitems__([3])[0]
    assert list(row) == list(data[3]) and isinstance(row["query"], TokenizedText)


def test_a_thousand_rows_without_a_negative_are_rows_like_others():
    """`datasets` hands on a thousand rows at a time, and tokenizers refuse a list without a text."""
    column = ["sort"] * 1001
    data = datasets.Dataset.from_dict({"query": column, "positive": column, "negative": [[]] * 1000 + [["search"]]})
    collator = collator_of(id_column=None)
    kept = tokenized_once(data, collator, TWICE, 8)
    assert isinstance(kept, TokenizedRows)
    for numbers in ([0, 999, 1000], [0, 1]):
        assert_same(collator(kept.__getitems__(numbers)), collator(data.__getitems__(numbers)))


def test_a_training_over_two_epochs_tokenizes_once_and_learns_the_same(tmp_path, monkeypatch):
    asked, trained = counting(monkeypatch), {}
    for name in ("once", "as read"):
        if name == "as read":
            monkeypatch.setattr(tokenized, "tokenized_once", lambda dataset, *others: dataset)
        torch.manual_seed(0)
        asked.clear()
        one = DistTrainer(
            Tiny(), DistTrainingArguments(
                str(tmp_path / name), num_train_epochs=2, per_device_train_batch_size=8, gradient_cache_chunk_size=3,
                save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            ), data_collator=collator_of(), train_dataset=rows(), loss=InfoNCELoss(),
        )  # fmt: skip
        before = one.model.tokens.weight.detach().clone()
        one.train()
        trained[name] = one.model.tokens.weight.detach(), asked.total()
        assert not torch.equal(before, one.model.tokens.weight)
    assert torch.equal(trained["once"][0], trained["as read"][0])
    assert trained["as read"][1] == 2 * trained["once"][1] > 0


@pytest.mark.parametrize("share", [0, 0.5, 0.99, "rows"])
def test_a_torn_file_is_made_again(folder, share):
    data, collator = rows(), collator_of()
    expected = collator(tokenized_once(data, collator, TWICE, 8).__getitems__([1, ROWS - 1]))
    (path,) = folder.glob("tokens_*.arrow")
    whole = path.read_bytes()
    path.unlink()  # not in place: it is mapped
    if share == "rows":
        table = pa.ipc.open_stream(whole).read_all().slice(0, ROWS - 1)
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_bytes(whole[: int(len(whole) * share)])
    assert_same(collator(tokenized_once(data, collator, TWICE, 8).__getitems__([1, ROWS - 1])), expected)
    assert len(path.read_bytes()) == len(whole) and not [*folder.glob("*.unfinished*")]


def test_a_file_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("sync") or sync(handle))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("name") or replace(*names))
    tokenized_once(rows(), collator_of(), TWICE, 8)
    assert done == ["sync", "name"]


def test_two_processes_tokenize_once(tmp_path, monkeypatch):
    made, data, waits = tokenized._tokens_of, rows(), tmp_path / "the other one waits"

    def counted(*arguments, **options):
        with open(tmp_path / "made", "a") as file:
            file.write(f"{os.getpid()}\n")
        deadline = time.monotonic() + 60
        while not waits.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return made(*arguments, **options)

    monkeypatch.setattr(tokenized, "_tokens_of", counted)
    monkeypatch.setattr(kept_files, "activity", SimpleNamespace(touch=lambda: (activity.touch(), waits.touch())))
    monkeypatch.setattr(kept_files, "SECONDS_BETWEEN_SIGNS", 0.1)

    def target(say) -> str:
        collator, before = collator_of(), activity.since
        batch = collator(tokenized_once(data, collator, TWICE, 8).__getitems__([5, 6, 7]))
        assert_same(batch, collator(data.__getitems__([5, 6, 7])))
        assert activity.since > before  # also that of who waits: a watchdog leaves it in peace
        return str(int(batch["positive"]["input_ids"].sum()))

    assert int(Run("ddp", tmp_path / "run", target).result()) > 0
    assert len((tmp_path / "made").read_text().splitlines()) == 1


def test_a_folder_that_can_not_be_written_is_said_and_one_that_can_only_be_read_is_used(folder, monkeypatch):
    said = []
    monkeypatch.setattr(tokenized.logger, "warning", said.append)
    folder.parent.mkdir()
    folder.write_text("a file, where the folder should be")
    data, collator = rows(), collator_of()
    assert tokenized_once(data, collator, TWICE, 8) is data
    assert "can not be kept in" in said[0] and "HF_DATASETS_CACHE" in said[0]
    folder.unlink()
    tokenized_once(data, collator, TWICE, 8)
    monkeypatch.setattr(kept_files, "FileLock", lambda path: pytest.fail("asked to write"))
    assert isinstance(tokenized_once(data, collator, TWICE, 8), TokenizedRows) and len(said) == 1


def test_threads_run_where_nobody_else_tokenizes_and_the_user_has_not_decided(monkeypatch):
    inside = []

    def look() -> str:
        with threads_of_tokenizer():
            inside.append(os.environ["TOKENIZERS_PARALLELISM"])
        return os.environ["TOKENIZERS_PARALLELISM"]

    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    collator_of()
    assert look() == "off" and inside == ["true"]
    pid = os.fork()
    if not pid:
        os._exit(0 if look() == "off" and inside[-1] == "off" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    collator_of()
    assert look() == "false" and inside[-1] == "false"
