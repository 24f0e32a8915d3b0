"""`stages` of a run file: each is a run of its own, checked before the first one trains.

A stage's fields go over the file's, the command line over both; its name makes its folder, stage_<i>_<name>. What
makes the model or the processes belongs to the whole run, so a stage cannot set it. A run that resumes skips finished
stages; the first other one continues from its newest complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dist_ext.checkpoints import manifest
from hf_dist_ext.checkpoints.folder import checkpoint_to_resume, decides_here, resume_or_start
from hf_dist_ext.errors import UsageError
from hf_dist_ext.run.fields import check_name
from hf_dist_ext.run.files import looks_like_a_path, upload_command
from hf_dist_ext.run.sources import sources_of

if TYPE_CHECKING:
    from hf_dist_ext.run.config import Run

Layer = tuple[dict[str, Any], str]  # fields, and where they come from

OF_THE_WHOLE_RUN = frozenset(
    "stages task accelerate_config num_processes model_name_or_path model_config model_revision tokenizer_name dtype "
    "trust_remote_code attn_implementation is_causal pooling projection_dim normalize output_dir overwrite_output_dir "
    "use_cpu resume_from_checkpoint bf16 fp16 fsdp fsdp_config deepspeed "
    "push_to_hub hub_model_id hub_token load_in_4bit".split()
)
FOLDERS = "stage_*"


def plan_stages(run: Run, layers: list[Layer], parse: Callable[[list[Layer]], Run]) -> list[Run]:
    """The stages of a run, in order. `layers`: the run file and the command line; `parse` makes a run of layers."""
    if not run.options.stages:
        raise UsageError("stages=[] is empty. Give at least one stage, or null for a run without stages.")
    if run.given.get("push_to_hub"):
        raise UsageError(
            "push_to_hub=true with stages would push their checkpoints, and never the model that they end with. "
            f"Push the folder afterwards: {upload_command(run.training['output_dir'], None)}"
        )
    stages: list[Run] = []
    for index, fields in enumerate(run.options.stages):
        name = check_name(fields.get("name"), "stages", [stage.name for stage in stages])
        where = f'stage {index} "{name}"'
        if alien := OF_THE_WHOLE_RUN & fields.keys():
            raise UsageError(f"{where}: {min(alien)} holds for the whole run. Set it outside of stages.")
        (file, origin), *over = [
            ({key: value for key, value in layer.items() if key != "stages"}, origin) for layer, origin in layers
        ]
        own = {key: value for key, value in fields.items() if key != "name" and not key.startswith("_")}
        folder = str(Path(run.training["output_dir"], f"stage_{index}_{name}"))
        whole = {"output_dir": folder, "resume_from_checkpoint": None}
        try:
            stage = parse([(file, origin), (own, where), *over, (whole, where)])
            _check_paths(stage)
        except UsageError as error:
            raise UsageError(str(error) if where in str(error) else f"{where}: {error}") from None
        stage.name = name
        stages.append(stage)
    _resume(run, stages)
    return stages


def _check_paths(stage: Run) -> None:
    """Data that is clearly a file here must be here: a stage's turn may come after days."""
    for options in [stage.options, *(source.config for source in sources_of(stage.options))]:
        for field in ("dataset_name", "eval_dataset_name", "image_folder"):
            value = getattr(options, field)
            is_path = value is not None and (field == "image_folder" or looks_like_a_path(value))
            if is_path and not Path(value).expanduser().exists():
                raise UsageError(f'{field}="{value}": there is no such file or folder. Paths start at {Path.cwd()}.')


def _folder_of(stage: Run) -> Path:
    return Path(stage.training["output_dir"])


def _count_finished(stages: list[Run]) -> int:
    """Up to the last one that has its mark: a stage that starts withdraws those of the stages after it. UsageError
    where one before it has none."""
    has_mark = [(_folder_of(stage) / manifest.MANIFEST).is_file() for stage in stages]
    count = max((index + 1 for index, has in enumerate(has_mark) if has), default=0)
    if not all(has_mark[:count]):
        gone, last = stages[has_mark.index(False)], stages[count - 1]
        raise UsageError(
            f'stage "{last.name}" is finished, but {_folder_of(gone)} of stage "{gone.name}" before it has no '
            f"{manifest.MANIFEST}. Put it back, or give --overwrite_output_dir without resume_from_checkpoint to "
            "train all stages anew."
        )
    return count


def _check_whole(stage: Run) -> None:
    """UsageError where files are gone of a finished stage that the next one starts from."""
    folder = _folder_of(stage)
    if not (broken := manifest.why_incomplete(folder)):
        return
    own = [path for path in manifest.checkpoints_in(folder) if not manifest.why_incomplete(path)]
    anew = (
        f"--resume_from_checkpoint {own[-1]} to end this stage again; those after it then begin anew"
        if own
        else "--overwrite_output_dir without resume_from_checkpoint to train all stages anew"
    )
    raise UsageError(
        f'stage "{stage.name}" was finished, but {folder} is not whole any more: {broken}. Put it back, or give '
        f"{anew}."
    )


def _resume(run: Run, stages: list[Run]) -> None:
    asked = run.training.get("resume_from_checkpoint")
    if asked is None or asked is False or not decides_here():
        return
    output_dir = Path(run.training["output_dir"])
    num_finished = _count_finished(stages)
    if asked == "auto":
        asked = num_finished > 0 or resume_or_start(dict(stages[0].training)) or None
        run.training["resume_from_checkpoint"] = asked
        if asked is None:
            # a job that was killed during its first save has left torn folders: it starts afresh over them
            is_torn = any(output_dir.glob(FOLDERS))
            run.training["overwrite_output_dir"] = run.training.get("overwrite_output_dir") or is_torn
            return
    if asked is True:
        if not any(path.is_dir() for path in output_dir.glob(FOLDERS)):
            raise UsageError(
                f"resume_from_checkpoint is true but {output_dir} holds no {FOLDERS} folder. "
                "Remove it to start afresh."
            )
        for stage in stages[:num_finished]:
            stage.is_done = True
        if num_finished:
            _check_whole(stages[num_finished - 1])
        for current in stages[num_finished : num_finished + 1]:
            folder = _folder_of(current)
            has_some = current is stages[0] or resume_or_start({"output_dir": str(folder)})
            if has_some and checkpoint_to_resume(True, folder):
                current.training["resume_from_checkpoint"] = True
        return
    checkpoint = Path(asked)
    folders = [_folder_of(stage).resolve() for stage in stages]
    if checkpoint.resolve().parent not in folders:
        raise UsageError(
            f'resume_from_checkpoint="{asked}" lies in no stage of this run ({", ".join(f.name for f in folders)}). '
            "Give true, or a checkpoint in one of them."
        )
    index = folders.index(checkpoint.resolve().parent)
    if index > num_finished:
        raise UsageError(
            f'resume_from_checkpoint="{asked}" is of stage "{stages[index].name}", but stage '
            f'"{stages[num_finished].name}" is not finished. Give true to continue there.'
        )
    for stage in stages[:index]:
        stage.is_done = True
    if index:
        _check_whole(stages[index - 1])
    checkpoint_to_resume(asked, folders[index])
    stages[index].training["resume_from_checkpoint"] = asked
