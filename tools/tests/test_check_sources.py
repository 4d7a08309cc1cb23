"""The checker of sizes and of private names of torch: what it finds, and what it leaves alone."""

from __future__ import annotations

import json

import check_sources
import pytest
from check_sources import CEILINGS, Ceiling, check, count, main
from module_imports import read_packages

LINE = "number = 1\n"


@pytest.fixture
def root(tmp_path):
    for package in CEILINGS:
        folder = tmp_path / "packages" / package.replace("_", "-") / "src" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text('"""A package."""\n')
    return tmp_path


@pytest.fixture
def violations(root):
    """Return a function that writes modules (name -> source) and gives the texts of the violations."""

    def found(sources):
        for name, source in sources.items():
            package = name.partition("/")[0]
            root.joinpath("packages", package.replace("_", "-"), "src", f"{name}.py").write_text(source)
        modules = read_packages(root, CEILINGS).values()
        return [violation.text for violation in check(modules, count(modules))]

    return found


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import torch\ntorch._foreach_add_([], [])", "torch._foreach_add_"),
        ("import torch as t\nt._C._name()", "t._C._name"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", "dist.distributed_c10d._world"),
        ("import torch.nn\ntorch.nn.Linear(1, 1)._hooks", "torch.nn.Linear(1, 1)._hooks"),
        ("from torch import nn\nnn._name", "nn._name"),
        ("import torch\nops = torch.ops.aten\nops._to_copy", "ops._to_copy"),
        ("from torch.optim import Optimizer\nOptimizer._hooks", "Optimizer._hooks"),
        ("from torch._C import Future", "import of torch._C.Future"),
        ("from torch.optim.optimizer import _name", "import of torch.optim.optimizer._name"),
        ("def f():\n    import torch._dynamo", "import of torch._dynamo"),
        ("def f(grad):\n    return grad._version", "grad._version"),
        ("class A:\n    def f(self):\n        return self.grad._version", "self.grad._version"),
        ("from operator import attrgetter\nattrgetter('_version')", "the name '_version' as a string"),
        ("vars(ddp)['_rebuilt'] = True", "the name '_rebuilt' as a string"),
        ("name = 'torch.Tensor._version'", "the name 'torch.Tensor._version' as a string"),
    ],
)
def test_a_private_name_of_torch_is_told_once(violations, source, use):
    home = "def version_of(tensor): return tensor._version\ndef rebuilt(ddp): return vars(ddp)['_rebuilt']\n"
    texts = violations({"zeroshard_comm/_torch_private": home, "zeroshard/a": source})
    assert texts == [f"{use} is private in torch: reach it in _torch_private.py of zeroshard, with the reason"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.Tensor.__init__",
        "import torch\nx = torch.nn",
        "class A:\n    def f(self):\n        return self._version",
        "class A:\n    def _version(self): ...",
        "def f(other):\n    return other._own",
        '"""torch.Tensor._version"""',
        "def f(x):\n    return f'{x}_version'",
        "from zeroshard._torch_private import version_of\nversion_of(1)",
    ],
)
def test_names_of_its_own_are_left_alone(violations, source):
    home = "def version_of(tensor): return tensor._version\n"
    assert not violations({"zeroshard/_torch_private": home, "zeroshard/a": source})


def test_a_package_above_its_ceiling_is_told(root, monkeypatch, capsys):
    ceilings = dict.fromkeys(CEILINGS, Ceiling(1)) | {"zeroshard": Ceiling(10, "written twice")}
    monkeypatch.setattr(check_sources, "CEILINGS", ceilings)
    source = root / "packages" / "zeroshard" / "src" / "zeroshard" / "a.py"
    source.write_text(LINE * 9)
    assert main([str(root)]) == 0
    rows = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    assert ["zeroshard", "10", "10", "written twice"] in rows
    assert ["zeroshard_core", "1", "1"] in rows
    source.write_text(LINE * 10)
    assert main([str(root)]) == 1
    assert "zeroshard has 11 lines, and its ceiling is 10: take something out of it" in capsys.readouterr().out


def test_as_json_with_a_status_that_tells_of_violations(root, monkeypatch, capsys):
    monkeypatch.setattr(check_sources, "CEILINGS", CEILINGS | {"zeroshard": Ceiling(10)})
    (root / "packages" / "zeroshard" / "src" / "zeroshard" / "a.py").write_text(LINE * 501)
    assert main([str(root), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    ceiling = CEILINGS["zeroshard_core"]
    assert told["packages"]["zeroshard_core"] == {"lines": 1, "ceiling": ceiling.lines, "reason": ceiling.reason}
    assert [text.rpartition(" ")[2] for text in told["violations"]] == ["why"]


def test_a_repository_without_sources_is_an_error_and_not_clean(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no source of zeroshard_core" in capsys.readouterr().err
