"""From a run to its processes: stay in this one, or hand over to accelerate's own launcher.

`hand_over_if_needed(run)` is the first thing a training script does. Depending on who started the process:

(1) plain `python`, one process: return; of several GPUs one stays visible, or Trainer would use nn.DataParallel
(2) plain `python`, several processes: accelerate's launcher runs the script again in each; exit with their exit code
(3) a process that (2) started: return
(4) `accelerate launch` or torchrun: compare what runs with what the run file asks (`check_running`), return

The module imports no torch; the launcher is imported when it takes over.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_dist_ext import launched
from hf_dist_ext.checkpoints.folder import check_output_dir
from hf_dist_ext.errors import UsageError
from hf_dist_ext.planner import auto
from hf_dist_ext.planner.described import check_data
from hf_dist_ext.planner.devices import count_devices
from hf_dist_ext.run import compatibility, deepspeed_install, lease, packages, record
from hf_dist_ext.run.config import Run
from hf_dist_ext.run.preemption import INTERRUPTED, REQUEUE, SIGNALS, forward_to_children, is_free
from hf_dist_ext.run.presets import distributed_type, find_preset, is_shipped, load_preset, mesh_size

HANDED_OVER = "HF_DIST_HANDED_OVER"  # set for the processes of (2), whose run was checked before they existed
CPU_PROCESSES = 2  # where no device says how many
PIPELINES = {"multi_gpu_pp": "multi_gpu_ddp", "multi_gpu_3d": "multi_gpu_tp"}  # preset -> without pipelines


def hand_over_if_needed(run: Run, program: Sequence[str] = (), argv: Sequence[str] | None = None) -> None:
    """Returns in a process that shall train; does not return in one that only starts others. Raises UsageError.

    `program` and `argv` are what the started processes run: a script, or "--module" and a module, and its arguments.
    Nothing is the script, and None are the arguments, that this process runs.
    """
    program, argv = program or sys.argv[:1], sys.argv[1:] if argv is None else argv
    output_dir = run.training["output_dir"]
    if is_launched():
        if launched.rank() == 0:
            lease.take(output_dir)
        run.is_launched = os.environ.get(HANDED_OVER) != "1"
        if run.is_launched:
            check_running(run)  # (4)
        return
    _refuse_lonely_tasks()
    os.environ[lease.TOKEN] = lease.take(output_dir).token
    devices = 0 if run.training.get("use_cpu") else count_devices()
    plan = plan_launch(run, devices, program)
    _check_before_ranks(run)
    _say_choice(plan, run, devices)
    if plan.kind == "NO":
        _keep_one_device(devices)  # (1)
        return
    where = f"{devices} visible GPU(s)" if devices else "no GPU visible: on the CPU over gloo, slowly"
    _say(f"{plan.path.stem}: starting {plan.num_processes} process(es), {where}")
    sys.exit(_run_launcher(plan, devices, [*program, *argv]))  # (2)


def _check_before_ranks(run: Run) -> None:
    """What needs no library. The folder comes last, as to overwrite it is no remedy for any other mistake."""
    for one in run.stages or [run]:
        packages.check(one.training)
    check_data(run)
    check_output_dir(run.training)


def is_launched() -> bool:
    """Whether a launcher started this process. accelerate sets a world size for several processes only, but always
    says how to compile."""
    return any(name in os.environ for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_DYNAMO_MODE"))


def _say(text: str) -> None:
    print(f"hf-dist: {text}", file=sys.stderr, flush=True)


def _keep_one_device(devices: int) -> None:
    if devices < 2:
        return
    name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"
    first = os.environ[name] = os.environ.get(name, "0").split(",")[0].strip()
    _say(f"one process: using the first of {devices} visible GPUs ({name}={first}); accelerate_config spreads a run")


@dataclass(frozen=True)
class LaunchPlan:
    """`kind` is accelerate's distributed_type in capitals; "NO" is this process alone."""

    path: Path
    kind: str
    num_processes: int
    choice: auto.Choice | None = None  # of "auto"


