"""Trains and audits sound models: neither the check in every step nor the audit may report anything.

python tests/parity/sound_runs.py                  # 1,000 steps in each precision, half an hour on two cores
python tests/parity/sound_runs.py --steps 100
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_dist_ext.audit.audit import AuditReport  # noqa: E402
from hf_dist_ext.engine.losses import InfoNCELoss  # noqa: E402
from hf_dist_ext.errors import RunError  # noqa: E402
from hf_dist_ext.training.arguments import DistTrainingArguments  # noqa: E402
from hf_dist_ext.training.trainer import DistTrainer  # noqa: E402
from tests.parity.exactness_worker import ROUTED, THREE, Case, build_model, collate  # noqa: E402

DTYPES = ("float64", "float32", "bf16")
ACCUMULATED = {"gradient_accumulation_steps": 2}
PACKED = {"gradient_cache_packing": True}
# A model of the exactness table -> arguments beside those of `sound_run`.
MODELS: dict[str, dict] = {
    "bert": {}, "deep": PACKED, "deep:0.2": {}, "dropout": ACCUMULATED, "lora": {}, "lora:0.3": PACKED,
    "towers": {}, "two alike": {"frozen_modules": ["document"]}, "two texts": {}, "table and text": {},
    "dense": {"gradient_cache_keep_graph": 2}, "static": {}, "qwen3:16": ACCUMULATED, "llama": {},
    "half frozen": {}, "xlm-roberta": PACKED, "modernbert": {}, "base": {"trainable_modules": ["projection"]},
}  # fmt: skip


def sound_run(model: str, dtype: str, steps: int, folder: str, audits: bool = True) -> str:
    """What was reported of it; "": nothing."""
    columns = {name: 1 for name in THREE} if model not in ("towers", *ROUTED) else {"query": 1, "positive": 1}
    case = Case(model, model, columns)
    made = build_model(model, dtype=torch.float64 if dtype == "float64" else torch.float32)
    args = DistTrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=steps, learning_rate=1e-3, save_strategy="no", report_to=[],
        disable_tqdm=True, logging_steps=10**6, use_cpu=True, bf16=dtype == "bf16",
        **{"gradient_cache_chunk_size": 3, "gradient_cache_packing": False} | MODELS[model],
    )  # fmt: skip
    trainer = DistTrainer(
        made.to(torch.float64 if dtype == "float64" else torch.float32).train(), args, loss=InfoNCELoss(0.1, True),
        data_collator=lambda rows: collate(case, rows, 0), train_dataset=list(range(2000)),
    )  # fmt: skip
    report = trainer.audit() if audits else AuditReport("no audit")
    try:
        trainer.train()
    except RunError as error:
        return f"{report}\n{error}"
    return "" if report.is_right else str(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each precision, over all models")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--without_audit", action="store_true", help="train alone")
    options = parser.parse_args()
    steps, reported = -(-options.steps // len(options.models)), 0
    for dtype in options.dtypes:
        for model in options.models:
            with tempfile.TemporaryDirectory() as folder:
                said = sound_run(model, dtype, steps, folder, not options.without_audit)
            reported += bool(said)
            print(f"{dtype:8} {model:20} {steps} steps: {said or 'nothing reported'}", flush=True)
    runs = len(options.dtypes) * len(options.models)
    print(f"{runs * steps} steps and {runs * (not options.without_audit)} audits: {reported} reported")
    sys.exit(1 if reported else 0)


if __name__ == "__main__":
    main()
