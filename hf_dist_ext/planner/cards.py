"""Cards by name: memory as the driver shows it, peak arithmetic and links, from their makers' data sheets.

`half` counts dense bfloat16 products of the matrix units that are added up in float32 (float16 where a card has no
bfloat16), `single` float32 without TF32, which torch leaves off; both per second, a multiply-add as two. Data sheets
mostly give products of sparse matrices, twice as many. Runs reach a share of a peak: HALF_REACHED and SINGLE_REACHED
are assumptions, so times are good for comparing, and for orders of magnitude.

`memory_mib` is what nvidia-smi shows with ECC as the cards are delivered; of the V100 it is the data sheet's 32 GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_dist_ext.errors import UsageError

HALF_REACHED, SINGLE_REACHED = 0.4, 0.7


@dataclass(frozen=True)
class Card:
    memory_mib: int
    half: float
    single: float
    interconnect: str
    source: str  # of `half` and `single`
    words: tuple[str, ...]  # in the driver's name of the card
    has_bf16: bool = True

    @property
    def memory_gib(self) -> float:
        return self.memory_mib / 1024

    def speed(self, item: int) -> float:
        """Operations per second of a run that computes with so many bytes per element."""
        return self.half * HALF_REACHED if item < 4 else self.single * SINGLE_REACHED


AMPERE = "NVIDIA Ampere GA102 architecture white paper"
ADA = "NVIDIA Ada architecture white paper"
BLACKWELL = "NVIDIA Blackwell architecture technical brief, HGX B200 at 1,000 W"
CARDS = {  # the first one counts whose words are all in a driver's name
    "b200": Card(183359, 2250e12, 80e12, "nvlink", BLACKWELL, ("B200",)),
    "h200": Card(143771, 989e12, 67e12, "nvlink", "NVIDIA H200 data sheet, SXM", ("H200",)),
    "h100-pcie": Card(81559, 756e12, 51e12, "pcie", "NVIDIA H100 data sheet, PCIe", ("H100", "PCIe")),
    "h100": Card(81559, 989e12, 67e12, "nvlink", "NVIDIA H100 data sheet, SXM", ("H100",)),
    "a100-80": Card(81920, 312e12, 19.5e12, "nvlink", "NVIDIA A100 data sheet", ("A100", "80GB")),
    "a100-40": Card(40960, 312e12, 19.5e12, "nvlink", "NVIDIA A100 data sheet", ("A100", "40GB")),
    "l40s": Card(46068, 362e12, 91.6e12, "pcie", "NVIDIA L40S data sheet", ("L40S",)),
    "l4": Card(23034, 121e12, 30.3e12, "pcie", "NVIDIA L4 data sheet", ("L4",)),
    "a10": Card(23028, 125e12, 31.2e12, "pcie", "NVIDIA A10 data sheet", ("A10",)),
    "4090": Card(24564, 165.2e12, 82.6e12, "pcie", ADA, ("4090",)),
    "3090": Card(24576, 71e12, 35.6e12, "pcie", AMPERE, ("3090",)),
    "v100-32": Card(32768, 125e12, 15.7e12, "nvlink", "NVIDIA V100 data sheet, SXM2", ("V100", "32GB"), False),
    "t4": Card(15360, 65e12, 8.1e12, "pcie", "NVIDIA T4 data sheet", ("T4",), False),
}


def card_named(name: str) -> Card:
    if name not in CARDS:
        raise UsageError(
            f"--device {name} is not known. Choose one of {', '.join(CARDS)}, or give --device_memory_gib."
        )
    return CARDS[name]


def card_of(driver_name: str) -> str | None:
    """The card that a driver calls so, such as "NVIDIA A100-SXM4-80GB"; None for others."""
    words = set(re.split(r"[\s-]+", driver_name.strip()))
    return next((name for name, card in CARDS.items() if words.issuperset(card.words)), None)
