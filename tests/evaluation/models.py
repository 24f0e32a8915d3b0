"""Small models of sentence-transformers whose embeddings are far apart. Make them before processes are forked."""

from tempfile import TemporaryDirectory

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import AutoConfig, AutoModel

from tests.tiny_models import model_config, tiny_tokenizer

PROMPTS = {"query": "search : ", "document": "list of "}


def transformer(family: str = "bert", **config) -> Transformer:
    torch.manual_seed(0)
    config = {"initializer_range": 0.3} | model_config(family, **config)
    with TemporaryDirectory() as folder:
        AutoModel.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
        tiny_tokenizer(max_length=24).save_pretrained(folder)
        return Transformer(folder)


def sentence_transformer(**config) -> SentenceTransformer:
    modules = [transformer(**config)]
    modules += [Pooling(modules[0].get_embedding_dimension()), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS).double()


def multi_vector_encoder() -> MultiVectorEncoder:
    modules = [transformer()]
    torch.manual_seed(1)
    modules.append(
        Dense(modules[0].get_embedding_dimension(), 16, bias=False, activation_function=torch.nn.Identity(),
              module_input_name="token_embeddings")
    )  # fmt: skip
    modules += [MultiVectorMask(), Normalize(module_input_name="token_embeddings")]
    return MultiVectorEncoder(modules=modules, device="cpu", prompts=PROMPTS).double()
