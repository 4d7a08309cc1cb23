"""The checker of imports: what it finds, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_imports import RULES, check, main


@pytest.fixture
def repository(tmp_path):
    """Return a function that writes modules (name -> source) and gives the texts of the violations."""
    for package in RULES:
        folder = tmp_path / "packages" / package.replace("_", "-") / "src" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text('"""A package."""\n')

    def violations(sources):
        for name, source in sources.items():
            package = name.partition("/")[0]
            path = tmp_path / "packages" / package.replace("_", "-") / "src" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return [violation.text for violation in check(tmp_path)]

    return violations


def test_packages_that_keep_the_rules_are_clean(repository):
    assert not repository(
        {
            "zeroshard_core/plan": "import json\nimport torch\n__all__ = ['Plan']\n",
            "zeroshard_comm/exchange": "import torch.distributed as dist\nfrom zeroshard_core.plan import Plan\n",
            "zeroshard/optimizer": "from zeroshard_comm import exchange\nfrom zeroshard import local\n",
            "zeroshard/local": "import zeroshard_core\n",
            "zeroshard_testing/plugin": "import pytest\n",
        }
    )


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("zeroshard_core/plan", "zeroshard_comm"),
        ("zeroshard_comm/exchange", "zeroshard"),
        ("zeroshard/optimizer", "zeroshard_integrations"),
        ("zeroshard_testing/pool", "zeroshard_core"),
        ("zeroshard/optimizer", "zeroshard_testing"),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "import {0}",
        "from {0} import x",
        "def f():\n    import {0}.y",
        "from importlib import import_module\nimport_module('{0}')",
    ],
)
def test_an_arrow_against_the_order_is_found(repository, module, target, form):
    (text,) = repository({module: form.format(target)})
    assert f"must not import {target}" in text


def test_an_undeclared_third_party_is_found(repository):
    (text,) = repository({"zeroshard_core/plan": "import numpy as np\n"})
    assert "must not import numpy" in text


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "import torch.distributed.tensor",
        "from torch import distributed",
        "from torch import nn, distributed as d",
        "from torch.distributed import all_reduce",
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.distributed.barrier()",
        "import torch as t\nx = t.distributed",
        "import torch.nn\ntorch.distributed.barrier()",
        "import torch\ngetattr(torch, 'distributed')",
        "import importlib\nimportlib.import_module('torch.distributed')",
        "import importlib\nimportlib.import_module('.distributed', 'torch')",
        "import importlib\nimportlib.import_module(name='.distributed', package='torch')",
        "__import__('torch.distributed.tensor')",
        "import sys\nsys.modules['torch.distributed']",
        "import importlib\nimportlib.import_module('torch.' + 'distributed')",
        "if True:\n    def f():\n        from torch import distributed",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.distributed",
    ],
)
def test_core_never_reaches_torch_distributed(repository, source):
    texts = repository({"zeroshard_core/plan": source})
    assert any("must not reach torch.distributed" in text for text in texts), texts


@pytest.mark.parametrize(
    "source",
    [
        '"""torch.distributed"""',
        "# import torch.distributed\n",
        "import torch\nx = torch.nn\n",
        "import torch\ndtype = getattr(torch, 'float32')\n",
        "message = 'torch.distributed is not needed here'",
        "class Grid:\n    distributed = 1\n\n\nx = Grid().distributed\n",
    ],
)
def test_words_about_torch_distributed_are_no_use_of_it(repository, source):
    assert not repository({"zeroshard_core/plan": source})


def test_a_cycle_between_modules_is_found_and_spelled_out(repository):
    _, text = repository(
        {
            "zeroshard_core/a": "from zeroshard_core import b\n",
            "zeroshard_core/b": "from zeroshard_core.c import x\n",
            "zeroshard_core/c": "def late():\n    from . import a\n",
        }
    )
    assert text == "import cycle: zeroshard_core.a -> zeroshard_core.b -> zeroshard_core.c -> zeroshard_core.a"


@pytest.mark.parametrize("others", ["a", "a, c"])
def test_a_circle_of_more_than_two_modules_is_found_if_types_count(repository, others):
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zeroshard_core import "
    found = repository(
        {
            "zeroshard_core/a": "from zeroshard_core import b\n",
            "zeroshard_core/b": f"{for_types}{others}\n",
            "zeroshard_core/c": f"{for_types}a\n",
        }
    )
    circle = "3 modules import each other in a circle: zeroshard_core.a, zeroshard_core.b, zeroshard_core.c"
    assert found == ([circle] if "c" in others else [])


def test_a_module_that_imports_its_package_which_imports_it_is_a_cycle(repository):
    (text,) = repository(
        {
            "zeroshard_core/__init__": "from zeroshard_core.a import f\n",
            "zeroshard_core/a": "from zeroshard_core import f\n",
        }
    )
    assert text == "import cycle: zeroshard_core -> zeroshard_core.a -> zeroshard_core"


def test_modules_that_share_an_import_are_no_cycle(repository):
    assert not repository(
        {
            "zeroshard_core/a": "from zeroshard_core import b, c\n",
            "zeroshard_core/b": "from zeroshard_core import c\n",
            "zeroshard_core/c": "",
        }
    )


def test_torch_behind_the_plugin_is_found(repository):
    (text,) = repository(
        {
            "zeroshard_testing/plugin": "from zeroshard_testing import pool\n",
            "zeroshard_testing/pool": "from zeroshard_testing.deep.wire import x\n",
            "zeroshard_testing/deep/__init__": "import torch\n",
            "zeroshard_testing/deep/wire": "",
        }
    )
    assert "zeroshard_testing.plugin must not import torch" in text


def test_torch_in_the_testing_packages_init_counts_for_the_plugin(repository):
    (text,) = repository(
        {
            "zeroshard_testing/__init__": "import torch.nn\n",
            "zeroshard_testing/plugin": "",
        }
    )
    assert "zeroshard_testing.plugin must not import torch" in text


def test_torch_imported_late_or_for_type_checkers_leaves_the_plugin_alone(repository):
    assert not repository(
        {
            "zeroshard_testing/plugin": "from zeroshard_testing.pool import start\n",
            "zeroshard_testing/pool": (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n\n"
                "def start():\n    import torch\n"
            ),
            "zeroshard_testing/worker": "import torch\n",
        }
    )


def test_a_violation_names_file_and_line(repository, tmp_path, capsys):
    repository({"zeroshard_core/plan": "import json\nimport torch.distributed\n"})
    assert main([str(tmp_path)]) == 1
    expected = Path("zeroshard-core", "src", "zeroshard_core", "plan.py")
    assert f"{expected}:2: " in capsys.readouterr().out


def test_a_repository_without_sources_is_an_error_and_not_clean(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no source of zeroshard_core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from zeroshard_core.plan import shift", "zeroshard_core.plan.shift"),
        ("from zeroshard_core._torch_private import foreach_copy_", "zeroshard_core._torch_private.foreach_copy_"),
        ("from zeroshard_core import _torch_private", "zeroshard_core._torch_private"),
        ("def f():\n    from zeroshard_core.gone import Plan", "zeroshard_core.gone.Plan"),
    ],
)
def test_private_names_of_a_sibling_are_refused(repository, statement, name):
    # Given a sibling with one public name, and a private module,
    sources = {
        "zeroshard_core/plan": "__all__ = ['Plan']\ndef shift(): ...\n",
        "zeroshard_core/_torch_private": "__all__ = ['foreach_copy_']\n",
        "zeroshard_comm/public": "from zeroshard_core.plan import Plan\n",
    }

    # When another package imports what is not public,
    found = repository({**sources, "zeroshard_comm/exchange": statement + "\n"})

    # Then it is named.
    assert [text.partition(" is no public name of zeroshard_core")[0] for text in found] == [name]
