import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import parse_config
from hf_dist_ext.models.embedding_model import (
    EmbeddingModel,
    pool_tokens,
)
from hf_dist_ext.models.weights import check_weights, load_weights
from tests.tiny_models import CHECKPOINTING, EXPERTS_CONFIG, TEXT_CONFIGS, model_config

DECODERS = ("qwen3", "llama")


def unused_parameters(model: torch.nn.Module, **features) -> list[str]:
    """Names of trainable parameters without a gradient from the embeddings of `features`; one forward and backward.

    Such a parameter makes DDP fail unless it searches the graph each step (`find_unused_parameters`).
    """
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True)
    output = model(**features)
    embeddings = output if isinstance(output, torch.Tensor) else output.embeddings
    gradients = torch.autograd.grad(embeddings.sum(), parameters, allow_unused=True)
    return [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]


def tiny(model_type="bert", seed=0, **options):
    torch.manual_seed(seed)
    if model_type in DECODERS:
        options.setdefault("pooling", "last")
    return EmbeddingModel.from_config(model_config(model_type), **options).eval()


def features(rows=3, tokens=7, padding_side="right", seed=1):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    for row in range(1, rows):
        padding = slice(tokens - 2 * row, tokens) if padding_side == "right" else slice(0, 2 * row)
        mask[row, padding] = 0
    input_ids = torch.randint(4, 32, (rows, tokens), generator=generator) * mask
    return {"input_ids": input_ids, "attention_mask": mask}


# ---- pooling ----


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_equals_a_loop_over_the_real_tokens_of_each_row(pooling, padding_side):
    tokens = torch.randn(3, 7, 5, dtype=torch.float64)
    mask = features(padding_side=padding_side)["attention_mask"]
    assert 0 < mask.sum() < mask.numel()

    for row, pooled in enumerate(pool_tokens(tokens, mask, pooling)):
        real = [tokens[row, position] for position in range(7) if mask[row, position]]
        expected = {"mean": sum(real) / len(real), "cls": real[0], "last": real[-1]}[pooling]
        torch.testing.assert_close(pooled, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_row_without_real_tokens_gives_zeros_and_finite_gradients(pooling):
    tokens = torch.randn(2, 4, 5, requires_grad=True)
    pooled = pool_tokens(tokens, torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]), pooling)
    torch.nn.functional.normalize(pooled, dim=-1).sum().backward()

    assert pooled[0].abs().sum() > 0 and torch.equal(pooled[1], torch.zeros(5))
    assert tokens.grad[0].abs().sum() > 0 and tokens.grad.isfinite().all() and not tokens.grad[1].any()


def test_values_at_padding_never_reach_the_embedding():
    tokens, mask = torch.randn(1, 3, 4), torch.tensor([[1, 1, 0]])
    poisoned = tokens.clone()
    poisoned[0, 2] = torch.nan
    for pooling in ("mean", "cls", "last"):
        assert torch.equal(pool_tokens(tokens, mask, pooling), pool_tokens(poisoned, mask, pooling))


def test_the_mean_of_half_precision_tokens_is_summed_in_float32():
    tokens = torch.randn(1, 1000, 4).to(torch.bfloat16)
    pooled = pool_tokens(tokens, None, "mean")
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, tokens.double().mean(dim=1).float(), rtol=1e-5, atol=1e-6)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(UsageError, match=r"\(2, 3\) must be .* \(2, 4\)"):
        pool_tokens(torch.zeros(2, 4, 5), torch.ones(2, 3), "mean")


# ---- forward ----


