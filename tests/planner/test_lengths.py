"""Rows are as long in a plan as training may cut them; the data is not opened."""

from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.traced import config_of
from tests.parity.memory_table import SIGLIP
from tests.planner.test_choose import make_run  # noqa: F401, a fixture
from tests.tiny_models import embedding_model, model_config, tiny_tokenizer


def lengths(run):
    work = workload_of(run, config_of(run))
    return {one.name: one.length for one in work.columns}, " ".join(work.notes)


def test_rows_without_a_length_are_counted_at_the_limits_of_the_models_folder(make_run, tmp_path):  # noqa: F811
    config = model_config("bert", max_position_embeddings=64)
    embedding_model(config, tokenizer=tiny_tokenizer(max_length=24)).save_pretrained(str(tmp_path / "model"))
    fields = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": "some/data"}
    found, said = lengths(make_run(None, max_length=None, **fields))
    assert found == {"query": 24, "positive": 24} and "max_length" not in said and "columns is not given" in said
    (tmp_path / "model" / "sentence_bert_config.json").write_text('{"max_seq_length": 48, "query_length": 32}')
    columns = {name: name for name in ("query", "positive", "negative")}
    found, said = lengths(make_run(None, max_length={"negative": 16}, columns=columns, **fields))
    assert found == {"query": 32, "positive": 48, "negative": 16} and "columns" not in said


def test_texts_of_siglip_are_counted_at_all_its_positions(make_run):  # noqa: F811
    found, said = lengths(make_run(SIGLIP, image_columns=["positive"], max_length=None))
    assert found["query"] == SIGLIP["text_config"]["max_position_embeddings"] and "tokens" not in said
