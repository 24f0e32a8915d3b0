"""`hf-dist plan` over several machines: each row is the plan of that machine."""

import json

from hf_dist_ext import cli
from tests.planner.test_choose import DECODER, make_run  # noqa: F401, a fixture

WORDS = ["plan", "run.json", "--num_rows", "100000", "--json"]


def said(capsys, *words):
    cli.main([*WORDS, *words])
    return json.loads(capsys.readouterr().out)


def test_every_row_is_the_plan_of_its_machine(make_run, capsys):  # noqa: F811
    make_run(DECODER, per_device_train_batch_size=64, gradient_cache_chunk_size=16, bf16=True)
    table = said(capsys, "--num_devices", "1,8", "--device", "h100,4090", "--price_per_hour", "3,0.5")
    machines = [(one["hardware"]["device"], one["hardware"]["num_devices"]) for one in table]
    assert machines == [("h100", 1), ("h100", 8), ("4090", 1), ("4090", 8)]
    for of_table, (device, devices) in zip(table, machines, strict=True):
        price = {"h100": "3", "4090": "0.5"}[device]
        alone = said(capsys, "--num_devices", str(devices), "--device", device, "--price_per_hour", price)
        assert of_table["recommended"] == alone["recommended"]
        chosen = (of_table["recommended"] or {"strategy": ""})["strategy"]
        of_best = [one["made_to_fit"]["bytes"] for one in alone["strategies"] if one["strategy"] == chosen]
        assert of_table["bytes"] == (of_best[0] if of_best else None)
    assert len({one["recommended"]["strategy"] for one in table}) > 1


def test_the_table_names_the_quickest_the_cheapest_and_what_does_not_fit(make_run, capsys):  # noqa: F811
    run = {"per_device_train_batch_size": 64, "gradient_cache_chunk_size": 16, "bf16": True}
    make_run(DECODER | {"num_hidden_layers": 84}, **run)
    words = ["--num_devices", "1,8", "--device", "h100,l4", "--price_per_hour", "3,0.5", "--host_memory_gib", "1"]
    cli.main([*WORDS[:-1], *words])
    out = capsys.readouterr().out
    row = {line.split()[0] + line.split()[1]: line for line in out.splitlines() if line.startswith(("h100", "l4"))}
    assert "quickest" in row["h1008"] and "cheapest" in out
    assert "nothing fits" in row["l41"] and "would do" in row["l41"] and "would do" not in row["h1008"]
