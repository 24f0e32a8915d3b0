"""What audit_others.py measures inside a library's environment: `python audit_others_cases.py LIBRARY OUTPUT`."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from audit_others import Difference, compare, line_of, row_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

ROWS, CHUNK, WIDTH = 8, 3, 32  # of a process's batch, of a chunk (which does not divide it), of the model
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PLAIN = "without a cache"
OWN_NEGATIVES = "by design another loss: negatives come from the own process only"
FOLDERS: dict[float, str] = {}  # of tiny models, by their dropout

# A setting, what measures it, and a remark.
Case = tuple[str, Callable[[], list[Difference]], str]
Features = dict[str, Tensor]


def tiny_bert(dropout: float = 0.0) -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "initializer_range": 0.3}
    return BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes, **rates), False).double().train()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = {
        name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    }
    words = [*special.values(), *(f"w{index}" for index in range(50))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, model_max_length=32, **special)


def texts(rows: int, seed: int, length: int | None = None) -> list[str]:
    """Of 1 to 12 words, or of `length`."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [length or int(torch.randint(1, 13, (), generator=draw)) for _ in range(rows)]
    return [" ".join(f"w{word}" for word in torch.randint(0, 50, (n,), generator=draw).tolist()) for n in lengths]


def tokenized(columns: int, length: int | None = None) -> list[Features]:
    read = tiny_tokenizer()
    return [dict(read(texts(ROWS, 9 * RANK + i, length), padding=True, return_tensors="pt")) for i in range(columns)]


def of_all_processes(value: Any) -> list:
    values = [value] * PROCESSES
    if PROCESSES > 1:
        dist.all_gather_object(values, value)
    return values


def joined(batches: list[Features]) -> Features:
    """Features of several processes as one batch, padded to the longest row."""
    rows = {name: [row for batch in batches for row in batch[name]] for name in batches[0]}
    return {name: pad_sequence(of_name, batch_first=True) for name, of_name in rows.items()}


