"""What hypothesis draws tensors and plans from."""

import torch
from hypothesis import strategies as st
from zeroshard_core import STRATEGIES, TensorSpec, nbytes, numel, partition

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.integers(1, 2_000).map(lambda size: (size,)),
    st.tuples(st.integers(1, 40), st.integers(1, 64)),
)
BOOLEANS = st.booleans()
WORLD_SIZES = st.integers(1, 9)


@st.composite
def specs(draw, trainable=BOOLEANS, max_size=12):
    count = draw(st.integers(0, max_size))
    return [
        TensorSpec(
            name=f"layer{i}.{draw(st.sampled_from(['weight', 'bias', 'ß']))}",
            shape=draw(SHAPES),
            dtype=draw(st.sampled_from(DTYPES)),
            device=draw(st.sampled_from(["cpu", "cuda:0", "cuda:1"])),
            trainable=draw(trainable),
            group=draw(st.integers(0, 2)),
        )
        for i in range(count)
    ]


@st.composite
def plans(draw, tensors=None, world_sizes=WORLD_SIZES):
    return partition(
        draw(specs()) if tensors is None else tensors,
        draw(world_sizes),
        strategy=draw(st.sampled_from(sorted(STRATEGIES))),
        cost=draw(st.sampled_from([numel, nbytes])),
    )
