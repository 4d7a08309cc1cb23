"""The command ``zeroshard plan``: what it reads, what it shows, and what it refuses in one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn
from zeroshard_core import RankBytes

pytest.importorskip("typer", reason="the command needs the extra zeroshard[cli]")

from safetensors.torch import save_file
from zeroshard import Planner
from zeroshard.planner import main
from zeroshard.planner.comparison import advised, compare
from zeroshard.planner.models import InputError, read_model
from zeroshard.planner.report import at_the_highest

TRAIN = """
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1000))

def experts():
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.up = nn.Parameter(torch.empty(4, 8, 8))
    return model

def groups():
    model = make_model()
    hidden = [p for p in model.parameters() if p.ndim == 2]
    rest = (named for named in model[2].named_parameters())
    return [{"params": hidden, "optimizer_class": torch.optim.Muon}, {"params": rest, "lr": 0.1}]

def two_classes():
    model = make_model()
    weights, rest = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim != 2]
    groups = {torch.optim.Muon: weights, torch.optim.SGD: rest}
    return [{"params": params, "optimizer_class": cls} for cls, params in groups.items()]

def only_sgd():
    return [{"params": [p], "optimizer_class": torch.optim.SGD} for p in make_model().parameters()]

def one_twice():
    weight = nn.Parameter(torch.empty(4))
    return [{"params": weight}, {"params": [weight]}]

def parameters():
    return make_model().parameters()

def exits():
    raise SystemExit(0)

class Printing(torch.optim.SGD):
    def __init__(self, params, **defaults):
        print("an optimizer")
        super().__init__(params, **defaults)

def prints():
    print("a model")
    return make_model()

def lazy():
    return nn.LazyLinear(3)

def nothing_in_it():
    return nn.Module()

class Endless(torch.optim.SGD):
    def step(self):
        raise KeyError("momentum")

def adapters():
    return nn.Sequential(nn.Linear(512, 512).requires_grad_(False), nn.Linear(512, 4))

def reads_values():
    return nn.Linear(int(torch.ones(3).sum()), 4)

def raises():
    raise RuntimeError("no such layer")

def number():
    return 3

