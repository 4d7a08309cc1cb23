"""Everything this repository checks and builds, one nox session each; ``nox -l`` lists them.

Every session that needs torch installs it first, at one version. ``ZEROSHARD_TORCH`` selects another version (such as
``2.14.1``). If pip would fetch a build with CUDA without need, set ``PIP_EXTRA_INDEX_URL`` to an index of CPU builds.

Tags say when a session runs automatically: ``ci`` on every change, ``unit`` on every change and every Python,
``nightly``, and ``gpu`` nightly on a machine with a GPU. A test compares them with the workflows.

Every change is tested with ``TORCH`` and with the newest torch, and every night also with ``OLDEST``.
"""

from __future__ import annotations

import os
import shutil
import xml.etree.ElementTree as ElementTree
import zipfile
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2024.3.2"
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).parent
# The oldest torch that the packages allow. PyPI has it only with CUDA, 5 GB, which is too much for every change.
OLDEST = "2.11.0"
# The version that sessions install by default: an older one that exists as a small build for CPUs.
TORCH = os.environ.get("ZEROSHARD_TORCH", "2.13.0")
RUFF = "ruff==0.17.5"
MYPY = "mypy==2.4.1"

# Each package with the siblings that it needs, itself last; siblings come after the packages that they need.
PACKAGES: dict[str, list[str]] = {
    "zeroshard-core": ["zeroshard-core"],
    "zeroshard-comm": ["zeroshard-core", "zeroshard-comm"],
    "zeroshard": ["zeroshard-core", "zeroshard-comm", "zeroshard"],
    "zeroshard-integrations": ["zeroshard-core", "zeroshard-comm", "zeroshard", "zeroshard-integrations"],
    "zeroshard-testing": ["zeroshard-testing"],
}
BACKENDS = {
    "gloo-cpu": ["ci", "nightly"],
    "gloo-cuda": ["gpu"],
    "nccl": ["gpu"],
    "emulated": ["nightly"],
    "fake": ["ci", "nightly"],
}
# Versions of torch against which the emulated accelerator compiles: all of them nightly, one on every change.
EMULATED_WITH = {"2.11": f"=={OLDEST}", "2.13": "==2.13.0", "newest": ""}
EMULATED_ON_EVERY_CHANGE = "2.13"
# Programs import modules of their own folder, whose names may also exist in tests/.
BESIDE_PROGRAMS = ["--override-ini", "pythonpath=tools"]
TEST_NEEDS = ["pytest", "hypothesis", "safetensors"]
# Packages that the harness and its tests use if they are installed; only sessions over all packages install them.
PLUGIN_NEEDS = ["pytest-xdist", "pytest-cov", "pytest-timeout", "cloudpickle", "numpy", "expecttest"]
# Frameworks with which users train. Only the frameworks session installs them; others skip their tests.
FRAMEWORKS = ["accelerate>=1.3", "transformers>=5.0", "lightning>=2.4"]
TOOL_NEEDS = ["rich", "typer", "matplotlib"]
# Distributions, each with the module of its optimizers.
OTHER_OPTIMIZERS = {
    "pytorch_optimizer": "pytorch_optimizer",
    "heavyball": "heavyball",
    "schedulefree": "schedulefree",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "muon-optimizer": "muon",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
}

