"""The experiment trackers of `report_to` and the packages they need, so that a run without them ends before it starts.

Trainer finds out when its callbacks are made, after models were loaded on every rank. The module imports no torch.
"""

from __future__ import annotations

import importlib.util

from hf_dist_ext.errors import UsageError

# Each tracker needs one package of each tuple, mostly of its own name; from transformers 5.23's integration_utils.py.
_NAMES = (
    "azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard trackio "
    "wandb"
).split()
PACKAGES: dict[str, list[tuple[str, ...]]] = {name: [(name,)] for name in _NAMES} | {
    "azure_ml": [("azureml",)],
    "dagshub": [("dagshub",), ("mlflow",)],
    "flyte": [("flytekit",)],
    "kubeflow": [],
    "tensorboard": [("tensorboard", "tensorboardX")],
}


def check(report_to: str | list[str] | None) -> None:
    """UsageError for a tracker that is unknown or not installed."""
    for name in [report_to] if isinstance(report_to, str) else report_to or []:
        if name in ("all", "none"):
            continue
        if name not in PACKAGES:
            known = ", ".join(PACKAGES)
            raise UsageError(f'report_to="{name}" is no tracker that Trainer knows. Choose from {known}.')
        for packages in PACKAGES[name]:
            if not any(importlib.util.find_spec(package) for package in packages):
                raise UsageError(
                    f'report_to="{name}", but {packages[0]} is not installed. Install it (pip install '
                    f"{packages[0].replace('_', '-')}), or remove it from report_to."
                )
