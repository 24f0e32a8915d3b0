"""Words find pictures, and pictures words: a pair of towers that was trained, asked by a text or a picture.

    pair = TowerPair.load("outputs/glyph_search")
    pair.embed(["greek small letter alpha"])              # (1, D)
    pair.embed([PIL.Image.open("alpha.png")])             # (1, D), comparable with the former

Texts go through the column of the text tower, with that column's prompt and length, pictures through the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor

from hf_dist_ext.data.collator import ContrastiveCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.towers import TowerModel
from hf_dist_ext.tasks.image_pairs import IMAGE, TEXT, pair_collator

ROWS_PER_BATCH = 64


class TowerPair:
    """A pair of towers with what makes texts and pictures into its features."""

    def __init__(self, model: TowerModel, collator: ContrastiveCollator):
        self.model, self.collator = model, collator
        columns = reversed(model.column_to_tower.items())
        self.columns = {tower: column for column, tower in columns}  # the first of each

    @classmethod
    def load(cls, folder: str | Path) -> TowerPair:
        """Of the folder that a run of towers ended with; texts get the prompts and lengths of that run."""
        model = TowerModel.from_pretrained(folder)
        if set(model.towers) != {TEXT, IMAGE}:
            raise UsageError(f"{folder} has the towers {', '.join(model.towers)}, not a text and an image tower.")
        path = Path(folder, "run.json")
        run = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        try:
            processor = AutoProcessor.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} holds a model but no processor. Save the processor beside it.") from error
        columns, prompts = list(model.column_to_tower), run.get("prompts")
        if prompts is None:  # such a run, or whoever wrote the folder, has the model's own
            prompts = {column: model.prompts[column] for column in columns if column in model.prompts}
        collator = pair_collator(model, processor, columns, prompts, run.get("max_length"))
        return cls(model.to("cuda" if torch.cuda.is_available() else "cpu"), collator)

    @torch.inference_mode()
    def embed(self, values: Sequence[Any], rows_per_batch: int = ROWS_PER_BATCH) -> torch.Tensor:
        """(len(values), D) float32 on the CPU, of texts or of PIL images."""
        column = self.columns[TEXT if isinstance(values[0], str) else IMAGE]
        vectors = []
        for first in range(0, len(values), rows_per_batch):
            features = self.collator.features(column, list(values[first : first + rows_per_batch]))
            features = {name: value.to(self.model.device) for name, value in features.items()}
            vectors.append(self.model(column=column, **features).embeddings.float().cpu())
        return torch.cat(vectors)

    encode_query = encode_document = embed

    def supports(self, modality: str) -> bool:
        return modality in (TEXT, IMAGE)

    @staticmethod
    def similarity(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """(q, D), (M, D) -> (q, M): dot products, as in training."""
        return queries @ documents.T