# A program for each package, which must run if only that package is installed; the wheels session runs it.
SMOKE: dict[str, str] = {
    "zeroshard-core": (
        "import torch; from zeroshard_core import TensorSpec, partition;"
        "plan = partition([TensorSpec(str(i), (64,), torch.float32) for i in range(4)], 2);"
        "assert plan.imbalance == 1.0, plan"
    ),
    "zeroshard-comm": "from zeroshard_comm import Traffic; Traffic()",
    "zeroshard": (
        "import torch, torch.distributed as dist; from zeroshard import ZeroRedundancyOptimizer;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "p = torch.nn.Parameter(torch.ones(4)); o = ZeroRedundancyOptimizer([p], torch.optim.SGD, lr=1.0);"
        "p.grad = torch.ones(4); o.step(); assert p.sum() == 0, p; dist.destroy_process_group()"
    ),
    "zeroshard-integrations": (
        "import torch, torch.distributed as dist; from zeroshard import ZeroRedundancyOptimizer;"
        "from zeroshard_integrations.ddp import register_reduce_to_owner;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False));"
        "o = ZeroRedundancyOptimizer(m.parameters(), torch.optim.SGD, lr=1.0);"
        "register_reduce_to_owner(m, o); w = m.module.weight.item();"
        "m(torch.ones(1, 1)).sum().backward(); o.step(); assert m.module.weight.item() == w - 1;"
        "dist.destroy_process_group()"
    ),
    "zeroshard-testing": (
        "import sys, zeroshard_testing.plugin; assert 'torch' not in sys.modules, 'the plugin imports torch'"
    ),
}


@nox.session(tags=["ci"])
def tests(session: nox.Session) -> None:
    """Run all tests that run on a change: of the packages and the tools, then on ranks; needs no GPU."""
    _run_all_tests(session, f"torch=={TORCH}")


@nox.session(name="tests-torch")
@nox.parametrize(
    "torch",
    [
        nox.param(f"torch=={OLDEST}", id="oldest", tags=["nightly"]),
        nox.param("torch", id="newest", tags=["ci", "nightly"]),
    ],
)
def tests_torch(session: nox.Session, torch: str) -> None:
    """Run the same tests with the oldest torch that the packages allow, or with the newest that pip finds."""
    _run_all_tests(session, torch)


@nox.session(tags=["unit"])
@nox.parametrize("package", list(PACKAGES))
def unit(session: nox.Session, package: str) -> None:
    """Run tests and doctests of one package, with only the siblings that it needs installed."""
    siblings = PACKAGES[package]
    # Its tests may run on ranks, and that takes the testing package; no other that it does not need is there.
    _install_sources(session, [*siblings, *({"zeroshard-testing"} - set(siblings))])
    # Modules that need an extra are tested where all packages are.
    only_its_own = ["--doctest-modules", "--doctest-ignore-import-errors"]
    _pytest(session, *only_its_own, f"packages/{package}", *session.posargs)


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Check style, imports between packages, sizes of packages, and prose for phrases to avoid."""
    session.install(RUFF)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    for checked in ("imports", "sources", "idioms"):
        session.run("python", f"tools/check_{checked}.py")


@nox.session(tags=["ci"])
def typecheck(session: nox.Session) -> None:
    """Check types with mypy; with ``-- --python-executable PYTHON`` it does not install what the sources import."""
    session.install(MYPY)
    if "--python-executable" not in session.posargs:
        # Mypy reads sources; compiling torch's takes longer than that.
        session.env["PIP_NO_COMPILE"] = "1"
        _install_torch(session)
        session.log("installing what the sources import")
        session.install("nox", *TEST_NEEDS, *TOOL_NEEDS, *PLUGIN_NEEDS)
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/*/src"))
    session.run("mypy", *sources, "tools", "noxfile.py", *session.posargs)


@nox.session(tags=["ci"])
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning, a link without a target or a public name without a page is an error."""
    _install_sources(session, list(PACKAGES), "sphinx", "myst-parser", "furo", "sphinx-copybutton")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *session.posargs)


@nox.session(tags=["ci"])
def wheels(session: nox.Session) -> None:
    """Build the wheels of all packages; install each alone in a clean environment, and use it there."""
    session.install("build", "hatchling", "virtualenv")
    dist = Path(session.create_tmp(), "dist")
    shutil.rmtree(dist, ignore_errors=True)
    for package in PACKAGES:
        session.log(f"building {package}")
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(dist), f"packages/{package}", silent=True
        )
    for number, package in enumerate(PACKAGES, 1):
        session.log(f"{number} of {len(PACKAGES)}: {package} alone")
        _check_license(session, package, dist)
        _try_alone(session, package, dist)
    session.log(f"the wheels are in {dist}")


