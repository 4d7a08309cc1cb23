"""What the collective path issues for real shapes at any number of ranks, and the time that the host takes for it.

An iteration is a backward with ``register_reduce_to_owner`` and DDP's buckets (1 MiB for the first, 25 MiB for others),
and a step. On torch's fake backend one process stands for a rank of any number and nothing moves.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from time import process_time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench.results import Row
from bench.turns import WARM_UP, ratio, take_turns
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not an explicit export
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import Coordinator, RankGroup, Segment, choose_broadcaster, choose_transport, collectives
from zeroshard_core import SMALLEST_PART, Plan, Run, TensorSpec, partition, split
from zeroshard_integrations.ddp import register_reduce_to_owner

META = torch.device("meta")
NARROWER = 12
"""How many times fewer columns than the model's the tensors have whose host time is measured."""
_BUCKETS = [1024 * 1024, 25 * 1024 * 1024]
Shapes = list[tuple[int, ...]]


_GPT2_BLOCK: Shapes = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
_GPT2_BLOCK += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
GPT2: Shapes = [(50257, 768), (1024, 768), *_GPT2_BLOCK * 12, (768,), (768,)]
_LLAMA_LAYER: Shapes = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)]
_LLAMA_LAYER += [(8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,)]
MODELS = {"GPT-2 124M": GPT2, "Llama 1B": [(128256, 2048), *_LLAMA_LAYER * 16, (2048,)]}
"""Shapes of parameters, in the order of the model."""


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Make torch's fake process group the default one: this process is rank 0 of so many, which do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _smallest(ranks: int) -> int:
    return 1024 if ranks >= 64 else SMALLEST_PART


def count(shapes: Shapes, strategy: str) -> Row:
    """Count what one iteration with a strategy of partition issues on the group of :func:`fake_group`.

    ``groups`` are of reduces or broadcasts that are issued as one, and ``members`` are these reduces and broadcasts.
    ``staging MB`` is the memory of the buffers that matrices lie in, and ``padding`` the size of the matrices of
    gradients over the size of what they hold.
    """
    coordinator = Coordinator(RankGroup.of())
    ranks = coordinator.ranks
    params = [torch.empty(shape, device=META) for shape in shapes]
    specs = [TensorSpec(str(index), shape, torch.float32, "meta") for index, shape in enumerate(shapes)]
    plan = partition(specs, ranks.world_size, strategy=strategy, smallest_part=_smallest(ranks.world_size))
    order = [*range(len(params))][::-1]
    assigned, _ = dist._compute_bucket_assignment_by_size([params[index] for index in order], _BUCKETS)  # type: ignore[attr-defined]  # not an explicit export
    issued: Counter[str] = Counter()
    padded = held = 0
    with _counting(issued):
        transport = choose_transport(coordinator, META, 0)
        for places in assigned:
            tensors = [order[place] for place in places]
            buffer = torch.empty(sum(specs[tensor].numel for tensor in tensors), device=META)
            reducer = transport.reducer(_runs(plan, tensors), buffer)
            reducer.begin(buffer).finish()
            assert isinstance(reducer, collectives.CollectiveReducer)
            matrix = reducer.matrix
            padded += matrix.width * ranks.world_size
            columns = zip(matrix.runs, matrix.columns, strict=True)
            held += sum(run.stop - run.start for run, column in columns if column is not None)
        segments = [
            Segment(shard.rank, param.view(-1), plan.is_cut(index), shard.flat)
            for index, param in enumerate(params)
            for shard in plan.of_tensor(index)
        ]
        choose_broadcaster(coordinator, segments, META).broadcast()
    slots = ranks.context.shared(collectives.Staging)._slots.values()
    return {
        "buckets": len(assigned),
        "reduce-scatters": issued["reduce_scatter"],
        "all-gathers": issued["all_gather"],
        "groups": issued["groups"],
        "members": issued["reduce"] + issued["broadcast"],
        "staging MB": sum(slot._memory.nbytes for slot in slots if slot._memory is not None) // 10**6,
        "padding": padded / held if held else 1.0,
    }


def _runs(plan: Plan, tensors: Sequence[int]) -> list[Run]:
    runs, offset = [], 0
    for tensor in tensors:
        for shard in plan.of_tensor(tensor):
            runs.append(Run(shard.rank, offset + shard.flat.start, offset + shard.flat.stop, plan.is_cut(tensor)))
        offset += plan.tensors[tensor].numel
    return runs


