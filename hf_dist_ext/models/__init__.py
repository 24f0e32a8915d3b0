"""What encodes: a transformers model with pooling and a projection, or one tower for each column.

`embedding_model.py` and `towers.py` are the two models, `backbones.py` builds or loads what stands inside them,
`static_backbone.py` is a table of vectors in a backbone's place, `multi_vector.py` keeps a vector of every token,
`dense.py` holds the maps that follow. `packing.py` has a backbone read rows that stand end to end, `masks.py` tells it
whether rows are padded. `causal_lm.py` loads causal language models, also in stages, `weights.py` compares and loads
state dicts. `model_folder.py` and `adapter_folder.py` write the folders that sentence-transformers and servers read,
`router_folder.py` and `dual_encoders.py` those of two towers.
"""
