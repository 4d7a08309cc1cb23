"""The emulated device computes what the CPU does, refuses by name what it has not, and counts where the host waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn import functional

pytestmark = [pytest.mark.exhaustive, pytest.mark.ranks(1, backend="emulated")]

CPU = torch.device("cpu")
Outcome = Iterable[torch.Tensor]


def assert_same(found: Outcome, expected: Outcome, device: torch.device) -> None:
    """Compare what a program gave on the device and on the CPU: dtypes, shapes, strides and bits."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert (ours.device, theirs.device) == (device, CPU), place
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), place
        assert bits(ours) == bits(theirs), place


def bits(tensor: torch.Tensor) -> list[int]:
    # Both with the same kernels: -0.0 and NaN count.
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()


def line_of(mark: str) -> int:
    """Return the number of the line in this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}"))


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values that were drawn on the CPU."""
    return torch.randn(shape, dtype=dtype, device="cpu").to(device)


# ------------------------------------------------------------------------- operations, as on the CPU bit by bit


def training(make: Callable[[], nn.Module], *shape: int) -> Callable[[torch.device], Outcome]:
    """Return a program that runs a module forward and backward: outputs, gradients and buffers."""

    def program(device: torch.device) -> Outcome:
        module = make().to(device)
        inputs = drawn(device, *shape).requires_grad_()
        output = module(inputs)
        output.square().mean().backward()
        assert inputs.grad is not None
        return [output, inputs.grad, *(param.grad for param in module.parameters()), *module.buffers()]

    return program


def embedding(device: torch.device) -> Outcome:
    module = nn.Embedding(20, 8, padding_idx=3).to(device)
    output = module(torch.randint(20, (4, 5)).to(device))
    output.square().sum().backward()
    return [output, module.weight.grad]


def transformer_layer(device: torch.device) -> Outcome:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True).to(device)
    # Attention in parts: fused kernels of the CPU sum in another order.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = layer(drawn(device, 3, 5, 16))
        output.square().mean().backward()
    return [output, *(param.grad for param in layer.parameters())]


def losses(device: torch.device) -> Outcome:
    logits, classes = drawn(device, 6, 10).requires_grad_(), torch.randint(10, (6,)).to(device)
    total = functional.cross_entropy(logits, classes) + functional.smooth_l1_loss(logits, drawn(device, 6, 10))
    total = total + functional.binary_cross_entropy_with_logits(logits, torch.rand(6, 10).to(device))
    total.backward()
    return [total, logits.grad]


def an_optimizer(make: Callable[[list[torch.Tensor]], optim.Optimizer]) -> Callable[[torch.device], Outcome]:
    def program(device: torch.device) -> Outcome:
        params = [drawn(device, *shape).requires_grad_() for shape in [(7, 5), (11,), (1,), ()]]
        optimizer = make(params)
        for _ in range(3):
            for param in params:
                param.grad = drawn(device, *param.shape)
            optimizer.step()
        states = [optimizer.state[param] for param in params]
        # A step is a CPU tensor where the optimizer is neither fused nor capturable.
        return [*params, *(one for state in states for name, one in state.items() if name != "step")]

    return program


def clipped_gradients(device: torch.device) -> Outcome:
    params = [drawn(device, 9, 4).requires_grad_() for _ in range(3)]
    for param in params:
        param.grad = drawn(device, 9, 4)
    norm = nn.utils.clip_grad_norm_(params, 0.5)
    return [norm, *(param.grad for param in params)]


def foreach_operators(device: torch.device) -> Outcome:
    xs, ys = ([drawn(device, size) for size in (3, 7, 11)] for _ in range(2))
    kept = [*torch._foreach_add(xs, ys, alpha=2), *torch._foreach_norm(xs), *torch._foreach_abs(ys)]
    torch._foreach_mul_(xs, 3)
    torch._foreach_addcdiv_(xs, ys, [one.abs() + 1 for one in ys], value=0.5)
    torch._foreach_lerp_(xs, ys, 0.25)
    torch._foreach_copy_(ys, xs)
    return [*kept, *xs, *ys, *torch._foreach_max(xs)]


def views_of_complex_numbers(device: torch.device) -> Outcome:
    x = drawn(device, 4, 5, dtype=torch.complex64)
    conjugated = x.conj()
    assert conjugated.is_conj()
    imaginary = x.conj().imag
    assert imaginary.is_neg()
    return [conjugated, imaginary, x @ conjugated.t(), conjugated * 2, imaginary + 1, torch.view_as_real(x), x.abs()]