@nox.session(tags=["ci"])
def quickstart(session: nox.Session) -> None:
    """Train a small GPT on two ranks, plainly and sharded, and compare them, in a minute; options go after ``--``."""
    _install_sources(session, PACKAGES["zeroshard-integrations"], "numpy", "rich", for_tests=False)
    session.run("python", "docs/examples/quickstart.py", *session.posargs)


@nox.session
@nox.parametrize(
    "backend",
    [nox.param(name, tags=tags) for name, tags in BACKENDS.items()],
)
def ranks(session: nox.Session, backend: str) -> None:
    """Run tests on ranks of one backend; with ``-- --require`` it fails if this machine lacks the backend."""
    require = "--require" in session.posargs
    posargs = [argument for argument in session.posargs if argument != "--require"]
    _install_sources(session, list(PACKAGES), *TOOL_NEEDS)
    missing = session.run("python", "tools/backend_here.py", backend, silent=True)
    if isinstance(missing, str) and missing.strip():
        refuse = session.error if require else session.skip
        refuse(missing.strip().splitlines()[-1])
    required = [f"--ranks-require={backend}"] if require else []
    # On the emulated accelerator nearly every test repeats what runs on gloo; this session is the place for it.
    repeats = ["-m", "exhaustive or not exhaustive"] if backend == "emulated" else []
    _pytest(session, "tests", "packages", f"--ranks-backend={backend}", *required, *repeats, *posargs)


@nox.session(tags=["nightly"])
def exhaustive(session: nox.Session) -> None:
    """Run tests that take long or repeat others with more values; the emulated device has sessions of its own."""
    _install_sources(session, list(PACKAGES), *TOOL_NEEDS, *PLUGIN_NEEDS)
    selected = ["-m", "exhaustive", "-k", "not emulated"]
    _pytest(session, "tests", "packages", *selected, *session.posargs)
    _pytest(session, *BESIDE_PROGRAMS, "tools", *selected, *session.posargs)


@nox.session(name="page-commands", tags=["nightly"])
def page_commands(session: nox.Session) -> None:
    """Run the commands that README.md and the guides show, in the order of each page; takes half an hour."""
    _install_sources(session, ["zeroshard-testing"], "nox")
    session.log("installing what README installs: pages that need more must say so")
    session.install("-r", "requirements.txt")
    _pytest(session, "-v", "tests/pages", "-m", "exhaustive", *session.posargs, may_skip=False)


@nox.session(tags=["nightly"])
def frameworks(session: nox.Session) -> None:
    """Train with the newest versions of Accelerate, Hugging Face's Trainer and Lightning."""
    _install_sources(session, list(PACKAGES), *FRAMEWORKS)
    load = ["-p", "torch._dynamo.compiled_autograd"]
    _pytest(session, *load, "tests/frameworks", *session.posargs)
    _pytest(session, *load, "tests/frameworks", "-m", "exhaustive", *session.posargs)


@nox.session(tags=["nightly"])
def optimizers(session: nox.Session) -> None:
    """Check optimizers of other packages: fails if one couples tensors and is not refused; options go after ``--``.

    With ``-- --require`` it also fails if a test of them is skipped.
    """
    require = "--require" in session.posargs
    posargs = [argument for argument in session.posargs if argument != "--require"]
    _install_sources(session, list(PACKAGES), *TOOL_NEEDS, *PLUGIN_NEEDS, *OTHER_OPTIMIZERS)
    session.log("1 of 2: all of them on toy tensors, some 15 minutes")
    session.run("python", "tools/optimizer_page", *posargs)
    session.log("2 of 2: some of them on ranks")
    load = [argument for module in OTHER_OPTIMIZERS.values() for argument in ("-p", module)]
    # timm imports torchvision, of which only the build for exactly this torch can be loaded.
    _pytest(session, *load, "-rs", "-k", "not timm", "tests/plan/test_other_optimizers.py", may_skip=not require)


