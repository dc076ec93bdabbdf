"""The figures that the papers print, and how they were measured. Nothing here is ours."""

from __future__ import annotations

from typing import NamedTuple

from cubeloom.plan.reproduce.report import Point

_ABSTRACT, _PRINTED, _RECALLED = "abstract", "figure, printed", "recalled"


def _figure(number: int) -> str:
    return f"figure {number}, by eye"


# Bian et al. 2021, arXiv 2105.14450: the abstract, and the table of weak scaling as a blog shows it
# (zhen8838.github.io, mesh-matmul). Seconds of all samples of a step; the average is of a sample.
CUBE_OVER_1D = Point("64 V100: 3-D over 1-D", 2.32, _ABSTRACT)
CUBE_OVER_2D = Point("64 V100: 3-D over 2-D", 1.57, _ABSTRACT)
CUBE_TABLE = "table, in a blog"


class CubeRow(NamedTuple):
    scheme: str
    ranks: int
    samples: int
    hidden: int
    forward: float
    backward: float
    average: float


CUBE = (
    CubeRow("1-D", 8, 60, 2048, 4.759, 15.676, 0.341),
    CubeRow("1-D", 16, 60, 4096, 12.488, 30.894, 0.723),
    CubeRow("1-D", 36, 40, 6120, 13.515, 31.822, 1.133),
    CubeRow("1-D", 64, 30, 8192, 13.915, 32.890, 1.560),
    CubeRow("2-D", 16, 192, 4096, 33.860, 101.981, 0.708),
    CubeRow("2-D", 36, 288, 6120, 54.760, 165.850, 0.766),
    CubeRow("2-D", 64, 384, 8192, 99.419, 304.707, 1.052),
    CubeRow("3-D", 8, 192, 2048, 30.096, 81.212, 0.580),
    CubeRow("3-D", 64, 384, 8192, 79.349, 125.037, 0.672),
)

# Li and Hoefler 2021, arXiv 2107.06925.
SCHEMES = ("PipeDream", "PipeDream-2BW", "GPipe", "GEMS", "DAPPLE")
GPT2 = "GPT-2, 2,048 P100"
GPT2_SPEEDUP = {
    scheme: Point(f"{GPT2}: Chimera over {scheme}", value, _PRINTED)
    for scheme, value in zip(SCHEMES, (2.01, 1.16, 1.42, 2.34, 1.38), strict=True)
}
GPT2_RATE = {
    scheme: Point(f"{GPT2}: {scheme}, sequences/s", value, _figure(1))
    for scheme, value in zip((*SCHEMES, "Chimera"), (255.0, 430.0, 360.0, 220.0, 370.0, 505.0), strict=True)
}
GPT2_BUBBLE = {
    scheme: Point(f"{GPT2}: {scheme}, bubble ratio", value, _figure(1))
    for scheme, value in (("GPipe", 0.45), ("GEMS", 0.83), ("DAPPLE", 0.49), ("Chimera", 0.32))
}
GPT2_MEMORY = {
    scheme: Point(f"{GPT2}: {scheme}, GiB of the fullest node", value, _figure(1))
    for scheme, value in (("Chimera", 15.2), ("GEMS", 13.0), ("PipeDream", 16.0))
}
GPT2_AGAIN = {
    scheme: Point(f"{GPT2}: {scheme} recomputes", float(again), _figure(1))
    for scheme, again in zip((*SCHEMES, "Chimera"), (True, True, True, False, True, False), strict=True)
}
GPT2_WEAK = Point("GPT-2: Chimera, weak scaling from 512 to 2,048 nodes", 0.914, _RECALLED)
GPT2_DOUBLING = Point("GPT-2, 512 P100, batch 2,048: doubling over direct", 223 / 198, _figure(18))

BERT = "Bert-48, 64 P100"
BERT_RATE = {
    scheme: Point(f"{BERT}: {scheme}, sequences/s", value, _figure(14))
    for scheme, value in zip((*SCHEMES, "Chimera"), (170.0, 290.0, 205.0, 140.0, 275.0, 340.0), strict=True)
}
BERT_SPEEDUP = {
    scheme: Point(
        f"{BERT}: Chimera over {scheme}",
        BERT_RATE["Chimera"].value / BERT_RATE[scheme].value,
        f"{_figure(14)}, a ratio",
    )
    for scheme in SCHEMES
}
BERT_AGAIN = {
    scheme: Point(f"{BERT}: {scheme} recomputes", float(again), _figure(14))
    for scheme, again in zip((*SCHEMES, "Chimera"), (False, True, True, False, False, False), strict=True)
}
BERT_32 = Point("Bert-48, 32 P100: Chimera, sequences/s", 166.0, _figure(13))
BERT_CHOICE = tuple(
    Point(f"Bert-48, 32 P100: the {what} that equation 1 chooses", value, _figure(13))
    for what, value in (("W", 8.0), ("D", 4.0), ("B", 8.0))
)
EAGER_OPT = {
    nodes: Point(f"Bert-48, {nodes} P100: eager-opt over eager", value, _figure(12))
    for nodes, value in ((16, 1.03), (32, 1.09), (64, 1.12))
}
# Contents of the authors' repository: the profile of one block, and the gradients of the largest stage.
BLOCK = {
    (samples, which): Point(f"BERT-large block, P100, {samples} samples: {which}, ms", value, "code, prof/")
    for samples, which, value in (
        (8, "forward", 4.500),
        (8, "backward", 7.653),
        (32, "forward", 16.100),
        (32, "backward", 26.953),
    )
}
LARGEST = {
    (model, depth): Point(f"{model} in {depth} stages: numbers of the largest", value, "code, performance_model/")
    for model, depth, value in (("bert-48", 4, 182_937_600.0), ("gpt2-64", 32, 104_994_560.0))
}

# Singh, Sating and Bhatele 2023, arXiv 2305.13525, first version and later ones.
UNET_OVER_MEGATRON = Point("28B U-Net, 256 A100: over Megatron-LM", 1.60, _ABSTRACT)
GPT_OVER_MEGATRON = Point("80B GPT, 1,024 A100: over Megatron-LM", 1.26, _ABSTRACT)
GPT_OF_PEAK = Point("80B GPT, 1,024 A100: share of peak", 0.57, _ABSTRACT)