def results_in_given_tensors(device: torch.device) -> Outcome:
    x, y = drawn(device, 4, 6), drawn(device, 6, 3)
    empty, small, large = (torch.empty(size, device=device) for size in (0, 12, 100))
    torch.mm(x, y, out=empty)
    torch.mm(x, y, out=small.view(4, 3))
    part = large[10:22].view(4, 3)
    torch.mm(x, y, out=part)
    values, places = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    torch.sort(x, dim=1, out=(values, places))
    torch.add(x, 1, out=x)
    return [empty, small, part, values, places, x]


def writes_to_views(device: torch.device) -> Outcome:
    x = drawn(device, 6, 8)
    x[1:3].mul_(2)
    x.t()[2].zero_()
    x.view(-1)[5:9].copy_(drawn(device, 4))
    x[:, ::3] += 1
    x.diagonal().fill_(7)
    first, second = x.chunk(2)
    first.add_(second)
    parts = torch.split(x, [2, 6], dim=1)
    parts[1].sub_(0.5)
    x.unsqueeze(0).transpose(1, 2)[0, 0].neg_()
    return [x, first, parts[0], x.as_strided((2, 2), (8, 3), 1)]


def indices_and_masks(device: torch.device) -> Outcome:
    x, places = drawn(device, 6, 8), torch.tensor([4, 0, 4], device=device)
    mask = x > 0
    y = x.clone()
    y[mask] = 0
    y[places, 2] = 5
    z = x.clone().index_add_(0, places, drawn(device, 3, 8)).masked_fill_(mask, 1)
    z.index_put_((places, places), drawn(device, 3), accumulate=True)
    chosen = [x[mask], x[places], x[[1, 2]], x[1, None, ::2], x[..., 3], x[x.sum(1) > 0], x[torch.tensor([3])]]
    more = [mask.nonzero(), x.masked_select(mask), torch.where(mask, x, -x), x.gather(1, places.expand(6, 3))]
    return [y, z, *chosen, *more, x.take_along_dim(x.argsort(1), 1), *torch.topk(x, 3)]


def channels_last(device: torch.device) -> Outcome:
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    module = module.to(device, memory_format=torch.channels_last)
    inputs = drawn(device, 2, 3, 8, 8).to(memory_format=torch.channels_last)
    output = module(inputs)
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.square().sum().backward()
    return [inputs, output, torch.empty_like(inputs).fill_(1), *(param.grad for param in module.parameters())]


def random_numbers(device: torch.device) -> Outcome:
    torch.manual_seed(7)
    first = [torch.randn(5, 3, device=device), torch.rand(4, device=device), torch.randint(9, (6,), device=device)]
    x = torch.empty(20, device=device).uniform_(-1, 1)
    more = [torch.randperm(10, device=device), x.bernoulli(0.3), torch.multinomial(x.abs(), 4), x.normal_().clone()]
    return [*first, x, *more, functional.dropout(x, 0.5), nn.init.kaiming_uniform_(torch.empty(4, 3, device=device))]


def a_generator_of_its_own(device: torch.device) -> Outcome:
    generator = torch.Generator(device).manual_seed(3)
    return [torch.randn(5, device=device, generator=generator), torch.rand(5, device=device, generator=generator)]


def other_dtypes(device: torch.device) -> Outcome:
    x = drawn(device, 5, 5) * 3
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.complex64]
    module = nn.Linear(5, 2).to(device).to(torch.bfloat16)
    converted = [x.to(dtype) for dtype in dtypes]
    moved = torch.ones(3, dtype=torch.int64).to(device, torch.float16)
    return [*converted, moved, module.weight, module(converted[2]), x.view(torch.int32), x.to(device=device)]


def sums_and_products(device: torch.device) -> Outcome:
    x, y = drawn(device, 7, 7), drawn(device, 7, 7)
    linear = [torch.linalg.solve(x, y), torch.linalg.inv(x), *torch.linalg.qr(x), torch.linalg.norm(x), x.det()]
    reduced = [x.sum(0), x.mean(), x.std(1), x.cumsum(1), x.logsumexp(0), x.prod(), x.norm(), x.var(), x.argmax()]
    joined = [torch.cat([x, y]), torch.stack([x, y], 1), torch.einsum("ij,jk->ik", x, y), torch.bmm(x[None], y[None])]
    return [*linear, *reduced, *joined, torch.addmm(x, x, y, beta=2), torch.baddbmm(x[None], x[None], y[None])]