@nox.session(name="torch-suite", tags=["nightly"])
def torch_suite(session: nox.Session) -> None:
    """Run PyTorch's own distributed tests on the ranks of zeroshard-testing, and compare with PyTorch's runner."""
    _install_sources(session, ["zeroshard-testing"], *PLUGIN_NEEDS)
    session.run("python", "tools/torch_suite.py", *session.posargs)


@nox.session
@nox.parametrize(
    "torch",
    [
        nox.param(version, tags=["ci", "nightly"] if version == EMULATED_ON_EVERY_CHANGE else ["nightly"])
        for version in EMULATED_WITH
    ],
)
def emulated(session: nox.Session, torch: str) -> None:
    """Test the emulated accelerator, its corpus and the hooks on it, compiled against one version of torch."""
    _install_sources(session, list(PACKAGES), *TOOL_NEEDS, torch=f"torch{EMULATED_WITH[torch]}")
    own = sorted(str(path) for path in Path("packages/zeroshard-testing/tests").glob("test_emulated_*.py"))
    names = ("emulated_smoke", "emulated_edges", "emulated_corpus", "ddp_on_accelerators")
    across = [f"tests/emulated/test_{name}.py" for name in names]
    everything = ["-m", "exhaustive or not exhaustive", "--ranks-require=emulated"]
    _pytest(session, *own, *across, *everything, *session.posargs)


