"""The probe steps on the meta device, or on the CPU where a class refuses that; and says what the class keeps."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zeroshard_core import StateEntry, TensorSpec, probe, update_bytes

LARGE = TensorSpec("embedding", (1 << 20, 1 << 20), torch.bfloat16)


class Watched(torch.optim.SGD):
    """Remembers the devices of what it steps, and refuses those in ``refused``."""

    seen = ()
    refused = ""

    def __init__(self, params, **defaults):
        super().__init__(params, **defaults)
        device = self.param_groups[0]["params"][0].device.type
        if device == self.refused:
            raise NotImplementedError(device)
        type(self).seen += (device,)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(Watched, "seen", ())
    return Watched


def test_a_tensor_that_no_memory_holds_is_probed():
    # Given a tensor of 2 TiB, when the state of Adam is asked for,
    found = probe(torch.optim.Adam, {"lr": 0.1, "fused": True}, [LARGE])[LARGE.shape, LARGE.dtype]

    # Then both moments are known by shape, dtype and bytes, and the step as a number of 4 bytes.
    moment = StateEntry(LARGE.shape, torch.bfloat16, 2 << 40)
    assert found == {"step": StateEntry((), torch.float32, 4), "exp_avg": moment, "exp_avg_sq": moment}


def test_each_shape_and_dtype_is_stepped_once():
    specs = [TensorSpec(name, shape, torch.float32) for name, shape in [("a", (2, 3)), ("b", (2, 3)), ("c", (3,))]]
    found = probe(Watched, {"momentum": 0.5}, [*specs, TensorSpec("d", (3,), torch.float64)])
    assert list(found) == [((2, 3), torch.float32), ((3,), torch.float32), ((3,), torch.float64)]
    assert Watched.seen == ("meta",) * 3


def test_a_class_that_refuses_the_meta_device_is_stepped_on_the_cpu(watched, monkeypatch):
    monkeypatch.setattr(watched, "refused", "meta")
    found = probe(watched, {"momentum": 0.5}, [TensorSpec("a", (2, 3), torch.float32)])
    assert found[(2, 3), torch.float32] == {"momentum_buffer": StateEntry((2, 3), torch.float32, 24)}
    assert watched.seen == ("cpu",)


class Asking(torch.optim.SGD):
    """Keeps state by the values of what it steps: a meta tensor has none."""

    def step(self):
        [param] = self.param_groups[0]["params"]
        large = param.norm().item() > 0.5 and int(param.count_nonzero()) and not param.isnan().any()
        if large and not torch.equal(param, param.grad):
            self.state[param]["large"] = torch.zeros_like(param)


def test_questions_about_values_are_answered_on_the_meta_device():
    # Given a tensor of 2 TiB, whose values the class asks for, then it is stepped without them.
    found = probe(Asking, {}, [LARGE])[LARGE.shape, LARGE.dtype]
    assert found == {"large": StateEntry(LARGE.shape, torch.bfloat16, 2 << 40)}


def test_factored_state_follows_the_dimensions_that_it_shares():
    found = probe(torch.optim.Adafactor, {}, [TensorSpec("a", (1000, 20), torch.float32)])[(1000, 20), torch.float32]
    assert {key: entry.shape for key, entry in found.items()} == {"step": (), "row_var": (1000, 1), "col_var": (1, 20)}


@pytest.mark.parametrize("implementation", ["fused", "foreach", "capturable"])
def test_an_implementation_that_the_class_has_chosen_is_left_out(implementation):
    def build(params, **group):
        return torch.optim.AdamW([{**group, "params": params}], **{implementation: True})

    found = probe(build, {"lr": 0.1}, [LARGE])[LARGE.shape, LARGE.dtype]
    assert found["exp_avg"] == StateEntry(LARGE.shape, torch.bfloat16, 2 << 40)


def test_what_a_class_raises_on_the_cpu_is_raised(watched, monkeypatch):
    monkeypatch.setattr(watched, "refused", "meta")
    with pytest.raises(RuntimeError, match="floating point"):
        probe(watched, {}, [TensorSpec("ids", (3,), torch.int64)])


def test_hooks_of_all_optimizers_are_not_called():
    called = []
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(1))
    try:
        probe(torch.optim.Adam, {}, [TensorSpec("a", (3,), torch.float32)])
    finally:
        handle.remove()
    assert not called


class Quantized(torch.Tensor):
    """A float32 tensor for its users, which holds one byte for each element."""

    def __tensor_flatten__(self):
        return ["codes"], None


class Quantizing(torch.optim.SGD):
    def step(self):
        [param] = self.param_groups[0]["params"]
        momentum = torch.zeros_like(param, requires_grad=False).as_subclass(Quantized)
        momentum.codes = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
        self.state[param]["momentum"] = momentum


def test_the_bytes_of_a_quantized_entry_are_of_the_tensors_in_it():
    found = probe(Quantizing, {}, [TensorSpec("weight", (10, 4), torch.float32)])
    assert found[(10, 4), torch.float32] == {"momentum": StateEntry((10, 4), torch.float32, 40)}


class Factor:
    def __init__(self, param):
        self.param, self.matrices, self.again = param, [param.new_zeros(3, 3), param.new_zeros(2)], self


def test_numbers_have_no_bytes_and_other_objects_those_of_the_tensors_in_them():
    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            param = self.param_groups[0]["params"][0]
            self.state[param].update({"steps": 1, "notes": {"a": 1}, "factor": Factor(param)})

    found = probe(Noted, {}, [TensorSpec("a", (3,), torch.float32)])[(3,), torch.float32]
    assert found == {"steps": StateEntry(()), "notes": StateEntry(None), "factor": StateEntry(None, None, 44)}


def test_operators_between_tensors_are_not_taken_for_writing():
    class Packing(torch.optim.SGD):
        def step(self):
            [param] = self.param_groups[0]["params"]
            high, low = (torch.ones(shape, dtype=torch.int32, device=param.device) for shape in ((3, 1), (1, 4)))
            self.state[param]["packed"] = high << low

    found = probe(Packing, {}, [LARGE])[LARGE.shape, LARGE.dtype]
    assert found == {"packed": StateEntry((3, 4), torch.int32, 48)}


def test_a_loop_that_no_answer_ends_runs_on_real_values():
    class Halving(torch.optim.SGD):
        def step(self):
            [param] = self.param_groups[0]["params"]
            while param.grad.norm().item() > 0.1:
                param.grad.mul_(0.5)
            self.state[param]["kept"] = param.grad.clone()

    spec = TensorSpec("a", (3,), torch.float32)
    assert probe(Halving, {}, [spec])[(3,), torch.float32] == {"kept": StateEntry((3,), torch.float32, 12)}
    # A copy is made before the last one is dropped.
    assert update_bytes(Halving, {}, spec) == 12


@pytest.mark.parametrize(
    ("cls", "foreach", "copies"),
    [
        (torch.optim.SGD, False, 0),
        (torch.optim.AdamW, False, 2),
        (torch.optim.AdamW, True, 1),
        # In bfloat16: half a copy, twice, beside a copy; and two products of a quarter of the elements.
        (torch.optim.Muon, False, 1 + 2 * 0.5 + 2 * 0.5 * 0.25),
    ],
)
def test_an_update_allocates_so_many_copies_of_a_tensor(cls, foreach, copies):
    spec = TensorSpec("a", (512, 2048), torch.float32)
    assert update_bytes(cls, {"lr": 0.1}, spec, foreach=foreach) == copies * spec.nbytes
