"""Measures what the planner predicts, on the CPU: one optimizer step through `DistTrainer`, every byte counted.

    python tests/parity/memory_worker.py CASES.json STRATEGY     # cases of memory_table.py; or under accelerate launch

(1) a run file becomes a model and a trainer, as scripts/train_hf.py does it; rows are random tokens, the last of each
    is padding
(2) saved activations: hooks on what autograd packs, weights and inputs left out; checkpointed layers pack again in
    backward, where hooks of their own hide it, so those are counted too
(3) parameters, gradients and optimizer state: the local bytes of their tensors
Rank 0 prints a line of JSON per case: {"predicted": {...}, "measured": {...}}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch import nn

from hf_dist_ext.data.collator import CONSTANTS
from hf_dist_ext.models import from_run
from hf_dist_ext.planner import catalog, memory
from hf_dist_ext.planner.from_run import workload_of
from hf_dist_ext.run.read import load_run
from hf_dist_ext.tasks import trace
from hf_dist_ext.tasks import trace_pictures as pictures
from hf_dist_ext.tasks.readers import stand_in
from tests.tiny_models import tiny_tokenizer

WHO_TRAINS = ("trainable_modules", "frozen_modules", "use_lora", "lora_r", "lora_target_modules")
PICTURE = 64  # pixels of a side, where a model takes any size
IMAGE = 63  # the token that stands for a part of a picture
PARTS = ("parameters", "gradients", "optimizer", "activations")


# ---- (2) ----


class SavedBytes:
    """Bytes saved for backward: now, and the most so far. Storages count once; weights and inputs do not count."""

    def __init__(self, model: nn.Module):
        self.model, self.inputs = model, set()
        self.held: dict[int, int] = {}
        self.now = self.most = 0

    def is_weight(self, key: int) -> bool:
        # asked when something is saved: FSDP puts gathered weights in place only while a layer runs
        return key in self.inputs or any(storage_of(one) == key for one in self.model.parameters())

    def add(self, tensor: torch.Tensor) -> Token | None:
        key = storage_of(tensor)
        return None if self.is_weight(key) else Token(self, tensor, key)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        def pack(tensor: torch.Tensor):
            return (tensor.detach(), self.add(tensor))  # with its graph, what no backward reaches would stay alive

        original = torch.utils.checkpoint._recomputation_hook
        owner = self

        class Counting(original):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                inner, tokens = self.pack_hook, []
                self.tokens = tokens

                def pack_again(tensor):
                    tokens.append(owner.add(tensor))
                    return inner(tensor)

                self.pack_hook = pack_again

        torch.utils.checkpoint._recomputation_hook = Counting
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0]):
                yield
        finally:
            torch.utils.checkpoint._recomputation_hook = original


class Token:
    """Alive as long as what it counts is saved."""

    def __init__(self, owner: SavedBytes, tensor: torch.Tensor, key: int):
        self.owner, self.key, self.size = owner, key, tensor.untyped_storage().nbytes()
        self.tensor = tensor.detach()  # keeps the storage, so that its address stays its own
        owner.held[key] = owner.held.get(key, 0) + 1
        if owner.held[key] == 1:
            owner.now += self.size
            owner.most = max(owner.most, owner.now)

    def __del__(self):
        self.owner.held[self.key] -= 1
        if not self.owner.held[self.key]:
            self.owner.now -= self.size


def storage_of(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()


def local_bytes(tensors) -> int:
    locals_ = [getattr(one, "_local_tensor", one) for one in tensors if isinstance(one, torch.Tensor)]
    return sum(one.numel() * one.element_size() for one in locals_)


# ---- (1) ----


def run_of(case: dict, folder: str):
    path = Path(folder, "run.json")
    content = {"dataset_name": "code-search", "output_dir": str(Path(folder, "out")), **case["run"]}
    if case.get("code"):
        content |= {"model_config": None, "model_name_or_path": own_code(Path(folder, "own"), case)}
    who = {name: content.pop(name) for name in WHO_TRAINS if name in content}
    path.write_text(json.dumps(content), encoding="utf-8")
    run = load_run(["--config", str(path)])
    run.given |= who  # applied by `build` itself, so that what is measured is independent of frozen/who_trains.py
    for name in who.keys() & vars(run.options).keys():
        setattr(run.options, name, who[name])
    return run


def own_code(folder: Path, case: dict) -> str:
    """A folder with a model's code and weights, and a tokenizer, which reads no text here."""
    import transformers

    folder.mkdir()
    (folder / "own_code.py").write_text(case["code"], encoding="utf-8")
    maps = {"AutoConfig": "own_code.OwnConfig", "AutoModel": "own_code.OwnModel"}
    content = case["run"]["model_config"] | {"model_type": "own", "auto_map": maps}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    transformers.AutoModel.from_config(config, trust_remote_code=True).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def shape_of(case: dict, run) -> dict:
    shape = trace.complete_config(run.options)
    return shape | ({"tiles_of_picture": case["tiles"]} if case.get("tiles") else {})


