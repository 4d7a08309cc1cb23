"""The pictures of work and state per rank show what today's partitions give."""

from __future__ import annotations

import re

import pytest
from balance_pictures import PICTURES, gpt2, main


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    main(folder)
    return folder


def texts(file):
    return re.findall(r">([^<>\n]+)</text>", file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["muon-work.svg", "muon-state.svg"])
def test_the_committed_picture_has_the_figures_of_the_partitions(drawn, name):
    found = texts(drawn / name)

    assert sum(re.fullmatch(r"\d\.\d\d", text) is not None for text in found) == 3 * 8
    assert found == texts(PICTURES / name), "run tools/bench/balance_pictures.py"


def test_a_picture_is_drawn_alike_again(drawn, tmp_path):
    main(tmp_path)

    for file in drawn.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_muon_has_the_matrices_of_the_blocks_alone():
    tensors = gpt2()

    assert sum(spec.numel for spec in tensors) == 124_439_808
    assert [len([spec for spec in tensors if spec.group == group]) for group in (0, 1)] == [4 * 12, 8 * 12 + 4]
    assert all(spec.name.startswith("h.") and len(spec.shape) == 2 for spec in tensors if spec.group == 0)
