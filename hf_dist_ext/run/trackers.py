"""The experiment trackers of `report_to` and the packages they need, so that a run without them ends before it starts.

Trainer finds out when its callbacks are made, after models were loaded on every rank. The module imports no torch.
"""

from __future__ import annotations

import importlib.util

from hf_dist_ext.errors import UsageError

# Each tracker needs one package of each tuple; from transformers 5.23's integration_utils.py.
PACKAGES: dict[str, list[tuple[str, ...]]] = {
    "azure_ml": [("azureml",)],
    "clearml": [("clearml",)],
    "codecarbon": [("codecarbon",)],
    "comet_ml": [("comet_ml",)],
    "dagshub": [("dagshub",), ("mlflow",)],
    "dvclive": [("dvclive",)],
    "flyte": [("flytekit",)],
    "kubeflow": [],
    "mlflow": [("mlflow",)],
    "neptune": [("neptune",)],
    "swanlab": [("swanlab",)],
    "tensorboard": [("tensorboard", "tensorboardX")],
    "trackio": [("trackio",)],
    "wandb": [("wandb",)],
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
