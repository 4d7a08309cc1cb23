"""The check on import that torch has the private names that a package uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from zeroshard_comm._torch_private import check_names


def test_names_of_modules_classes_and_instances_are_found():
    attribute_of_instances = "torch.optim.Optimizer._optimizer_step_pre_hooks"
    check_names("it", dict.fromkeys(["torch._C", "torch.Tensor._version", attribute_of_instances], ""), "2.15")


def test_all_that_is_missing_is_named_with_both_versions():
    used = ["torch._gone", "torch.gone._name", "torch.optim.Optimizer._gone", "torch.ops.aten._gone", "torch._C"]
    with pytest.raises(ImportError) as raised:
        check_names("it", dict.fromkeys(used, ""), "2.15")
    assert str(raised.value) == (
        f"it uses torch._gone, torch.gone._name, torch.optim.Optimizer._gone, torch.ops.aten._gone, which torch "
        f"{torch.__version__} does not have: install a newer it, or torch 2.15, the newest that it was tested with"
    )


def test_the_package_cannot_be_imported_with_a_torch_that_has_renamed_something():
    program = "import torch; del torch._foreach_add_; import zeroshard_comm"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: zeroshard_comm uses torch._foreach_add_, which" in done.stderr.splitlines()[-1]
