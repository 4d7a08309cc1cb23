"""The probe steps on the meta device, or on the CPU where a class refuses that; and says what the class keeps."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zeroshard_core import StateEntry, TensorSpec, probe

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


def test_a_large_tensor_of_a_class_that_refuses_the_meta_device_takes_no_memory(watched, monkeypatch):
    # Given a class that must be stepped on the CPU, when a tensor of 2 TiB is asked for,
    monkeypatch.setattr(watched, "refused", "meta")
    found = probe(watched, {"momentum": 0.5}, [LARGE])[LARGE.shape, LARGE.dtype]

    # Then its state is that of a small one, with the sizes of the large one in place of its own.
    assert found == {"momentum_buffer": StateEntry(LARGE.shape, torch.bfloat16, 2 << 40)}


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


class Quantised(torch.Tensor):
    """A float32 tensor for its users, which holds one byte for each element."""

    def __tensor_flatten__(self):
        return ["codes"], None


class Quantising(torch.optim.SGD):
    def step(self):
        [param] = self.param_groups[0]["params"]
        momentum = torch.zeros_like(param, requires_grad=False).as_subclass(Quantised)
        momentum.codes = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
        self.state[param]["momentum"] = momentum


def test_the_bytes_of_a_quantised_entry_are_of_the_tensors_in_it():
    found = probe(Quantising, {}, [TensorSpec("weight", (10, 4), torch.float32)])
    assert found[(10, 4), torch.float32] == {"momentum": StateEntry((10, 4), torch.float32, 40)}


def test_numbers_and_other_objects_have_no_bytes():
    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            param = self.param_groups[0]["params"][0]
            self.state[param].update({"steps": 1, "notes": {"a": 1}})

    found = probe(Noted, {}, [TensorSpec("a", (3,), torch.float32)])[(3,), torch.float32]
    assert found == {"steps": StateEntry(()), "notes": StateEntry(None)}
