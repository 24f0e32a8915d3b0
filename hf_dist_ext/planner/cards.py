"""Cards by name: memory as the driver shows it, peak arithmetic and links, from their makers' data sheets.

`half` counts dense bfloat16 products of the matrix units (float16 where a card has no bfloat16), `single` float32
without TF32, which torch leaves off; both per second, a multiply-add as two. Runs reach a share of a peak:
HALF_REACHED and SINGLE_REACHED are assumptions, so times are good for comparing, and for orders of magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_dist_ext.errors import UsageError

HALF_REACHED, SINGLE_REACHED = 0.4, 0.7
NVIDIA = "https://www.nvidia.com/en-us/"


@dataclass(frozen=True)
class Card:
    memory_gib: float
    half: float
    single: float
    interconnect: str
    source: str
    words: tuple[str, ...]  # in the driver's name of the card

    def speed(self, item: int) -> float:
        """Operations per second of a run that computes with so many bytes per element."""
        return self.half * HALF_REACHED if item < 4 else self.single * SINGLE_REACHED


CARDS = {
    "b200": Card(179, 2250e12, 75e12, "nvlink", NVIDIA + "data-center/dgx-b200/", ("B200",)),
    "h200": Card(140.4, 989e12, 67e12, "nvlink", NVIDIA + "data-center/h200/", ("H200",)),
    "h100": Card(79.6, 989e12, 67e12, "nvlink", NVIDIA + "data-center/h100/", ("H100",)),
    "a100-80": Card(80, 312e12, 19.5e12, "nvlink", NVIDIA + "data-center/a100/", ("A100", "80GB")),
    "a100-40": Card(40, 312e12, 19.5e12, "nvlink", NVIDIA + "data-center/a100/", ("A100", "40GB")),
    "l40s": Card(45, 362e12, 91.6e12, "pcie", NVIDIA + "data-center/l40s/", ("L40S",)),
    "l4": Card(22.5, 121e12, 30.3e12, "pcie", NVIDIA + "data-center/l4/", ("NVIDIA L4",)),
    "a10": Card(22.5, 125e12, 31.2e12, "pcie", NVIDIA + "data-center/products/a10-gpu/", ("NVIDIA A10",)),
    "4090": Card(24, 165.2e12, 82.6e12, "pcie", NVIDIA + "geforce/graphics-cards/40-series/rtx-4090/", ("4090",)),
    "3090": Card(24, 71e12, 35.6e12, "pcie", NVIDIA + "geforce/graphics-cards/30-series/rtx-3090/", ("3090",)),
    "v100-32": Card(32, 125e12, 15.7e12, "nvlink", NVIDIA + "data-center/v100/", ("V100", "32GB")),
    "t4": Card(15, 65e12, 8.1e12, "pcie", NVIDIA + "data-center/tesla-t4/", ("T4",)),
}


def card_named(name: str) -> Card:
    if name not in CARDS:
        raise UsageError(
            f"--device {name} is not known. Choose one of {', '.join(CARDS)}, or give --device_memory_gib."
        )
    return CARDS[name]


def card_of(driver_name: str) -> str | None:
    """The card that a driver calls so; None for others."""
    return next((name for name, card in CARDS.items() if all(word in driver_name for word in card.words)), None)
