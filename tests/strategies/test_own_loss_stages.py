"""Causal language models cut into stages, in one process."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import causal_lm
from hf_dist_ext.strategies import choose
from hf_dist_ext.strategies.pipeline import own_loss_stages, stages
from hf_dist_ext.strategies.pipeline.own_loss import cut_rows
from hf_dist_ext.strategies.pipeline.own_loss_stages import StagedModelWithLoss
from hf_dist_ext.strategies.pipeline.passes import first_row
from tests.parity.causal_worker import TIED, Case, build, collate

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def make(name: str = "llama", is_tied: bool = True):
    return build(Case("", name, config=TIED if is_tied else {}))


PLACES = [0, 1, 2]


def cut_of(model, own: list[int]) -> StagedModelWithLoss:
    return StagedModelWithLoss(model, own, stages.firsts_of(model, PLACES, None, StagedModelWithLoss))


def score(model, features):
    outputs = model(**features, num_items_in_batch=7)
    return outputs.loss, outputs.logits


@pytest.mark.parametrize("name", sorted(stages.DECODERS))
@pytest.mark.parametrize("owned", [[[0], [1], [2]], [[0, 2], [1]]])
def test_stage_after_stage_gives_the_loss_and_logits_of_the_whole_model(name, owned):
    batch = collate(list(range(5)), pads_left=False)
    with torch.no_grad():
        expected = score(make(name), batch)
        cuts = {stage: cut for own in owned for cut in [cut_of(make(name), own)] for stage in own}
        hidden = cuts[1].run(1, batch, cuts[0].run(0, batch, None))
        found = cuts[2].score(batch, hidden, score, nullcontext)
    assert expected[0] > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_other_models_are_refused_and_those_that_can_be_named(kind):
    config = AutoConfig.for_model(kind, vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(UsageError, match=f'made of "{kind}".*exact for llama, mistral, qwen2, qwen3. Use'):
        StagedModelWithLoss.base_of(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("own", [[0], [1], [2], [0, 2]])
def test_names_are_those_of_the_whole_model(own, is_tied):
    whole, model = make(is_tied=is_tied), make(is_tied=is_tied)
    cut = cut_of(model, own)
    names = [name for name, _ in model.named_parameters()]
    assert (EMBEDDINGS in names) is (0 in own or (is_tied and 2 in own))
    assert (HEAD in names) is (not is_tied and 2 in own)
    assert set(names) <= {name for name, _ in whole.named_parameters()}
    is_copied = is_tied and own in ([0], [2])
    assert [len(cut.copied), len(cut.copies)] == [is_copied, is_tied and own == [2]]
    if is_copied:
        assert cut.copied[0] is model.get_parameter(EMBEDDINGS) is model.get_parameter(HEAD)
    with cut.whole():
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_read_stage_by_stage(is_tied, tmp_path, monkeypatch):
    whole = make(is_tied=is_tied).float()
    whole.save_pretrained(tmp_path)
    read = 0
    for own in ([0], [1], [2]):
        staged = partial(own_loss_stages.staged, own=own, places=PLACES, split=None)
        monkeypatch.setattr(choose, "in_stages", lambda args, has_own_loss, staged=staged: staged)
        model = causal_lm.load_causal_lm(tmp_path, None)
        assert type(model) is type(whole)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is is_tied
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
        before = {name for name, p in model.named_parameters() if p.device.type != "meta"}
        cut_of(model, own)
        here = dict(model.named_parameters())
        assert here.keys() == before and all(torch.equal(p, whole.get_parameter(n)) for n, p in here.items())
        read += sum(p.numel() for p in here.values())
    copy = whole.lm_head.weight.numel() if is_tied else 0
    assert read == sum(p.numel() for p in whole.parameters()) + copy


def test_the_head_is_counted_where_layers_are_dealt():
    model = make()
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    assert StagedModelWithLoss.head_in_layers(model.config) == pytest.approx(model.lm_head.weight.numel() / layer)
    model.config.vocab_size *= 12  # as much as three layers
    assert stages.firsts_of(model, PLACES, None, StagedModelWithLoss) == [0, 2, 5]


def test_without_a_pipeline_a_model_is_read_whole(tmp_path):
    whole = make().float()
    whole.save_pretrained(tmp_path)
    found = causal_lm.load_causal_lm(tmp_path, None, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in whole.state_dict().items())


def test_a_model_without_weights_of_a_stage_is_refused(tmp_path, monkeypatch):
    AutoModelForCausalLM.from_config(make(is_tied=False).config).model.save_pretrained(tmp_path)
    staged = partial(own_loss_stages.staged, own=[2], places=PLACES, split=None)
    monkeypatch.setattr(choose, "in_stages", lambda args, has_own_loss: staged)
    with pytest.raises(UsageError, match="lacks 1 weights.*lm_head"):
        causal_lm.load_causal_lm(tmp_path, None)


def test_a_batch_is_cut_into_rows():
    batch = collate(list(range(5)), pads_left=False) | {"scale": torch.tensor(2.0), "name": "all"}
    chunks = cut_rows(batch, 2)
    sizes = [(chunk.start, chunk.stop, chunk.width, chunk.num_tokens) for chunk in chunks]
    assert sizes == [(0, 2, 14, 28), (2, 4, 14, 28), (4, 5, 14, 14)]
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(torch.cat([chunk.features[name] for chunk in chunks]), batch[name])
    assert all(chunk.features["scale"] == 2 and chunk.features["name"] == "all" for chunk in chunks)


def test_an_idle_chunk_takes_numbers_of_a_batch_as_they_are():
    chunk = cut_rows({"input_ids": torch.arange(12).view(3, 4), "factor": torch.tensor(2.0)}, 2)[1]
    features = first_row(chunk).features
    assert features["input_ids"].tolist() == [[8, 9, 10, 11]] and features["factor"] == 2
