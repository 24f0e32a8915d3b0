"""The files around a backbone's weights that make its folder an embedding model for other programs.

We write the older sentence-transformers layout, not the one of its release 6: Text Embeddings Inference cannot parse
the new one (July 2026) and vLLM pooled it wrongly until August 2026; the older one loads everywhere, in release 6 too.

    config.json, model.safetensors          the backbone under its own names, as AutoModel loads it; Matryoshka dims
    tokenizer.json, tokenizer_config.json   the tokenizer's own files (saved by whoever has the tokenizer)
    sentence_bert_config.json               the length at which texts are cut; query_length and document_length only
                                            where they differ: sentence-transformers 6.2 knows them
    config_sentence_transformers.json       prompts
    1_Pooling/  2_Dense/  3_Normalize/      one folder per module after the backbone; Dense and Normalize only if used,
                                            and as many of Dense as there are
    modules.json                            which modules there are; written last, as without it the others are ignored

A model of token vectors is one for MultiVectorEncoder (models/multi_vector.py).

A folder of adapters has the same files beside peft's (models/adapter_folder.py); what config.json would say,
Matryoshka dims and precision, then stands in config_sentence_transformers.json.

Reading takes both layouts and a plain transformers folder, with any number of Dense modules. What we cannot reproduce
exactly (another pooling, another order of modules) is a UsageError, and so is a piece that is listed and gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_dist_ext.errors import UsageError
from hf_dist_ext.models import multi_vector
from hf_dist_ext.models.dense import TANH, DenseLayer
from hf_dist_ext.policy import TOKENS

# our pooling -> sentence-transformers' name of it, and the boolean that names it in the older layout
POOLING_NAMES = {"mean": "mean", "cls": "cls", "last": "lasttoken"}
POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ADAPTERS = "adapter_config.json"
STATIC = "StaticEmbedding"
VECTOR = "sentence_embedding"  # what sentence-transformers calls a row's vector between its modules
OF_LINEAR = ("weight", "bias")
WITHOUT_WEIGHTS = ("Pooling", "Normalize")
DOCUMENT_NAMES = ("document", "passage", "corpus")  # of prompts, in sentence-transformers
# Where older releases of sentence-transformers said how texts are read; the first one that is there holds.
READING = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Keys of sentence_bert_config.json by which release 6 of sentence-transformers reads chat messages and pictures.
MESSAGES = ("transformer_task", "modality_config", "module_output_name", "processing_kwargs")
HUB_IGNORE = ["onnx/*", "openvino/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.bin", "*.safetensors"]


@dataclass
class ModelFolder:
    """What a folder says about the embedding, beside the backbone."""

    backbone_folder: Path | None = None  # None when writing: the backbone lies at the top
    is_plain: bool = False  # no more than a backbone: what follows are defaults
    has_adapters: bool = False  # of a base that lies elsewhere
    is_static: bool = (
        False  # the backbone is a table of vectors (models/static_backbone.py), which has no pooling module
    )
    pooling: str = "mean"
    projection: dict[str, torch.Tensor] | None = None  # its weights, under the names of models/dense.py
    dense: list[DenseLayer] = field(default_factory=list)  # what it is made of
    normalize: bool = True
    max_length: int | None = None  # None: the tokenizer's own limit holds
    lengths: dict[str, int | None] = field(default_factory=dict)  # of "query" and "document", where they differ
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None  # of the prompt before texts that are encoded without another
    matryoshka_dims: list[int] | None = None
    dtype: str | None = None  # of a base with adapters while they were trained
    messages: dict[str, object] = field(default_factory=dict)  # how rows of texts and pictures are read; see MESSAGES


def resolve_folder(name_or_path: str | Path, revision: str | None = None) -> Path:
    """A folder as it is, or the local copy of a hub model; `.bin` weights only where there are no safetensors: in the
    whole of it, or in one of its modules."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.is_file():
        raise UsageError(f"{path} is a file. Give the folder that holds config.json and the weights.")

    from huggingface_hub import snapshot_download

    def download(weights: str, **only: list[str]) -> Path:
        ignored = [pattern for pattern in HUB_IGNORE if pattern != weights]
        return Path(snapshot_download(str(name_or_path), revision=revision, ignore_patterns=ignored, **only))

    try:
        folder = download("*.safetensors")
        if not any(folder.rglob("*.safetensors")):
            return download("*.bin")
        # sentence-transformers 2 wrote the weights of a Dense module as .bin beside safetensors of the Transformer.
        modules = read_json(folder / "modules.json", missing_is_empty=True)
        paths = [module["path"] for module in modules if kind_of(module) not in WITHOUT_WEIGHTS]
        if lacking := [path for path in paths if not any((folder / path).glob("*.safetensors"))]:
            download("*.bin", allow_patterns=[str(Path(path, "pytorch_model*.bin")) for path in lacking])
        return folder
    except Exception as error:  # the hub client raises a different type for each of: no such name, no network, offline
        raise UsageError(
            f'Model "{name_or_path}" is neither a folder here nor available from the hub ({type(error).__name__}). '
            "Check the name and revision; offline (HF_HUB_OFFLINE), give a folder or a model already in the cache."
        ) from error