def _say_choice(plan: LaunchPlan, run: Run, devices: int) -> None:
    if plan.choice is None:
        return
    record.hand_on(asdict(plan.choice))
    if devices or run.options.accelerate_config == "auto":
        _say(f"auto: {plan.choice.preset}. {' '.join(plan.choice.reasons)}")
    for warning in plan.choice.warnings:
        _say(f"warning: {warning}")


def plan_launch(run: Run, devices: int, program: Sequence[str] = ("scripts/train_hf.py",)) -> LaunchPlan:
    """What a run asks for on a machine with so many visible devices. Raises UsageError when that cannot be."""
    asked, wanted = run.options.accelerate_config or "auto", run.options.num_processes
    choice = None
    if asked == "auto" and _pipeline_size(run) > 1:
        asked = next(iter(PIPELINES))
    if asked == "auto":
        choice = auto.choose(run, devices)
        asked = choice.preset
    path = find_preset(asked)
    preset = load_preset(path)
    kind = distributed_type(preset)
    devices = 0 if preset.get("use_cpu") else devices
    _refuse_impossible(run, kind, _fsdp_version(preset), devices, f'accelerate_config="{path.stem}"')
    if kind == "NO":
        if wanted not in (None, 1):
            raise UsageError(
                f'num_processes={wanted}, but "{path.stem}" is one process. Use "multi_gpu_ddp" or "auto".'
            )
        _refuse_unread(run, kind, devices)
        return LaunchPlan(path, kind, 1, choice)
    if kind == "MULTI_CPU":
        raise UsageError(
            f"{path}: accelerate starts MULTI_CPU through mpirun only. Use multi_gpu_ddp, without GPUs too."
        )
    if int(preset.get("num_machines") or 1) > 1:
        raise UsageError(
            f"{path} names {preset['num_machines']} machines. Start it on each of them with: accelerate launch "
            f"--config_file {path} --machine_rank N {' '.join(program)} --config {run.path}"
        )
    gpu_ids = str(preset.get("gpu_ids") or "all")
    if gpu_ids != "all":
        devices = len(gpu_ids.split(","))
    if wanted is None and not is_shipped(path):
        wanted = preset.get("num_processes")
    mesh, group, size = mesh_size(preset), _group_size(preset), _pipeline_size(run)
    if mesh == group > 1:  # as many groups as there are processes for
        of_pipelines = devices // (size * group) * (size * group) or size * group
        wanted = int(wanted or (devices or preset.get("num_processes") or group if size == 1 else of_pipelines))
        if wanted % group:
            raise UsageError(
                f"{wanted} processes do not make groups of {group} for tensor parallelism ({path}). Set num_processes "
                f"to a multiple of {group}."
            )
    elif mesh > 1 and wanted not in (None, mesh):
        raise UsageError(
            f"num_processes={wanted}, but the parallelism_config of {path} is a mesh of {mesh} processes. "
            "Make them equal, or leave num_processes out."
        )
    if path.stem in PIPELINES and size == 1:
        raise UsageError(
            f"{path.stem} starts processes for pipelines, and the run file does not say how many make one. Set "
            f"pipeline_parallel_size, or use {PIPELINES[path.stem]}."
        )
    wanted = int(wanted or (mesh if mesh > 1 else devices // size * size) or max(CPU_PROCESSES, size))
    _refuse_too_many(wanted, devices, "Set num_processes to null")
    is_alone = kind == "MULTI_GPU" and wanted == 1
    _refuse_unread(run, "TP" if group > 1 else "NO" if is_alone else kind, devices)
    return LaunchPlan(path, kind, wanted, choice)


def in_words(run: Run) -> tuple[str, int]:
    """What would start here, or why nothing can; and how many groups of processes would hold rows of their own."""
    devices = 0 if run.training.get("use_cpu") else count_devices()
    try:
        plan = plan_launch(run, devices)
    except UsageError as error:
        return f"none here. {error}", 1
    where = f"{devices} visible GPU(s)" if devices else "no GPU visible: on the CPU"
    same_rows = _pipeline_size(run) * _group_size(load_preset(plan.path))
    return f"{plan.num_processes} ({plan.path.stem}), {where}", plan.num_processes // same_rows


def _pipeline_size(run: Run) -> int:
    """Processes that a run file asks a pipeline to have; 1 without one."""
    return max(int(one.training.get("pipeline_parallel_size") or 1) for one in run.stages or [run])


def _group_size(preset: dict[str, Any]) -> int:
    """Processes that tensor parallelism splits every layer over; 1 without it."""
    return int((preset.get("parallelism_config") or {}).get("parallelism_config_tp_size") or 1)


def _fsdp_version(preset: dict[str, Any]) -> int:
    return int((preset.get("fsdp_config") or {}).get("fsdp_version", 1))


def _refuse_impossible(run: Run, kind: str, fsdp_version: int, devices: int, what: str) -> None:
    if kind == "FSDP" and fsdp_version == 1 and devices == 0:
        raise UsageError(
            f"{what}: FSDP version 1 does not run without a GPU. Set fsdp_version: 2, or use multi_gpu_fsdp."
        )
    if kind == "DEEPSPEED":
        deepspeed_install.check(f"{what}: ")
    if run.training.get("fsdp") and kind != "FSDP" and (kind == "NO" or devices == 0):
        # Trainer would take the field and train without sharding: alone, or as DDP over gloo
        raise UsageError(f'fsdp is set, but {what} does not shard. Set "accelerate_config": "multi_gpu_fsdp" instead.')


def _refuse_unread(run: Run, kind: str, devices: int) -> None:
    """What every process would refuse, in `hf-dist config` too. A pipeline refuses more when it is made."""
    if _pipeline_size(run) > 1:
        for one in run.stages or [run]:
            compatibility.refuse_without_fsdp(one.training, "MULTI_GPU")
        return
    for one in run.stages or [run]:
        is_fsdp = kind == "FSDP" or bool(one.training.get("fsdp") and devices)
        is_ddp = is_fsdp and one.training.get("sharding") == "NO_SHARD"
        compatibility.refuse_without_fsdp(one.training, "FSDP" if is_fsdp else kind)
        compatibility.refuse_without_ddp(one.training, "MULTI_GPU" if is_ddp else "FSDP" if is_fsdp else kind)


def _refuse_too_many(processes: int, devices: int, remedy: str) -> None:
    if 0 < devices < processes:
        raise UsageError(f"{processes} processes were asked for, but {devices} GPU(s) are visible. {remedy}.")


def _refuse_lonely_tasks() -> None:
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = os.environ.get(name, "1")
        if tasks.isdigit() and int(tasks) > 1:
            raise UsageError(
                f"{tasks} tasks run this script ({name}) and each would train alone. Start one task per machine with: "
                "accelerate launch --num_machines ... --machine_rank ... or run without srun/mpirun."
            )


def _run_launcher(plan: LaunchPlan, devices: int, command: list[str]) -> int:
    """accelerate's launcher in this process; its children's exit code, 128 + the signal's number when one ended it."""
    os.environ[HANDED_OVER] = "1"
    preset = load_preset(plan.path)
    if preset.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"  # the launcher says so to a single process only
    words = ["--config_file", str(plan.path), "--num_processes", str(plan.num_processes)]
    if not preset.get("main_process_port"):
        words += ["--main_process_port", "0"]  # a free one
    if devices == 0 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        words += ["--num_cpu_threads_per_process", str(max(1, cores // plan.num_processes))]

    import torch.distributed.run  # noqa: F401, so that its loggers exist below
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # A rank prints its own traceback, and a usage error needs none: one line below says the rest.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    arguments = launch_command_parser().parse_args([*words, *command])
    arguments.signals_to_handle = "SIGHUP,SIGQUIT"  # torchrun's, less those after which it would kill 30 s later
    for number in filter(is_free, SIGNALS):
        signal.signal(number, forward_to_children)
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code in (REQUEUE, INTERRUPTED):
            _say(f"asked to stop; exit code {code}. The same command with --resume_from_checkpoint auto goes on")
        elif code != 2:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            if code == -signal.SIGKILL:
                how += ", which is mostly the machine's memory running out (look at its system log)"
            _say(f"rank {rank} ended with {how}; the others were stopped")
        return code if code > 0 else 128 - code
    except subprocess.CalledProcessError as error:
        return error.returncode
    except SignalException as error:
        _say(f"{signal.Signals(error.sigval).name}: all processes were stopped")
        return 128 + int(error.sigval)
    except ValueError as error:
        raise UsageError(f"accelerate refuses {plan.path}: {error}") from None
    return 0


def check_running(run: Run) -> None:
    """Under the user's own launcher: what runs against what the run file asks. Rank 0 looks and speaks for all.

    A difference that works is one warning; one that cannot work is an error, and so is an output_dir of another run.
    The others cannot overtake rank 0: the first thing they do is to wait for it in the process group.
    """
    if launched.rank() != 0:
        if launched.rank() % launched.processes_here(1) == 0:  # another machine, with files of its own
            check_data(run)
        return
    _check_before_ranks(run)
    processes = launched.processes()
    local = launched.processes_here(processes)
    devices = 0 if run.training.get("use_cpu") or launched.uses_cpu() else count_devices()
    kind = _running_kind(processes)
    version = int(launched.fsdp_setting("version", "1"))
    runs = _in_words(kind, version, launched.mesh_size("tp"), _pipeline_size(run))
    runs += "" if kind == "NO" else f" on {processes} process(es)"
    _refuse_impossible(run, kind, version, devices, f"The launcher started {runs}")
    _refuse_too_many(local, devices, f"Add to accelerate launch: --num_processes {devices}")
    if processes == 1 and "LOCAL_RANK" not in os.environ:
        _keep_one_device(devices)
    elif devices > local:
        _say(f"{local} processes use {local} of {devices} visible GPUs; --num_processes {devices} uses all")
    elif devices == 0 and processes > 1:
        _say(f"no GPU visible: {processes} processes on the CPU over gloo, slowly")
    if asks := _what_is_asked(run, kind, version, processes):
        _say(f"warning: the launcher started {runs}, the run file asks for {asks}. What the launcher started runs.")


def _running_kind(processes: int) -> str:
    if launched.uses_fsdp():
        return "FSDP"
    if launched.uses_deepspeed():
        return "DEEPSPEED"
    return "MULTI_GPU" if processes > 1 else "NO"


def _in_words(kind: str, fsdp_version: int, group: int, pipeline: int) -> str:
    if pipeline > 1 and kind == "MULTI_GPU":
        return f"pipelines of {pipeline} " + (f"groups of {group} processes" if group > 1 else "processes")
    if group > 1:
        return f"tensor parallelism in groups of {group}"
    names = {"NO": "one process", "MULTI_GPU": "DDP", "FSDP": f"FSDP version {fsdp_version}", "DEEPSPEED": "DeepSpeed"}
    return names.get(kind, kind)


def _what_is_asked(run: Run, kind: str, fsdp_version: int, processes: int) -> str | None:
    """What the run file asks for, in words, when that is not what runs."""
    asked, wanted = run.options.accelerate_config or "auto", run.options.num_processes
    if asked != "auto":
        preset = load_preset(find_preset(asked))
        asked_kind, version, group = distributed_type(preset), _fsdp_version(preset), _group_size(preset)
        is_same = asked_kind == kind or (asked_kind == "MULTI_GPU" and processes == 1 and kind == "NO")
        is_same &= (group > 1) == (launched.mesh_size("tp") > 1)  # --parallelism_config_tp_size says how large
        if not is_same or (kind == "FSDP" and version != fsdp_version):
            return f'accelerate_config="{asked}" ({_in_words(asked_kind, version, group, _pipeline_size(run))})'
    return f"num_processes={wanted}" if wanted not in (None, processes) else None