def second_derivatives(device: torch.device) -> Outcome:
    x = drawn(device, 6).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [first, second]


def checkpointed_activations(device: torch.device) -> Outcome:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    inputs = drawn(device, 4, 8).requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False).sum().backward()
    return [inputs.grad, *(param.grad for param in layer.parameters())]


def functional_gradients(device: torch.device) -> Outcome:
    x = drawn(device, 4, 3)
    return [torch.vmap(lambda row: row.softmax(0) * row.sum())(x), torch.func.grad(lambda one: one.sin().sum())(x)]


PROGRAMS: dict[str, Callable[[torch.device], Outcome]] = {
    "linear": training(lambda: nn.Linear(7, 5), 4, 7),
    "linear with three dimensions": training(lambda: nn.Linear(7, 5), 2, 3, 7),
    "layer norm": training(lambda: nn.LayerNorm(7), 4, 7),
    "group norm": training(lambda: nn.GroupNorm(2, 4), 3, 4, 5),
    "gelu": training(nn.GELU, 4, 7),
    "softmax": training(lambda: nn.Softmax(1), 4, 7),
    "conv1d": training(lambda: nn.Conv1d(4, 6, 3, stride=2), 2, 4, 9),
    "conv2d": training(lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=False), 2, 4, 6, 6),
    "transposed conv2d": training(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), 2, 4, 5, 5),
    "batch norm": training(lambda: nn.BatchNorm1d(7), 8, 7),
    "batch norm in two dimensions": training(lambda: nn.BatchNorm2d(3), 4, 3, 5, 5),
    "average pool": training(lambda: nn.AdaptiveAvgPool2d(2), 2, 3, 6, 6),
    "embedding": embedding,
    "transformer layer": transformer_layer,
    "losses": losses,
    "AdamW foreach": an_optimizer(lambda params: optim.AdamW(params, foreach=True)),
    "AdamW fused": an_optimizer(lambda params: optim.AdamW(params, fused=True)),
    "AdamW for loop": an_optimizer(lambda params: optim.AdamW(params, foreach=False)),
    "AdamW amsgrad": an_optimizer(lambda params: optim.AdamW(params, amsgrad=True, foreach=True)),
    "SGD": an_optimizer(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)),
    "SGD fused": an_optimizer(lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True)),
    "clipped gradients": clipped_gradients,
    "foreach operators": foreach_operators,
    "complex numbers": views_of_complex_numbers,
    "results in given tensors": results_in_given_tensors,
    "writes to views": writes_to_views,
    "indices and masks": indices_and_masks,
    "channels last": channels_last,
    "random numbers": random_numbers,
    "a generator of its own": a_generator_of_its_own,
    "other dtypes": other_dtypes,
    "sums and products": sums_and_products,
    "second derivatives": second_derivatives,
    "checkpointed activations": checkpointed_activations,
    "functional gradients": functional_gradients,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operations_give_the_bits_that_the_cpu_gives(device, name):
    found = []
    for place in (device, CPU):
        torch.manual_seed(0)
        found.append(PROGRAMS[name](place))
    assert_same(*found, device)


def test_attention_is_close_to_the_cpu_s(device):
    torch.manual_seed(0)
    on_cpu = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    found = functional.scaled_dot_product_attention(*(one.to(device) for one in on_cpu))
    assert torch.allclose(found.cpu(), functional.scaled_dot_product_attention(*on_cpu), rtol=1e-5, atol=1e-6)


def test_a_module_that_is_copied_or_pickled_keeps_its_device(device, tmp_path):
    module = nn.Linear(3, 2).to(device)
    assert_same(copy.deepcopy(module).parameters(), [one.cpu() for one in module.parameters()], device)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert_same(loaded.values(), [one.detach().cpu() for one in module.parameters()], device)
    on_cpu = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert {one.device for one in on_cpu.values()} == {CPU}
    torch.save(on_cpu, tmp_path / "cpu.pt")
    again = torch.load(tmp_path / "cpu.pt", map_location=device)
    assert_same(again.values(), on_cpu.values(), device)
    other = nn.Linear(3, 2).to(device)
    other.load_state_dict(on_cpu)
    assert_same(other.state_dict().values(), on_cpu.values(), device)


