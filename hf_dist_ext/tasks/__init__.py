"""From a run file to the parts of a trainer.

`parts.py` names the tasks and makes the trainer. `embedding.py` builds text and image-text pairs, whose rows
`readers.py` reads. `sources.py` loads several datasets, `image_text.py` builds conversations about pictures, which
`generation.py` has answered. `lengths.py` says how many tokens a row may have, `unknown_tokens.py` whether the
tokenizer knows the texts. `losses.py` makes the loss. `adapters.py` adds LoRA, `stages.py` runs one trainer after
another. `search.py` and `audit.py` are the commands of these names. For the planner, `trace.py` counts a model, whose
forward `trace_record.py` writes down (of a base in 4 bits with the layers of `trace_4bit.py`, of pictures by what
`trace_pictures.py` knows), and `speed.py` measures the CPU.
"""
