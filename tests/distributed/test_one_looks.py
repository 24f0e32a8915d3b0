"""What is looked at before training, once per machine: the first process looks at the files, the others rely on it."""

import json
from functools import partial

import torch.distributed as dist
from accelerate import PartialState
from PIL import Image

from hf_dist_ext.data import conversations, image_files
from hf_dist_ext.data.load import load_datasets
from hf_dist_ext.run.config import RunConfig
from tests.distributed.forked import Run


def load(say, folder) -> str:
    PartialState(cpu=True)
    looked, find_image = [], image_files.find_image
    image_files.find_image = lambda name, root: looked.append(str(name)) or find_image(name, root)
    fields = {"dataset_name": str(folder / "rows.jsonl"), "image_columns": ["positive"], "image_folder": str(folder)}
    train, _ = load_datasets(RunConfig(**fields))
    everyone = [None, None]
    dist.all_gather_object(everyone, (len(looked), len(set(looked)), train[5]["positive"].size, len(train)))
    return json.dumps(everyone)


def test_the_files_of_pictures_are_looked_at_by_one_process_of_a_machine(tmp_path):
    for i in range(6):
        Image.new("RGB", (2, 3 + i)).save(tmp_path / f"{i}.png")
    rows = [json.dumps({"query": f"q{i}", "positive": f"{i}.png"}) for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    first, second = json.loads(Run("ddp", tmp_path / "run.log", partial(load, folder=tmp_path)).result())
    assert first == [6, 6, [2, 8], 6]
    assert second[2:] == [[2, 8], 6]
    assert second[0] <= 1  # the row that was opened above


def parse(say, folder) -> str:
    PartialState(cpu=True)
    parsed, json_rows = [], conversations._json_rows
    conversations._json_rows = lambda path: parsed.append(str(path)) or json_rows(path)
    fields = {"task": "image-text-to-text", "dataset_name": str(folder / "rows.json"), "image_folder": str(folder)}
    train, _ = conversations.load_conversations(RunConfig(**fields))
    everyone = [None, None]
    dist.all_gather_object(everyone, (len(parsed), len(train)))
    return json.dumps(everyone)


def test_a_file_of_conversations_is_parsed_by_one_process_of_a_machine(tmp_path):
    Image.new("RGB", (2, 3)).save(tmp_path / "0.png")
    turns = [{"from": "human", "value": "<image> what?"}, {"from": "gpt", "value": "a cat"}]
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": turns}] * 4))
    found = json.loads(Run("ddp", tmp_path / "run.log", partial(parse, folder=tmp_path)).result())
    assert found == [[1, 4], [0, 4]]