def large():
    return nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(32)])
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command in a folder with a module ``train``, and return its status, output and errors."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "script.py").write_text("train()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["zeroshard", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_the_table_of_a_function_fits_80_columns(command: Command) -> None:
    status, shown, _ = command(
        "train:make_model", "-o", "Muon:matrices+AdamW:rest", "--ranks", "2,4", "--memory", "1GiB"
    )
    assert status == 0
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "133,288 parameters in the model's float32, 0 of them frozen" in shown
    for said in (
        "DDP*", "FSDP2*", "whole", "level", "level+grads", "refused", "partition='whole'", "Per rank and step:",
        "Not counted: activations, the device's context, NCCL's buffers, fragmentation.",
    ):  # fmt: skip
        assert said in shown
    # It has one class.
    assert "torch ZeRO" not in shown
    assert "torch ZeRO*" in command("train:make_model")[1]


def test_what_is_left_may_be_negative_and_decides_the_exit_status(command: Command) -> None:
    arguments = ("train:make_model", "--memory", "1MB")
    status, shown, _ = command(*arguments)
    assert (status, "-1.666 MB" in shown) == (0, True)
    assert command(*arguments, "--require-fit")[0] == 1
    assert command("train:make_model", "--memory", "1GB", "--require-fit")[0] == 0


def test_the_verdict_says_what_fits_and_the_call_is_to_be_pasted(command: Command) -> None:
    _, shown, _ = command("train:large", "--memory", "4.2GB", "--require-fit", "-o", "AdamW(lr=1e-3)")
    told = " ".join(shown.split())
    assert "8 ranks of 4.2GB: level+grads leaves" in told
    assert re.search(r"Fits: FSDP2, level.grads, .*\. Does not fit: .*DDP", told)
    assert (
        "optimizer = ZeroRedundancyOptimizer(\n"
        "    model.named_parameters(), torch.optim.AdamW,\n"
        "    lr=0.001, partition='level')\n"
        "sharding = shard_gradients(model, optimizer)  # in place of DDP\n"
    ) in shown
    status, shown, _ = command("train:large", "--memory", "2.1GB", "--require-fit")
    assert status == 1
    assert re.search(r"Does not fit: .*whole.grads", " ".join(shown.split()))
    assert "Use FSDP2" in shown
    shown = command("train:large", "--memory", "8MB")[1]
    assert "Nothing fits: FSDP2 takes" in shown
    assert "Use more ranks, or a smaller dtype." in shown


def test_several_classes_and_a_hook_are_in_the_call(command: Command) -> None:
    _, shown, _ = command("train:make_model", "-o", "Muon(lr=0.02):matrices+AdamW:rest", "--master-weights")
    assert (
        "groups = [\n"
        '    {"params": matrices,\n     "optimizer_class": torch.optim.Muon, "lr": 0.02},\n'
        '    {"params": rest,\n     "optimizer_class": torch.optim.AdamW},\n'
        "]\n"
        "optimizer = ZeroRedundancyOptimizer(\n"
        "    groups, torch.optim.AdamW,\n"
        "    partition='whole', master_weights=True)\n"
        "register_reduce_to_owner(ddp, optimizer)  # a hook of DDP\n"
    ) in shown


def test_groups_that_all_have_a_class_are_planned_with_it(command: Command) -> None:
    told = json.loads(command("train:only_sgd", "--json")[1])
    assert [*told["advice"]] == ["SGD"]
    assert told["rows"][0]["per_rank"][0]["state"] == 0
    shown = command("train:two_classes")[1]
    assert "No -o was given" not in shown
    assert "groups = two_classes()\noptimizer = ZeroRedundancyOptimizer(\n    groups, " in shown


def test_the_json_has_bytes_as_integers_per_rank_and_as_predicted(command: Command) -> None:
    _, shown, _ = command("train:make_model", "-o", "SGD(momentum=0.9)", "-o", "AdamW", "--ranks", "3", "--json")
    told = json.loads(shown)
    assert told["schema"] == 2
    rows = {(row["optimizers"], row["partition"]): row for row in told["rows"]}
    assert len(rows) == len(told["rows"]) == 18
    verdict = "3 ranks: whole has the least peak of zeroshard and DDP, 1.835 MB, 31% less than DDP."
    assert told["advice"]["AdamW"]["verdict"] == f"{verdict} FSDP2 shards parameters too: 889.1 kB."
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1000))
    planner = Planner(model, torch.optim.AdamW, backend="nccl")
    expected = planner.predict(3, "split")
    here = rows["AdamW", "split"]
    assert [rank["state"] for rank in here["per_rank"]] == [rank.state for rank in expected.ranks]
    assert [rank["total"] for rank in here["per_rank"]] == [rank.total for rank in expected.ranks]
    assert here["sent"] == [*expected.sent]
    assert here["work"] == [*planner.weighed(expected.plan).loads]
    sharded, expected = rows["AdamW", "split+grads"], planner.predict(3, "split", shards_gradients=True)
    assert [rank["total"] for rank in sharded["per_rank"]] == [rank.total for rank in expected.ranks]
    assert (sharded["sharded"], here["sharded"]) == (True, False)
    assert sharded["sent"] == here["sent"]
    plain = rows["AdamW", "DDP"]["per_rank"][0]
    assert (told["elements"], told["frozen"]) == (133288, 0)
    assert (plain["parameters"], plain["buffers"]) == (4 * 133288, 2 * 4 * 64 + 8)
    # Momentum is half of what AdamW keeps, beside its steps.
    assert rows["SGD(momentum=0.9)", "DDP"]["per_rank"][0]["state"] == (plain["state"] - 4 * 7) // 2
    assert rows["AdamW", "FSDP2"]["is_arithmetic"]
    assert not here["is_arithmetic"]
    assert (told["dtypes_of_model"], told["dtype"], told["master_weights"]) == (["float32"], None, False)


def test_dtypes_and_master_weights(command: Command) -> None:
    def split(*options: str) -> dict[str, int]:
        _, shown, _ = command("train:make_model", "--ranks", "1", "--partition", "whole", "--json", *options)
        [row] = [row for row in json.loads(shown)["rows"] if row["partition"] == "whole"]
        found: dict[str, int] = row["per_rank"][0]
        return found

    usual, half = split(), split("--dtype", "bfloat16")
    assert [half[kind] * 2 for kind in ("parameters", "gradients")] == [usual["parameters"], usual["gradients"]]
    master = split("--dtype", "bfloat16", "--master-weights", "--grad-dtype", "float32")
    assert master["gradients"] == usual["gradients"]
    assert master["state"] == usual["state"] + usual["parameters"]


