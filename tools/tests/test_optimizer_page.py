"""The trial of all optimizers: what is tried, what becomes of what hangs, what the page and the exit code say."""

from __future__ import annotations

import pytest
import torch
import typer
from optimizer_page import cli
from optimizer_page.cli import tables_of
from optimizer_page.trials import ARGUMENTS, PACKAGES, Seen, Trial, partition_of, run, trials_of
from optimizer_page.workers import Worker

FAKE = """
import os, time
from torch.optim import SGD, Optimizer

class Hangs(SGD):
    def step(self):
        while True: time.sleep(1)

class Ends(SGD):
    def step(self): os._exit(3)

class Works(SGD):
    def step(self):
        print("a class may print")
        super().step()
"""


class CountsByItself(torch.optim.SGD):
    def step(self):
        super().step()
        self.state["count"] = 1


class ScalesBlocks(torch.optim.SGD):
    def step(self):
        for param in self.param_groups[0]["params"]:
            blocks = param.grad.flatten().split(256)
            param.grad = torch.cat([block / block.abs().max() for block in blocks]).view_as(param)
        super().step()


class KeepsAContainer(torch.optim.SGD):
    def step(self):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param] = {0: {"momentum": torch.zeros_like(param)}}


class Fails(torch.optim.SGD):
    def step(self):
        raise RuntimeError


COUPLED = Seen(Trial("heavyball", "New"), "coupled", 7)
SEEN = [
    Seen(Trial("torch.optim", "Adam"), "equal", fits="split"),
    Seen(Trial("torch.optim", "LBFGS"), "coupled", 1, "", refused=True),
    Seen(Trial("heavyball", "Muon"), "draws random numbers", fits="level"),
    Seen(Trial("heavyball", "Odd"), "cannot tell", None, "TypeError: a | b"),
]


def test_a_trial_of_a_class_tells_what_is_seen_and_whether_it_is_refused():
    trials = {trial.name: trial for trial in trials_of("torch.optim")}
    assert "Optimizer" not in trials
    assert run(trials["AdamW"]) == Seen(Trial("torch.optim", "AdamW"), "equal", fits="split")
    found = run(trials["LBFGS"])
    assert (found.verdict, found.refused, found.partition, found.is_missing) == ("coupled", True, "refused", False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.optim.Adam, "split"),
        (torch.optim.Adafactor, "level"),
        (torch.optim.Muon, "level"),
        (CountsByItself, "whole"),
        (ScalesBlocks, "level"),
        (KeepsAContainer, "level"),
        (Fails, "level"),
    ],
)
def test_the_partition_is_found_by_stepping_a_tensor_whole_and_in_parts(kind, expected):
    assert partition_of(kind, {}) == expected


def test_arguments_are_of_packages_that_are_tried():
    assert {name.rpartition(".")[0] for name in ARGUMENTS} <= set(PACKAGES)
    assert Trial("pytorch_optimizer", "Lamb", 1).title == "Lamb(pre_norm=True)"
    assert Trial("pytorch_optimizer", "SAM").title == "SAM(base_optimizer=SGD)"


def test_a_class_that_hangs_or_ends_its_process_cannot_be_told_and_others_are_tried(tmp_path, monkeypatch):
    (tmp_path / "fake_optimizers.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    worker = Worker(limit=300)
    try:
        ends, hangs, works = worker.ask("fake_optimizers")
        assert [ends.name, hangs.name, works.name] == ["Ends", "Hangs", "Works"]
        assert worker.ask(ends) == "its process has ended"
        assert worker.ask(works) == Seen(works, "equal", fits="split")
        assert isinstance(worker.ask("no_such_package"), ImportError)
        worker.limit = 2
        assert worker.ask(hangs) == "no end within 2 s"
    finally:
        worker.close()


def test_the_tables_have_a_row_for_each_and_count():
    tables = tables_of(SEEN, {"torch.optim": "2.13.0", "heavyball": "3.2.1"})
    assert "| torch.optim | 2.13.0 | 1 | 1 | 0 | 0 |" in tables
    assert "| heavyball | 3.2.1 | 0 | 0 | 1 | 1 |" in tables
    assert '| `Adam` | equal |  | `"split"` |  |' in tables
    assert "| `LBFGS` | coupled | 1 | refused |  |" in tables
    assert '| `Muon` | draws random numbers |  | `"level"` |  |' in tables
    assert "| `Odd` | cannot tell |  |  | TypeError: a \\| b |" in tables


@pytest.mark.parametrize("missing", [False, True])
def test_it_fails_on_what_eligibility_lacks_and_writes_the_tables_of_the_page(monkeypatch, tmp_path, capsys, missing):
    # Given a page, and what trials have shown,
    page = tmp_path / "page.md"
    page.write_text(f"# Optimizers\n{cli.MARK}of the last time\n")
    monkeypatch.setattr(cli, "PAGE", page)
    monkeypatch.setattr(cli, "_seen", lambda *_: iter([*SEEN, *[COUPLED] * missing]))
    monkeypatch.setattr(cli.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    # when it is written,
    with pytest.raises(typer.Exit) as ended:
        cli.main(write=True)
    # then a coupled class that is not refused is an error, and the text before the tables stays.
    assert ended.value.exit_code == missing
    assert ("error: heavyball.New couples tensors from step 7 on" in capsys.readouterr().err) == missing
    text = page.read_text()
    assert text.startswith(f"# Optimizers\n{cli.MARK}\n| package |")
    assert "## heavyball 2.13.0\n" in text
    assert "of the last time" not in text


def test_an_unknown_package_is_refused_before_anything_runs():
    with pytest.raises(typer.BadParameter, match=r"'x' is not one of torch.optim"):
        cli.main(["x"])


def test_the_page_of_the_documentation_has_all_packages():
    _, _, tables = cli.PAGE.read_text(encoding="utf-8").partition(cli.MARK)
    assert all(f"\n## {package} " in tables for package in PACKAGES)