@contextmanager
def _counting(issued: Counter[str]) -> Iterator[None]:
    """Count collectives in place of issuing them, as if the backend issued several as one."""

    @contextmanager
    def group(*_: object, **__: object) -> Iterator[None]:
        issued["groups"] += 1
        yield

    def counting(name: str) -> Callable[..., None]:
        return lambda *_, **__: issued.update([name])

    with ExitStack() as stack:
        for module, names in ((dist, ("reduce", "broadcast")), (collectives, ("reduce_scatter", "all_gather"))):
            for name in names:
                stack.enter_context(mock.patch.object(module, name, counting(name)))
        stack.enter_context(mock.patch.object(collectives, "coalescing_manager", group))
        stack.enter_context(mock.patch.object(RankGroup, "coalesces", return_value=True))
        yield


def host_times(shapes: Shapes, ranks: int, rounds: int) -> dict[str, Row]:
    """Return by partition the host's time of an iteration and of its step, beside torch's class with bucket views."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The fake all-gather copies this rank's row to all others, and the fake reduce-scatter makes a view for each rank.
    # An accelerator's host does neither, so they only issue a call.
    gather, reduce = (partial(_call, place=place) for place in (1, 0))
    nothing = mock.patch.multiple(collectives, all_gather=gather, reduce_scatter=reduce)
    found: dict[str, Row] = {}
    with fake_group(ranks), nothing:
        for strategy in ("whole", "split"):
            steps: list[float] = []
            turns = {"ours": _iteration(shapes, strategy, ranks, steps), "torch": _iteration(shapes, None, ranks, [])}
            times = take_turns(turns, rounds, f"{strategy}, {ranks} ranks", processor_time=True)
            ms, step = (1e3 * sorted(each)[len(each) // 2] for each in (times["ours"], steps[WARM_UP:]))
            found[strategy] = {"ms": ms, "step ms": step, "/ torch": ratio(times["ours"], times["torch"])}
            del turns
            gc.collect()
    return found


def _iteration(shapes: Shapes, strategy: str | None, ranks: int, steps: list[float]) -> Callable[[], None]:
    """Return a function that makes one iteration, and appends what its step takes; of torch's class by default."""
    model = DistributedDataParallel(_Elements(shapes), gradient_as_bucket_view=True, bucket_cap_mb=25 / NARROWER)
    settings: dict[str, Any] = {"lr": 1e-3, "foreach": True}
    optimizer: torch.optim.Optimizer
    if strategy is None:
        model.register_comm_hook(ranks, _all_reduce)
        optimizer = TorchZero(model.parameters(), AdamW, parameters_as_bucket_view=True, **settings)
    else:
        # Tensors are cut into as many parts as those of the model.
        plan: Any = partial(split, smallest_part=_smallest(ranks) // NARROWER) if strategy == "split" else strategy
        sharded = ZeroRedundancyOptimizer(model.parameters(), AdamW, partition=plan, elementwise=True, **settings)
        register_reduce_to_owner(model, sharded)
        optimizer = sharded

    def iterate() -> None:
        model().backward()
        started = process_time()
        # Else what would arrive is not unpacked.
        with mock.patch.object(RankGroup, "moves_data", return_value=True):
            optimizer.step()
        steps.append(process_time() - started)
        optimizer.zero_grad()

    return iterate


class _Elements(nn.Module):
    """All parameters, of which forward reads an element each: gradients, and next to no arithmetic."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.zeros(*shape[:-1], shape[-1] // NARROWER) for shape in shapes])

    def forward(self) -> torch.Tensor:
        return torch.stack([param.view(-1)[0] for param in self.params]).sum()


def _call(*rows: torch.Tensor, place: int, op: object = None, **options: Any) -> Any:  # noqa: ANN401, ARG001 - torch's
    return dist.broadcast(rows[place], group_src=0, **options)


def _all_reduce(ranks: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do what DDP does without a hook, which the fake backend cannot serve: its works have no results."""
    dist.all_reduce(bucket.buffer().div_(ranks), async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure(ranks: Sequence[int], rounds: int) -> list[Row]:
    """Return a row for each model, partition and number of ranks, with the host's times for GPT-2."""
    made: list[Row] = []
    for (model, shapes), number in product(MODELS.items(), ranks):
        times = host_times(shapes, number, rounds) if shapes is GPT2 else {}
        for strategy in ("whole", "split"):
            row = {"model": model, "partition": strategy, "ranks": number}
            with fake_group(number):
                made.append({**row, **count(shapes, strategy), **times.get(strategy, {})})
    return made
