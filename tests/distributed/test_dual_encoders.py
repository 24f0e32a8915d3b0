"""Runs of CLIP and SigLIP: FSDP2 on two processes trains what one process trains, and the folder is whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from tests.distributed.forked import launch, train_hf
from tests.tasks.test_stages import main
from tests.tiny_models import WORDS, save_dual_encoder

TEXTS = [" ".join(WORDS[number % 9 :][: 1 + number % 5]) for number in range(24)]


@pytest.fixture
def run_file(tmp_path):
    def write(family: str, **more) -> Path:
        save_dual_encoder(family, tmp_path / "model")
        rows = []
        for number, text in enumerate(TEXTS):
            Image.new("RGB", (20, 20), (number * 10, 255 - number * 10, 80)).save(tmp_path / f"{number}.png")
            rows.append({"caption": text, "file": f"{number}.png"})
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
        fields = {
            "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "pairs.jsonl"),
            "columns": {"query": "caption", "positive": "file"}, "image_columns": ["positive"],
            "image_folder": str(tmp_path), "loss": "siglip" if family == "siglip" else "infonce", "optim": "sgd",
            "gradient_cache_chunk_size": 3, "max_steps": 4, "save_steps": 2, "learning_rate": 0.05, "use_cpu": True,
            "disable_tqdm": True, "report_to": "none", "normalize": True,
        }  # fmt: skip
        (tmp_path / "run.json").write_text(json.dumps(fields | more))
        return tmp_path / "run.json"

    return write


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family, mode, more", [
    ("clip", "multi_gpu_fsdp", {}),
    ("siglip", "fsdp-sharded", {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-3}),
    ("siglip", "multi_gpu_fsdp", {"trainable_modules": ["text"], "frozen_parts_fsdp": "shard"}),
])  # fmt: skip
def test_two_processes_of_fsdp_train_what_one_trains_and_keep_the_scale(run_file, tmp_path, family, mode, more):
    alone, two = tmp_path / "alone", tmp_path / "two"
    main(run_file(family, output_dir=str(alone), per_device_train_batch_size=8, **more))
    path = run_file(family, output_dir=str(two), per_device_train_batch_size=4, **more)
    launch(mode, 2, train_hf, "--config", path)
    before, one, found = weights_of(tmp_path / "model"), weights_of(alone), weights_of(two)
    assert found.keys() == one.keys() == before.keys()
    scales = {"logit_scale"} | ({"logit_bias"} if family == "siglip" else set())
    assert all(torch.equal(found[name], before[name]) for name in scales)
    moved = {name for name in found if not torch.equal(found[name], before[name])}
    assert len(moved) > 20 and any(name.startswith("vision_model") for name in moved) != ("trainable_modules" in more)
    for name, weight in one.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
    shutil.rmtree(two / "checkpoint-4")
    launch(mode, 2, train_hf, "--config", path, "--resume_from_checkpoint", "true")
    again = weights_of(two)
    assert again.keys() == found.keys() and all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_text_is_encoded_by_the_folder_as_the_run_reads_it_whatever_else_is_in_its_batch(run_file, tmp_path, family):
    """SigLIP gives the vector of the last position: it is the same only where all texts have one width."""
    main(run_file(family, output_dir=str(tmp_path / "out"), per_device_train_batch_size=8, eval_holdout=8))
    served = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    together = served.encode(TEXTS, convert_to_tensor=True)
    alone = torch.stack([served.encode([text], convert_to_tensor=True)[0] for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    width = served.preprocess(TEXTS[:1])["input_ids"].shape[1]
    assert width == (16 if family == "siglip" else 3)
    report = json.loads((tmp_path / "out" / "metrics.json").read_text())
    more = {"model_name_or_path": str(tmp_path / "out"), "output_dir": str(tmp_path / "more"), "learning_rate": 0.0}
    main(run_file(family, eval_holdout=8, per_device_train_batch_size=8, max_steps=1, **more))
    again = json.loads((tmp_path / "more" / "metrics.json").read_text())
    assert again["before"] == report["after"]
