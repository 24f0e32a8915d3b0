"""Checkpoints of a run with frozen parts: what trains, its optimizer state, and a fingerprint of the rest.

A checkpoint holds the plan's parameters, the buffers of the modules that own them, and the optimizer's state, all by
the parameter's name and not by its position or shard. So what DDP saved is resumed by FSDP, by one process, and back.

Whole tensors are gathered one by one, and rank 0 writes them to `trainable.safetensors` and `trainable_optimizer.pt`.
Sharded ones (FSDP2 with SHARDED_STATE_DICT) lie in `trainable/` and `trainable_optimizer/`, in torch's distributed
format. When a checkpoint is read, every rank takes its part of what the files hold; names, shapes and groups must be
those of the run.

The frozen weights are not saved: `frozen.json` has a fingerprint of each, taken before anything was wrapped or
trained, and a checkpoint on top of other ones is refused. So it is with the base of adapters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from hf_dist_ext.checkpoints import safe_reading
from hf_dist_ext.checkpoints.async_save import Writer
from hf_dist_ext.checkpoints.weights import differences, refuse, shapes
from hf_dist_ext.errors import UsageError
from hf_dist_ext.models.adapters import PREFIX, parameters_of_adapters
from hf_dist_ext.strategies.base import WHOLE, Strategy
from hf_dist_ext.strategies.tensors import bare_optimizer, empty_like, is_split, put, whole

WEIGHTS, OPTIMIZER = "trainable.safetensors", "trainable_optimizer.pt"
SHARDED_WEIGHTS, SHARDED_OPTIMIZER = "trainable", "trainable_optimizer"
FROZEN = "frozen.json"
BY_POSITION = WHOLE[0]
OF_SHAPE_OF_PARAMETER = ("/exp_avg", "/exp_avg_sq", "/momentum_buffer")
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
SAMPLE = 1024  # elements of a frozen tensor whose bytes are hashed, beside the sum over all of them

# ---- what is saved ----


def named(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By the names of the bare model, whatever wraps it or its modules."""
    by_name = {}
    for name, tensor in tensors:
        for wrapper in WRAPPERS:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
        by_name[name] = tensor
    return by_name


def saved_tensors(model: nn.Module, saved: frozenset[str]) -> dict[str, torch.Tensor]:
    """The parameters to save, and the persistent buffers of the modules that own them, by name, sorted. A module
    without parameters, such as BatchNorm without affine, goes with the one around it."""
    # Without the buffers that are not persistent. First of all: FSDP2 has whole weights behind an evaluation and frees
    # them here; parameters that were looked up before would be those, without memory.
    kept = named(model.state_dict(keep_vars=True).items())
    parameters = named(model.named_parameters())
    owners = {name.rpartition(".")[0] for name in saved}
    around_any, around_saved = ({one for name in names for one in _around(name)} for names in (parameters, saved))
    buffers = named(model.named_buffers())
    tensors = {name: parameters[name] for name in saved}
    for name, buffer in buffers.items():
        own, *outer = _around(name)
        inner = next((one for one in outer if one in around_any), None)
        if name in kept and (own in owners if own in around_any else inner in around_saved):
            tensors[name] = buffer
    return dict(sorted(tensors.items()))