def predict(case: dict, run, strategy: str, world: int) -> dict[str, float]:
    work = replace(workload_of(run, shape_of(case, run)), mask_bytes=0, packs=False)  # as on a CPU
    found = trace.shape(run, work)
    work = replace(work, found=found, embedding_dim=found["embedding_dim"])
    settings = memory.Settings(is_checkpointed=work.is_checkpointed)
    chosen = next(one for one in catalog.STRATEGIES if one.name == strategy)
    case = memory.Case(work, chosen, catalog.Hardware(world), settings)
    found = memory.estimate(case)
    sharded = "w" in chosen.shards
    whole = memory.model_of(work).whole
    held = memory.activation_cost(case)
    stored = whole.frozen_stored + whole.trained_stored
    return {
        "parameters": stored / (world if sharded else 1),
        "gradients": (whole.trained_stored - (strategy != "DDP") * whole.unused_stored) / (world if sharded else 1),
        "optimizer": found.optimizer,
        "activations": held.saved + held.casts,
    }


def measure(case: dict, run, folder: str) -> dict[str, float]:
    from hf_dist_ext.engine.losses import InfoNCELoss
    from hf_dist_ext.training.arguments import DistTrainingArguments
    from hf_dist_ext.training.trainer import DistTrainer

    torch.manual_seed(0)
    args = DistTrainingArguments(
        **run.training, use_cpu=True, max_steps=1, report_to="none", save_strategy="no", dataloader_pin_memory=False,
        remove_unused_columns=False, overwrite_output_dir=True, logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model, collate = build(case, run)
    found: dict[str, float] = {}

    class Measured(DistTrainer):
        def training_step(self, model, inputs, *more):
            saved = SavedBytes(model)
            found["parameters"] = local_bytes(model.parameters())
            columns = self._prepare_inputs(inputs)
            values = [one for name, column in columns.items() if name != CONSTANTS for one in column.values()]
            saved.inputs = {storage_of(one) for one in values if isinstance(one, torch.Tensor)}
            with saved.measured():
                loss = super().training_step(model, columns, *more)
            found["activations"] = saved.most
            found["gradients"] = local_bytes(one.grad for one in model.parameters() if one.grad is not None)
            return loss

    trainer = Measured(
        model, args, loss=InfoNCELoss(), train_dataset=Rows(256), data_collator=collate, processing_class=None
    )
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    found["optimizer"] = local_bytes(states)
    return found


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def build(case: dict, run):
    """Model and collator. Every text row has one padding token, so that attention takes a mask."""
    config = run.options
    lengths = config.max_length

    def texts(rows: list[int], column: str) -> dict[str, torch.Tensor]:
        length = lengths[column] if isinstance(lengths, dict) else lengths
        mask = torch.ones(len(rows), length, dtype=torch.long)
        mask[:, -1] = 0
        return {"input_ids": torch.randint(5, 60, (len(rows), length)), "attention_mask": mask}

    options = {"projection_dim": config.projection_dim, "dtype": config.dtype or "float32"}
    options["attn_implementation"] = config.attn_implementation
    if config.model_config is None:
        options |= {"trust_remote_code": config.trust_remote_code, "pooling": "mean", "normalize": True}
        model = from_run.build(config.model_name_or_path, **options)
    else:
        model = from_run.build(model_config=config.model_config, tokenizer=stand_in(config.model_config), **options)
    model.train()
    kind, shape = (config.model_config or {}).get("model_type"), shape_of(case, run)

    def collate(rows: list[int]) -> dict:
        if kind in ("clip", "siglip"):
            size = shape["vision_config"]["image_size"]
            pixels = torch.randn(len(rows), 3, size, size)
            of_columns = {"query": {"modality": "text"}, "positive": {"modality": "image"}}
            return {"query": texts(rows, "query"), "positive": {"pixel_values": pixels}, CONSTANTS: of_columns}
        features = {name: texts(rows, name) for name in ("query", "positive")}
        for name in config.image_columns or ():
            features[name] |= with_pictures(shape, features[name]["input_ids"])
        of_columns = dict.fromkeys(features, {"modality": "message"})
        return {**features, CONSTANTS: of_columns} if "message" in model[0].modality_config else features

    given = run.given
    if given.get("use_lora"):
        from peft import LoraConfig

        of_backbone = LoraConfig(r=given["lora_r"], target_modules=given["lora_target_modules"])
        model.requires_grad_(False).transformers_model.add_adapter(of_backbone)
    elif case.get("trains"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in case["trains"]))
    return model, collate


