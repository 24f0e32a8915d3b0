"""Trainings on a fake CUDA device, each for two updates; `python -m tests.fake_cuda.cases OUTPUT.json [CASE ...]`.

What is written of each case is that of its second update, from its batch to the end: what made the host wait, how
often a weight was cast at most, and the kernels of every kind of phase (engine/gradient_cache.py).
"""

from __future__ import annotations

import os
import sys

from tests.fake_cuda.device import FakeDevice, install

DEVICE = install()

import gc  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from unittest import mock  # noqa: E402

import datasets  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, GISTEmbedLoss  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from transformers import masking_utils  # noqa: E402

from hf_dist_ext import DistTrainer, DistTrainingArguments  # noqa: E402
from hf_dist_ext.engine.late_interaction import LateInteractionLoss  # noqa: E402
from hf_dist_ext.engine.losses import InfoNCELoss  # noqa: E402
from hf_dist_ext.engine.sigmoid_loss import SigmoidLoss  # noqa: E402
from hf_dist_ext.models.from_run import build  # noqa: E402
from tests.sentence_models import picture_model, pictures, text_model  # noqa: E402
from tests.tiny_models import WORDS, model_config, tiny_tokenizer  # noqa: E402

ROWS, CHUNK = 8, 4
masking_utils.is_tracing = lambda *given: False  # it takes tensors without values for tracing, and hides a read


def text(start: int, words: int) -> str:
    return " ".join(WORDS[(start + i) % len(WORDS)] for i in range(words))


def pairs(**more: Callable[[int], object]) -> datasets.Dataset:
    columns = {"query": lambda i: text(i, 1 + i % 5), "positive": lambda i: text(i, 2 + i % 17), **more}
    return datasets.Dataset.from_list([{name: of(i) for name, of in columns.items()} for i in range(4 * ROWS)])


def model_of(name: str, **more) -> nn.Module:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    changes = no_dropout if name in ("bert", "xlm-roberta") else {}
    return build(model_config=model_config(name, **changes), tokenizer=tiny_tokenizer(), **more)


@dataclass
class Case:
    model: Callable[[Path], nn.Module]
    loss: Callable[[nn.Module], nn.Module] = lambda model: InfoNCELoss(learnable_temperature=True)
    data: Callable[[], datasets.Dataset] = pairs
    options: dict = field(default_factory=dict)
    processes: int = 1
    launcher: dict[str, str] = field(default_factory=dict)  # what accelerate's adds to the environment


def family(name: str, **more) -> Callable[[Path], nn.Module]:
    return lambda folder: model_of(name, **more)


PADDED, PACKED = {"gradient_cache_packing": False}, {"gradient_cache_packing": True}
rated = lambda: pairs(label=lambda i: i / 32)  # noqa: E731
with_pictures = lambda: datasets.Dataset.from_dict(  # noqa: E731
    {"image": pictures(4 * ROWS), "text": [text(i, 2 + i % 9) for i in range(4 * ROWS)]}
)
FSDP = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # fmt: skip
CASES = {
    "bert packed": Case(family("bert"), options=PACKED),
    "bert padded": Case(family("bert"), options=PADDED),
    "modernbert packed": Case(family("modernbert"), options=PACKED),
    "modernbert padded": Case(family("modernbert"), options=PADDED),
    "xlm-roberta packed": Case(family("xlm-roberta"), options=PACKED),
    "xlm-roberta padded": Case(family("xlm-roberta"), options=PADDED),
    "qwen3 packed": Case(family("qwen3", pooling="last"), options=PACKED),
    "qwen3 padded": Case(family("qwen3", pooling="last"), options=PADDED),
    "dense": Case(family("bert", projection_dim=16), lambda model: InfoNCELoss(symmetric=True)),
    "dropout": Case(lambda folder: build(model_config=model_config("bert"), tokenizer=tiny_tokenizer())),
    "clip": Case(picture_model, data=with_pictures),
    "siglip": Case(family("bert"), lambda model: SigmoidLoss()),
    "late interaction": Case(family("bert", pooling="tokens", projection_dim=8), lambda model: LateInteractionLoss()),
    "cosent": Case(family("bert"), CoSENTLoss, rated),
    "gist": Case(text_model, lambda model: GISTEmbedLoss(model, text_model(Path(tempfile.mkdtemp())))),
    "frozen layers": Case(family("bert", projection_dim=16), options={"trainable_modules": ["layer.1", "projection"]}),
    "frozen backbone": Case(family("bert", projection_dim=16), options={"trainable_modules": ["projection"]}),
    "kept graphs": Case(family("bert"), options={"gradient_cache_keep_graph": 3}),
    "no cache": Case(family("bert"), options={"gradient_cache_chunk_size": None}),
    "float32": Case(family("bert"), options={"bf16": False}),
    "fp16": Case(family("bert"), options={"bf16": False, "fp16": True}),
    "accumulation": Case(family("bert"), options={"gradient_accumulation_steps": 2}),
    "ddp": Case(family("bert"), processes=2),
    "fsdp2": Case(family("bert"), processes=2, launcher=FSDP),
    "hsdp": Case(
        family("bert"),
        lambda model: InfoNCELoss(),
        pairs,
        {"sharding": "HYBRID_SHARD", "sharding_group_size": 2},
        4,
        FSDP,
    ),
}