def test_tensors_say_where_they_are(device):
    x = torch.ones(3, device=device)
    assert (x.device, x.is_cpu, x.is_emu, x.get_device()) == (torch.device("emu", 0), False, True, 0)
    assert str(x) == "tensor([1., 1., 1.], device='emu:0')"
    assert torch.accelerator.current_accelerator() == torch.device("emu")
    assert torch.accelerator.device_count() == torch.emu.device_count() == 1
    for other in (torch.device("emu"), "emu:0", torch.device("emu", 0)):
        assert torch.zeros(2, device=other).device == device
    with torch.device(device):
        assert torch.zeros(2).device == device
    assert torch.ones(2, device=device).emu() is not None


def test_memory_that_nothing_has_written_is_nan(device):
    assert torch.empty(5, device=device).isnan().all()
    assert torch.empty(5, device=device, dtype=torch.bfloat16).isnan().all()


def test_the_device_s_module_has_what_torch_s_others_have(device):
    current, side = torch.emu.current_stream(), torch.emu.Stream()
    with torch.emu.stream(side):
        assert torch.emu.current_stream() == torch.accelerator.current_stream() == side
        with torch.emu.stream(None):
            assert torch.emu.current_stream() == side
    assert torch.emu.current_stream() == current != side
    event = torch.emu.Event()
    event.record(side)
    event.wait()
    event.synchronize()
    assert event.query()
    torch.emu.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(current)
    with torch.emu.device(0):
        torch.emu.set_device(0)
        assert torch.emu.current_device() == 0
    with torch.random.fork_rng(device_type="emu"):
        torch.emu.manual_seed_all(3)
        torch.randn(3, device=device)
    torch.emu.empty_cache()


def test_memory_of_the_device_is_none_of_numpy_s(device):
    with pytest.raises(TypeError, match="emu:0"):
        torch.ones(3, device=device).numpy()


def test_a_loader_pins_what_it_loads(device):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for (values,) in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
        assert values.is_pinned()
        assert values.to(device, non_blocking=True).tolist() == values.tolist()


def test_inference_mode(device):
    with torch.inference_mode():
        x = nn.Linear(4, 4).to(device)(torch.ones(2, 4, device=device))
        x.zero_()[0].add_(1)
        assert x.tolist() == [[1] * 4, [0] * 4]


# ------------------------------------------------------------------------------------------------ mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_lowers_the_precision_of_what_its_lists_name(device, dtype):
    x = drawn(device, 4, 6)
    with torch.autocast(device.type, dtype=dtype):
        assert torch.is_autocast_enabled(device.type)
        lowered = [x @ x.t(), functional.linear(x, x), functional.conv1d(x[None], x[:, :, None][:, :4])]
        kept = [x.softmax(1), x.to(dtype).sum(), (x @ x.t()).log_softmax(0), functional.layer_norm(x, (6,))]
        promoted = torch.cat([x.to(dtype), x])
        with torch.autocast(device.type, enabled=False):
            assert (x @ x.t()).dtype == torch.float32
    assert {one.dtype for one in lowered} == {dtype}
    assert {one.dtype for one in kept} == {torch.float32}
    assert promoted.dtype == torch.float32
    assert torch.equal(lowered[0].cpu(), (x.to(dtype) @ x.to(dtype).t()).cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_scaled_loss_trains_and_skips_steps_that_overflow(device, dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)).to(device)
    optimizer = optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=2)
    inputs = drawn(device, 16, 6)
    losses, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            loss = module(inputs).float().square().mean()
        scaler.scale(loss).backward()
        if step == 3:
            module[0].weight.grad.fill_(torch.inf)
        before = [one.clone() for one in module.parameters()]
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True)]
        assert moved == [step != 3] * 4
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert losses[-1] < losses[0]
    assert scales == [256, 512, 512, 256, 256, 512]


# ------------------------------------------------------------------------------------- what the device does not have


def sparse_from_indices(device: torch.device) -> None:
    torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (3,), device=device)


def sparse_gradient(device: torch.device) -> None:
    nn.Embedding(5, 2, sparse=True).to(device)(torch.tensor([1, 2], device=device)).sum().backward()


