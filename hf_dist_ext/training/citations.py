"""What to cite of our losses and of the gradient cache, as BibTeX. The others say it themselves."""

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


def parts_of(loss: Any) -> list[Any]:
    """The loss and those inside of it, without what only holds others; [] for None."""
    found: list[Any] = []
    waiting = [loss]
    while waiting:
        one = waiting.pop(0)
        if one is not None and one not in found:
            found.append(one)
            waiting = [*getattr(one, "losses", {}).values(), getattr(one, "loss", None), *waiting]
    return [one for one in found if type(one).__name__ not in AROUND_OTHERS]


def own_citations(loss: Any, is_cached: bool) -> dict[str, str]:
    """What is cited -> BibTeX, of losses of ours and of the gradient cache where it is used."""
    parts = parts_of(loss)
    found = {type(one).__name__: OF_LOSS[type(one).__name__] for one in parts if type(one).__name__ in OF_LOSS}
    if any(getattr(one, "matryoshka", None) for one in parts):
        found["Matryoshka"] = MATRYOSHKA
    return found | ({"Gradient cache": GRADIENT_CACHE} if is_cached and parts else {})