def with_pictures(config: dict, ids: torch.Tensor) -> dict:
    """One random picture at the start of every row (whose tokens are then its place), as the model takes it. Its
    sizes are written here, so that a plan's are checked, and the model counts the tokens."""
    kind, rows, side = config["model_type"], len(ids), config["vision_config"].get("image_size", PICTURE)
    side = side if isinstance(side, int) else side[0]
    tiles, patch = config.get("tiles_of_picture", 1), config["vision_config"]["patch_size"]
    patch = patch if isinstance(patch, int) else patch[0]
    counts, more = {"num_images": [1] * rows}, {}
    if kind.startswith("qwen"):
        patches = PICTURE // 8 * 8 // patch
        tokens, shape = (patches // 2) ** 2, (rows * patches**2, 3 * 2 * patch**2)
        more = {"image_grid_thw": torch.tensor([[1, patches, patches]] * rows), "mm_token_type_ids": None}
    elif kind == "llava_next":  # the whole picture, and one tile whose lines have an end each
        tokens, shape = (side // 8) ** 2 * 2 + side // 8, (rows, 2, 3, side, side)
        more = {"image_sizes": torch.tensor([[side, side]] * rows)}
    elif kind in ("idefics3", "smolvlm"):
        tokens, shape = tiles * (side // 8 // config["scale_factor"]) ** 2, (rows, tiles, 3, side, side)
        counts["num_tiles"] = [tiles] * rows
    elif kind == "internvl":
        tokens, shape = tiles * (side // patch // 2) ** 2, (rows * tiles, 3, side, side)
        counts["num_tiles"] = [tiles] * rows
    else:
        tokens, shape = config.get("mm_tokens_per_image") or (side // 8) ** 2, (rows, 3, side, side)
    ids[:, :tokens] = IMAGE
    if "mm_token_type_ids" in more:
        more["mm_token_type_ids"] = (ids == IMAGE).int()
    return {"pixel_values": torch.randn(shape), **more, **counts}


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    strategy, rank = sys.argv[2], int(os.environ.get("RANK", "0"))
    pictures.PICTURE = PICTURE
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(case, folder)
            measured = measure(case, run, folder)
            predicted = predict(case, run, strategy, int(os.environ.get("WORLD_SIZE", "1")))
        if rank == 0:
            print(
                "CASE " + json.dumps({"name": case["name"], "predicted": predicted, "measured": measured}), flush=True
            )


if __name__ == "__main__":
    main()
