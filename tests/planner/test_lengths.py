"""Rows of local data are as long in a plan as training cuts them."""

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

from hf_dist_ext.data.sentence_collator import SentenceCollator
from hf_dist_ext.planner import lengths, local_files
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.memory import Case
from hf_dist_ext.planner.traced import config_of, traced
from hf_dist_ext.planner.traffic import arithmetic
from tests.data import test_load
from tests.parity.memory_table import CLIP, SIGLIP
from tests.planner.test_choose import make_run  # noqa: F401, a fixture
from tests.tiny_models import WORDS, embedding_model, model_config, tiny_tokenizer

TEXT = WORDS * 4
ROWS = [{"query": " ".join(TEXT[: 1 + i % 7]), "positive": " ".join(TEXT[: 3 + i % 40])} for i in range(120)]
PROMPTS = {"query": "search file : "}


def write(path: Path, rows) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)
    else:
        test_load.write(path, rows)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that cuts at 24 tokens."""
    path = tmp_path_factory.mktemp("model")
    config = model_config("bert", max_position_embeddings=64)
    embedding_model(config, tokenizer=tiny_tokenizer(max_length=24)).save_pretrained(str(path))
    return str(path)


def columns(run):
    work = workload_of(run, config_of(run))
    return {one.name: one for one in work.columns}, work


def test_a_query_is_found_under_the_name_that_sentence_transformers_gives_it(make_run, folder, tmp_path):  # noqa: F811
    named = [{"anchor": row["query"], "positive": row["positive"]} for row in ROWS]
    found = []
    for rows in (ROWS, named):
        data = write(tmp_path / "rows.jsonl", rows)
        run = make_run(None, model_name_or_path=folder, dataset_name=data, max_length=None)
        found.append(columns(run)[0]["query"].length)
    assert found[0] == found[1] == 16


@pytest.mark.parametrize("ending", local_files.ENDINGS)
def test_rows_are_as_long_as_the_collator_makes_them(make_run, folder, tmp_path, ending):  # noqa: F811
    data = write(tmp_path / f"rows{ending}", ROWS)
    run = make_run(None, model_name_or_path=folder, dataset_name=data, max_length=None, prompts=PROMPTS)
    found, work = columns(run)
    preprocess = SentenceTransformer(folder, device="cpu").preprocess
    batch = SentenceCollator(preprocess, ["query", "positive"], PROMPTS, is_of_run=True)(ROWS)
    for name, column in found.items():
        counts = batch[name]["attention_mask"].sum(1)
        assert column.tokens == pytest.approx(counts.float().mean().item())
        assert column.length == -(-int(counts.max()) // 8) * 8
    assert found["positive"].length == 24 > found["query"].length
    assert all(name in " ".join(work.notes) for name in ("query has", "positive has", "(p95)"))


def test_a_sample_leaves_room_for_longer_rows(make_run, folder, monkeypatch):  # noqa: F811
    data = write(Path("rows.jsonl"), ROWS)
    run = make_run(None, model_name_or_path=folder, dataset_name=data, max_length=64, per_device_train_batch_size=4)
    found, work = columns(run)
    work = traced(run)
    costs = [(one.tokens / one.length, work.work(one)) for one in found.values()]
    computed = sum(share * 2 * 4 * (cost.forward + cost.backward) for share, cost in costs)
    assert max(share for share, _ in costs) < 1 and arithmetic(Case(work)) == pytest.approx(computed)
    for count in (60, 100):  # 100: every second row is read
        monkeypatch.setattr(lengths, "ROWS", count)
        sampled, _ = columns(run)
        assert sampled["positive"].length > found["positive"].length == 48


@pytest.mark.parametrize("ending", local_files.ENDINGS)
def test_a_file_says_whether_rows_of_it_were_left_out(tmp_path, ending):
    path = Path(write(tmp_path / f"rows{ending}", ROWS))
    for count, leaves_out in ((60, True), (100, True), (200, False)):
        rows, found = local_files.rows_of(path, count)
        assert found == leaves_out and bool(rows) and (len(rows) < len(ROWS)) == leaves_out


@pytest.mark.parametrize(("name", "content"), [
    ("rows.csv", "query,positive\na," + "b " * 80_000 + "\n"),
    ("rows.json", '["a", "b"]'),
    ("rows.jsonl", '"a"\n"b"\n'),
])  # fmt: skip
def test_rows_that_can_not_be_read_are_left_to_training_to_explain(make_run, folder, tmp_path, name, content):  # noqa: F811
    (tmp_path / name).write_text(content)
    data = str(tmp_path / name)
    run = make_run(None, model_name_or_path=folder, dataset_name=data, max_length=None)
    found, _ = columns(run)
    assert {one.length for one in found.values()} == {24} and {one.tokens for one in found.values()} == {None}


def test_negatives_of_the_data_are_counted_though_no_field_names_them(make_run, folder, tmp_path):  # noqa: F811
    rows = [row | {"negative": [row["positive"], row["query"]]} for row in ROWS]
    data = write(tmp_path / "rows.jsonl", rows)
    found, _ = columns(make_run(None, model_name_or_path=folder, dataset_name=data, per_device_train_batch_size=4))
    assert [(name, one.rows) for name, one in found.items()] == [("query", 4), ("positive", 4), ("negative", 8)]


def test_data_that_is_not_here_is_counted_at_the_limit_of_the_models_folder(make_run, folder):  # noqa: F811
    found, work = columns(make_run(None, model_name_or_path=folder, dataset_name="some/data", max_length=None))
    assert {one.length for one in found.values()} == {24} and {one.tokens for one in found.values()} == {None}
    assert not any("max_length" in note for note in work.notes)


def test_texts_of_siglip_are_counted_at_all_its_positions(make_run, tmp_path):  # noqa: F811
    tiny_tokenizer().save_pretrained(tmp_path)
    rows = write(tmp_path / "rows.jsonl", [{"query": "sort", "positive": "sort.png"}] * 9)
    more = {"image_columns": ["positive"], "tokenizer_name": str(tmp_path), "max_length": None}
    found, work = columns(make_run(SIGLIP, dataset_name=rows, **more))
    assert found["query"].length == SIGLIP["text_config"]["max_position_embeddings"]
    assert not any("tokens" in note for note in work.notes)
    assert columns(make_run(CLIP, dataset_name=rows, **more))[0]["query"].length == 8


def test_columns_without_a_length_are_counted_at_the_folders(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128, "query_length": 32}')
    fields = SimpleNamespace(max_length={"negative": 7}, model_name_or_path=str(folder), model_revision=None)
    found = {name: lengths.limit_of(fields, name, name == "query") for name in ("query", "positive", "negative")}
    assert found == {"query": 32, "positive": 128, "negative": 7}