def write_model_folder(folder: str | Path, contents: ModelFolder, hidden_size: int) -> None:
    """Write everything but the backbone's and the tokenizer's own files; `hidden_size` is the backbone's."""
    folder = Path(folder)
    has_tokens = contents.pooling == TOKENS
    chain = [STATIC] if contents.is_static else ["Transformer"]
    if not (contents.is_static or has_tokens):
        chain.append("Pooling")
        pooling = POOLING_NAMES[contents.pooling]
        write_json(
            folder / "1_Pooling" / "config.json",
            # What all releases take: those before 5.4 stop at the key "embedding_dimension", and later ones read this
            # name of it too. vLLM takes the first key that is true for the pooling.
            {"word_embedding_dimension": hidden_size}
            | {flag: name == pooling for name, flag in POOLING_FLAGS.items()}
            | {"include_prompt": True, "pooling_mode": pooling},
        )
    for number, layer in enumerate(contents.dense if contents.projection is not None else ()):
        named = multi_vector.STATES if has_tokens else {}
        _write_dense(folder / f"{len(chain)}_Dense", layer, _weights_of(contents, number), named)
        chain.append("Dense")
    if has_tokens:
        chain.append(multi_vector.MASK)
    if contents.normalize:
        chain.append("Normalize")
    lengths = {f"{role}_length": length for role, length in contents.lengths.items() if length is not None}
    if contents.max_length is not None or lengths or contents.messages:
        whole = {} if contents.max_length is None else {"max_seq_length": contents.max_length}
        content = whole | {"do_lower_case": False} | lengths | contents.messages
        write_json(folder / "sentence_bert_config.json", content)
    of_adapters = {"matryoshka_dimensions": contents.matryoshka_dims, "dtype": contents.dtype}
    more = (of_adapters if contents.has_adapters else {}) | (multi_vector.SETTINGS if has_tokens else {})
    write_prompts(folder, contents.prompts, contents.default_prompt_name, contents.normalize, **more)
    write_modules(folder, chain)


def write_prompts(
    folder: Path, prompts: Mapping[str, str], default_name: str | None, is_cosine: bool, **more: object
) -> None:
    """config_sentence_transformers.json."""
    prompts = _with_document_prompt(prompts)
    content = {
        "model_type": "SentenceTransformer",
        "prompts": prompts,
        # sentence-transformers refuses a folder whose default is none of its prompts
        "default_prompt_name": default_name if default_name in prompts else None,
        "similarity_fn_name": "cosine" if is_cosine else "dot",
    }
    write_json(folder / "config_sentence_transformers.json", content | more)


def write_modules(folder: Path, chain: list[str]) -> None:
    """modules.json of modules that lie in the folder itself (the first one) and in folders of their own."""
    has_tokens = multi_vector.MASK in chain
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": multi_vector.type_of(kind, has_tokens)}
        for i, kind in enumerate(chain)
    ]
    for module in modules:
        (folder / module["path"]).mkdir(exist_ok=True)
    if has_tokens:
        multi_vector.write_modules(folder, chain)
    write_json(folder / "modules.json", modules)