def _around(name: str) -> Iterator[str]:
    """The modules around a tensor, the innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def optimizer_state(model: nn.Module, optimizer: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """(`name/key` -> state of the parameter `name`; the groups with names for parameters)."""
    optimizer = bare_optimizer(optimizer)
    name_of = {id(parameter): name for name, parameter in named(model.named_parameters()).items()}
    state = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            state[f"{name_of[id(parameter)]}/{key}"] = value
    groups = [group | {"params": [name_of[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return dict(sorted(state.items())), groups


# ---- writing ----


def save_weights(
    model: nn.Module,
    saved: frozenset[str],
    digests: Mapping[str, str],
    folder: Path,
    keep: bool,
    is_sharded: bool,
    writer: Writer,
    strategy: Strategy,
) -> None:
    """Write the weights `saved` and the `digests` of the others; every rank calls it, those that `keep` write whole
    tensors."""
    tensors = saved_tensors(model, saved)
    if is_sharded:
        writer.shards({name: tensor.detach() for name, tensor in tensors.items()}, folder / SHARDED_WEIGHTS)
    else:
        weights = strategy.collected(tensors, keep)
        if keep:
            writer.tensors(weights, folder / WEIGHTS)
    if keep:
        write_digests(folder, digests)


def save_optimizer(
    model: nn.Module,
    optimizer: Any,
    folder: Path,
    args: Any,
    is_sharded: bool,
    writer: Writer,
    strategy: Strategy,
) -> None:
    state, groups = optimizer_state(model, optimizer)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    content = {"groups": groups, "rest": {name: value for name, value in state.items() if name not in tensors}}
    if is_sharded:
        _check_can_be_sharded(model, tensors, args.optim)
        writer.shards(tensors, folder / SHARDED_OPTIMIZER)
    else:
        content["state"] = strategy.collected(tensors, args.should_save)
        parts = strategy.said_by_parts((content["groups"], content["rest"]))
        of_parts = zip(*(groups for groups, _ in parts), strict=True)
        content["groups"] = [g[0] | {"params": [name for of in g for name in of["params"]]} for g in of_parts]
        content["rest"] = {name: value for _, rest in parts for name, value in rest.items()}
    if args.should_save:
        writer.torch(content, folder / OPTIMIZER)


def _check_can_be_sharded(model: nn.Module, state: Mapping[str, torch.Tensor], optim: str) -> None:
    """A plain tensor beside a sharded parameter is this rank's own affair: the format would keep one rank's."""
    sharded = {name for name, p in named(model.named_parameters()).items() if is_split(p)}
    local = [n for n, v in state.items() if n.rpartition("/")[0] in sharded and v.dim() and not is_split(v)]
    if local:
        raise UsageError(
            f"optim={optim} keeps {local[0]!r} per process, which no checkpoint of frozen parts can "
            "hold. Use adamw_torch."
        )


# ---- reading ----


def has_trainable_weights(folder: str | Path) -> bool:
    return Path(folder, WEIGHTS).is_file() or Path(folder, SHARDED_WEIGHTS).is_dir()


def stored_shapes(folder: Path, trust: bool = False) -> dict[str, tuple[int, ...]]:
    """Of the weights that a checkpoint holds, by name."""
    if (folder / SHARDED_WEIGHTS).is_dir():
        entries = safe_reading.read_entries(folder / SHARDED_WEIGHTS, trust)
        return {name: tuple(entry.size) for name, entry in entries.items()}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read_into(tensors: Mapping[str, torch.Tensor], folder: Path, trust: bool = False) -> None:
    """Every rank takes its part of what the weights of a checkpoint hold."""
    if (folder / SHARDED_WEIGHTS).is_dir():
        state = {name: tensor.detach() for name, tensor in tensors.items()}
        return safe_reading.load(state, folder / SHARDED_WEIGHTS, trust)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name, tensor in tensors.items():
            put(tensor, file.get_tensor(name))


def load_weights(
    model: nn.Module,
    saved: frozenset[str],
    folder: Path,
    trust: bool = False,
    elsewhere: frozenset[str] = frozenset(),
) -> None:
    """All or nothing: UsageError with the difference when names or shapes are not those of the run. `elsewhere`: names
    that other ranks read."""
    if not has_trainable_weights(folder):
        raise UsageError(
            f"{folder} holds no {WEIGHTS}: it is of a run without frozen parts. resume_weights_only=true takes its "
            "weights into this run."
        )
    tensors = saved_tensors(model, saved)
    stored = {name: shape for name, shape in stored_shapes(folder, trust).items() if name not in elsewhere}
    refuse(folder, "trained weights", differences(shapes(tensors), stored))
    read_into(tensors, folder, trust)


def load_on_base(
    model: nn.Module,
    folder: Path,
    trust: bool = False,
    elsewhere: frozenset[str] = frozenset(),
    said_by_parts: Callable[[Any], list[Any]] = lambda content: [content],
) -> None:
    """What was trained, into a bare model whose other weights must be those that it was trained on. `elsewhere`: names
    that other ranks read; `said_by_parts`: of all ranks that have layers of their own."""
    names = frozenset(stored_shapes(folder, trust)) & {name for name, _ in model.named_parameters()}
    parts = said_by_parts(frozen_digests(model, names))
    check_frozen(folder, {name: digest for part in parts for name, digest in part.items()})
    load_weights(model, names, folder, trust, elsewhere)


def _read_optimizer(folder: Path, ours: list[list[str]], own: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What `save_optimizer` wrote; or the same of a file with whole tensors by name (`optimizer.bin`), or by position
    (`optimizer.pt`) in the groups of a trainer that has made them as this one has. `ours`: names of the groups; `own`:
    name -> shape."""
    path = next(path for name in (OPTIMIZER, *WHOLE) if (path := folder / name).is_file())
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if path.name == OPTIMIZER:
        return content
    state, groups = content["state"], content["param_groups"]
    if path.name == BY_POSITION:
        lengths = [[len(group["params"]) for group in groups], [len(names) for names in ours]]
        if lengths[0] != lengths[1]:
            raise UsageError(
                f"{folder} holds an optimizer with groups of {lengths[0]} parameters, this run's are of {lengths[1]}: "
                "which state is whose can not be told. Resume it with the arguments it was saved with."
            )
        positions = [at for group in groups for at in group["params"]]
        names = dict(zip(positions, [name for of in ours for name in of], strict=True))
        state = {names[at]: values for at, values in state.items()}
        groups = [group | {"params": of} for group, of in zip(groups, ours, strict=True)]
    flat = {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}
    tensors = {entry: value for entry, value in flat.items() if isinstance(value, torch.Tensor)}
    alike = {entry: tuple(value.shape) for entry, value in tensors.items() if entry.endswith(OF_SHAPE_OF_PARAMETER)}
    wrong = [entry for entry, shape in alike.items() if own.get(entry.rpartition("/")[0], shape) != shape]
    refuse(folder, "optimizer states", {"of another shape": wrong})
    return {"groups": groups, "state": tensors, "rest": {k: v for k, v in flat.items() if k not in tensors}}


