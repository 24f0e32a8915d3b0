"""What other programs need of a model's folder, as data, and the comparison of a folder with it.

    for answer in answers(folder): print(answer.server.name, answer.reasons, answer.notes)

(1) `SERVERS` is the table. `source` says where a server's rules come from; only where it says "run" was one tried.
(2) `answers` reads JSON files and names of files, no weights. What a server would drop in silence counts as a "no", as
    what it refuses does: the embeddings would be other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.model_folder import ADAPTERS, POOLING_FLAGS, STATIC, kind_of, read_json
from hf_dist_ext.models.router_folder import CONFIG as ROUTER
from hf_dist_ext.models.router_folder import ROUTERS

ACTIVATION = "torch.nn.modules.activation."
OLD_NAMES = "sentence_transformers.models."  # of module types, until release 5.3
DENSE_KEYS = ("in_features", "out_features", "bias", "activation_function")
NEW_TOKENIZER, OLD_TOKENIZER = "TokenizersBackend", "PreTrainedTokenizerFast"  # two names of one class
READING_KEYS = ("max_seq_length", "do_lower_case")  # of sentence_bert_config.json


@dataclass(frozen=True)
class Server:
    """Fields that are None allow anything."""

    name: str
    source: str
    model_types: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None  # kinds; others are refused or left out
    poolings: tuple[str, ...] | None = None
    needs_old_names: bool = False  # of module types
    needs_pooling_flags: bool = False  # pooling_mode_mean_tokens and the like
    unknown_pooling_keys: bool = True
    activations: tuple[str, ...] | None = None  # of Dense
    residual: bool = True
    dense_keys: tuple[str, ...] | None = None
    reading_keys: tuple[str, ...] | None = None
    takes_adapters: bool = False
    needs_old_tokenizers: bool = False  # its transformers is older than 5
    files: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)  # about "prompts", "matryoshka", "no normalize", "bfloat16"


MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
POOLINGS = ("cls", "mean", "lasttoken")
OLD = dict(  # of releases of sentence-transformers that stop at a key which they do not know
    needs_old_names=True,
    needs_pooling_flags=True,
    unknown_pooling_keys=False,
    residual=False,
    dense_keys=DENSE_KEYS,
    reading_keys=READING_KEYS,
    takes_adapters=True,
    needs_old_tokenizers=True,
    files=("modules.json",),
)
SERVERS = (  # (1)
    Server(
        "text-embeddings-inference",
        "its Rust sources (router/src/lib.rs, backends/src/lib.rs, backends/candle, 2026); read, not run",
        model_types=tuple(
            "bert camembert distilbert gemma3_text mistral modernbert mpnet new nomic_bert qwen2 qwen3 roberta "
            "xlm-roberta".split()
        ),
        modules=MODULES,
        poolings=POOLINGS,
        needs_old_names=True,
        needs_pooling_flags=True,
        activations=("torch.nn.modules.linear.Identity", ACTIVATION + "Tanh"),
        residual=False,
        files=("config.json", "tokenizer.json", "1_Pooling/config.json"),
        notes={
            "prompts": "start it with --default-prompt-name, or put the prompt in front of the texts",
            "no normalize": "/embed divides by the length unless the request says normalize=false",
            "matryoshka": "cut the vectors after the request, then divide by the length",
            "bfloat16": "it computes in float16 or float32",
        },
    ),
    Server(
        "vllm",
        "its Python sources (transformers_utils/config.py, models/adapters.py, models/registry.py, 2026) and its pull "
        "request 54533; read, not run",
        model_types=tuple(
            "bert gemma2 gemma3_text llama mistral modernbert new nomic_bert phi3 qwen2 qwen3 roberta "
            "xlm-roberta".split()
        ),
        modules=MODULES,
        poolings=POOLINGS,
        needs_old_names=True,  # before August 2026
        needs_pooling_flags=True,
        activations=(
            "torch.nn.modules.linear.Identity",
            *(ACTIVATION + name for name in ("GELU", "ReLU", "SiLU", "Sigmoid", "Tanh")),
        ),
        residual=False,
        files=("config.json", "tokenizer_config.json", "modules.json"),
        notes={
            "prompts": "it ignores them: put the prompt in front of the texts",
            "matryoshka": "a request may ask for dimensions, as config.json has is_matryoshka",
        },
    ),
    Server("sentence-transformers 3 and 4", "run with 3.4.1 and 4.1.0", modules=(*MODULES, "CLIPModel"), **OLD),
    Server(
        "sentence-transformers 5.0 to 5.3",
        "run with 5.1.2 and 5.3.0",
        modules=(*MODULES, "CLIPModel", STATIC, "Router"),
        **OLD,
    ),
    Server("sentence-transformers", "run with 6.2.0", takes_adapters=True, files=("modules.json",)),
)


@dataclass(frozen=True)
class Answer:
    server: Server
    reasons: tuple[str, ...]  # why not; none: it serves the folder
    notes: tuple[str, ...]


def answers(folder: str | Path, names: tuple[str, ...] = ()) -> list[Answer]:
    """Of all servers, or of those with these names."""
    known = {server.name: server for server in SERVERS}
    if alien := [name for name in names if name not in known]:
        raise UsageError(f'--server "{alien[0]}" is not known. Choose from {", ".join(known)}.')
    facts = _facts(Path(folder))
    wanted = [server for server in SERVERS if not names or server.name in names]
    return [Answer(one, tuple(_reasons(one, facts)), tuple(_notes(one, facts))) for one in wanted]  # (2)


@dataclass(frozen=True)
class _Facts:
    folder: Path
    modules: list[dict[str, str]]  # those of a Router's routes too
    kinds: list[str]
    config: Mapping[str, Any]
    pooling: Mapping[str, Any] | None
    dense: list[Mapping[str, Any]]
    reading: Mapping[str, Any]
    own: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def _facts(folder: Path) -> _Facts:
    modules = read_json(folder / "modules.json", missing_is_empty=True) or []
    kinds = [kind_of(module) for module in modules]
    paths = [folder / module["path"] for module in modules]
    first = paths[0] if paths else folder
    config = read_json(first / "config.json", missing_is_empty=True)
    if not modules and not config:
        raise UsageError(f"{folder} holds neither modules.json nor config.json, so it is not a model folder.")
    types = [{"type": name} for name in read_json(first / ROUTER, missing_is_empty=True).get("types", {}).values()]
    of_kind = {kind: path for kind, path in zip(kinds, paths, strict=True)}
    return _Facts(
        folder, modules + types, kinds, config,
        read_json(of_kind["Pooling"] / "config.json") if "Pooling" in of_kind else None,
        [read_json(path / "config.json") for kind, path in zip(kinds, paths, strict=True) if kind == "Dense"],
        read_json(first / "sentence_bert_config.json", missing_is_empty=True),
        read_json(folder / "config_sentence_transformers.json", missing_is_empty=True),
        read_json(first / "tokenizer_config.json", missing_is_empty=True),
    )  # fmt: skip


def _reasons(server: Server, facts: _Facts) -> Iterator[str]:
    yield from (f"{file} is missing" for file in server.files if not (facts.folder / file).is_file())
    if server.modules is not None:
        alien = [kind for kind in dict.fromkeys(facts.kinds) if kind not in server.modules]
        yield from (f"it has no module {kind}" for kind in alien)
        if alien and alien[0] in ROUTERS:
            return
    kind = facts.config.get("model_type")
    if server.model_types is not None and facts.kinds[:1] != [STATIC] and kind not in server.model_types:
        yield f'it has no "{kind}" of its own: {", ".join(server.model_types)}'
    if server.needs_old_names:
        new = [module["type"] for module in facts.modules if not module["type"].startswith(OLD_NAMES)]
        yield from (f"modules.json has the new name {name}" for name in new[:1])
    if (facts.folder / ADAPTERS).is_file() and not server.takes_adapters:
        yield "the folder holds adapters without their base"
    if server.needs_old_tokenizers and facts.tokenizer.get("tokenizer_class") == NEW_TOKENIZER:
        yield f"tokenizer_config.json has the class {NEW_TOKENIZER}, which transformers before 5 does not know"
    yield from _reasons_of_pooling(server, facts.pooling)
    for dense in facts.dense:
        yield from _reasons_of_dense(server, dense)
    known = facts.reading if server.reading_keys is None or facts.kinds[:1] != ["Transformer"] else server.reading_keys
    unknown = [key for key in facts.reading if key not in known]
    yield from (f'sentence_bert_config.json has the key "{key}", at which it stops' for key in unknown[:1])


def _reasons_of_pooling(server: Server, pooling: Mapping[str, Any] | None) -> Iterator[str]:
    if pooling is None:
        return
    flagged = [name for name, flag in POOLING_FLAGS.items() if pooling.get(flag)]
    if server.needs_pooling_flags and not flagged:
        yield "1_Pooling/config.json has none of the keys such as pooling_mode_mean_tokens"
    mode = flagged or [pooling.get("pooling_mode")]
    if server.poolings is not None and (len(mode) != 1 or mode[0] not in server.poolings):
        yield f"it does not pool by {', '.join(map(str, mode))}"
    if not pooling.get("include_prompt", True) and server.poolings is not None:
        yield "it pools the prompt too (include_prompt)"
    if not server.unknown_pooling_keys and "embedding_dimension" in pooling:
        yield '1_Pooling/config.json has the key "embedding_dimension", at which it stops'


def _reasons_of_dense(server: Server, dense: Mapping[str, Any]) -> Iterator[str]:
    activation = dense.get("activation_function", ACTIVATION + "Tanh")
    if server.activations is not None and activation not in server.activations:
        yield f"its Dense has no {activation}"
    if dense.get("use_residual") and not server.residual:
        yield "its Dense has no residual connection"
    unknown = [key for key in dense if server.dense_keys is not None and key not in server.dense_keys]
    yield from (f'the config.json of a Dense has the key "{key}", at which it stops' for key in unknown[:1])


def _notes(server: Server, facts: _Facts) -> Iterator[str]:
    has = {
        "prompts": any((facts.own.get("prompts") or {}).values()),
        "matryoshka": bool(facts.config.get("matryoshka_dimensions") or facts.own.get("matryoshka_dimensions")),
        "no normalize": "Normalize" not in facts.kinds,
        "bfloat16": (facts.config.get("dtype") or facts.config.get("torch_dtype")) == "bfloat16",
    }
    yield from (f"{what}: {text}" for what, text in server.notes.items() if has[what])
