"""`hf-dist export`: which programs serve a model's folder, a folder that they do serve, and an ONNX model of it.

(1) `check` compares the folder with the table of models/servers.py
(2) `write` loads the model, writes it in the layout that all read, and takes out what older programs stop at. Where a
    server still would not serve it, nothing is left behind. Weights are compared bit for bit
(3) `write_onnx` lets sentence-transformers export the transformer through optimum, and compares embeddings
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, AutoProcessor

from hf_dist_ext.checkpoints.folder import require_new
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.backbones import load_tokenizer, one_line
from hf_dist_ext.models.dual_encoders import DUAL_ENCODERS
from hf_dist_ext.models.embedding_model import EmbeddingModel
from hf_dist_ext.models.model_folder import first_module, read_json, read_model_folder, resolve_folder, write_json
from hf_dist_ext.models.router_folder import ROUTERS
from hf_dist_ext.models.servers import NEW_TOKENIZER, OLD_TOKENIZER, READING_KEYS, Answer, answers

TEXTS = ["A short text.", "parse a date from a string", "A text of many words, which is longer than all others."]
ONNX_TOLERANCE = 1e-4  # of embeddings: float32, other kernels


def main(model: str, check: bool, output: str | None, servers: list[str], onnx: str | None) -> None:
    """`servers`: names; none is all of them."""
    folder, names = resolve_folder(model), tuple(servers)
    if check or not (output or onnx):
        found = answers(folder, names)
        show(folder, found)
        if names and any(one.reasons for one in found):
            raise SystemExit(1)
    if output:
        write(folder, Path(output), names)
    if onnx:
        write_onnx(folder, Path(onnx))


# (1) ---------------------------------------------------------------------------------------------------------------


def show(folder: Path, found: list[Answer]) -> None:
    print(f"{folder}, served by")
    for one in found:
        print(f"  {one.server.name}: {'no' if one.reasons else 'yes'}")
        for line in one.reasons or one.notes:
            print(f"    {line}")
        print(f"    ({one.server.source})")


# (2) ---------------------------------------------------------------------------------------------------------------


def write(folder: Path, output: Path, names: tuple[str, ...]) -> None:
    """A folder that the servers with these names serve, or a UsageError and none."""
    require_new("--output", output)
    answers(folder, names)  # a name that is not known stops here
    if first_module(folder)[0] in ROUTERS:
        raise UsageError(
            f"{folder} has a Router, which sentence-transformers alone serves (release 5 and later), from the folder "
            "as it is. There is nothing to export."
        )
    _rewrite(folder, output)
    refused = [one for one in answers(output, names) if one.reasons]
    if refused:
        shutil.rmtree(output)
        lines = [f"{one.server.name}: {reason}" for one in refused for reason in one.reasons]
        raise UsageError(
            f"{folder} can not be written so that all serve it. {'; '.join(lines)}. Name the servers that you need: "
            "--server NAME."
        )
    show(output, answers(output, names))


def _rewrite(folder: Path, output: Path) -> None:
    kind, place = first_module(folder)
    config = read_json(place / "config.json", missing_is_empty=True)
    if config.get("model_type") in DUAL_ENCODERS:
        _rewrite_dual_encoder(folder, place, output)
        return
    if (place / "sentence_bert_config.json").is_file() and read_model_folder(folder).messages:
        raise UsageError(
            f"{folder} reads chat messages or pictures, which sentence-transformers alone does, from the folder as it "
            "is: release 5.4 and later. There is nothing to export."
        )
    model = EmbeddingModel.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    model.save_pretrained(output, tokenizer=tokenizer)
    path = output / "sentence_bert_config.json"
    if path.is_file():  # a length for each role goes: the longest of them is that of all
        write_json(path, {key: value for key, value in read_json(path).items() if key in READING_KEYS})
    _rename_tokenizer(output)
    _compare(model, EmbeddingModel.from_pretrained(output))


def _rewrite_dual_encoder(folder: Path, place: Path, output: Path) -> None:
    """Its weights in one file."""
    model = AutoModel.from_pretrained(place)
    model.save_pretrained(output)
    AutoProcessor.from_pretrained(place).save_pretrained(output)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, output / name)
    if model.config.model_type == "clip":  # older releases read a CLIPModel, and no settings
        (output / "sentence_bert_config.json").unlink(missing_ok=True)
        modules = read_json(output / "modules.json", missing_is_empty=True) or [{"idx": 0, "name": "0", "path": ""}]
        modules[0] |= {"path": "", "type": "sentence_transformers.models.CLIPModel"}
        for module in modules[1:]:
            module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
            (output / module["path"]).mkdir(exist_ok=True)
        write_json(output / "modules.json", modules)
    _rename_tokenizer(output)
    _compare(model, AutoModel.from_pretrained(output))


def _rename_tokenizer(output: Path) -> None:
    path = output / "tokenizer_config.json"
    settings = read_json(path, missing_is_empty=True)
    if settings.get("tokenizer_class") == NEW_TOKENIZER:
        write_json(path, settings | {"tokenizer_class": OLD_TOKENIZER})


def _compare(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    if ours.keys() != theirs.keys() or not all(torch.equal(theirs[name], value) for name, value in ours.items()):
        raise UsageError("the exported folder does not load as it was written. Check that the disk is not full.")


# (3) ---------------------------------------------------------------------------------------------------------------


def write_onnx(folder: Path, output: Path) -> None:
    """The folder with `onnx/model.onnx` in it, as sentence-transformers loads it by backend="onnx"."""
    missing = [name for name in ("sentence_transformers", "optimum.onnxruntime") if not _is_there(name)]
    if missing:
        raise UsageError(
            f"--onnx needs {missing[0].replace('optimum.onnxruntime', 'optimum and onnxruntime')}, which is not "
            "installed: pip install 'sentence-transformers[onnx]'."
        )
    from sentence_transformers import SentenceTransformer

    require_new("--onnx", output)
    if first_module(folder)[0] not in ("", "Transformer"):
        raise UsageError(f"{folder} begins with a {first_module(folder)[0]}; --onnx exports one text transformer.")
    before = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    options = {"provider": "CPUExecutionProvider", "export": True}
    again = {"provider": "CPUExecutionProvider", "file_name": "onnx/model.onnx"}
    try:
        model = SentenceTransformer(str(folder), backend="onnx", model_kwargs=options, device="cpu")
        model.save_pretrained(str(output))
        served = SentenceTransformer(str(output), backend="onnx", model_kwargs=again, device="cpu")
        after = served.encode(TEXTS, convert_to_tensor=True)
    except Exception as error:  # optimum raises whatever it meets: it follows transformers at a distance
        shutil.rmtree(output, ignore_errors=True)
        raise UsageError(
            f"--onnx: optimum can not export it with transformers {transformers.__version__}: {one_line(error)}. "
            "Export it in an environment with the transformers that optimum asks for."
        ) from error
    difference = (after - before).abs().max().item()
    scale = before.abs().max().item()
    if not difference <= ONNX_TOLERANCE * max(scale, 1.0):
        shutil.rmtree(output)
        raise UsageError(f"--onnx: embeddings differ by {difference:.1e} of {scale:.1e}, so nothing was kept.")
    print(f"{output}: embeddings differ by at most {difference:.1e} of {scale:.1e}.")


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
