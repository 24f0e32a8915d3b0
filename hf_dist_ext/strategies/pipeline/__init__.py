"""Pipelines: each process has some of a model's layers.

`strategy.py` is the strategy, `options.py` says what can run as a pipeline, `stages.py` cuts a model, `schedules.py`
says which rank works on what when, and `passes.py` takes the chunks of a step through the stages.
"""