def test_embeddings_are_pooled_projected_and_normalized():
    model = tiny(projection_dim=5, projection_bias=True).double()
    batch = features()
    tokens = model.backbone(**batch).last_hidden_state
    mask = batch["attention_mask"].double().unsqueeze(-1)
    projected = (tokens * mask).sum(1) / mask.sum(1) @ model.projection.weight.T + model.projection.bias
    expected = projected / projected.square().sum(-1, keepdim=True).sqrt()

    embeddings = model(**batch).embeddings
    assert embeddings.shape == (3, 5) and model.embedding_dim == 5
    torch.testing.assert_close(embeddings, expected, rtol=1e-12, atol=1e-14)

    model.normalize = False
    torch.testing.assert_close(model(**batch).embeddings, projected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("model_type", TEXT_CONFIGS)
def test_every_parameter_of_every_backbone_gets_a_gradient(model_type):
    model = tiny(model_type, projection_dim=8).train()
    batch = features()
    assert unused_parameters(model, **batch, token_type_ids=torch.zeros_like(batch["input_ids"]), labels=None) == []
    assert {key.split(".")[0] for key in model.state_dict()} == {"backbone", "projection"}
    assert not any("pooler" in key for key in model.state_dict())


@pytest.mark.parametrize("config, words", [
    ({"model_type": "bert", "num_hidden_layers": 0}, "model_config: num_hidden_layers=0 must be at least 1"),
    ({"model_type": "t5", "num_layers": -1}, "model_config: num_layers=-1 must"),  # T5's name of it
    ({"model_type": "clip", "text_config": {"hidden_size": 0}}, "model_config: text_config: hidden_size=0 must"),
])  # fmt: skip
def test_a_configuration_of_nothing_is_refused(config, words):
    with pytest.raises(UsageError, match=words):
        parse_config(config)


def test_unused_parameters_are_found():
    model = tiny()
    model.extra = torch.nn.Linear(2, 2)
    assert unused_parameters(model, **features()) == ["extra.weight", "extra.bias"]


def test_a_pooler_that_cannot_be_left_out_is_replaced():
    config = dict(model_config("bert"), model_type="layoutlm")
    model = EmbeddingModel.from_config(config)
    batch = features()
    assert model(**batch).embeddings.abs().sum() > 0
    assert not any("pooler" in key for key in model.state_dict())


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_pooler_in_the_files_is_left_out_without_a_report(tmp_path, model_type, caplog):
    torch.manual_seed(0)
    whole = AutoModel.from_config(AutoConfig.for_model(**model_config(model_type)))
    whole.save_pretrained(tmp_path)
    assert any("pooler" in key for key in load_file(tmp_path / "model.safetensors"))
    caplog.clear()
    model = EmbeddingModel.from_pretrained(tmp_path)
    assert not any("pooler" in key for key in model.state_dict()) and not caplog.text
    # what else is not taken is still said
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"stray.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    EmbeddingModel.from_pretrained(tmp_path)
    assert "stray.weight" in caplog.text and "pooler.dense" not in caplog.text


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_decoder_keeps_no_cache_and_ignores_padding_on_the_right(model_type):
    model = tiny(model_type)
    model.config.use_cache = True
    outputs = []
    model.backbone.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    batch = features()
    embeddings = model(**batch).embeddings

    assert outputs[0].past_key_values is None
    alone = model(input_ids=batch["input_ids"][1:2, :5]).embeddings
    torch.testing.assert_close(embeddings[1:2], alone, rtol=1e-5, atol=1e-6)


def test_left_and_right_padding_agree_for_a_decoder():
    model = tiny("qwen3")
    right, left = features(), features(padding_side="left")
    for row in range(3):
        real = left["attention_mask"][row].bool()
        left["input_ids"][row, real] = right["input_ids"][row, right["attention_mask"][row].bool()]
    torch.testing.assert_close(model(**right).embeddings, model(**left).embeddings, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16_gives_float32_embeddings_of_length_one(how):
    model = tiny(projection_dim=8, dtype="bfloat16" if how == "weights" else None)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        embeddings = model(**features()).embeddings
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(3), rtol=1e-6, atol=1e-6)


def test_a_backbone_without_hidden_states_is_named():
    model = tiny()
    model.backbone.forward = lambda **inputs: {}
    with pytest.raises(UsageError, match="BertModel returns no last_hidden_state"):
        model(**features())


# ---- as Trainer, PEFT and accelerate use it ----


def test_activation_checkpointing_leaves_the_gradients_as_they_are():
    gradients = []
    for is_checkpointing in (False, True):
        model = tiny(projection_dim=8).train()
        enable, disable = (getattr(model, f"{CHECKPOINTING}_{word}") for word in ("enable", "disable"))
        if is_checkpointing:
            enable(**{f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}})
        assert getattr(model, f"is_{CHECKPOINTING}") is is_checkpointing
        torch.manual_seed(3)  # dropout
        model(**features()).embeddings[:, 0].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert gradients[0][0].abs().sum() > 0
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))
    disable()
    assert not getattr(model, f"is_{CHECKPOINTING}")