def read_model_folder(folder: str | Path) -> ModelFolder:
    """What `folder` says. A plain transformers folder means mean pooling and normalization."""
    folder = Path(folder)
    if not (folder / "modules.json").is_file():
        # Without the list other programs drop projection and normalization without a word; we do not.
        leftovers = [name for name in ("1_Pooling", "2_Dense", "3_Normalize") if (folder / name).exists()]
        if leftovers:
            raise UsageError(
                f"{folder} holds {', '.join(leftovers)} but no modules.json. Copy the whole folder again."
            )
        if (folder / ADAPTERS).is_file() or (folder / "trainable.safetensors").is_file():
            raise UsageError(
                f"{folder} holds what was trained, not a whole model: hf-dist merge {folder} --output DIR makes one."
            )
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} holds neither modules.json nor config.json, so it is not a model folder.")
        return ModelFolder(backbone_folder=folder, is_plain=True, matryoshka_dims=_read_matryoshka_dims(folder))

    modules = [(kind_of(module), folder / module["path"]) for module in read_json(folder / "modules.json")]
    return read_chain(folder, modules)


def first_module(folder: str | Path) -> tuple[str, Path]:
    """The kind of the first module of a folder and where it lies; ("", the folder) for one without modules.json."""
    folder = Path(folder)
    first, *_ = read_json(folder / "modules.json", missing_is_empty=True) or [{"type": "", "path": ""}]
    return kind_of(first), folder / first["path"]


def kind_of(module: Mapping[str, str]) -> str:
    """The class of an entry of modules.json; releases before and after 6 have it in other packages."""
    return module["type"].rpartition(".")[2]


def read_chain(folder: Path, modules: list[tuple[str, Path]]) -> ModelFolder:
    """What modules say that follow one another, each with its own folder; `folder` has the files of them all."""
    chain = [kind for kind, _ in modules]
    own = read_json(folder / "config_sentence_transformers.json", missing_is_empty=True)
    has_tokens = multi_vector.check(own, folder, modules)
    first = [STATIC] if STATIC in chain else ["Transformer", "Pooling"]
    rest = ["Dense"] * chain.count("Dense") + ["Normalize"] * ("Normalize" in chain)
    if not has_tokens and chain != first + rest:
        raise UsageError(
            f"{folder} chains {' -> '.join(chain)}; supported is Transformer -> Pooling [-> Dense ...] "
            f"[-> Normalize], or {STATIC} in the place of the first two. EmbeddingModel.from_backbone takes the "
            "backbone only."
        )
    backbone_folder, is_static = modules[0][1], chain[0] == STATIC
    has_adapters = (backbone_folder / ADAPTERS).is_file()
    if not (has_adapters or is_static or (backbone_folder / "config.json").is_file()):
        raise UsageError(f"{backbone_folder} has no config.json. Copy the whole folder again.")
    length = {} if is_static else read_reading(backbone_folder)
    lengths = {role: length.get(f"{role}_length", length.get("max_seq_length")) for role in ("query", "document")}
    if length.get("query_length") is None and length.get("document_length") is None:
        lengths = {}
    if has_tokens:
        multi_vector.check_lengths(backbone_folder, length)
    is_ours = not has_adapters and (backbone_folder / "config.json").is_file()
    of_projection = multi_vector.STATE if has_tokens else VECTOR
    layers, projection = _read_projection([path for kind, path in modules if kind == "Dense"], of_projection)
    return ModelFolder(
        backbone_folder=backbone_folder,
        is_static=is_static,
        pooling="mean" if is_static else TOKENS if has_tokens else _read_pooling(modules[1][1]),
        projection=projection,
        dense=layers,
        normalize="Normalize" in chain,
        max_length=length.get("max_seq_length"),
        lengths=lengths,
        prompts=own.get("prompts") or {},
        default_prompt_name=own.get("default_prompt_name"),
        matryoshka_dims=_read_matryoshka_dims(backbone_folder) if is_ours else own.get("matryoshka_dimensions"),
        dtype=own.get("dtype"),
        has_adapters=has_adapters,
        messages=_read_messages(length),
    )


def read_reading(folder: Path) -> dict[str, object]:
    """How the texts of a Transformer module are read: its length, and `do_lower_case`, which is the tokenizer's part
    (backbones.load_tokenizer)."""
    return next(filter(None, (read_json(folder / name, missing_is_empty=True) for name in READING)), {})


def _read_messages(reading: Mapping[str, object]) -> dict[str, object]:
    """Release 6 says of a model of plain texts too how it is read; that is what all releases do without being told."""
    is_plain = set(reading.get("modality_config") or ()) <= {"text"} and not reading.get("processing_kwargs")
    return {} if is_plain else {key: reading[key] for key in MESSAGES if key in reading}


def reads_messages(messages: Mapping[str, object]) -> bool:
    """Whether rows are chat messages, with pictures or without, by what a folder says under MESSAGES."""
    return "message" in messages.get("modality_config", {})


