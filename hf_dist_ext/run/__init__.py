"""The run file and what happens before torch is imported.

`config.py` says what a run is, `files.py` reads its JSON or YAML, `read.py` puts the command line over that and
`other_names.py` has what other projects call a field, `gone.py` what to do instead of what 0.3 took out. `rules.py` refuses fields that contradict each other,
`compatibility.py` those that the way a run is spread does not read, `evaluations.py`, `sources.py` and `parts.py` read
the entries of `evaluations`, `datasets` and `losses`, `losses.py` knows the losses by name, `help.py` tells people and
editors what a run file may hold. The fields come from the dataclasses' source (`fields.py`). `presets.py` finds the
accelerate YAML and tells what it does. `lease.py` lets one run write into a folder, `preemption.py` forwards the
signals of a scheduler. `packages.py` asks for the packages of trackers, `deepspeed_install.py` whether DeepSpeed can
run here. `record.py` writes down what ran, `stages.py` reads runs that follow each other, and `examples.py` has the
run files of `hf-dist init`. Nothing here imports torch, so that help and errors come at once.
"""