@pytest.mark.parametrize("task_type", [None, TaskType.FEATURE_EXTRACTION])
def test_lora_trains_and_merges_into_a_folder_with_the_same_embeddings(task_type, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(
        tiny(), LoraConfig(r=2, init_lora_weights=False, task_type=task_type)
    )  # its defaults for bert
    model.enable_input_require_grads()
    batch = features()
    model(**batch).embeddings[:, 0].sum().backward()
    with_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert with_gradient and all("lora_" in name for name in with_gradient)

    with pytest.raises(UsageError, match="merge_and_unload"):
        model.get_base_model().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model.eval()(**batch).embeddings
    model.merge_and_unload().save_pretrained(tmp_path)
    reloaded = EmbeddingModel.from_pretrained(tmp_path)
    assert not torch.allclose(reloaded(**batch).embeddings, tiny()(**batch).embeddings)
    torch.testing.assert_close(reloaded(**batch).embeddings, expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_added_by_transformers_is_written_alone_and_read_back(tmp_path):
    torch.manual_seed(0)
    model = tiny()
    model.add_adapter(LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    model.eval().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}

    again = tiny()
    assert not torch.equal(again(**features()).embeddings, model(**features()).embeddings)
    again.load_adapter(str(tmp_path))
    assert torch.equal(again.eval()(**features()).embeddings, model(**features()).embeddings)


def test_what_others_ask_a_model_for():
    model = tiny(projection_dim=8)
    assert model.config is model.backbone.config and model.config.model_type == "bert"
    assert model.get_input_embeddings() is model.backbone.embeddings.word_embeddings
    assert model.get_output_embeddings() is None
    assert model.main_input_name == "input_ids" and model.base_model is model.backbone
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert model._no_split_modules == ["BertLayer"]
    model.resize_token_embeddings(40)
    assert model.backbone.embeddings.word_embeddings.num_embeddings == model.config.vocab_size == 40
    model.tie_weights()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_mixture_of_experts_keeps_its_fast_implementation():
    assert EmbeddingModel.from_config(EXPERTS_CONFIG).config._experts_implementation == "grouped_mm"


class ColumnSumTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).embeddings[:, 0].mean()


def test_trainer_trains_it_and_its_checkpoint_is_a_model_folder(tmp_path):
    model = tiny(projection_dim=8, prompts={"query": "search: "}, max_length=16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    rows = [{name: value[0] for name, value in features(rows=1, seed=row).items()} for row in range(4)]
    options = {"use_cpu": True, "max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": "none"}
    options |= {"gradient_checkpointing": True, "logging_steps": 1, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), **options)
    ColumnSumTrainer(model=model, args=arguments, train_dataset=rows).train()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())

    reloaded = EmbeddingModel.from_pretrained(tmp_path / "checkpoint-2")
    assert reloaded.prompts == {"query": "search: "} and reloaded.max_length == 16
    assert torch.equal(reloaded(**features()).embeddings, model.eval()(**features()).embeddings)


# ---- building and loading ----


