"""The table of what servers need of a folder: each of its rules, against a folder that all of them serve."""

import json

import pytest
from sentence_transformers import SentenceTransformer

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.servers import SERVERS, answers
from tests.models.test_model_folder import PROMPTS, change, read_json, remove, tiny, write_json
from tests.tiny_models import tiny_tokenizer

TEI, VLLM, OLDEST, OLD, NOW = (server.name for server in SERVERS)
GELU = "torch.nn.modules.activation.GELU"


@pytest.fixture
def folder(tmp_path):
    model = tiny(projection_dim=8, matryoshka_dims=[8, 4], prompts=PROMPTS)
    model.save_pretrained(tmp_path / "model", tokenizer=tiny_tokenizer())
    change("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")(tmp_path / "model")
    return tmp_path / "model"


def refused(folder) -> dict[str, str]:
    return {answer.server.name: "; ".join(answer.reasons) for answer in answers(folder) if answer.reasons}


def rename_modules(folder):
    modules = read_json(folder / "modules.json")
    modules[-1]["type"] = "sentence_transformers.base.modules.normalize.Normalize"
    write_json(folder / "modules.json", modules)


def new_pooling_keys(folder):
    path = folder / "1_Pooling" / "config.json"
    write_json(path, {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True})


def max_pooling(folder):
    flags = {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True, "pooling_mode": "max"}
    change("1_Pooling/config.json", **flags)(folder)


def test_a_folder_as_we_write_it_is_served_by_all(folder):
    assert refused(folder) == {}
    notes = {answer.server.name: " ".join(answer.notes) for answer in answers(folder)}
    assert "--default-prompt-name" in notes[TEI] and "ignores them" in notes[VLLM] and "dimensions" in notes[VLLM]
    assert notes[NOW] == "" and all(server.source for server in SERVERS)


@pytest.mark.parametrize(
    ("change_folder", "expected", "words"),
    [
        (rename_modules, {TEI, VLLM, OLDEST, OLD}, "new name sentence_transformers.base"),
        (new_pooling_keys, {TEI, VLLM, OLDEST, OLD}, "none of the keys such as pooling_mode_mean_tokens"),
        (max_pooling, {TEI, VLLM}, "does not pool by max"),
        (change("1_Pooling/config.json", include_prompt=False), {TEI, VLLM}, "include_prompt"),
        (change("1_Pooling/config.json", embedding_dimension=32), {OLDEST, OLD}, '"embedding_dimension", at which'),
        (change("2_Dense/config.json", activation_function=GELU), {TEI}, "no torch.nn.modules.activation.GELU"),
        (change("2_Dense/config.json", use_residual=True), {TEI, VLLM, OLDEST, OLD}, "no residual connection"),
        (change("2_Dense/config.json", module_input_name="x"), {OLDEST, OLD}, '"module_input_name", at which'),
        (change("sentence_bert_config.json", query_length=3), {OLDEST, OLD}, '"query_length", at which'),
        (change("config.json", model_type="t5"), {TEI, VLLM}, 'no "t5" of its own'),
        (
            change("tokenizer_config.json", tokenizer_class="TokenizersBackend"),
            {OLDEST, OLD},
            "before 5 does not know",
        ),
        (remove("tokenizer.json"), {TEI}, "tokenizer.json is missing"),
        (remove("modules.json"), {VLLM, OLDEST, OLD, NOW}, "modules.json is missing"),
    ],
)
def test_a_rule_that_is_broken_is_a_reason(folder, change_folder, expected, words):
    change_folder(folder)
    found = refused(folder)
    assert set(found) == expected and all(words in reasons for reasons in found.values())


def test_what_a_server_is_said_to_stop_at_is_what_ours_reads(folder):
    """The folder that sentence-transformers 6 writes is no folder for the others."""
    again = folder.parent / "again"
    SentenceTransformer(str(folder), device="cpu").save(str(again))
    assert set(refused(again)) == {TEI, VLLM, OLDEST, OLD}


def test_names_are_checked_and_a_folder_must_be_one(folder, tmp_path):
    assert [answer.server.name for answer in answers(folder, (VLLM,))] == [VLLM]
    with pytest.raises(UsageError, match='--server "tei" is not known. Choose from text-embeddings-inference'):
        answers(folder, ("tei",))
    with pytest.raises(UsageError, match="not a model folder"):
        answers(tmp_path)
    assert json.loads((folder / "modules.json").read_text())