def update_config(folder: str | Path, changes: Mapping[str, object]) -> None:
    """Set keys of the backbone's config.json; None removes one."""
    path = Path(folder) / "config.json"
    merged = read_json(path) | dict(changes)
    write_json(path, {key: value for key, value in merged.items() if value is not None or key not in changes})


def matryoshka_keys(dims: list[int] | None) -> dict[str, object]:
    """The keys of config.json by which vLLM (`ModelConfig.is_matryoshka`) allows shorter embeddings."""
    return {"is_matryoshka": True if dims else None, "matryoshka_dimensions": dims or None}


def _with_document_prompt(prompts: Mapping[str, str]) -> dict[str, str]:
    # Our documents' column is named "positive". encode_document of sentence-transformers 6.2 says that it looks for
    # "passage" and "corpus" too, but finds its own empty "document" first.
    document, *others = DOCUMENT_NAMES
    names = [name for name in (document, "positive", *others) if name in prompts]
    return {**prompts, "document": prompts[names[0]]} if names else dict(prompts)


def _weights_of(contents: ModelFolder, number: int) -> dict[str, torch.Tensor]:
    """Of one of the Dense modules; one alone has no number in its names."""
    if len(contents.dense) == 1:
        return contents.projection
    start = f"{number}."
    return {k.removeprefix(start): value for k, value in contents.projection.items() if k.startswith(start)}


def _write_dense(
    folder: Path, layer: DenseLayer, weights: Mapping[str, torch.Tensor], named: Mapping[str, str]
) -> None:
    config = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias}
    residual = {"use_residual": True} if layer.use_residual else {}  # releases before 5.7 do not know the key
    write_json(folder / "config.json", config | {"activation_function": layer.activation} | residual | dict(named))
    tensors = {f"linear.{name}" if name in OF_LINEAR else name: tensor for name, tensor in weights.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _read_projection(folders: list[Path], of: str = VECTOR) -> tuple[list[DenseLayer], dict[str, torch.Tensor] | None]:
    read = [_read_dense(folder, of) for folder in folders]
    layers, weights = [layer for layer, _ in read], [weights for _, weights in read]
    if len(weights) < 2:
        return layers, weights[0] if weights else None
    return layers, {f"{i}.{name}": tensor for i, of_one in enumerate(weights) for name, tensor in of_one.items()}


def _read_dense(folder: Path, of: str) -> tuple[DenseLayer, dict[str, torch.Tensor]]:
    """`of`: what it maps, as sentence-transformers calls it."""
    config = read_json(folder / "config.json")
    for name in ("module_input_name", "module_output_name"):
        if config.get(name, of) != of:
            raise UsageError(f'{folder} has {name}="{config[name]}"; an EmbeddingModel projects the pooled vector.')
    if (folder / "model.safetensors").is_file():
        weights = load_file(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").is_file():
        weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise UsageError(f"{folder} has no model.safetensors. Copy the whole folder again.")
    out_features, in_features = weights["linear.weight"].shape
    layer = DenseLayer(
        in_features, out_features, "linear.bias" in weights,
        config.get("activation_function", TANH), bool(config.get("use_residual")),
    )  # fmt: skip
    return layer, {name.removeprefix("linear."): tensor for name, tensor in weights.items()}


def _read_pooling(folder: Path) -> str:
    config = read_json(folder / "config.json")
    flagged = [name for name, flag in POOLING_FLAGS.items() if config.get(flag)]
    name = config.get("pooling_mode", flagged[0] if len(flagged) == 1 else flagged)
    ours = {theirs: own for own, theirs in POOLING_NAMES.items()}
    if not isinstance(name, str) or name not in ours:
        raise UsageError(f"{folder} pools by {name!r}; an EmbeddingModel pools by one of {list(ours)}.")
    if not config.get("include_prompt", True):
        raise UsageError(f"{folder} leaves the prompt out of pooling (include_prompt), which is not supported here.")
    return ours[name]


def _read_matryoshka_dims(folder: Path) -> list[int] | None:
    return read_json(folder / "config.json").get("matryoshka_dimensions")


def read_json(path: Path, missing_is_empty: bool = False):
    if not path.is_file():
        if missing_is_empty:
            return {}
        raise UsageError(f"{path} is missing. Copy the whole folder again.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not valid JSON ({error}). Copy the folder again.") from error


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