def load_optimizer(
    model: nn.Module, optimizer: Any, folder: Path, trust: bool = False, elsewhere: frozenset[str] = frozenset()
) -> None:
    """`elsewhere`: names of parameters that other ranks read."""
    optimizer = bare_optimizer(optimizer)
    parameters = named(model.named_parameters())
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    ours = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    content = _read_optimizer(folder, ours, shapes(parameters))
    theirs = [[name for name in group["params"] if name not in elsewhere] for group in content["groups"]]
    flat = [name for names in ours for name in names], [name for names in theirs for name in names]
    refuse(
        folder,
        "optimizer states",
        {
            "missing": [name for name in flat[0] if name not in flat[1]],
            "surplus": [name for name in flat[1] if name not in flat[0]],
            "in other groups": [n for mine, saved in zip(ours, theirs, strict=False) for n in set(mine) ^ set(saved)],
        },
    )
    if "state" not in content:
        content["state"] = {
            entry: empty_like(parameters[entry.rpartition("/")[0]], one.size, one.properties.dtype)
            for entry, one in safe_reading.read_entries(folder / SHARDED_OPTIMIZER, trust).items()
        }
        safe_reading.load(content["state"], folder / SHARDED_OPTIMIZER, trust)
    # torch's own form, with positions: its load_state_dict knows which values follow a parameter's device and dtype
    position = {name: i for i, name in enumerate(flat[0])}
    by_position: dict[int, dict[str, Any]] = {}
    for entry, value in (content["rest"] | content["state"]).items():
        name, _, key = entry.rpartition("/")
        if name not in position:  # another rank reads it
            continue
        if isinstance(value, torch.Tensor) and not is_split(value):
            whole_value, value = value, empty_like(parameters[name], value.shape, value.dtype)
            put(value, whole_value)
        by_position.setdefault(position[name], {})[key] = value
    groups = [
        group | {"params": [position[n] for n in mine]} for group, mine in zip(content["groups"], ours, strict=True)
    ]
    optimizer.load_state_dict({"state": by_position, "param_groups": groups})