@nox.session(name="emulated-checks", tags=["nightly"])
@nox.parametrize(
    "program", [nox.param(f"{name.replace('-', '_')}.py", id=name) for name in ("dropped-edges", "emulated-corpus")]
)
def emulated_checks(session: nox.Session, program: str) -> None:
    """Check that a test fails without each edge between streams, and that every run reports the seeded races."""
    _install_sources(session, list(PACKAGES))
    session.run("python", f"tools/{program}", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare training with other ways to train; the subcommand and its options go after ``--``."""
    _install_sources(session, PACKAGES["zeroshard-integrations"], *TOOL_NEEDS)
    session.run("python", "tools/bench", *(session.posargs or ["--help"]))


@nox.session(name="gpu-check", tags=["gpu"])
def gpu_check(session: nox.Session) -> None:
    """Write a report on one GPU, or the CPU, in 8 minutes; ``-- --help`` lists the options."""
    _install_sources(session, list(PACKAGES), "pytest-xdist")
    session.run("python", "tools/gpu_check", *session.posargs)


def _run_all_tests(session: nox.Session, torch: str) -> None:
    # With nox, this environment has everything that mypy reads.
    _install_sources(session, list(PACKAGES), "nox", *TOOL_NEEDS, *PLUGIN_NEEDS, torch=torch)
    # Rank tests wait about as long as they compute, so three processes use two cores.
    three_files_at_a_time = ["-n3", "--dist=loadfile"]
    session.log("1 of 2: tests and doctests of the packages and the tools")
    tests = ["--doctest-modules", *BESIDE_PROGRAMS, "packages", "tools"]
    _pytest(session, *three_files_at_a_time, *tests, *session.posargs)
    session.log("2 of 2: rank tests")
    # Workers are forked from a process that has loaded these; otherwise each would load them in its first test.
    loaded = [
        "torch._dynamo.compiled_autograd",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.optim",
        "zeroshard_integrations.ddp",
        "zeroshard_integrations.join",
    ]
    load = [argument for module in loaded for argument in ("-p", module)]
    _pytest(session, *three_files_at_a_time, *load, "tests", *session.posargs)


def _install_torch(session: nox.Session, torch: str = f"torch=={TORCH}") -> None:
    session.log(f"installing {torch}: a large download if it is not in pip's cache")
    session.install("--progress-bar=off", torch, silent=False)


def _install_sources(
    session: nox.Session, packages: list[str], *needs: str, torch: str = f"torch=={TORCH}", for_tests: bool = True
) -> None:
    """Install packages from source, siblings named together, and what their tests and the session need."""
    _install_torch(session, torch)
    session.log("installing the other requirements")
    session.install("hatchling", "editables", *(TEST_NEEDS if for_tests else []), *needs)
    session.log(f"installing {', '.join(packages)} from source")
    editable = [argument for package in packages for argument in ("-e", f"packages/{package}")]
    session.install("--no-build-isolation", *editable)


@dataclass(frozen=True)
class _Counts:
    """How many tests one pytest run collected, and how many of them it skipped."""

    collected: int
    skipped: int

    @classmethod
    def read(cls, report: Path) -> _Counts:
        suites = list(ElementTree.parse(report).iter("testsuite"))  # noqa: S314 - pytest has just written it
        return cls(*(sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped")))


def _pytest(session: nox.Session, *arguments: str, may_skip: bool = True) -> None:
    """Run pytest, and fail if no test was executed, because none was found or all were skipped."""
    report = Path(session.create_tmp(), "report.xml").resolve()
    report.unlink(missing_ok=True)
    # Rank workers import what the first of them has compiled, regardless of the user's environment.
    done = session.run("pytest", f"--junitxml={report}", *arguments, env={"PYTHONDONTWRITEBYTECODE": ""})
    if done is None:  # nox was started with --install-only
        return
    counts = _Counts.read(report)
    executed = counts.collected - counts.skipped
    session.log(f"{executed} tests executed, {counts.skipped} skipped")
    if executed < 1:
        session.error(f"no test was executed; {counts.skipped} were skipped")
    if counts.skipped and not may_skip:
        session.error(f"{counts.skipped} tests were skipped, and --require allows none; the reasons are above")


def _check_license(session: nox.Session, package: str, dist: Path) -> None:
    """Fail unless the wheel has this repository's license in the ``licenses`` folder of its metadata."""
    [wheel] = dist.glob(f"{package.replace('-', '_')}-{_version(package)}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name) for name in archive.namelist() if "/licenses/" in name}
    if (ROOT / "LICENSE").read_bytes() not in texts.values():
        session.error(f"{wheel.name} lacks the license; in its licenses folder are: {sorted(texts) or 'no files'}")


def _try_alone(session: nox.Session, package: str, dist: Path) -> None:
    """Install one package and its requirements in a clean environment, use it, and check for undeclared packages."""
    place = Path(session.create_tmp(), "alone")
    shutil.rmtree(place, ignore_errors=True)
    session.run("python", "-m", "virtualenv", "--quiet", str(place), silent=True)
    python = str(place / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    third_party = [f"torch=={TORCH}", *(["pytest"] if package == "zeroshard-testing" else [])]
    session.run(python, "-m", "pip", "install", "--quiet", "--progress-bar=off", *third_party, external=True)
    # Without an index, so that a sibling comes only from here, and only if it is declared.
    install = ["install", "--quiet", "--no-index", "--find-links", str(dist), f"{package}=={_version(package)}"]
    session.run(python, "-m", "pip", *install, external=True)
    session.run(python, "-m", "pip", "check", external=True)
    # -I ignores PYTHONPATH.
    session.run(python, "-I", "-c", SMOKE[package], external=True)
    strangers = [name.replace("-", "_") for name in PACKAGES if name not in PACKAGES[package]]
    session.run(
        python,
        "-I",
        "-c",
        f"import importlib.util as u; found = [n for n in {strangers} if u.find_spec(n)]; assert not found, found",
        external=True,
    )


def _version(package: str) -> str:
    lines = next(ROOT.glob(f"packages/{package}/src/*/__init__.py")).read_text(encoding="utf-8").splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("__version__ = "))


if __name__ == "__main__":
    nox.main()
