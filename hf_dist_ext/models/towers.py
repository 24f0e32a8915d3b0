"""`TowerModel`: one tower per column, for columns that one backbone cannot embed, such as a caption and its image.

    towers = {"text": CLIPTextModelWithProjection(...), "image": CLIPVisionModelWithProjection(...)}
    model = TowerModel(towers, column_to_tower={"query": "text", "positive": "image"})
    model(column="positive", pixel_values=pixels).embeddings  # (B, D)

(1) the column names the tower  (2) the tower embeds its features  (3) its vectors are divided by their L2 norm

A tower is an `EmbeddingModel` or a transformers model that ends in one vector per row (CLIP's `*ModelWithProjection`,
SigLIP's text and vision models). On disk each tower is a folder of its own, beside `towers.json`. Beside it lie files
by which sentence-transformers loads the whole: those that make one model of a dual encoder's towers
(models/dual_encoders.py), or a Router's over the towers of queries and documents (models/router_folder.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import dual_encoders, router_folder
from hf_dist_ext.models.backbones import load_complete
from hf_dist_ext.models.embedding_model import EmbeddingModel, EmbeddingOutput
from hf_dist_ext.models.model_folder import ModelFolder
from hf_dist_ext.models.weights import names_without_adapters

# where a tower's output keeps the vector per row, the first that is there
VECTOR_FIELDS = ("embeddings", "text_embeds", "image_embeds", "pooler_output")


class TowerModel(PreTrainedModel):
    """Towers by name, and the name of each column's tower; two columns may share one.

    A PreTrainedModel, so that Trainer saves it by `save_pretrained`; its own config says nothing. `prompts` and
    `tokenizers` (of towers that are `EmbeddingModel`s, by name) change nothing here: they are kept for its folder.
    """

    accepts_loss_kwargs = False  # as in EmbeddingModel
    supports_gradient_checkpointing = True
    all_tied_weights_keys: dict[str, str] = {}

    def __init__(
        self, towers: Mapping[str, PreTrainedModel], column_to_tower: Mapping[str, str], normalize: bool = True
    ):
        super().__init__(PreTrainedConfig())
        for column, tower in column_to_tower.items():
            if tower not in towers:
                raise UsageError(f'column "{column}" asks for the tower "{tower}"; there are {list(towers)}.')
        self.towers = nn.ModuleDict(dict(towers))
        self.column_to_tower = dict(column_to_tower)
        self.normalize = normalize
        self.prompts: dict[str, str] = {}
        self.default_prompt_name: str | None = None
        self.tokenizers: dict[str, Any] = {}

    def _each(self) -> dict[str, PreTrainedModel]:
        return cast("dict[str, PreTrainedModel]", dict(self.towers.items()))

    @property
    def embedding_dim(self) -> int:
        """That of every tower's vectors."""
        tower = next(iter(self._each().values()))
        names = ("projection_dim", "projection_size", "hidden_size")
        dims = (getattr(tower, "embedding_dim", None), *(getattr(tower.config, name, None) for name in names))
        return next(dim for dim in dims if dim)

    @property
    def is_routed(self) -> bool:
        """Whether the towers are those of texts that are queries, and of texts that are documents."""
        are_text = all(isinstance(tower, EmbeddingModel) for tower in self._each().values())
        return are_text and set(self.towers) == {router_folder.QUERY, router_folder.DOCUMENT}

    @property
    def _of_text(self) -> dict[str, PreTrainedModel]:
        return {name: tower for name, tower in self._each().items() if tower.main_input_name != "pixel_values"}

    @property
    def why_padded(self) -> str | None:
        """As in `EmbeddingModel`, of the first tower of texts that says something."""
        found = {
            name: getattr(tower, "why_padded", f"{type(tower).__name__} is no EmbeddingModel")
            for name, tower in self._of_text.items()
        }
        return next((f'in the tower "{name}", {why}' for name, why in found.items() if why), None)

    def why_many_calls(self, *options: Any) -> str | None:
        """As in `EmbeddingModel`; `why_padded` is None."""
        towers: Any = self._of_text.values()
        return next(filter(None, (tower.why_many_calls(*options) for tower in towers)), None)

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None: every tower has its own. accelerate asks before it shards, and transformers would raise."""

    def forward(self, column: str, vectors: torch.Tensor | None = None, **features) -> EmbeddingOutput:
        """Features of B rows of `column` -> `embeddings` (B, D), at least float32. `vectors` are embeddings of a
        frozen tower that were computed before; they are returned as they are."""
        if vectors is not None:
            return EmbeddingOutput(embeddings=vectors)
        if column not in self.column_to_tower:
            raise UsageError(f'no tower for column "{column}"; column_to_tower names {list(self.column_to_tower)}.')
        tower = self.towers[self.column_to_tower[column]]  # (1)
        output = tower(**features)  # (2)
        found = [getattr(output, name, None) for name in VECTOR_FIELDS]
        vectors = next((vectors for vectors in found if vectors is not None), None)  # (B, D)
        if vectors is None:
            raise UsageError(f"{type(tower).__name__} returns none of {', '.join(VECTOR_FIELDS)}: no vector per row.")
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return EmbeddingOutput(
            embeddings=nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors
        )  # (3)

    def activation_checkpointing_enable(self, **kwargs) -> None:  # type: ignore[override]
        for tower in self._each().values():
            tower.activation_checkpointing_enable(**kwargs)

    def activation_checkpointing_disable(self) -> None:
        for tower in self._each().values():
            tower.activation_checkpointing_disable()

    # What transformers before 5.23 calls the two above. Remove when the minimum is 5.23.
    def gradient_checkpointing_enable(self, **kwargs) -> None:  # type: ignore[override]
        for tower in self._each().values():
            tower.gradient_checkpointing_enable(**kwargs)

    def gradient_checkpointing_disable(self) -> None:
        for tower in self._each().values():
            tower.gradient_checkpointing_disable()

    def save_pretrained(  # type: ignore[override]  # no other option of transformers' is taken
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """One folder per tower, and `towers.json`; `state_dict` as in `EmbeddingModel.save_pretrained`."""
        if not is_main_process:
            return
        folder = Path(save_directory)
        state_dict = self.state_dict() if state_dict is None else state_dict
        for name, tower in self._each().items():
            prefix = f"towers.{name}."
            weights = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
            if weights.keys() != set(names_without_adapters(tower)):
                raise UsageError(f'state_dict must hold every weight of the tower "{name}" under "{prefix}".')
            tower.save_pretrained(folder / name, state_dict=weights)
        self.save_description(folder)
        if self.is_routed:
            router_folder.write_router(folder, self.normalize, self.prompts, self.default_prompt_name)
        else:
            dual_encoders.write(folder, self._each(), self.normalize, self.prompts, self.default_prompt_name)

    def save_description(self, folder: str | Path) -> None:
        """What there is beside weights: `towers.json`, tokenizers, and a config per tower that has none there yet."""
        folder = Path(folder)
        for name, tower in self._each().items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            if not (folder / name / "config.json").is_file():
                tower.config.save_pretrained(folder / name)
            if name in self.tokenizers:
                self.tokenizers[name].save_pretrained(folder / name)
        description = {
            "towers": {name: type(tower).__name__.removeprefix("FSDP") for name, tower in self._each().items()},
            "column_to_tower": self.column_to_tower,
            "normalize": self.normalize,
        }
        named = {"prompts": self.prompts, "default_prompt_name": self.default_prompt_name}
        description |= {name: value for name, value in named.items() if value}
        (folder / "towers.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, folder: str | Path, dtype: torch.dtype | str = "auto"
    ) -> TowerModel:
        """The model of a folder that `save_pretrained` wrote; `dtype` "auto" is what its files hold."""
        return cls.from_description(folder, lambda name, kind: load_tower(Path(folder, name), kind, dtype))

    @classmethod
    def from_description(cls, folder: str | Path, tower: Callable[[str, str], PreTrainedModel]) -> TowerModel:
        """The model that `folder` describes, of the towers that `tower` gives for their names and classes' names."""
        folder = Path(folder)
        if not (folder / "towers.json").is_file():
            raise UsageError(f"{folder} has no towers.json, so it is no folder of a TowerModel.")
        description = json.loads((folder / "towers.json").read_text(encoding="utf-8"))
        towers = {name: tower(name, kind) for name, kind in description["towers"].items()}
        model = cls(towers, description["column_to_tower"], description["normalize"]).eval()
        model.prompts = description.get("prompts", {})
        model.default_prompt_name = description.get("default_prompt_name")
        return model


def load_route(folder: Path, contents: ModelFolder, **options) -> EmbeddingModel:
    """The model of one route of a Router's folder; `contents`: what `read_routes` says of it."""
    tower = EmbeddingModel.from_pretrained(folder, contents=contents, **options)
    tower.config._name_or_path = str(folder)
    return tower


def class_of_tower(class_name: str, folder: str | Path) -> type[PreTrainedModel]:
    if class_name == EmbeddingModel.__name__:
        return EmbeddingModel
    model_class = getattr(transformers, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise UsageError(f'{folder} is a "{class_name}", which this version of transformers does not have.')
    return model_class


def load_tower(folder: str | Path, class_name: str, dtype: torch.dtype | str, **options) -> PreTrainedModel:
    """A tower with its weights; `options` go to its `from_pretrained`."""
    model_class = class_of_tower(class_name, folder)
    if model_class is EmbeddingModel:
        return EmbeddingModel.from_pretrained(folder, dtype=dtype, **options)
    return load_complete(model_class, folder, dtype=dtype, **options)
