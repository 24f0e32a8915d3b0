"""A folder whose queries and documents go through modules of their own: sentence-transformers' Router (once Asym).

    modules.json          Router, and what follows it for both routes
    router_config.json    the modules of every route: their folders and classes
    query/  document/     as we write it, a complete folder of an `EmbeddingModel` for each route, tokenizer included

Reading takes any folders that router_config.json names, as long as the routes share no weights: two towers that train
would end with two copies of what was one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.model_folder import (
    WITHOUT_WEIGHTS,
    ModelFolder,
    first_module,
    kind_of,
    read_chain,
    read_json,
    write_json,
    write_modules,
    write_prompts,
)

CONFIG = "router_config.json"
QUERY, DOCUMENT = "query", "document"
ROUTERS = ("Router", "Asym")


def is_router(folder: str | Path) -> bool:
    return first_module(folder)[0] in ROUTERS


def read_routes(folder: str | Path) -> dict[str, ModelFolder]:
    """What the folder says of "query" and of "document"."""
    folder = Path(folder)
    own, *after = read_json(folder / "modules.json")
    here = folder / own["path"]
    config = read_json(here / CONFIG, missing_is_empty=True) or read_json(here / "config.json")
    common = [(kind_of(module), folder / module["path"]) for module in after]
    routes = {task: _route(folder, config, task) for task in (QUERY, DOCUMENT)}
    if routes[QUERY] == routes[DOCUMENT]:
        raise UsageError(
            f'{folder}: its Router sends queries and documents through the same route, "{routes[QUERY]}", and has '
            f"{', '.join(config['structure'])}. Give the folder of a model that encodes them in two ways."
        )
    if alien := sorted(config["structure"].keys() - set(routes.values())):
        raise UsageError(f"{folder}: no query and no document goes through the Router's route {alien[0]}.")
    ids = {task: config["structure"][route] for task, route in routes.items()}
    _refuse_shared(folder, ids, config["types"], [kind for kind, _ in common])
    chains = {task: [(kind_of({"type": config["types"][one]}), here / one) for one in ids[task]] for task in ids}
    return {task: read_chain(folder, _normalized_once(chain + common)) for task, chain in chains.items()}


def write_router(folder: str | Path, normalize: bool, prompts: Mapping[str, str], default_name: str | None) -> None:
    """Write what stands above the routes' own folders, which are there."""
    folder = Path(folder)
    types, structure = {}, {}
    for task in (QUERY, DOCUMENT):
        modules = read_json(folder / task / "modules.json")
        paths = [str(Path(task, module["path"])) for module in modules]
        structure[task] = paths
        types |= {path: module["type"] for path, module in zip(paths, modules, strict=True)}
    parameters = {"default_route": DOCUMENT, "allow_empty_key": True}  # releases before 5.4 stop at further keys
    write_json(folder / CONFIG, {"types": types, "structure": structure, "parameters": parameters})
    is_cosine = normalize or all(paths[-1].endswith("Normalize") for paths in structure.values())
    write_prompts(folder, prompts, default_name, is_cosine)
    write_modules(folder, ["Router", *["Normalize"] * normalize])


def _route(folder: Path, config: Mapping[str, Any], task: str) -> str:
    """The route that a task's texts take, by the order of rules that sentence-transformers' Router documents."""
    parameters, structure = config.get("parameters", {}), config["structure"]
    mapped = {ast.literal_eval(key): route for key, route in (parameters.get("route_mappings") or {}).items()}
    keys = [(task, "text"), (task, None), (None, "text"), (None, None)]
    direct = [name for name in (task, "text") if name in structure]
    route = next((mapped[key] for key in keys if key in mapped), direct[0] if direct else None)
    route = route or parameters.get("default_route")
    if route not in structure:
        raise UsageError(
            f'{folder}: its Router has the routes {", ".join(structure)}, and none for the task "{task}". Rename the '
            f'routes to "{QUERY}" and "{DOCUMENT}", or give it route_mappings.'
        )
    return route


def _refuse_shared(folder: Path, ids: Mapping[str, list[str]], types: Mapping[str, str], after: Iterable[str]) -> None:
    shared = [
        one for one in ids[QUERY] if one in ids[DOCUMENT] and kind_of({"type": types[one]}) not in WITHOUT_WEIGHTS
    ]
    shared += [kind for kind in after if kind not in WITHOUT_WEIGHTS]
    if shared:
        raise UsageError(
            f"{folder}: the routes of its Router share {shared[0]}, and here each trains modules of its own. Save the "
            "model with a copy of it in each route, or train it with sentence-transformers."
        )


def _normalized_once(chain: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Without a Normalize that follows another one."""
    return [one for i, one in enumerate(chain) if not (one[0] == "Normalize" and chain[i - 1][0] == "Normalize")]
