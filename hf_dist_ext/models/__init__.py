"""What encodes: a transformers model with pooling and a projection, or one tower for each column.

`embedding_model.py` and `towers.py` are the two models, `backbones.py` builds or loads what stands inside them,
`causal_lm.py` loads causal language models, also in stages, `weights.py` compares and loads state dicts, and
`model_folder.py` and `adapter_folder.py` write the folders that sentence-transformers and servers read.
"""
