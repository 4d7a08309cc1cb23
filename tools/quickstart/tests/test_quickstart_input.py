"""What the quickstart makes of its input, without any rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_gpt import ByteGPT, Shape
from choices import assignment_of, check_optimizer, class_names, groups_of, optimizer_names, plain_optimizers
from cli import global_sequences
from corpus import Batches, read_corpus
from errors import InputError
from job import Continuation, worst

PROGRAM = Path(__file__).parents[1]


def test_every_world_size_sees_the_same_global_batch():
    batches = Batches(bytes(range(256)) * 4, sequences=12, context=8, seed=3)

    whole, _ = batches.of(5, 0, 1)

    for world_size in (2, 3, 4):
        shares = [batches.of(5, rank, world_size)[0] for rank in range(world_size)]
        assert sorted(torch.cat(shares).tolist()) == sorted(whole.tolist())


def test_targets_are_the_bytes_after_the_inputs():
    inputs, targets = Batches(bytes(range(100)), sequences=6, context=8, seed=0).of(0, 0, 1)

    assert torch.equal(targets, inputs + 1)


def test_a_text_of_exactly_one_context_can_be_drawn_from():
    inputs, _ = Batches(bytes(range(9)), sequences=6, context=8, seed=0).of(0, 0, 1)

    assert inputs.tolist() == [list(range(8))] * 6


def test_batches_that_do_not_fit_the_ranks_are_refused():
    with pytest.raises(ValueError, match="12 sequences cannot be divided evenly to 5 ranks"):
        Batches(bytes(100), sequences=12, context=8, seed=0).of(0, 0, 5)


def test_a_folder_is_read_in_order_without_what_is_no_text(tmp_path):
    (tmp_path / "b.txt").write_text("later")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("hidden")

    assert read_corpus(tmp_path, least=1) == b"first later"


def test_reading_ends_at_the_limit_even_within_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("äöü" * 100)

    assert read_corpus(tmp_path, least=1, limit=101) == ("äöü" * 100).encode()[:101]


@pytest.mark.parametrize(
    ("name", "partition", "told"),
    [
        ("adamw", "whole", "did you mean AdamW"),
        ("LBFGS", "whole", "LBFGS cannot be sharded"),
        ("SparseAdam", "whole", "SparseAdam takes sparse gradients"),
        ("pathlib.Path", "whole", "pathlib has no optimizer 'Path'"),
        ("nowhere.AdamW", "whole", "nowhere.AdamW cannot be imported"),
        ("Muon", "split", "choose --partition whole"),
        ("Muon:matrices+AdamW:rest", "split", "Muon may look at a whole tensor .* choose --partition level"),
        ("AdamW", "halves", "choose one of whole, split, level"),
        ("AdamW(lr=-1.0)", None, "Invalid learning rate"),
        ("AdamW(speed=1)", None, "unexpected keyword argument 'speed'"),
        ("AdamW:*.bias+SGD", None, r"AdamW:\*.bias matches no parameter; there are bytes.weight, positions.weight, "),
        ("Muon:matrices", None, "no class takes bytes.weight, positions.weight; add"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_with_what_can_be(name, partition, told):
    with pytest.raises(InputError, match=told):
        check_optimizer(name, partition)


def test_every_optimizer_that_is_offered_can_be_chosen():
    for name in optimizer_names():
        assert check_optimizer(name, None) == "whole"


def test_a_learning_rate_is_for_one_class():
    model = ByteGPT(Shape(layers=1), seed=0)
    assert [group.arguments for group in groups_of(model, "AdamW")] == [{}]
    assert [group.arguments for group in groups_of(model, "Muon:matrices+SGD(lr=1.0)")] == [{"lr": 0.02}, {"lr": 1.0}]
    assert [group.arguments for group in groups_of(model, "Muon", lr=0.5)] == [{"lr": 0.5}]
    for text in ("AdamW(lr=1e-3)", "Muon:matrices+AdamW"):
        with pytest.raises(InputError, match="--lr is for one class without a rate of its own"):
            groups_of(model, text, lr=0.5)


def test_groups_of_equal_class_and_arguments_share_a_plain_optimizer():
    groups = groups_of(ByteGPT(Shape(layers=1), seed=0), "AdamW:bytes.*+Muon:matrices+torch.optim.AdamW")

    assert assignment_of(groups) == [0, 1, 0]
    assert [(type(each).__name__, len(each.param_groups)) for each in plain_optimizers(groups)] == [
        ("AdamW", 2),
        ("Muon", 1),
    ]


def test_the_global_batch_can_be_shared_by_all_world_sizes():
    assert all(
        global_sequences(ranks, 3) % ranks == 0 and global_sequences(ranks, 3) % 3 == 0 for ranks in range(1, 17)
    )


def test_a_rank_that_is_not_a_number_is_the_worst():
    found = worst([Continuation([1.0], 0.1, 0.1), Continuation([1.0], float("nan"), 0.2)])

    assert found.difference != found.difference
    assert found.relative == 0.2


def test_optimizers_that_cannot_be_chosen_are_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(PROGRAM), "-o", "Muon:matrices+LBFGS:rest"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)

    assert ended.returncode == 2
    assert "LBFGS cannot be sharded" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: folder / "nowhere", "there is no file or folder"),
        pytest.param(lambda folder: folder, "holds no text files", marks=pytest.mark.exhaustive),
        pytest.param(
            lambda folder: _written(folder / "short.txt", "hi"),
            "holds 2 bytes of text, but one context needs",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_bad_data_is_one_line_and_exit_code_2(tmp_path, make, told):
    command = [sys.executable, str(PROGRAM), "--data", str(make(tmp_path))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)

    assert ended.returncode == 2
    assert told in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def _written(file, text):
    file.write_text(text)
    return file


def test_people_read_classes_alone():
    assert class_names("heavyball.SOAP(lr=1.0):matrices+AdamW(lr=0.1):*.bias+AdamW") == "SOAP + AdamW"
