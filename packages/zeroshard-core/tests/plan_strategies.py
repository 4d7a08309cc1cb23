"""What hypothesis draws tensors and plans from."""

from functools import partial

import torch
from hypothesis import strategies as st
from zeroshard_core import TensorSpec, nbytes, numel, partition, split, whole

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.integers(1, 2_000).map(lambda size: (size,)),
    st.tuples(st.integers(1, 40), st.integers(1, 64)),
)
STRIDES = st.sampled_from(["contiguous", "transposed"])
BOOLEANS = st.booleans()
SMALL_PARTS = {"whole": whole, "split": partial(split, smallest_part=4)}
"""The strategies by name, cutting tensors that are small enough to be drawn by the thousand."""
WORLD_SIZES = st.integers(1, 9)


@st.composite
def specs(draw, trainable=BOOLEANS, max_size=12):
    count = draw(st.integers(0, max_size))
    shapes = [draw(SHAPES) for _ in range(count)]
    return [
        TensorSpec(
            name=f"layer{i}.{draw(st.sampled_from(['weight', 'bias', 'ß']))}",
            shape=shape,
            dtype=draw(st.sampled_from(DTYPES)),
            device=draw(st.sampled_from(["cpu", "cuda:0", "cuda:1"])),
            trainable=draw(trainable),
            group=draw(st.integers(0, 2)),
            stride=torch.empty(shape[::-1], device="meta").stride()[::-1] if draw(STRIDES) == "transposed" else None,
        )
        for i, shape in enumerate(shapes)
    ]


@st.composite
def plans(draw, tensors=None, world_sizes=WORLD_SIZES):
    return partition(
        draw(specs()) if tensors is None else tensors,
        draw(world_sizes),
        strategy=SMALL_PARTS[draw(st.sampled_from(sorted(SMALL_PARTS)))],
        cost=draw(st.sampled_from([numel, nbytes])),
    )