def test_param_groups_of_a_function_keep_their_classes(command: Command) -> None:
    status, shown, _ = command("train:groups", "--ranks", "2", "--json")
    assert status == 0
    [split] = [row for row in json.loads(shown)["rows"] if row["partition"] == "split"]
    assert "Muon, the class of param group 0, is not known to be elementwise" in split["note"]


@pytest.mark.parametrize("function", ["parameters", "prints"])
def test_parameters_and_functions_that_print_are_as_the_model(command: Command, function: str) -> None:
    told, expected = (
        json.loads(command(f"train:{name}", "-o", "SGD(momentum=0.9)", "--json")[1])["rows"]
        for name in (function, "make_model")
    )
    assert [row["per_rank"][0]["state"] for row in told] == [row["per_rank"][0]["state"] for row in expected]
    assert told[0]["per_rank"][0]["state"] > 0


def test_what_classes_print_is_no_output(command: Command) -> None:
    _, shown, errors = command("train:make_model", "-o", "train.Printing", "--json")
    assert json.loads(shown)["rows"]
    assert "an optimizer" in errors


def test_work_is_in_one_unit_whatever_placed_the_tensors(command: Command) -> None:
    _, shown, _ = command("train:make_model", "--ranks", "3", "--json")
    work = {row["partition"]: sum(row["work"]) for row in json.loads(shown)["rows"] if row["work"]}
    assert len(work) == 6
    assert max(work.values()) == pytest.approx(min(work.values()))


def test_matrices_are_listed(command: Command) -> None:
    assert command("train:make_model", "--show")[:2] == (0, "1.weight\n")


def test_experts_are_said_to_be_replicated(command: Command) -> None:
    assert "experts are replicated; expert parallelism is not modelled" in command("train:experts")[1]


def test_the_backend_decides_how_small_parts_are(command: Command) -> None:
    def imbalance(backend: str) -> float:
        _, shown, _ = command(
            "train:make_model", "--ranks", "64", "--backend", backend, "--partition", "split", "--json"
        )
        [row] = [row for row in json.loads(shown)["rows"] if row["partition"] == "split"]
        found: float = row["imbalances"]["work"]
        return found

    assert imbalance("nccl") < imbalance("gloo")


def test_bars_of_a_picture_add_up_to_the_peak() -> None:
    for temporaries, transient in ((5, 7), (7, 5), (5, 0)):
        held = RankBytes(1, 2, 3, 4, 0, temporaries=temporaries, transient=transient)
        assert sum(asdict(at_the_highest(held)).values()) == held.total