# ---- the frozen weights ----


@torch.no_grad()
def frozen_digests(model: nn.Module, saved: frozenset[str]) -> dict[str, str]:
    """name -> digest of every tensor that a checkpoint does not hold: shape, dtype, the sum over all elements taken as
    integers, which sees a change of any one, and the bytes of a sample of them, which sees an exchange of many."""
    left_out = saved_tensors(model, saved).keys()
    digests, tied = {}, {id(p) for name, p in model.named_parameters() if name in saved}
    for name, tensor in named(model.state_dict(keep_vars=True).items()).items():
        if name not in left_out and id(tensor) not in tied and isinstance(tensor, torch.Tensor):
            # split over processes already (tensor parallelism): gathered, one after the other
            with whole(tensor) as content:
                digests[name] = digest_of(content)
    return digests


def base_digests(model: nn.Module) -> dict[str, str]:
    """Of what the adapters of a peft model stand on: its checkpoints hold these, and the projection of an embedding
    model. Nothing of a quantized base, which is another one in its files."""
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        return {}
    digests = frozen_digests(model, frozenset(name for name, p in model.named_parameters() if p.requires_grad))
    backbone = getattr(model, "transformers_model", None)  # of a SentenceTransformer, which saves its other modules
    inside = None if backbone is None else {id(p) for p in backbone.parameters()}
    if inside is not None:
        inside -= {id(p) for p in parameters_of_adapters(backbone)}  # its folder holds nothing of inactive ones
    kept = {name for name, p in model.named_parameters() if inside is None or id(p) in inside}
    return {name: digest for name, digest in digests.items() if name in kept}


def digest_of(tensor: torch.Tensor) -> str:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.contiguous().view(-1)
    bits = bits.view(sizes.get(bits.element_size(), torch.uint8)) if bits.numel() else bits
    step = max(len(bits) // SAMPLE, 1)
    sample = bits[::step].cpu().numpy().tobytes()
    head = f"{tuple(tensor.shape)} {tensor.dtype} {int(bits.sum(dtype=torch.int64)) if bits.numel() else 0}"
    return hashlib.sha256(head.encode() + sample).hexdigest()[:16]


def fingerprint(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def write_digests(folder: Path, digests: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FROZEN).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def check_base(folder: Path, model: nn.Module) -> None:
    """`check_frozen` for adapters, of which `folder` may name other parts than `model`, in which nothing trains any
    more."""
    if (folder / FROZEN).is_file():
        is_inside = getattr(model, "transformers_model", None) is not None
        place, saved = _place if is_inside else str, json.loads((folder / FROZEN).read_text(encoding="utf-8"))
        known = {place(name): name for name in saved}
        digests = frozen_digests(model, frozenset(n for n, _ in model.named_parameters() if place(n) not in known))
        found = {known[place(name)]: digest for name, digest in digests.items() if place(name) in known}
        # a pooler that no embedding depends on is left out (models/from_run.py)
        without = {name for name in saved if is_inside and ".pooler." in name}
        check_frozen(folder, {name: saved[name] for name in without} | found)


def _place(name: str) -> str:
    """Of a weight of a SentenceTransformer, whose modules have names of their own in a script, and whose model may be
    wrapped by peft there."""
    return name.partition(".")[2].replace(PREFIX, "", 1)


def check_frozen(folder: Path, digests: Mapping[str, str]) -> None:
    """UsageError when the weights below a checkpoint are not those it was trained on."""
    path = folder / FROZEN
    if not path.is_file():
        return
    saved = json.loads(path.read_text(encoding="utf-8"))
    differences = {
        "missing": [name for name in saved if name not in digests],
        "surplus": [name for name in digests if name not in saved],
        "with other values": [name for name in saved if name in digests and saved[name] != digests[name]],
    }
    refuse(folder, "frozen weights", differences)
