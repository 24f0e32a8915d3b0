"""The run file and what happens before torch is imported.

`config.py` reads the JSON file and the command line, from the fields that `fields.py` finds in the dataclasses'
source; `presets.py` finds the accelerate YAML. `lease.py` lets one run write into a folder, `preemption.py` forwards
the signals of a scheduler. Nothing here imports torch, so that help and errors come at once.
"""
