"""Declarations: what ranks compare before anything is sent."""

from __future__ import annotations

from dataclasses import replace

import torch
from zeroshard_comm import ShardingConfig, explain_configs
from zeroshard_core import TensorSpec, partition

SPECS = [TensorSpec("a", (4, 4), torch.float32), TensorSpec("b", (3,), torch.float32)]
PLAN = partition(SPECS, 2)
DECLARATION = ShardingConfig(PLAN, {"optimizer": "Adam"}, (True, True))


def explained(other: ShardingConfig) -> str | None:
    return explain_configs(DECLARATION.to_json(), other.to_json(), 0, 3)


def test_equal_declarations_have_equal_digests_and_no_difference() -> None:
    again = ShardingConfig.from_json(DECLARATION.to_json())
    assert again.digest == DECLARATION.digest
    assert explained(again) is None
    assert 0 <= DECLARATION.digest < 2**63


def test_each_kind_of_difference_changes_the_digest_and_is_named() -> None:
    shape = replace(DECLARATION, plan=partition([replace(SPECS[0], shape=(2, 8)), SPECS[1]], 2))
    setting = replace(DECLARATION, settings={"optimizer": "SGD"})
    active = replace(DECLARATION, active=(True, False))
    words = {
        "shape": (shape, "(4, 4) here, (2, 8) there (here: rank 0, there: rank 3)"),
        "setting": (setting, "optimizer is 'Adam' on rank 0 and 'SGD' on rank 3"),
        "active": (active, "'b' is trainable or has a gradient on rank 0, but is frozen on rank 3"),
    }
    for other, expected in words.values():
        assert other.digest != DECLARATION.digest
        assert expected in str(explained(other))


def test_a_rank_without_a_declaration_explains_nothing() -> None:
    assert explain_configs(DECLARATION.to_json(), "", 0, 1) is None
