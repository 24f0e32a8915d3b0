"""Models cut into stages, in one process: stage after stage is the whole model."""

import pytest
import torch
from peft import LoraConfig
from sentence_transformers import SentenceTransformer

from hf_dist_ext.errors import UsageError
from hf_dist_ext.strategies.pipeline import stages
from tests.tiny_models import TEXT_CONFIGS, embed, embedding_model, loaded

LAYERS = 5
# Of float64: weights that lie elsewhere in memory may be multiplied in another order.
ROUNDING = {"rtol": 0.0, "atol": 1e-14}


def build(name: str, **options) -> SentenceTransformer:
    torch.manual_seed(0)
    config = TEXT_CONFIGS.get(name, TEXT_CONFIGS["llama"]) | {"model_type": name, "num_hidden_layers": LAYERS}
    options = {"pooling": "last" if name in stages.DECODERS else "mean", "projection_dim": 16} | options
    return embedding_model(config, **options).double().eval()


def rows() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 32, (5, 11), generator=generator)
    mask = (torch.arange(11)[None] < torch.tensor([11, 3, 7, 1, 9])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def through(cuts: list[stages.StagedModel], features: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = None
    for stage in range(cuts[0].num_stages):
        cut = next(cut for cut in cuts if stage in cut.own)
        hidden = cut.run(stage, features, hidden)
    return hidden


@pytest.mark.parametrize("name", sorted(stages.DECODERS | stages.ENCODERS.keys()))
@pytest.mark.parametrize("owned", [[[0], [1], [2]], [[0, 2], [1]]])
def test_stage_after_stage_is_the_whole_model(name, owned):
    firsts = stages.firsts_of(build(name), 3, None)
    assert firsts == [0, 1, 3]
    with torch.no_grad():
        whole = embed(build(name), **rows())
        found = through([stages.StagedModel(build(name), own, firsts) for own in owned], rows())
    assert whole.norm() > 0 and torch.allclose(found, whole, **ROUNDING)


def test_a_rank_keeps_no_memory_of_other_stages():
    whole = build("qwen3")
    sizes = dict.fromkeys((name for name, _ in whole.named_parameters()), 0)
    for own in ([0], [1]):
        model = build("qwen3")
        cut = stages.StagedModel(model, own, [0, 2])
        for name, parameter in model.named_parameters():
            assert parameter.device.type == "cpu"
            sizes[name] += parameter.numel()
        with cut.whole():
            assert {name: p.shape for name, p in model.named_parameters()} == {
                name: p.shape for name, p in whole.named_parameters()
            }
    assert sizes == {name: p.numel() for name, p in whole.named_parameters()}


@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3"])
def test_weights_are_read_stage_by_stage(name, tmp_path, monkeypatch):
    whole = build(name)
    whole.save_pretrained(str(tmp_path))
    never_had_memory, to = [], torch.nn.Module.to

    def watched(self, *where, **options):
        if where == ("meta",):  # a part of another stage
            never_had_memory.append(all(parameter.is_meta for parameter in self.parameters()))
        return to(self, *where, **options)

    monkeypatch.setattr(torch.nn.Module, "to", watched)
    cuts = []
    for own in ([0], [1]):
        never_had_memory.clear()
        model = loaded(tmp_path, in_stages=lambda kind, own=own: stages.staged(kind, own, 2, None))
        read = sum(p.numel() for p in model[0].parameters() if p.device.type != "meta")
        assert never_had_memory and all(never_had_memory)
        cuts.append(stages.StagedModel(model, own, stages.firsts_of(model, 2, None)))
        assert read == sum(p.numel() for p in model[0].parameters())
    assert type(cuts[0].base.transformers_model) is type(whole.transformers_model)
    with torch.no_grad():
        assert torch.allclose(through(cuts, rows()), embed(whole, **rows()), **ROUNDING)


def test_adapters_lie_where_their_layers_are():
    model = build("llama").requires_grad_(False)
    model.transformers_model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    torch.nn.init.normal_(model.transformers_model.layers[4].self_attn.q_proj.lora_B["default"].weight)
    with torch.no_grad():
        whole = embed(model, **rows())
        cut = stages.StagedModel(model, [0, 1], [0, 2])
        assert torch.allclose(through([cut], rows()), whole, **ROUNDING)
    assert [len(cut.parameters(stage)) for stage in (0, 1)] == [4, 6]  # two matrices per layer
    assert stages.StagedModel(model, [1], [0, 2]).parameters(1) and len(list(model.named_parameters())) < 60


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_stages": 6}, "5 layers do not make 6 stages"),
        ({"split": [1, 2]}, "2 numbers; 2 stages need 1"),
        ({"split": [5]}, r"5 layers cut at \[5\]"),
        ({"split": [0]}, r"5 layers cut at \[0\]"),
    ],
)
def test_a_split_leaves_no_stage_empty(options, words):
    with pytest.raises(UsageError, match=words):
        stages.first_layers(LAYERS, **({"num_stages": 2} | options))
    assert stages.first_layers(LAYERS, 2, [4]) == [0, 4]


@pytest.mark.parametrize("name", ["distilbert", "mpnet", "deberta-v2"])
def test_other_models_are_refused_by_name(name):
    with pytest.raises(UsageError, match=f'can not be made of "{name}"'):
        stages.StagedModel(build(name), [0], [0, 2])
