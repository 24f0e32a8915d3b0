"""What to cite of a loss, as BibTeX: losses of sentence-transformers say it themselves, the others stand here."""

from __future__ import annotations

from typing import Any

GRADIENT_CACHE = """@misc{gao2021scaling,
    title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},
    year={2021},
    eprint={2101.06983},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}"""
MATRYOSHKA = """@misc{kusupati2022matryoshka,
    title={Matryoshka Representation Learning},
    author={Aditya Kusupati and Gantavya Bhatt and Aniket Rege and Matthew Wallingford and Aditya Sinha and Vivek \
Ramanujan and William Howard-Snyder and Kaifeng Chen and Sham Kakade and Prateek Jain and Ali Farhadi},
    year={2022},
    eprint={2205.13147},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}"""
OF_LOSS = {
    "InfoNCELoss": """@misc{oord2018representation,
    title={Representation Learning with Contrastive Predictive Coding},
    author={Aaron van den Oord and Yazhe Li and Oriol Vinyals},
    year={2018},
    eprint={1807.03748},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}""",
    "SigmoidLoss": """@misc{zhai2023sigmoid,
    title={Sigmoid Loss for Language Image Pre-Training},
    author={Xiaohua Zhai and Basil Mustafa and Alexander Kolesnikov and Lucas Beyer},
    year={2023},
    eprint={2303.15343},
    archivePrefix={arXiv},
    primaryClass={cs.CV}
}""",
    "LateInteractionLoss": """@misc{khattab2020colbert,
    title={ColBERT: Efficient and Effective Passage Search via Contextualized Late Interaction over BERT},
    author={Omar Khattab and Matei Zaharia},
    year={2020},
    eprint={2004.12832},
    archivePrefix={arXiv},
    primaryClass={cs.IR}
}""",
}


AROUND_OTHERS = ("SentenceTransformersLoss", "SumOfLosses", "LossPerSource")


def names_of(loss: Any) -> list[str]:
    """The loss and those inside of it, by their classes."""
    return [type(one).__name__ for one in _chain(loss) if type(one).__name__ not in AROUND_OTHERS]


def citations_of(loss: Any, is_cached: bool) -> list[str]:
    """BibTeX entries of a loss, those inside of it, and the gradient cache where it is used; none for None."""
    found = [OF_LOSS.get(type(one).__name__) or getattr(one, "citation", None) for one in _chain(loss)]
    if getattr(loss, "matryoshka", None):
        found.append(MATRYOSHKA)
    if is_cached:
        found.append(GRADIENT_CACHE)
    return list(dict.fromkeys(entry.strip() for entry in found if isinstance(entry, str)))


def _chain(loss: Any) -> list[Any]:
    found, waiting = [], [loss]
    while waiting:
        one = waiting.pop(0)
        if one is not None and one not in found:
            found.append(one)
            waiting = [*getattr(one, "losses", {}).values(), getattr(one, "loss", None), *waiting]
    return found