def elapsed_time(device: torch.device) -> None:
    first, second = (torch.Event(device, enable_timing=True) for _ in range(2))
    for event in (first, second):
        event.record()
    first.elapsed_time(second)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    ("program", "names"),
    [
        (lambda device: torch.ones(3, 3, device=device).to_sparse(), "sparse"),
        (lambda device: torch.ones(3, 3, device=device).to_sparse_csr(), "sparse"),
        (lambda device: torch.eye(3).to_sparse().to(device), "sparse"),
        (sparse_from_indices, "sparse"),
        (sparse_gradient, "sparse"),
        (lambda device: torch.empty(3, device=device, layout=torch.sparse_coo), "sparse"),
        (lambda device: torch.emu.CUDAGraph(), "torch.emu.CUDAGraph"),
        (lambda device: torch.emu.graph(None), "torch.emu.graph"),
        (lambda device: torch.emu.make_graphed_callables(None, ()), "torch.emu.make_graphed_callables"),
        (lambda device: torch.empty(3, device="emu:1"), "emu:1"),
        (lambda device: torch.empty_strided((3,), (1,), device="emu:1"), "emu:1"),
        (lambda device: torch.ones(3, device="emu:1"), "emu:1"),
        (lambda device: torch.tensor([1.0], device="emu:1"), "emu:1"),
        (lambda device: torch.ones(3).to("emu:1"), "emu:1"),
        (lambda device: torch.ones(3, device=device).to("emu:1"), "emu:1"),
        (lambda device: torch.Stream("emu:1"), "emu:1"),
        (elapsed_time, "measures no time"),
        (lambda device: torch.add(torch.ones(9, device=device), 1, out=torch.ones(1, device=device)), "out="),
        # Torch has kernels for them that fuse more, for every device but the CPU.
        (lambda device: nn.LSTM(5, 4).to(device)(torch.ones(2, 3, 5, device=device)), "aten::_thnn_fused_lstm_cell"),
        (lambda device: nn.GRU(5, 4).to(device)(torch.ones(2, 3, 5, device=device)), "aten::_thnn_fused_gru_cell"),
    ],
)
def test_what_there_is_not_is_refused_by_name(device, program, names):
    with pytest.raises(NotImplementedError, match=names):
        program(device)


def test_an_operator_without_a_cpu_kernel_is_refused_by_its_name(device):
    library = torch.library.Library("emulated_test", "DEF")
    try:
        library.define("nowhere(Tensor x) -> Tensor")
        with pytest.raises(NotImplementedError, match="emulated_test::nowhere has no CPU kernel"):
            torch.ops.emulated_test.nowhere(torch.ones(1, device=device))
        library.define("somewhere(Tensor x) -> Tensor")
        library.impl("somewhere", lambda x: x + 1, "CPU")
        found = torch.ops.emulated_test.somewhere(torch.ones(1, device=device))
        assert (found.device, found.item()) == (device, 2)
    finally:
        library._destroy()


def test_other_attributes_of_the_device_s_module_are_missing(device):
    assert not hasattr(torch.emu, "memory_snapshot")
    with pytest.raises(AttributeError, match=r"torch\.emu"):
        torch.emu.nothing  # noqa: B018


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there + here,
        lambda here, there: here.add_(there),
        lambda here, there: there.add_(here),
        lambda here, there: here @ there.view(4, 1),
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.where(here > 0, here, there),
        lambda here, there: torch._foreach_add_([here], [there]),
        lambda here, there: torch.add(here, 1, out=there),
        lambda here, there: functional.linear(here[None], there[None]),
        lambda here, there: here.gather(0, there.long()),
        lambda here, there: there[here > 0],
    ],
)
def test_tensors_of_the_device_do_not_mix_with_those_of_the_cpu(device, mix):
    with pytest.raises(RuntimeError, match=r"same device|indices should be either on cpu"):
        mix(torch.ones(4, device=device), torch.ones(4))


def test_numbers_and_indices_of_the_cpu_mix_with_tensors_of_the_device(device):
    x = torch.arange(4.0, device=device)
    assert (x + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert torch.mul(torch.tensor(2.0), x).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([2, 3])].tolist() == [2, 3]
    assert x[torch.tensor([True, False, False, True])].tolist() == [0, 3]


# ------------------------------------------------------------------------------------------ copies and the host