class Watch:
    """Of one training. `steps`: what was noted of every update."""

    def __init__(self, trainer: DistTrainer, device: FakeDevice):
        self.trainer, self.device = trainer, device
        self.steps: list[dict] = []
        self.kernels: dict[str, list[int]] = defaultdict(list)  # of this update, by the kind of phase
        self._fetch, trainer.get_batch_samples = trainer.get_batch_samples, self._begin
        self._phase, trainer.clock.phase = trainer.clock.phase, self._counted

    def _begin(self, *given):
        self.end()
        return self._fetch(*given)

    def end(self) -> None:
        device, casts = self.device, self.device.casts
        self.steps.append(
            {"reads": dict(device.reads), "copies": dict(device.copies), "casts": max(casts.values(), default=0),
             "cast": len(casts), "kernels": dict(self.kernels)}
        )  # fmt: skip
        self.kernels = defaultdict(list)
        device.reset()

    @contextmanager
    def _counted(self, phase) -> Iterator[None]:
        before = self.device.kernels.total()
        with self._phase(phase):
            yield
        self.kernels[phase.kind].append(self.device.kernels.total() - before)


@contextmanager
def launched(case: Case) -> Iterator[None]:
    """As the first of several processes, whose collectives answer at once with what it sends itself."""
    if case.processes == 1:
        yield
        return
    size = str(case.processes)
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "1"}  # fmt: skip
    make, none = dist.new_group, {"backend": "fake"}
    of_cpus = mock.patch.object(dist, "new_group", lambda *given, **more: make(*given, **more | none))
    same = mock.patch.object(dist, "_verify_params_across_processes", lambda *given: None)  # reads what ranks have
    by_hook = mock.patch.object(nn.parallel, "DistributedDataParallel", Reduced)
    with mock.patch.dict(os.environ, names | case.launcher), of_cpus, same, by_hook:
        dist.init_process_group("fake", rank=0, world_size=case.processes, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


class Reduced(DistributedDataParallel):
    """Reduces by a hook, as the group has no results for DDP's own, and measures no time."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.register_comm_hook(None, self._as_it_is)
        self.logger = mock.Mock()

    @staticmethod
    def _as_it_is(state, bucket):
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        reduced.set_result(bucket.buffer())
        return reduced


def run(case: Case) -> dict:
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    with launched(case), tempfile.TemporaryDirectory() as folder:
        options = {"gradient_cache_chunk_size": CHUNK, "bf16": True} | case.options
        args = DistTrainingArguments(
            str(Path(folder, "run")), per_device_train_batch_size=ROWS, max_steps=2, logging_steps=100, report_to=[],
            save_strategy="no", disable_tqdm=True, dataloader_num_workers=0, **options,
        )  # fmt: skip
        model = case.model(Path(folder, "model"))
        if case.launcher:  # FSDP2 moves it in place; tests/strategies/test_placement.py sees that it moves all of it
            model.to(args.device)
        trainer = DistTrainer(model, args, train_dataset=case.data(), loss=case.loss(model))
        watch = Watch(trainer, DEVICE)
        trainer.train()
        watch.end()
        assert len(watch.steps) == 3, "before the first update, and after each"
        return watch.steps[2] | {"packs": trainer.step.sizes.may_pack}


def mistakes() -> dict:
    """What the device notes of one of each kind."""
    DEVICE.reset()
    there = torch.ones(8, 8).to("cuda")
    torch.ones(8).to("cuda", non_blocking=True)
    torch.ones(8).pin_memory().to("cuda", non_blocking=True)  # none
    bool(there.sum() > 0)
    there.tolist()
    try:
        torch.ones(8, 8) @ there
        return {"mixes": True}
    except RuntimeError as error:
        return {"reads": dict(DEVICE.reads), "copies": dict(DEVICE.copies), "error": str(error)}


def main() -> None:
    output, *names = sys.argv[1:]
    found = {}
    datasets.disable_progress_bars()
    gc.freeze()  # each end of a training collects garbage
    with DEVICE:
        found["mistakes"] = mistakes()
        for name in names or CASES:
            try:
                found[name] = run(CASES[name])
            except Exception:
                found[name] = {"error": traceback.format_exc()}
    Path(output).write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    os._exit(0)  # torch's threads would ask a device that is not there to end


if __name__ == "__main__":
    main()
