"""The gradient cache beside the plain step and sentence-transformers: one run, same weights, data, dtype and batch.

    python scripts/benchmark_gradient_cache.py --output outputs/benchmark               # two CPU cores: some 5 minutes

(1) one SentenceTransformer, and a copy of it for each side
(2) text: code-search pairs. Every cached contestant's chunk size is swept, its best goes into the turns. Ours are the
    fastest that need no more memory than theirs ("ours" is what a run does by default: chunks are packed where that
    saves padding; "ours, padded" never does)
(3) fixed: rows of one length, where nothing can be trimmed: what the second forward costs (arithmetic says 4/3)
(4) flat: our memory from small batches to large ones at one chunk size

Plain is the whole padded batch in one forward and backward, with our InfoNCE; every column is padded to its longest
row, as collators do. A step is: clear the gradients, cut (ours), forward, loss, backward. Contestants take turns, each
turn starts with another one, and a ratio is the median of the ratios within a turn, so that a busy machine slows both
sides of it. CPU seconds of the process stand beside wall seconds: with one thread they leave out what others use.

Peak memory is counted, not sampled: the bytes of all tensors made by the step that are alive together, weights and
batch not included, gradients of the weights included. Activation memory is the bytes that the model's graph keeps for
its backward, at the highest.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from model_sizes import bert
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging
from turns import PeakBytes, describe_machine, ratio

from hf_dist_ext import policy
from hf_dist_ext.data.code_search import load_code_search, train_tokenizer
from hf_dist_ext.data.sentence_collator import ContrastiveCollator
from hf_dist_ext.engine.budget import widened
from hf_dist_ext.engine.gradient_cache import cached_step
from hf_dist_ext.engine.layout import lay_out
from hf_dist_ext.engine.losses import InfoNCELoss
from hf_dist_ext.engine.tables import ChunkLimits
from hf_dist_ext.models.embedder import embedder_of
from hf_dist_ext.models.from_run import build
from hf_dist_ext.training.packing import decided

TEMPERATURE = 0.05
COLUMNS = ["query", "positive"]
ALL_GRAPHS = 10**9
PLAIN, OURS, OURS_PADDED, OURS_PACKED = "plain", "ours", "ours, padded", "ours, packed"
OURS_ALL_KEPT = "ours, all graphs kept"
THEIR_PLAIN, THEIR_CACHED = "sentence-transformers plain", "sentence-transformers cached"
HEAD = ("contestant", "seconds", "CPU s", "x plain", "MiB", "tokens", "gradient error")


@dataclass(frozen=True)
class Size:
    """A model, and the batches and chunk sizes it is measured at."""

    name: str
    model: dict
    text: tuple[int, int] = (1024, 256)  # pairs, tokens of a row at most
    chunk_tokens: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)  # ours, swept
    mini_batches: tuple[int, ...] = (8, 16, 32, 64)  # theirs, swept: rows
    mini_batch_tokens: tuple[int, ...] = (256, 512, 1024)  # theirs, swept: real tokens
    fixed: tuple[int, int, tuple[int, ...]] = (256, 64, (32, 64, 128))  # pairs, tokens, rows of a chunk, swept
    flat: tuple[tuple[int, ...], int, int] = ((256, 1024, 4096, 16384), 16, 64)  # pairs, tokens, rows of a chunk
    exact_pairs: int = 48  # of the float64 check


PRESETS = {
    "cpu": Size("width64", bert(64, 1, 2)),
    "smoke": Size(
        "smoke", bert(32, 1, 2), text=(16, 32), chunk_tokens=(128, 256), mini_batches=(4,), mini_batch_tokens=(64,),
        fixed=(16, 8, (4,)), flat=((16, 64), 4, 8), exact_pairs=8,
    ),
}  # fmt: skip

Batch = dict[str, dict[str, Tensor]]
Step = Callable[[], object]  # gradients are in the model afterwards


# (1) -----------------------------------------------------------------------------------------------------------------


class Models:
    """The same weights twice."""

    def __init__(self, ours: SentenceTransformer, theirs: SentenceTransformer) -> None:
        self.ours, self.theirs, self.embedder = ours, theirs, embedder_of(ours)
        self.loss = InfoNCELoss(TEMPERATURE)

    def encode(self, features: dict) -> Tensor:
        return self.embedder.call(self.ours, features)


def make_models(size: Size, tokenizer) -> Models:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | size.model
    ours = build(model_config=config, tokenizer=tokenizer).train()
    return Models(ours, copy.deepcopy(ours))


def plain_step(models: Models, batch: Batch) -> Step:
    def step() -> None:
        models.ours.zero_grad(set_to_none=True)
        models.loss({column: models.encode(features) for column, features in batch.items()}).loss.backward()

    return step


def our_step(
    models: Models,
    batch: Batch,
    limits: ChunkLimits,
    keep_graph: int = 0,
    encode: Callable | None = None,
    packing: bool | str = "auto",
) -> Step:
    """`packing`: as gradient_cache_packing."""
    encode = encode or (lambda chunk: models.encode(chunk.features))
    layers = models.ours.transformers_model.config.num_hidden_layers
    widening = policy.widening(layers, is_checkpointed=False)

    def step() -> None:
        models.ours.zero_grad(set_to_none=True)
        chunked = lay_out(batch, replace(limits, packs=bool(packing)))
        if packing:
            chunked = decided(chunked, packing)
        wide = widened(chunked, widening) if widening > 1 else None
        cached_step(chunked, encode, models.loss, keep_graph=keep_graph, wide=wide)

    return step


def their_step(models: Models, batch: Batch, **chunks: int) -> Step:
    """Their cached loss with `mini_batch_size` or `mini_batch_num_tokens`, or their plain one with neither."""
    kind = losses.CachedMultipleNegativesRankingLoss if chunks else losses.MultipleNegativesRankingLoss
    loss = kind(models.theirs, scale=1 / TEMPERATURE, **chunks)

    def step() -> None:
        models.theirs.zero_grad(set_to_none=True)
        loss([dict(features) for features in batch.values()], None).backward()  # their modules write into these dicts

    return step


# measuring -----------------------------------------------------------------------------------------------------------


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that graphs made inside keep for their backward: now, and at the highest. `known` tensors do not count.
    A storage that is saved several times is counted once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(self._keep, lambda kept: kept[0])
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.users: Counter[int] = Counter()
        self.alive = self.peak = 0

    def _keep(self, tensor: Tensor) -> list[Tensor]:
        kept, storage = _Kept([tensor]), tensor.untyped_storage()
        if storage._cdata not in self.known:
            self._count(storage._cdata, storage.nbytes(), 1)
            weakref.finalize(kept, self._count, storage._cdata, storage.nbytes(), -1)
        return kept

    def _count(self, key: int, nbytes: int, change: int) -> None:
        self.users[key] += change
        if self.users[key] == max(change, 0):  # its first user came, or its last one went
            self.alive += change * nbytes
            self.peak = max(self.peak, self.alive)


class _Kept(list):
    """A list that weakref can watch."""


def peak_of(step: Step) -> int:
    """Bytes of the tensors that the step makes and that are alive together."""
    with PeakBytes() as memory:
        step()
    return memory.peak


def take_turns(steps: dict[str, Step], turns: int) -> dict[str, dict[str, list[float]]]:
    """Per contestant its wall and CPU seconds in every turn. Nothing is dropped: steps have run before."""
    names = list(steps)
    seconds: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu_seconds": []} for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            seconds[name]["seconds"].append(time.perf_counter() - wall)
            seconds[name]["cpu_seconds"].append(time.process_time() - cpu)
    return seconds


def by_speed(steps: dict[str, Step], turns: int = 1) -> list[str]:
    """The contestants of a sweep, fastest first; each counts with its least disturbed turn."""
    seconds = {name: min(values["seconds"]) for name, values in take_turns(steps, turns).items()}
    for name, value in seconds.items():
        print(f"  {name:<58}{value:>9.3f} s")
    return sorted(seconds, key=seconds.get)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, under the name it has in the transformer."""
    return {
        name.removeprefix("backbone.").removeprefix("0.model."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def gradient_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest gradient of its parameter; a parameter whose true gradient is
    zero (a key's bias under softmax) is compared with a thousandth of the model's largest instead."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = max(gradient.abs().max() for gradient in wanted.values())
    assert largest > 0
    return max(
        ((found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3 * largest)).item()
        for name, gradient in wanted.items()
    )


def observed(steps: dict[str, Step], models: Models) -> dict[str, dict]:
    """Name -> peak memory; tokens that go through the transformer, padding and every pass included; the gradient's
    distance from the plain step's, which comes first."""
    figures, wanted, tokens = {}, {}, [0]

    def count(module: nn.Module, args: tuple) -> None:
        tokens[0] += args[0].numel()

    # Their module calls the transformer's forward past its hooks, but the token embedding's are run.
    embedders = [model.get_input_embeddings() for model in (models.ours[0].model, models.theirs[0].model)]
    handles = [embedder.register_forward_pre_hook(count) for embedder in embedders]
    for name, step in steps.items():
        tokens[0] = 0
        peak = peak_of(step)
        found = gradients(models.theirs if name.startswith("sentence") else models.ours)
        wanted = found if name == PLAIN else wanted
        error = gradient_error(found, wanted)
        figures[name] = {"peak_bytes": peak, "tokens": tokens[0], "max_relative_gradient_error": error}
    for handle in handles:
        handle.remove()
    return figures


def measured(steps: dict[str, Step], models: Models, turns: int) -> dict[str, dict]:
    """What `observed` says, and seconds; printed as a table."""
    figures = observed(steps, models)
    for name, values in take_turns(steps, turns).items():
        figures[name].update(values)
    print("{:<34}{:>9}{:>9}{:>9}{:>9}{:>10}{:>16}".format(*HEAD))
    for name, entry in figures.items():
        over = ratio(figures, name, PLAIN)
        wall, cpu = (statistics.median(entry[key]) for key in ("seconds", "cpu_seconds"))
        memory, error = entry["peak_bytes"] / 2**20, entry["max_relative_gradient_error"]
        print(f"{name:<34}{wall:>9.3f}{cpu:>9.3f}{over:>9.2f}{memory:>9.1f}{entry['tokens']:>10}{error:>16.1e}")
    return figures


# (2) -----------------------------------------------------------------------------------------------------------------


def text_batches(size: Size, code_root: str | None) -> tuple[object, Callable[[int], Batch]]:
    """The tokenizer, and batches of so many pairs; past the dataset's end it begins again."""
    dataset = load_code_search(held_out=1, root=code_root)["train"].shuffle(seed=0)
    tokenizer = train_tokenizer((text for name in COLUMNS for text in dataset[name]), model_max_length=size.text[1])
    collate = ContrastiveCollator(tokenizer, COLUMNS, max_length=size.text[1])

    def batch_of(pairs: int) -> Batch:
        batch = collate(dataset.select([i % len(dataset) for i in range(pairs)]).to_list())
        return {name: batch[name] for name in COLUMNS}

    return tokenizer, batch_of


def sweep(size: Size, models: Models, batch: Batch) -> tuple[ChunkLimits, dict]:
    """Our fastest setting that needs no more memory than theirs, where any does not, and their fastest."""
    theirs = {f"{THEIR_CACHED}, mini_batch_size {n}": {"mini_batch_size": n} for n in size.mini_batches}
    for n in size.mini_batch_tokens:  # beside a token budget their mini_batch_size cuts the loss stage only
        theirs[f"{THEIR_CACHED}, {n} tokens"] = {"mini_batch_num_tokens": n, "mini_batch_size": 256}
    print("sweep")
    fastest, *_ = by_speed({name: their_step(models, batch, **chunks) for name, chunks in theirs.items()})
    limit = peak_of(their_step(models, batch, **theirs[fastest]))
    ours = {f"{OURS}, {n} tokens per chunk": ChunkLimits(max_tokens=n) for n in size.chunk_tokens}
    steps = {name: our_step(models, batch, limits) for name, limits in ours.items()}
    ours_by_speed = by_speed(steps, turns=3)
    small = [name for name in ours_by_speed if peak_of(steps[name]) <= limit]
    return ours[(small or ours_by_speed)[0]], theirs[fastest]


def compare_text(size: Size, models: Models, batch_of: Callable[[int], Batch], turns: int) -> dict:
    batch = batch_of(size.text[0])
    plain_step(models, batch_of(8))(), their_step(models, batch_of(8), mini_batch_size=4)()  # to warm up
    print(f"\n{size.name}: text, {size.text[0]} pairs cut at {size.text[1]} tokens")
    ours, theirs = sweep(size, models, batch)
    steps = {
        PLAIN: plain_step(models, batch),
        OURS: our_step(models, batch, ours),
        OURS_PADDED: our_step(models, batch, ours, packing=False),
        OURS_ALL_KEPT: our_step(models, batch, ours, ALL_GRAPHS),
        THEIR_PLAIN: their_step(models, batch),
        THEIR_CACHED: their_step(models, batch, **theirs),
    }
    figures = measured(steps, models, turns)
    real = sum(int(features["attention_mask"].sum()) for features in batch.values())
    setting = {"our_setting": asdict(ours), "their_setting": theirs}
    return {"pairs": size.text[0], "real_tokens": real, **setting, "contestants": figures}


def exact_errors(size: Size, models: Models, batch_of: Callable[[int], Batch]) -> dict[str, float]:
    """The same comparison of gradients in float64, on a small batch cut into small chunks."""
    batch, limits = batch_of(size.exact_pairs), ChunkLimits(max_rows=5)
    exact = Models(copy.deepcopy(models.ours).double(), copy.deepcopy(models.theirs).double())
    steps = {
        PLAIN: plain_step(exact, batch),
        OURS_PADDED: our_step(exact, batch, limits, packing=False),
        OURS_PACKED: our_step(exact, batch, limits, packing=True),
        OURS_ALL_KEPT: our_step(exact, batch, limits, ALL_GRAPHS),
        THEIR_CACHED: their_step(exact, batch, mini_batch_size=5),
    }
    errors = {name: entry["max_relative_gradient_error"] for name, entry in observed(steps, exact).items()}
    errors.pop(PLAIN)
    print("gradient error in float64: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    return errors


# (3), (4) ------------------------------------------------------------------------------------------------------------


def fixed_batch(pairs: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = {name: torch.randint(5, 500, (pairs, length), generator=generator) for name in COLUMNS}
    return {name: {"input_ids": v, "attention_mask": torch.ones_like(v)} for name, v in ids.items()}


def compare_fixed(size: Size, models: Models, turns: int) -> dict:
    pairs, length, swept = size.fixed
    batch, chosen = fixed_batch(pairs, length), {}
    print(f"\n{size.name}: fixed, {pairs} pairs of {length} tokens each; sweep")
    for name, keep_graph in ((OURS, 0), (OURS_ALL_KEPT, ALL_GRAPHS)):
        limits = {f"{name}, {rows} rows per chunk": ChunkLimits(max_rows=rows) for rows in swept}
        steps = {words: our_step(models, batch, one, keep_graph) for words, one in limits.items()}
        chosen[name] = limits[by_speed(steps, turns=5)[0]]
    steps = {
        PLAIN: plain_step(models, batch),
        OURS: our_step(models, batch, chosen[OURS]),
        OURS_PACKED: our_step(models, batch, chosen[OURS], packing=True),
        OURS_ALL_KEPT: our_step(models, batch, chosen[OURS_ALL_KEPT], ALL_GRAPHS),
        THEIR_CACHED: their_step(models, batch, mini_batch_size=chosen[OURS].max_rows),
    }
    rows = {name: limits.max_rows for name, limits in chosen.items()}
    return {"pairs": pairs, "length": length, "chunk_rows": rows, "contestants": measured(steps, models, turns)}


def flat_memory(size: Size, models: Models) -> list[dict]:
    """Per batch: bytes that the model's graph holds, that the step needs at most, and of the embeddings."""
    batches, length, chunk_rows = size.flat
    points = []
    print(f"\n{size.name}: flat, rows of {length} tokens, {chunk_rows} rows per chunk")
    print(f"{'pairs':>8}{'activations, MiB':>18}{'peak, MiB':>11}{'embeddings, MiB':>17}")
    for pairs in batches:
        batch = fixed_batch(pairs, length)
        given = [value for features in batch.values() for value in features.values()]
        saved = SavedBytes([*models.ours.parameters(), *models.ours.buffers(), *given])

        def encode(chunk, saved=saved):
            with saved:
                return models.encode(chunk.features)

        peak = peak_of(our_step(models, batch, ChunkLimits(max_rows=chunk_rows), encode=encode))
        nbytes = pairs * len(COLUMNS) * models.ours.get_embedding_dimension() * 4
        assert saved.peak > 0 and saved.alive == 0, (saved.peak, saved.alive)
        found = {"activation_bytes": saved.peak, "peak_bytes": peak, "embedding_bytes": nbytes}
        points.append({"pairs": pairs, **found})
        print("{:>8}{:>18.2f}{:>11.2f}{:>17.2f}".format(pairs, *(value / 2**20 for value in found.values())))
    return points


# the report ----------------------------------------------------------------------------------------------------------


def ratios_of(size: dict, key: str = "seconds") -> dict[str, float]:
    text, fixed, flat = size["text"]["contestants"], size["fixed"]["contestants"], size["flat"]
    pairs = {
        "cached_over_plain": (text, OURS, PLAIN),
        "cached_packed_over_padded": (text, OURS, OURS_PADDED),
        "cached_all_graphs_over_plain": (text, OURS_ALL_KEPT, PLAIN),
        "cached_over_sentence_transformers_cached": (text, OURS, THEIR_CACHED),
        "cached_over_sentence_transformers_plain": (text, OURS, THEIR_PLAIN),
        "fixed_no_graph_over_plain": (fixed, OURS, PLAIN),
        "fixed_packed_over_padded": (fixed, OURS_PACKED, OURS),
        "fixed_all_graphs_over_plain": (fixed, OURS_ALL_KEPT, PLAIN),
        "fixed_sentence_transformers_cached_over_plain": (fixed, THEIR_CACHED, PLAIN),
    }
    ratios = {name: ratio(figures, one, other, key) for name, (figures, one, other) in pairs.items()}
    ours, theirs = (text[name]["peak_bytes"] for name in (OURS, THEIR_CACHED))
    small, large = flat[0]["activation_bytes"], flat[-1]["activation_bytes"]
    ratios["cached_peak_memory_over_sentence_transformers_cached"] = ours / theirs
    ratios["activation_memory_of_largest_over_smallest_batch"] = large / small
    return ratios


def run(options: argparse.Namespace) -> None:
    size = PRESETS[options.preset]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "sentence-transformers"))
    machine = f"{describe_machine('cpu')}; {packages}"
    print(machine)
    tokenizer, batch_of = text_batches(size, options.code_root)
    models = make_models(size, tokenizer)
    found: dict = {"text": compare_text(size, models, batch_of, options.turns)}
    found["float64_gradient_error"] = exact_errors(size, models, batch_of)
    found["fixed"] = compare_fixed(size, models, 7 * options.turns)
    found["flat"] = flat_memory(size, models)
    found["ratios"], found["ratios_of_cpu_seconds"] = ratios_of(found), ratios_of(found, "cpu_seconds")
    print()
    for name, value in found["ratios"].items():
        print(f"{name:<56}{value:>7.3f}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        report = {"command": " ".join(sys.argv), "machine": machine, **found}
        (options.output / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {options.output}/results.json")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="cpu")
    parser.add_argument("--turns", type=int, default=3, help="turns of the text comparison; the others follow it")
    parser.add_argument("--code_root", help="read code-search pairs from this folder instead of the standard library")
    parser.add_argument("--output", type=Path, help="write results.json into this folder")
    options = parser.parse_args(argv)
    run(options)


if __name__ == "__main__":
    main()
