"""QLoRA: adapters over a base in 4 bits. What needs bitsandbytes is skipped where it is not installed."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.planner.memory import Case, Settings, activation_cost, model_of
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks import trace
from hf_dist_ext.tasks.adapters import adapt, quantization_of
from hf_dist_ext.tasks.parts import make_arguments
from tests.saved_bytes import saved_bytes
from tests.tasks.test_folders import TEXTS, resumed, served, write_run
from tests.tasks.test_stages import main
from tests.tiny_models import embed, embedding_model, loaded, model_config, tiny_tokenizer

needs_bitsandbytes = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")


@pytest.fixture
def run_file(tmp_path):
    torch.manual_seed(0)
    config = model_config("qwen3", hidden_size=64, intermediate_size=128, head_dim=32)
    embedding_model(config, pooling="last").save_pretrained(str(tmp_path / "model"))
    return write_run(tmp_path, model_name_or_path=str(tmp_path / "model"), use_lora=True, load_in_4bit=True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--use_lora", "false"), "load_in_4bit=true has no effect without use_lora"),
        (("--save_full_model", "true"), "load_in_4bit does not go with save_full_model"),
        (("--trainable_modules", ".*projection"), "load_in_4bit does not go with trainable_modules"),
        ((), "load_in_4bit needs bitsandbytes, which is not installed: pip install bitsandbytes"),
    ],
)
def test_what_can_not_be_is_refused_before_a_weight_is_read(run_file, more, words, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name)
    )
    monkeypatch.setattr("hf_dist_ext.models.from_run._load", None)
    with pytest.raises(SystemExit):
        main(run_file, *more)
    assert words in capsys.readouterr().err


def adapted(run):
    quantized = quantization_of(run, make_arguments(run))
    model = loaded(run.options.model_name_or_path, dtype="float32", quantization_config=quantized)
    adapt(model, run.options)
    return model.train()


@needs_bitsandbytes
def test_adapters_train_on_a_base_in_4_bits_and_the_run_is_resumed(run_file, tmp_path):
    main(run_file)
    after = loaded(tmp_path / "out")
    assert (served(tmp_path / "out") - served(tmp_path / "model")).abs().max() > 1e-3
    again = resumed(run_file, tmp_path)
    for name, value in after.state_dict().items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-6)


@needs_bitsandbytes
def test_a_plan_counts_what_is_stored_and_kept(run_file):
    run = load_run(["--config", str(run_file), "--lora_target_modules", "all-linear", "--max_length", "32"])
    work = replace(workload_of(run, trace.complete_config(run.options)), mask_bytes=0)
    found = trace.shape(run, work)
    work = replace(work, found=found, embedding_dim=found["embedding_dim"], columns=work.columns[:1])
    model = adapted(run)
    weights = list(model.parameters())
    states = [one.quant_state for one in weights if hasattr(one, "quant_state")]
    scales = [one for state in states for one in (state.absmax, state.code, state.offset, state.state2.absmax)]
    stored, whole = sum(one.numel() * one.element_size() for one in [*weights, *scales]), model_of(work).whole
    assert len(states) == 14 and stored == pytest.approx(whole.frozen_stored + whole.trained_stored)
    ids = torch.randint(3, 10, (work.batch, work.columns[0].length))
    features = {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) > 0).long().expand(ids.shape)}
    with saved_bytes([*weights, *model.buffers(), *features.values()]) as peak:
        (embed(model, **features) * torch.ones(())).sum()
    needed = activation_cost(Case(work, settings=Settings(chunk_rows=work.batch)))
    assert needed.total == pytest.approx(peak(), rel=0.01) and peak() > 2**18


@needs_bitsandbytes
def test_cached_gradients_are_those_of_the_whole_batch(run_file):
    from bitsandbytes.nn import Linear4bit

    run = load_run(["--config", str(run_file)])
    model = adapted(run)
    assert sum(isinstance(module, Linear4bit) for module in model.modules()) == 14
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in trained.items():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.02)  # zero at the start, and the gradient of lora_A with it
    texts = {"query": TEXTS * 2, "positive": [text + " sort" for text in TEXTS * 2]}
    batch = {name: dict(tiny_tokenizer()(of, padding=True, return_tensors="pt")) for name, of in texts.items()}
    with torch.no_grad():  # as evaluations do, after which training goes on
        evaluated = {name: embed(model.eval(), **features) for name, features in batch.items()}
    embeddings = {name: embed(model.train(), **features) for name, features in batch.items()}
    for name, value in evaluated.items():
        torch.testing.assert_close(value, embeddings[name], rtol=0, atol=1e-5)
    loss = InfoNCELoss(temperature=0.1)
    loss(embeddings)[0].backward()
    plain = {name: one.grad.clone() for name, one in trained.items()}
    model.zero_grad()
    chunked = lay_out(batch, ChunkLimits(max_rows=2))
    cached_step(chunked, encode=lambda chunk: embed(model, **chunk.features), score=loss)
    for name, one in trained.items():
        assert plain[name].abs().max() > 0
        torch.testing.assert_close(one.grad, plain[name], rtol=1e-4, atol=1e-6)