def test_a_picture_is_drawn(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    status, *_ = command("train:make_model", "--ranks", "2,4", "--memory", "1GB", "--picture", "out.svg")
    assert (status, "<svg" in (tmp_path / "out.svg").read_text()) == (0, True)
    assert command("train:make_model", "--picture", "nowhere/out.svg")[0] == 2


def test_the_help_has_three_examples_on_one_screen(command: Command) -> None:
    status, shown, _ = command("--help")
    assert (status, shown.count("zeroshard plan ")) == (0, 4)
    assert len(shown.splitlines()) <= 50


def test_a_terminal_shows_a_bar_for_each_optimizer(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("train:make_model", "-o", "SGD", "-o", "AdamW", "--ranks", "2,4")
    _, plain, nothing = command(*arguments)
    assert nothing == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    status, shown, errors = command(*arguments)

    assert (status, shown) == (0, plain)
    assert re.search(r"Planning SGD .*100%.*Planning AdamW .*100%", errors, re.DOTALL)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere:make"], "nowhere:make: ModuleNotFoundError: No module named 'nowhere'"),
        (["train:nothing"], "module 'train' has no attribute 'nothing'"),
        (["train:nothing_in_it"], "train:nothing_in_it has no parameters"),
        (["train:lazy"], "uninitialized parameter"),
        (["train:exits"], "SystemExit: 0"),
        (["train:one_twice"], "a parameter is in two param groups"),
        (["train:groups", "-o", "SGD+AdamW"], "the model is a list of param groups: name one class"),
        (["train:make_model", "-o", "train.Endless"], "the state of Endless could not be measured"),
        (["train:make_model", "-o", "AdamW(betas=(0.9,))"], "IndexError"),
        (["train:make_model", "-o", "SparseAdam"], "the state of SparseAdam could not be measured"),
        (["train:make_model", "-o", "Muon:matrices+AdamW", "--partition", "split"], "not known to be elementwise"),
        (["x" * 5000], "is no file, folder or module:function"),
        (["train:raises"], "train.py:65: RuntimeError: no such layer"),
        (["train.py"], "is a file of Python: name a function of its module, such as train:make_model"),
        (["train.py:make_model"], "is a file of Python: name a function of its module, such as train:make_model"),
        (["train:reads_values"], "train.py:62: .*--real builds it on the CPU"),
        (["train:number"], "train:number returns int, no model or param groups"),
        (["no.safetensors"], "no.safetensors does not exist: name a file, or the folder"),
        (["script:make"], r"script.py:1: NameError: .*should stand below if __name__ == .__main__.:"),
        (["gpt2"], "'gpt2' is no file, folder or module:function. .*hf download gpt2 config.json"),
        (["."], r"\. has no config.json, model.safetensors.index.json or model.safetensors"),
        (["train:make_model", "-o", "Adm"], "'Adm': torch.optim has no optimizer 'Adm'; did you mean Adam?"),
        (
            ["train:make_model", "-o", "Muon"],
            r"'Muon': Muon only supports 2D parameters.*; Muon takes matrices alone: -o 'Muon:matrices\+AdamW:rest'",
        ),
        (["train:make_model", "-o", "SGD:*.gain+AdamW"], "SGD:.*gain matches no parameter"),
        (["train:make_model", "-o", "AdamW(betas=2)"], "'AdamW.betas=2.'"),
        (["train:make_model", "-o", "AdamW(nothing=2)"], "unexpected keyword argument 'nothing'"),
        (["train:make_model", "--ranks", "0"], "--ranks '0' is no list of numbers from 1 to 999999, such as 2,4,8"),
        (["train:make_model", "--ranks", "9" * 5000], "numbers from 1 to 999999"),
        (["train:make_model", "--ranks", "2,x"], "--ranks '2,x' is no list of numbers from 1 to 999999, such as 2,4,8"),
        (["train:make_model", "--partition", "even"], "--partition 'even' is not one of whole, split, level"),
        (
            ["train:make_model", "--memory", "24"],
            "--memory: '24' is not an amount of memory: write a number and one of bytes, kB, MB, GB",
        ),
        (["train:make_model", "--require-fit"], "--require-fit needs --memory"),
    ],
)
def test_bad_input_is_told_in_one_line(command: Command, arguments: list[str], told: str) -> None:
    status, shown, errors = command(*arguments)
    assert (status, shown) == (2, "")
    assert errors.count("\n") == 1
    assert re.search(told, errors), errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train:make_model", "--backend", "mpi"], "'mpi' is not one of 'gloo', 'nccl'"),
        (["train:make_model", "--dtype", "int8"], "'int8' is not one of 'float64', 'float32', 'bfloat16', 'float16'"),
        ([], "missing argument 'model'"),
    ],
)
def test_usage_is_told_as_commands_do(command: Command, arguments: list[str], told: str) -> None:
    status, shown, errors = command(*arguments)
    assert (status, shown) == (2, "")
    assert errors.startswith("Usage: zeroshard plan ")
    assert told in errors.lower()


def test_values_are_read_where_the_model_is_built_on_the_cpu(command: Command) -> None:
    assert command("train:reads_values", "--real")[0] == 0


def test_files_of_safetensors_are_read_by_their_headers(tmp_path: Path) -> None:
    tensors = {"wte.weight": torch.zeros(100, 8), "h.0.attn.bias": torch.ones(4, 4), "h.0.fc.weight": torch.zeros(8, 8)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(100, 8).half(), "ids": torch.arange(3)}, tmp_path / "b.safetensors")
    files = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(["lm_head.weight", "ids"], "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    for found in (read_model(str(index)), read_model(str(tmp_path))):
        assert {name: (tuple(p.shape), p.dtype) for name, p in found.params.items()} == {
            "wte.weight": ((100, 8), torch.float32),
            "h.0.fc.weight": ((8, 8), torch.float32),
            "lm_head.weight": ((100, 8), torch.float16),
        }
        assert found.matrices == {"h.0.fc.weight"}
        assert found.notes == ("left out, as buffers or of a dtype that is not trained: h.0.attn.bias, ids",)
    assert len(read_model(str(tmp_path / "a.safetensors")).params) == 2


def test_a_checkpoint_of_integers_is_no_model_to_train(tmp_path: Path) -> None:
    packed = {"h.0.qweight": torch.zeros(100, 8, dtype=torch.int32), "norm.weight": torch.ones(8)}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"most of it is of a dtype that is not trained, such as h\.0\.qweight"):
        read_model(str(tmp_path))