def wrapped(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if PROCESSES > 1 else model


def info_nce(queries: Tensor, *documents: Tensor, scale: float | Tensor = 20.0) -> Tensor:
    scores = F.normalize(queries, dim=-1) @ F.normalize(torch.cat(documents), dim=-1).T * scale
    return F.cross_entropy(scores, torch.arange(len(scores)))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    parameters = getattr(model, "module", model).named_parameters()
    return {name: None if each.grad is None else each.grad.clone() for name, each in parameters if each.requires_grad}


def full_gradients(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> dict[str, Tensor | None]:
    copied = copy.deepcopy(getattr(model, "module", model))
    copied.zero_grad(set_to_none=True)
    loss_of(copied).backward()
    return gradients(copied)


class FirstPass:
    """Notes the random states of each forward without a graph, and runs these forwards again in one graph."""

    def __init__(self, bert: BertModel):
        self.calls: list[tuple] = []
        calls = self.calls

        def note(module: nn.Module, inputs: tuple, options: dict) -> None:
            if not torch.is_grad_enabled():
                calls.append((options["input_ids"].clone(), torch.get_rng_state(), numpy.random.get_state()))

        bert.embeddings.register_forward_pre_hook(note, with_kwargs=True)

    def again(self, encode: Callable[[Features], Tensor], columns: list[Features]) -> list[Tensor]:
        found = {}
        for ids, torch_state, numpy_state in self.calls:
            torch.set_rng_state(torch_state)
            numpy.random.set_state(numpy_state)
            embeddings = encode({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
            for row, embedding in zip(ids.tolist(), embeddings, strict=True):
                found[tuple(row)] = embedding
        self.calls.clear()
        return [torch.stack([found[tuple(row)] for row in column["input_ids"].tolist()]) for column in columns]


def numpy_noise(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return output * torch.from_numpy(numpy.random.rand(*output.shape[:2], 1) < 0.9)


def of_columns(inputs: dict) -> dict[str, Features]:
    kinds = ("input_ids", "attention_mask")
    names = [name.removesuffix("_input_ids") for name in inputs if name.endswith("_input_ids")]
    return {name: {kind: inputs[f"{name}_{kind}"].clone() for kind in kinds} for name in names}


def of_rows_end_to_end(inputs: dict) -> dict[str, Features]:
    def column(features: Features) -> Features:
        offsets = features["offsets"].tolist()
        rows = [features["input_ids"][begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
        masks = [torch.ones_like(row) for row in rows]
        return {"input_ids": pad_sequence(rows, True), "attention_mask": pad_sequence(masks, True)}

    return {name: column(inputs[name]) for name in ("query", "positive", "negative")}


def trained(
    trainer: type, arguments: Callable, model: Any, loss: Any, full_loss: Callable, *, length: int | None = None,
    own_negatives: bool = False, collator: Any = None, read: Callable = of_columns, **options: Any,
) -> list[Difference]:  # fmt: skip
    """Two updates of a trainer. `own_negatives`: its loss is the mean of the losses of the processes."""
    from datasets import Dataset

    seen: list[dict[str, Features]] = []  # batches since the last update
    differences = []

    class Recording(trainer):
        def training_step(self, model: Any, inputs: dict, *rest: Any) -> Tensor:
            seen.append(read(inputs))
            return super().training_step(model, inputs, *rest)

    class Compare(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            found, steps = gradients(model), list(zip(*of_all_processes(seen), strict=True))
            groups = [[batch] for step in steps for batch in step] if own_negatives else steps

            def mean_loss(copied: Any) -> Tensor:
                batches = [[joined([part[name] for part in group]) for name in group[0]] for group in groups]
                return sum(full_loss(copied, batch) for batch in batches) / len(batches)

            differences.append(compare(found, full_gradients(model, mean_loss)))
            seen.clear()

    rows = ROWS * PROCESSES * 2 * options.get("gradient_accumulation_steps", 1)
    data = {name: texts(rows, seed, length) for seed, name in enumerate(("query", "positive", "negative"))}
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
        quiet |= {"disable_tqdm": True, "use_cpu": True}
        args = arguments(folder, per_device_train_batch_size=ROWS, max_steps=2, max_grad_norm=0, **quiet, **options)
        more = {"data_collator": collator} if collator else {}
        both = {"train_dataset": Dataset.from_dict(data), "callbacks": [Compare()], **more}
        Recording(model=model, args=args, loss=loss, **both).train()
    assert len(differences) == 2, differences
    return differences


def sentence_cases(
    trainer: type, arguments: Callable, loss_of: Callable, gathers: bool, **always: Any
) -> Iterator[Case]:
    """`loss_of`: of a loss's name, a model and options. `gathers`: it takes `gather_across_devices`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    def sentence_model(dropout: float = 0.0) -> Any:
        modules = [Transformer(FOLDERS[dropout]), Pooling(WIDTH)]
        return SentenceTransformer(modules=modules, device="cpu").double()

    def case(
        setting: str, remark: str = "", name: str = "MultipleNegativesRankingLoss", dropout: float = 0.0,
        noise: bool = False, scale: bool = False, loss_options: dict | None = None, **options: Any,
    ) -> Case:  # fmt: skip
        def measure() -> list[Difference]:
            model, given, is_random = sentence_model(dropout), dict(loss_options or {}), noise or dropout > 0
            bert = model[0].auto_model
            first_pass = FirstPass(bert)
            if noise:
                bert.embeddings.register_forward_hook(numpy_noise)
            if "GIST" in name:
                given["guide"] = sentence_model()
            loss = loss_of(name, model, **given)
            if scale:
                model.scale = loss.scale = nn.Parameter(torch.tensor(20.0, dtype=torch.double))
            given.pop("gather_across_devices", None)

            def full(copied: Any, columns: list[Features]) -> Tensor:
                if given:
                    return getattr(losses, name)(copied, **given)(columns, None)
                encode = lambda features: copied(features)["sentence_embedding"]  # noqa: E731
                embeddings = first_pass.again(encode, columns) if is_random else map(encode, columns)
                return info_nce(*embeddings, scale=copied.scale if scale else 20.0)

            length = 5 if is_random else None
            return trained(trainer, arguments, model, loss, full, length=length, **options, **always)

        return setting, measure, remark

    gather = {"gather_across_devices": True} if gathers else {}
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    twice = {"gradient_accumulation_steps": 2}
    if PROCESSES == 1:
        unreplayed = "replays torch's random states only" if gathers else ""
        assigned = "not documented: a parameter was assigned to `loss.scale`" if gathers else ""
        yield case("one process")
        yield case("gradient accumulation 2", **twice)
        yield case("both directions", loss_options=both)
        yield case("GIST", name="GISTEmbedLoss")
        yield case("dropout 0.1", dropout=0.1)
        yield case("dropout 0.1, gradient checkpointing", dropout=0.1, gradient_checkpointing=True)
        yield case("numpy noise in the forward", unreplayed, noise=True)
        yield case("learnable scale", assigned, scale=True)
        yield case("learnable scale, gradient accumulation 2", assigned, scale=True, **twice)
        return
    if gathers:
        yield case("DDP", OWN_NEGATIVES, own_negatives=True)
    ddp = "DDP, gather_across_devices" if gathers else "DDP"
    yield case(ddp, loss_options=gather)
    yield case(f"{ddp}, gradient accumulation 2", loss_options=gather, **twice)
    yield case(f"{ddp}, both directions", loss_options=gather | both)
    yield case(
        f"{ddp}, GIST, contrast_anchors=False", name="GISTEmbedLoss", loss_options=gather | {"contrast_anchors": False}
    )


def cases_of_sentence_transformers() -> Iterator[Case]:
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses

    def cached(name: str, model: Any, **options: Any) -> Any:
        return getattr(losses, f"Cached{name}")(model, mini_batch_size=CHUNK, **options)

    yield from sentence_cases(SentenceTransformerTrainer, SentenceTransformerTrainingArguments, cached, True)


def cases_of_ours() -> Iterator[Case]:
    from sentence_transformers.sentence_transformer import losses

    from hf_dist_ext import DistTrainer, DistTrainingArguments

    def arguments(*given: Any, **options: Any) -> DistTrainingArguments:
        return DistTrainingArguments(*given, gradient_cache_chunk_size=CHUNK, **options)

    def plain(name: str, model: Any, **options: Any) -> Any:
        return getattr(losses, name)(model, **options)

    yield from sentence_cases(DistTrainer, arguments, plain, False, read=of_rows_end_to_end)


def cases_of_pylate() -> Iterator[Case]:
    from pylate import losses, models, utils
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    def case(name: str, setting: str = "", remark: str = "", gather: bool = False, **options: Any) -> Case:
        def measure() -> list[Difference]:
            lengths = {"query_length": 8, "document_length": 16}
            model = models.ColBERT(FOLDERS[0.0], embedding_size=16, device="cpu", **lengths).double()
            chunks = {"mini_batch_size": CHUNK} if "Cached" in name else {}
            loss = getattr(losses, name)(model, gather_across_devices=gather, **chunks)
            full = lambda copied, columns: losses.Contrastive(copied)(columns)  # noqa: E731
            arguments, collator = SentenceTransformerTrainingArguments, utils.ColBERTCollator(model.tokenize)
            return trained(SentenceTransformerTrainer, arguments, model, loss, full, collator=collator, **options)

        return name + setting, measure, remark

    for name, remark in (("Contrastive", PLAIN), ("CachedContrastive", "")):
        if PROCESSES == 1:
            yield case(name, "", remark)
            yield case(name, ", gradient accumulation 2", remark, gradient_accumulation_steps=2)
        else:
            yield case(name, ", DDP", "; ".join(filter(None, (remark, OWN_NEGATIVES))), own_negatives=True)
            yield case(name, ", DDP, gather_across_devices", remark, gather=True)


def first_state(output: Any) -> Tensor:
    return output.last_hidden_state[:, 0]


def cases_of_gradcache() -> Iterator[Case]:
    import gradcache

    sys.modules["grad_cache"] = gradcache  # by this name its files import each other
    from gradcache.functional import cached, cat_input_tensor, gather_input_tensor
    from gradcache.grad_cache import GradCache
    from gradcache.loss import DistributedContrastiveLoss, SimpleContrastiveLoss

    def contrastive(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x @ y.T, torch.arange(len(x)))

    def measure(step: Callable, dropout: float) -> list[Difference]:
        bert, columns = tiny_bert(dropout), tokenized(2, 5 if dropout else None)
        encoder, first_pass = wrapped(bert), FirstPass(bert)
        step(encoder, *columns)
        columns = [joined(of_all_processes(column)) for column in columns]

        def full(copied: Any) -> Tensor:
            encode = lambda features: first_state(copied(**features))  # noqa: E731
            return contrastive(*(first_pass.again(encode, columns) if dropout else map(encode, columns)))

        return [compare(gradients(encoder), full_gradients(encoder, full))]

    def with_the_class(encoder: nn.Module, *columns: Features) -> None:
        loss = DistributedContrastiveLoss() if PROCESSES > 1 else SimpleContrastiveLoss()
        step = GradCache([encoder, encoder], CHUNK, loss, get_rep_fn=first_state)
        step(*columns, no_sync_except_last=PROCESSES > 1)

    def with_functions(encoder: nn.Module, *columns: Features) -> None:
        embed = cached(lambda **features: first_state(encoder(**features)))
        kept: list[list] = []
        for column in columns:
            cuts = range(0, ROWS, CHUNK)
            kept.append([embed(**{name: value[i : i + CHUNK] for name, value in column.items()}) for i in cuts])
        loss = cat_input_tensor(gather_input_tensor(contrastive) if PROCESSES > 1 else contrastive)
        (loss(*([leaf for leaf, _ in column] for column in kept)) * PROCESSES).backward()
        for leaf, again in sum(kept, []):
            again(leaf)

    renamed = "as published its import fails (`No module named 'grad_cache'`), so the module was given this name too"
    if PROCESSES == 1:
        for setting, dropout in (("", 0.0), (", dropout 0.1", 0.1)):
            yield f"class GradCache{setting}", lambda dropout=dropout: measure(with_the_class, dropout), renamed
            yield f"functions{setting}", lambda dropout=dropout: measure(with_functions, dropout), ""
    else:
        yield "class GradCache, DDP, DistributedContrastiveLoss", lambda: measure(with_the_class, 0.0), renamed
        yield "functions, DDP, loss times processes", lambda: measure(with_functions, 0.0), "as its README says"


def cases_of_flag_embedding() -> Iterator[Case]:
    from FlagEmbedding.finetune.embedder.encoder_only.base.modeling import BiEncoderOnlyEmbedderModel

    def measure() -> list[Difference]:
        options = {"temperature": 0.05, "normalize_embeddings": True, "negatives_cross_device": PROCESSES > 1}
        model = wrapped(BiEncoderOnlyEmbedderModel(tiny_bert(), sub_batch_size=CHUNK, **options))
        queries, passages = tokenized(2)
        model(queries=queries, passages=passages).loss.backward()
        columns = [joined(of_all_processes(column)) for column in (queries, passages)]
        full = lambda copied: info_nce(*(first_state(copied.model(**column)) for column in columns))  # noqa: E731
        return [compare(gradients(model), full_gradients(model, full))]

    ddp = ", DDP, negatives_cross_device" if PROCESSES > 1 else ""
    yield f"sub_batch_size{ddp}", measure, "without a cache: every sub-batch keeps its graph"


def cases_of_open_clip() -> Iterator[Case]:
    import open_clip
    from open_clip_train.train import train_one_epoch

    def measure(batches: int, **flags: bool) -> list[Difference]:
        torch.manual_seed(0)
        layers = {"layers": 3, "width": WIDTH}
        vision, text = (
            {"image_size": 16, "patch_size": 8, "head_width": 8},
            {"context_length": 8, "vocab_size": 64, "heads": 4},
        )
        model = wrapped(open_clip.CLIP(WIDTH, vision | layers, text | layers, output_dict=True).double())
        draw = torch.Generator().manual_seed(RANK)
        images = torch.randn(CHUNK * batches, 3, 16, 16, generator=draw, dtype=torch.double)
        words = torch.randint(1, 64, (CHUNK * batches, 8), generator=draw)
        found: list[dict] = []
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        optimizer.register_step_pre_hook(lambda *_: found.append(gradients(model)))

        class Loader(list):
            num_batches, num_samples = batches, len(images)

        loader = Loader(zip(images.split(CHUNK), words.split(CHUNK), strict=True))
        args = {"device": "cpu", "precision": "fp32", "accum_freq": batches, "skip_scheduler": True, "distill": False}
        args |= {
            "horovod": False,
            "wandb": False,
            "grad_clip_norm": None,
            "log_every_n_steps": 100,
            "batch_size": CHUNK,
        }
        ranks = {"rank": RANK, "world_size": PROCESSES}
        data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
        loss = open_clip.ClipLoss(**flags, **ranks)
        train_one_epoch(
            model, data, loss, 0, optimizer, None, None, None, SimpleNamespace(local_rank=RANK, **args, **ranks)
        )
        pairs = [torch.cat(each) for each in zip(*of_all_processes((images, words)), strict=True)]
        (given,) = found
        return [compare(given, full_gradients(model, lambda copied: open_clip.ClipLoss()(**copied(*pairs))))]

    ddp = "DDP, " if PROCESSES > 1 else ""
    yield f"{ddp}--accum-freq 1", lambda: measure(1), PLAIN
    yield f"{ddp}--accum-freq 3", lambda: measure(3), ""
    if PROCESSES > 1:
        local = {"local_loss": True, "gather_with_grad": True}
        yield "DDP, --local-loss --gather-with-grad, --accum-freq 1", lambda: measure(1, **local), PLAIN
        yield "DDP, --local-loss --gather-with-grad, --accum-freq 3", lambda: measure(3, **local), ""


CASES = {
    "sentence-transformers": cases_of_sentence_transformers,
    "GradCache": cases_of_gradcache,
    "pylate": cases_of_pylate,
    "FlagEmbedding": cases_of_flag_embedding,
    "open_clip_torch": cases_of_open_clip,
    "hf_dist_ext": cases_of_ours,
}


def main(library: str, output: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for dropout in (0.0, 0.1):  # before processes know each other, when only one of them saves
            FOLDERS[dropout] = f"{folder}/{dropout}"
            tiny_bert(dropout).save_pretrained(FOLDERS[dropout])
            tiny_tokenizer().save_pretrained(FOLDERS[dropout])
        if PROCESSES > 1:
            dist.init_process_group("gloo")
        version, rows = importlib.metadata.version(library), []
        for setting, measure, remark in CASES[library]():
            found = [difference for each in of_all_processes(measure()) for difference in each]
            rows.append(row_of(library, version, setting, PROCESSES, found, remark))
            if RANK == 0:
                print(line_of(rows[-1]), flush=True)
        if RANK == 0:
            Path(output).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
