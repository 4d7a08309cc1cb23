"""Broken rules of imports are found, each once, and what keeps the rules is not."""

from __future__ import annotations

import pytest
from check_imports import MAY_IMPORT, check

FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zeroshard_core import "
HOME = {"zeroshard/_torch_private": "def version_of(tensor):\n    return tensor._version\n"}


@pytest.fixture
def found(tmp_path):
    """Return a function that writes modules (name -> source) and gives the texts of the violations."""

    def violations(sources):
        for name, source in {**{f"{package}/__init__": "" for package in MAY_IMPORT}, **sources}.items():
            path = tmp_path / "packages" / name.partition("/")[0] / "src" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return [line.split(": ", 1)[1] for line in check(tmp_path)]

    return violations


def test_modules_that_keep_the_rules_are_clean(found):
    core = '"""torch.distributed"""\nimport json\nimport torch\n__all__ = [\'Plan\']\nPlan = torch.nn\n'
    comm = "import torch.distributed as dist\nfrom zeroshard_core.plan import Plan\n"
    own = "def f(self, x):\n    return self._version, x._own, f'{x}_version'\n"
    pair = {"zeroshard_core/a": "from zeroshard_core import b\n", "zeroshard_core/b": f"{FOR_TYPES}a\n"}
    assert not found({"zeroshard_core/plan": core, "zeroshard_comm/a": comm, "zeroshard/a": own, **HOME, **pair})


@pytest.mark.parametrize(
    ("module", "source", "text"),
    [
        (
            "zeroshard_core/a",
            "def f():\n    import zeroshard_comm.b",
            "zeroshard_core must not import zeroshard_comm.b",
        ),
        ("zeroshard_testing/a", "from zeroshard import b", "zeroshard_testing must not import zeroshard.b"),
        ("zeroshard_core/a", "import numpy", "zeroshard_core must not import numpy"),
        ("zeroshard_core/a", "from . import b", "zeroshard_core must not import ..b"),
        ("zeroshard/a", "from zeroshard_core import shift", "zeroshard_core.shift is not a public name"),
        ("zeroshard_core/a", "from torch import distributed", "zeroshard_core must not reach torch.distributed"),
        ("zeroshard_core/a", "import torch as t\nt.distributed.barrier", "zeroshard_core must not reach torch.distrib"),
        ("zeroshard_core/a", "__import__('torch.distributed')", "zeroshard_core must not reach torch.distributed"),
        ("zeroshard/a", "from torch import nn\nnn.Linear(1, 1)._hooks", "torch.nn.Linear._hooks is private in torch"),
        ("zeroshard/a", "from torch._C import Future", "torch._C.Future is private in torch"),
        ("zeroshard/a", "def f(grad):\n    return grad._version", "grad._version is private in torch"),
        ("zeroshard/a", "getattr(grad, '_version')", "_version is private in torch"),
    ],
)
def test_a_broken_rule_is_found(found, module, source, text):
    texts = found({module: source, **HOME})
    assert texts
    assert all(each.startswith(text) for each in texts)


@pytest.mark.parametrize("c", ["from zeroshard_core import a\n", f"{FOR_TYPES}a\n"])
def test_a_circle_is_found_and_spelled_out(found, c):
    sources = {"a": "from zeroshard_core import b\n", "b": "from zeroshard_core.c import x\n", "c": c}
    [text] = found({f"zeroshard_core/{name}": source for name, source in sources.items()})
    assert set(text.split(" -> ")) == {"zeroshard_core.a", "zeroshard_core.b", "zeroshard_core.c"}
    assert "zeroshard_core.b -> zeroshard_core.c" in f"{text} -> {text.split(' -> ')[1]}"