def test_damaged_and_missing_files_of_safetensors_are_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(InputError, match=r"1.safetensors is missing"):
        read_model(str(index))
    save_file({"a": torch.zeros(10)}, tmp_path / "1.safetensors")
    (tmp_path / "2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InputError, match=r"2.safetensors is a pointer of git-lfs"):
        read_model(str(index))
    (tmp_path / "2.safetensors").write_bytes((tmp_path / "1.safetensors").read_bytes()[:-8])
    with pytest.raises(InputError, match=r"2.safetensors is damaged"):
        read_model(str(index))
    save_file({"a": torch.zeros(10)}, tmp_path / "2.safetensors")
    with pytest.raises(InputError, match=r"names the tensor 'b', which 2.safetensors does not have"):
        read_model(str(index))
    index.write_text("{}")
    with pytest.raises(InputError, match="it has no weight_map"):
        read_model(str(index))
    index.write_text("[")
    with pytest.raises(InputError, match="cannot be read"):
        read_model(str(index))


MODELS = {
    "even layers": [(64, 64)] * 24,
    "a large embedding": [(4096, 64), *[(64, 64)] * 6],
    "one tensor": [(512, 512)],
    "vectors": [(64,)] * 40,
    "megabytes": [(1024, 1024)] * 12,
}


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.6, 0.75, 0.9, 1.0, 1.5])
@pytest.mark.parametrize("shapes", MODELS.values(), ids=[*MODELS])
def test_the_advised_row_fits_and_none_with_a_lower_peak_is_left_out(
    shapes: list[tuple[int, ...]], share: float
) -> None:
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    planner = Planner(params, torch.optim.AdamW)
    rows = [*compare(planner, "AdamW", 8, ("whole", "split", "level"), hook=True)]
    memory = int(share * rows[0].peak)
    found = advised(rows, memory)
    fitting = [row.peak for row in rows if row.peak <= memory and not (row.is_arithmetic and row.name != "DDP")]
    # Peaks that are printed alike are equal.
    assert found.peak <= memory or not fitting
    assert found.name == "FSDP2" if not fitting else f"{found.peak:.4g}" == f"{min(fitting):.4g}"


def test_of_equal_peaks_the_rule_for_partitions_is_advised() -> None:
    params = [nn.Parameter(torch.empty(1024, 1024, device="meta")) for _ in range(8)]
    rows = compare(Planner(params, torch.optim.AdamW, backend="gloo"), "AdamW", 8, ("whole", "split"), hook=True)
    whole, split = (row for row in rows if row.sharded)
    assert whole.peak < split.peak
    assert f"{whole.peak:.4g}" == f"{split.peak:.4g}"
    assert advised([whole, split], None) is split


def test_the_call_for_names_that_two_patterns_match_takes_each_parameter_once(command: Command) -> None:
    _, shown, _ = command("train:make_model", "-o", "SGD:*.bias+AdamW:*")
    assert "# params_0: what '*.bias' matches, and nothing above\n# params_1: what '*' matches" in shown
    assert '{"params": params_1,' in shown


def test_the_plain_optimizer_is_advised_where_sharding_saves_nothing(command: Command) -> None:
    for arguments, why in (
        (("train:make_model", "-o", "SGD", "--backend", "gloo"), "none of these partitions takes less than DDP"),
        (("train:large", "--ranks", "1"), "on one rank there is nothing to shard"),
    ):
        assert f"Use the plain optimizer: {why}." in command(*arguments)[1]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "zeroshard.planner.cli", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert re.search(r"typer.*: pip install 'zeroshard\[cli\]'", capsys.readouterr().err)


def test_what_cannot_be_imported_says_why(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('tokenizers>=9 is needed')")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert command("config.json") == (2, "", "zeroshard: tokenizers>=9 is needed\n")
