"""The package's metadata. Tool settings are in pyproject.toml, the tested versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

# The floors are tested on Python 3.10 (constraints-floor.txt). Why they are not lower: before torch 2.11 a launcher
# kills on SIGTERM what could have saved itself (launch.py), before 2.9 async saves find no stager, and beside 2.7
# transformers 5.20 is not imported. transformers 5.20 takes warmup_steps as a share of all steps and FSDP version 2
# from a boolean, and asks itself for huggingface_hub 1.31, safetensors 0.8, tokenizers 0.23.1 and, for adapters, peft
# 0.20. accelerate 1.14 reads every key of configs/accelerate. Before datasets 4.8, which asks
# for pyarrow 21, a stream's shuffle buffers are others. Tensor parallelism alone needs transformers 5.23.
REQUIRED = [
    "torch>=2.11",
    "transformers>=5.20",
    "accelerate>=1.14",
    "datasets>=4.8",
    "evaluate>=0.4.6",
    "filelock>=3.12",
    "huggingface_hub>=1.31",
    "numpy>=1.26",
    "peft>=0.20",
    "psutil>=5.9",
    "pyarrow>=21",
    "pyyaml>=6.0.1",
    "rich>=13",
    "safetensors>=0.8",
    "sentence-transformers>=6.2",
    "tokenizers>=0.23.1",
]
TEST = [
    "jsonschema>=4.20", "matplotlib>=3.8", "optuna>=5", "pytest>=8", "pytest-timeout>=2.3.1", "pytest-xdist>=3.8",
    "scikit-learn>=1.4", "tensorboard>=2.16.2",
]  # fmt: skip
IMAGE, PLOT = ["pillow>=10"], ["matplotlib>=3.8"]

setup(
    name="hf_dist_ext",
    version=re.search(r'^__version__ = "(.+)"', (HERE / "hf_dist_ext" / "__init__.py").read_text(), re.MULTILINE)[1],
    description="Exact full-batch contrastive training for the Hugging Face Trainer, from one process to DDP and FSDP",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # fcntl's locks, fork and POSIX signals are used throughout: Linux, and Windows through WSL; macOS was not tried.
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords="contrastive learning, embeddings, gradient cache, transformers, distributed training",
    python_requires=">=3.10",
    install_requires=REQUIRED,
    extras_require={
        "image": IMAGE,
        "plot": PLOT,
        "deepspeed": ["deepspeed>=0.19.8"],  # older ones apply updates that are not finite
        "tracking": ["tensorboard>=2.16.2", "wandb>=0.19"],
        "digits": [*IMAGE, "scikit-learn>=1.4"],  # the pictures of configs/digits_projection.json
        "images": [*IMAGE, *PLOT],  # those of configs/glyph_search.json, drawn with a font of matplotlib
        "test": TEST,
        "dev": [*TEST, "mypy>=2", "ruff>=0.12"],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.30"],  # mkdocs build
    },
    # The presets live in configs/accelerate, where a user looks for them; a wheel carries them inside the package.
    packages=[
        *find_namespace_packages(include=["hf_dist_ext*"], exclude=["*__pycache__*", "hf_dist_ext.examples*"]),
        "hf_dist_ext._configs",
    ],
    package_dir={"hf_dist_ext._configs": "configs/accelerate"},
    package_data={"hf_dist_ext._configs": ["*.yaml"], "hf_dist_ext": ["examples/**/*", "py.typed"]},
    entry_points={"console_scripts": ["hf-dist = hf_dist_ext.cli:main"]},
)