def test_a_copy_to_pinned_memory_shows_its_values_after_a_synchronization(device):
    for synchronize in (
        lambda stream, event: stream.synchronize(),
        lambda stream, event: event.synchronize(),
        lambda stream, event: torch.accelerator.synchronize(),
        lambda stream, event: torch.ones(1, device=device).item(),
        lambda stream, event: [event.query() for _ in range(2)],
    ):
        x = torch.arange(4.0, device=device)
        for target in (torch.empty(4, pin_memory=True), torch.empty(2, 8).pin_memory()[1, :4], None):
            # Without a target, torch takes pinned memory.
            copied = x.to("cpu", non_blocking=True) if target is None else target.copy_(x, non_blocking=True)
            assert copied.is_pinned()
            event = torch.accelerator.current_stream().record_event()
            assert copied.isnan().all()
            # The device goes on meanwhile.
            x.add_(0)
            synchronize(torch.accelerator.current_stream(), event)
            assert copied.tolist() == [0, 1, 2, 3]


def test_a_copy_to_pinned_memory_is_not_there_after_another_stream(device):
    side = torch.Stream(device)
    copied = torch.empty(4, pin_memory=True).copy_(torch.ones(4, device=device), non_blocking=True)
    side.synchronize()
    assert copied.isnan().all()
    torch.accelerator.synchronize()
    assert copied.tolist() == [1] * 4


def test_what_was_copied_to_pinned_memory_may_be_copied_back_by_streams_that_come_after(device):
    x, side = torch.arange(4.0, device=device), torch.Stream(device)
    offloaded, other = torch.empty(4, pin_memory=True), torch.empty(4, pin_memory=True)
    offloaded.copy_(x, non_blocking=True)
    other.copy_(x, non_blocking=True)
    with side:
        too_early = offloaded.to(device, non_blocking=True)
    back = offloaded.to(device, non_blocking=True)
    # The host has waited for nothing, and other memory is as it was.
    assert other.isnan().all()
    assert back.tolist() == [0, 1, 2, 3]
    with side:
        assert too_early.isnan().all()


def test_copies_to_memory_that_is_not_pinned_are_there_at_once(device):
    x = torch.arange(4.0, device=device)
    assert torch.empty(4).copy_(x, non_blocking=True).tolist() == [0, 1, 2, 3]


def test_copies_convert_and_fill_what_is_strided(device):
    x = torch.arange(6.0, device=device).view(2, 3)
    target = torch.zeros(3, 2, dtype=torch.int32)
    assert target.copy_(x.t()).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.zeros(2, 6).pin_memory()[:, ::2].copy_(x, non_blocking=True).tolist() == [[0, 1, 2], [3, 4, 5]]
    y = torch.zeros(2, 6, device=device)
    y[:, ::2].copy_(torch.arange(6).view(2, 3))
    assert y.tolist() == [[0, 0, 1, 0, 2, 0], [3, 0, 4, 0, 5, 0]]
    assert torch.zeros(2, 3, device=device).copy_(torch.arange(3)).tolist() == [[0, 1, 2]] * 2


def stepped(device: torch.device) -> optim.Optimizer:
    param = torch.ones(3, device=device, requires_grad=True)
    param.grad = torch.ones(3, device=device)
    optimizer = optim.AdamW([param], fused=True)
    optimizer.step()
    return optimizer


def side_stream(device: torch.device) -> torch.Stream:
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    return side


