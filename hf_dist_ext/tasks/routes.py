"""Task "embedding" with a Router: queries through one encoder and documents through another -> `TowerModel`.

(1) each route of the folder is an `EmbeddingModel` of its own, trained on its own columns: the first column has the
    queries, every other one documents
(2) where both routes end with a normalization, the `TowerModel` does it
(3) each column has its route's tokenizer, length and prompt
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer

from hf_dist_ext.data.routed_collator import RoutedCollator
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import static_backbone
from hf_dist_ext.models.backbones import kind_of_model, lower_cased
from hf_dist_ext.models.model_folder import ModelFolder, read_reading, resolve_folder
from hf_dist_ext.models.router_folder import DOCUMENT, QUERY, ROUTERS, read_routes
from hf_dist_ext.models.towers import TowerModel, load_route
from hf_dist_ext.run.config import Run, RunConfig
from hf_dist_ext.run.fields import show


def has_routes(config: RunConfig) -> bool:
    if config.model_name_or_path is None:
        return False
    try:
        return kind_of_model(config.model_name_or_path, config.model_revision) in ROUTERS
    except (OSError, ValueError):  # EmbeddingModel's own loading says what is wrong
        return False


def build(run: Run, columns: list[str]) -> TowerModel:
    config = run.options
    for name in ("is_causal", "pooling", "projection_dim", "datasets", "tokenizer_name", "matryoshka_dims"):
        if run.given.get(name) not in (None, False):
            raise UsageError(
                f"{name}={show(run.given[name])}, but {config.model_name_or_path} has a Router, and its routes have "
                f"their own. Remove {name}."
            )
    folder = resolve_folder(config.model_name_or_path, config.model_revision)
    options = {"dtype": config.dtype or "float32", "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    routes = read_routes(folder)
    towers = {task: load_route(folder, contents, **options) for task, contents in routes.items()}  # (1)
    dims = {task: tower.embedding_dim for task, tower in towers.items()}
    if len(set(dims.values())) > 1:
        raise UsageError(
            f"{folder}: queries have {dims[QUERY]} dimensions and documents {dims[DOCUMENT]}, so they can not be "
            "compared. Give the wider route a Dense module."
        )
    query, *documents = columns
    model = TowerModel(towers, {query: QUERY} | dict.fromkeys(documents, DOCUMENT), normalize=False)
    if all(tower.normalize for tower in towers.values()):  # (2)
        model.normalize = True
        for tower in towers.values():
            tower.normalize = False
    model.normalize = config.normalize if "normalize" in run.given else model.normalize
    model.prompts, model.default_prompt_name = dict(routes[QUERY].prompts), routes[QUERY].default_prompt_name
    for task, contents in routes.items():
        towers[task].prompts, towers[task].default_prompt_name = {}, None  # the folder of the whole has them
        model.tokenizers[task] = _tokenizer(contents, config)
    return model.train()


def _tokenizer(contents: ModelFolder, config: RunConfig) -> Any:
    if contents.is_static:
        return static_backbone.load_tokenizer(contents.backbone_folder)
    folder = contents.backbone_folder
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    return lower_cased(tokenizer, folder) if read_reading(folder).get("do_lower_case") else tokenizer


def collator(model: TowerModel, columns: list[str], prompts: Mapping[str, str], config: RunConfig) -> RoutedCollator:
    """(3)"""
    if isinstance(config.max_length, Mapping) and (alien := [one for one in config.max_length if one not in columns]):
        raise UsageError(f'max_length has "{alien[0]}", which is no column of this run: {", ".join(columns)}.')
    tokenizers = {column: model.tokenizers[task] for column, task in model.column_to_tower.items()}
    given = config.max_length
    lengths = {
        column: (given.get(column) if isinstance(given, Mapping) else given) or model.towers[task].max_length
        for column, task in model.column_to_tower.items()
    }
    for column, task in model.column_to_tower.items():
        model.towers[task].max_length = lengths[column]
    return RoutedCollator(
        model.tokenizers[DOCUMENT], columns, prompts, lengths, config.id_column, tokenizers=tokenizers
    )