def test_from_backbone_loads_float32_and_adds_what_is_asked(tmp_path):
    torch.manual_seed(0)
    backbone = AutoModel.from_config(tiny().config, dtype=torch.bfloat16)
    backbone.save_pretrained(tmp_path)
    model = EmbeddingModel.from_backbone(tmp_path, pooling="cls", projection_dim=6, attn_implementation="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager" and not model.training
    assert model.pooling == "cls" and model.projection.weight.shape == (6, 32)
    assert EmbeddingModel.from_backbone(tmp_path, dtype="auto").dtype == torch.bfloat16
    word_embeddings = backbone.embeddings.word_embeddings.weight
    assert torch.equal(model.get_input_embeddings().weight, word_embeddings.float())


def test_the_encoder_of_an_encoder_decoder_is_the_backbone(tmp_path):
    config = {
        "model_type": "t5",
        "vocab_size": 32,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
    }
    model = EmbeddingModel.from_config(config).eval()
    model.save_pretrained(tmp_path)
    assert unused_parameters(model, **features()) == []
    assert torch.equal(
        EmbeddingModel.from_pretrained(tmp_path)(**features()).embeddings, model(**features()).embeddings
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "brt"}, 'model_type="brt".*Did you mean "bert"'),
        ({"hiden_size": 8}, 'no field "hiden_size".*"hidden_size"'),
        ({"hidden_size": "wide"}, "hidden_size.*expected int"),
        ({"num_attention_heads": 5}, "model_config cannot be built"),
    ],
)
def test_a_wrong_model_config_is_named(changes, message):
    with pytest.raises(UsageError, match=message):
        EmbeddingModel.from_config(model_config("bert", **changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "mean, cls, last"),
        ({"projection_dim": 0}, "at least 1"),
        ({"projection_dim": 8, "matryoshka_dims": [4, 16]}, "between 1 and 8"),
        ({"dtype": "int8"}, "float32, bfloat16, float16 or auto"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(UsageError, match=message):
        tiny(**options)


def test_weights_that_would_stay_random_are_refused(tmp_path):
    model = tiny()
    weights = {key.removeprefix("backbone."): value for key, value in model.state_dict().items()}
    del weights["encoder.layer.1.output.dense.weight"]
    model.backbone.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UsageError, match="lacks 1 weights of BertModel .*layer.1.output.dense.weight"):
        EmbeddingModel.from_backbone(tmp_path)


def test_a_model_that_is_nowhere_is_named(monkeypatch, tmp_path):
    for load in (EmbeddingModel.from_backbone, EmbeddingModel.from_pretrained):
        with pytest.raises(UsageError, match="no-such-owner/no-such-model"):
            load("no-such-owner/no-such-model")


# ---- weights ----


def test_a_given_state_dict_is_written_exactly_and_comes_back_under_our_keys(tmp_path):
    model = tiny(projection_dim=8)
    given = {key: torch.randn_like(value).to(torch.bfloat16) for key, value in model.state_dict().items()}
    live = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=given)

    read = EmbeddingModel.from_pretrained(tmp_path).state_dict()
    assert read.keys() == given.keys()
    assert all(read[key].dtype == torch.bfloat16 and torch.equal(read[key], given[key]) for key in given)
    assert all(torch.equal(value, live[key]) for key, value in model.state_dict().items())

    load_weights(model, read)
    assert all(torch.equal(value, given[key].float()) for key, value in model.state_dict().items())


def test_fused_experts_come_back_under_our_keys(tmp_path):
    model = EmbeddingModel.from_config(EXPERTS_CONFIG, pooling="last")
    model.save_pretrained(tmp_path)
    read = EmbeddingModel.from_pretrained(tmp_path).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())


def test_partial_or_sharded_weights_are_not_written(tmp_path):
    model = tiny()
    weights = dict(model.state_dict())
    key, value = weights.popitem()
    with pytest.raises(UsageError, match=key):
        model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UsageError, match="get_state_dict"):
        model.save_pretrained(tmp_path, state_dict={**weights, key: value.as_subclass(DTensor)})
    with pytest.raises(UsageError, match="safetensors only"):
        model.save_pretrained(tmp_path, safe_serialization=False)
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded():
    model = tiny(projection_dim=8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    weights = {key: torch.ones_like(value) for key, value in before.items()}
    weights["stranger"] = weights.pop("projection.weight")
    weights["backbone.embeddings.word_embeddings.weight"] = torch.zeros(33, 32)
    with pytest.raises(UsageError, match="checkpoint-7 does not fit") as caught:
        load_weights(model, weights, source="checkpoint-7")
    assert "1 missing: projection.weight" in str(caught.value)
    assert "1 surplus: stranger" in str(caught.value)
    assert "word_embeddings.weight (33, 32) instead of (32, 32)" in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    check_weights(model, before)