WAITS: dict[str, Callable[[torch.Tensor, torch.device], Any]] = {
    "item": lambda x, device: x[0].item(),
    "bool": lambda x, device: bool(x[0]),
    "if": lambda x, device: 1 if x.isnan().any() else 0,
    "float": lambda x, device: float(x[0]),
    "int": lambda x, device: int(x[0]),
    "format": lambda x, device: f"{x[0]:.3f}",
    "tolist": lambda x, device: x.tolist(),
    "repr": lambda x, device: repr(x),
    "cpu": lambda x, device: x.cpu(),
    "to the cpu": lambda x, device: x.to("cpu"),
    "to memory that is not pinned": lambda x, device: torch.empty(4).copy_(x, non_blocking=True),
    "to pinned memory, blocking": lambda x, device: torch.empty(4, pin_memory=True).copy_(x),
    "to the device": lambda x, device: torch.ones(4).to(device),
    "from pinned memory, blocking": lambda x, device: torch.ones(4).pin_memory().to(device),
    "tensor of a list": lambda x, device: torch.tensor([1.0, 2.0], device=device),
    "tensor of a number": lambda x, device: torch.tensor(1.0, device=device),
    "nonzero": lambda x, device: x.nonzero(),
    "where with one argument": lambda x, device: torch.where(x > 0),
    "by a mask": lambda x, device: x[x > 0],
    "masked_select": lambda x, device: x.masked_select(x > 0),
    "written by a mask": lambda x, device: x.__setitem__(x > 0, torch.ones(4, device=device)),
    "by a list": lambda x, device: x[[0, 2]],
    "by an index of the cpu": lambda x, device: x[torch.tensor([0, 2])],
    "written by a list": lambda x, device: x.__setitem__([0, 2], 1.0),
    "equal": lambda x, device: torch.equal(x, x.clone()),
    "allclose": lambda x, device: torch.allclose(x, x.clone()),
    "unique": lambda x, device: x.unique(),
    "repeat_interleave": lambda x, device: x.repeat_interleave(torch.ones(4, dtype=torch.int64, device=device)),
    "inverse": lambda x, device: torch.linalg.inv(torch.eye(2, device=device)),
    "stream": lambda x, device: torch.accelerator.current_stream().synchronize(),
    "event": lambda x, device: torch.accelerator.current_stream().record_event().synchronize(),
    "device": lambda x, device: torch.accelerator.synchronize(),
    "device's module": lambda x, device: torch.emu.synchronize(),
    # Without a device, the barrier of a group that has gloo too is gloo's.
    "barrier": lambda x, device: dist.barrier(device_ids=[0]),
    "norm that must be finite": lambda x, device: nn.utils.get_total_norm([x], error_if_nonfinite=True),
}
NO_WAITS: dict[str, Callable[[torch.Tensor, torch.device], Any]] = {
    "arithmetic": lambda x, device: (x * 2 + x.sum()).relu_().sqrt(),
    "numbers": lambda x, device: torch.full((3,), 2.0, device=device) + torch.arange(3, device=device),
    "zeros": lambda x, device: torch.zeros(3, device=device).fill_(1).zero_(),
    "number of the cpu": lambda x, device: x * torch.tensor(2.0),
    "random": lambda x, device: torch.randn(3, device=device),
    "from pinned memory": lambda x, device: torch.ones(4).pin_memory().to(device, non_blocking=True),
    "to pinned memory": lambda x, device: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "to pinned memory of torch's own": lambda x, device: x.to("cpu", non_blocking=True),
    "on the device": lambda x, device: x.to(device).clone().copy_(x),
    "views": lambda x, device: x.view(2, 2)[1, :1].t().expand(2, 1),
    "masked_fill": lambda x, device: torch.where(x > 0, x, -x).masked_fill(x > 1, 0),
    "filled by a mask": lambda x, device: x.__setitem__(x > 0, 1.0),
    "by an index of the device": lambda x, device: x[torch.arange(2, device=device)],
    "repeat_interleave of a known size": lambda x, device: x.repeat_interleave(
        torch.ones(4, dtype=torch.int64, device=device), output_size=4
    ),
    "by a number": lambda x, device: x[2] + x[1:3].sum(),
    "wait_stream": lambda x, device: torch.accelerator.current_stream().wait_stream(side_stream(device)),
    "wait_event": lambda x, device: side_stream(device).wait_event(torch.accelerator.current_stream().record_event()),
    "query": lambda x, device: torch.accelerator.current_stream().query(),
    "record_stream": lambda x, device: x.record_stream(side_stream(device)),
    "all_reduce": lambda x, device: dist.all_reduce(x),
    "asynchronous all_reduce": lambda x, device: dist.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda x, device: dist.broadcast(x, 0),
    "backward": lambda x, device: nn.Linear(4, 2, device=device)(x).sum().backward(),
    "fused step": lambda x, device: stepped(device),
    "clipping": lambda x, device: nn.utils.clip_grads_with_norm_([x], 1.0, nn.utils.get_total_norm([x])),
    "shape": lambda x, device: (x.shape, x.numel(), len(x), x.is_contiguous()),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_in(device, device_costs, host_never_waits, name):
    x = torch.ones(4, device=device)
    with device_costs() as costs:
        WAITS[name](x, device)
    assert len(costs.host_waits) >= 1
    for wait in costs.host_waits:
        assert wait.call_site.startswith(f"{__file__}:"), wait
    with pytest.raises(RuntimeError, match=r"the host waits for the device here, inside host_never_waits\(\)"):  # noqa: SIM117
        with host_never_waits():
            WAITS[name](x, device)


@pytest.mark.parametrize("name", NO_WAITS)
def test_the_host_does_not_wait_in(device, device_costs, host_never_waits, name):
    x = torch.ones(4, device=device)
    with device_costs() as costs, host_never_waits():
        NO_WAITS[name](x, device)
    assert costs.host_waits == []


def test_a_wait_is_raised_at_its_line_and_allowed_again_afterwards(device, host_never_waits):
    x = torch.ones(4, device=device)

    def waits() -> None:
        with host_never_waits():
            x.add_(1)
            x[0].item()  # the first wait
            x.add_(1)

    with pytest.raises(RuntimeError, match="aten::_local_scalar_dense") as error:
        waits()
    assert line_of("the first wait") == error.traceback[-1].lineno + 1
    assert x.tolist() == [2] * 4
    with host_never_waits():
        with host_never_waits():
            pass
        with pytest.raises(RuntimeError, match="host_never_waits"):
            x.cpu()
    x.cpu()


def test_costs_of_a_block(device, device_costs):
    before = torch.zeros(1000, device=device)
    with device_costs() as costs:
        assert (costs.kernels, costs.collectives, costs.host_waits, costs.peak_bytes) == (0, {}, (), 0)
        x = before + 1
        x.view(10, 100)[3].mul_(2)
        torch._foreach_add_([x, before], 1)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(before, 0)
        y = torch.empty(5000, device=device)
        del y
        x.sum().item()  # a wait
    # Of which three are collectives; views and empty tensors launch nothing.
    assert costs.kernels == 1 + 1 + 1 + 3 + 2
    assert costs.collectives == {"all_reduce": 2, "broadcast": 1}
    (wait,) = costs.host_waits
    assert wait.title == "aten::_local_scalar_dense"
    assert wait.call_site == f"{__file__}:{line_of('a wait')}"
    assert costs.peak_bytes >= 4000 + 4000 + 20000
    with device_costs() as nothing:
        pass
    assert (nothing.kernels, nothing.collectives, nothing.host_waits) == (0, {}, [])
    assert nothing.peak_bytes < costs.peak_bytes


@pytest.mark.ranks(1, backend="gloo")
def test_costs_and_waits_are_refused_on_the_cpu(device, device_costs, host_never_waits):
    for refused, others in ((device_costs, ""), (host_never_waits, ', or "nccl"')):
        with pytest.raises(NotImplementedError, match=f' cpu: mark the test with backend="emulated"{others}$'):  # noqa: SIM117
            with refused():
                pass


def test_a_model_that_moves_to_the_device_and_back_keeps_its_parameters(device):
    embedding, head, seen = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), []
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    embedding.weight.register_hook(seen.append)
    model.to(device)
    assert model[0].weight is model[1].weight
    assert model[0].weight.device == device
    before = model[0].weight.detach().clone()
    model(torch.tensor([1], device=device)).sum().backward()
    optimizer.step()
    assert len(seen) == 1
    assert not torch.equal(model[0].weight, before)
    model.cpu()
    assert model[0].weight.grad.device.type == "cpu"
    model[0].weight.data = model[0].weight.data.to(device)
    assert model[1].weight.device == device


@pytest.mark.ranks(2, backend="emulated")
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_fsdp_brings_a_model_of_the_cpu_to_the_device(device, is_offloaded):
    def trained(where: torch.device, **policy: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        if policy:
            fully_shard(model, mesh=init_device_mesh(device.type, (2,)), **policy)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(3, 4, device=where)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.to(device).full_tensor().cpu() if policy else param for param in model.parameters()]

    offload = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
    for here, there in zip(trained(device, offload_policy=offload), trained(torch.device("cpu")), strict=True):
        assert torch.allclose(here, there, rtol=1e-5, atol=1e-6)


def test_forward_mode_derivatives(device):
    def of_squares(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(torch.func.grad(lambda v: (v**3).sin().sum()), (x,), (x,))[1]

    x = torch.arange(3.0)
    assert torch.equal(of_squares(x.to(device)).cpu(), of_squares(x))
    assert torch.equal(torch.func.hessian(lambda v: (v**3).sum())(x.to(device)).cpu(), torch.diag(6 * x))


def test_memory_is_counted_as_on_other_accelerators(device):
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    x = torch.ones(1000, device=device)
    assert torch.accelerator.memory_allocated() == before + 4000
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() == before + 4000
