"""Optimizers as text, and which parameters each class gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zeroshard.plan.choices import Choice, assign, matrix_names, optimizer_class, parse

NAMES = ("embedding.weight", "0.weight", "0.bias", "1.weight", "1.bias", "head.weight")
OTHERS = ("embedding.weight", "0.bias", "1.bias", "head.weight")
MATRICES = frozenset({"0.weight", "1.weight"})


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("AdamW", [Choice("AdamW")]),
        ("AdamW()", [Choice("AdamW")]),
        ("AdamW(lr=1e+3)", [Choice("AdamW", (("lr", 1e3),))]),
        ("Muon(lr=0.02):matrices+AdamW:rest", [Choice("Muon", (("lr", 0.02),), "matrices"), Choice("AdamW")]),
        (" SGD (momentum = 0.9) : *.bias + AdamW ", [Choice("SGD", (("momentum", 0.9),), "*.bias"), Choice("AdamW")]),
        (
            "pkg.sub.Class(betas=(0.9, -1), mode=')+:', on=True):[a-c].?",
            [Choice("pkg.sub.Class", (("betas", (0.9, -1)), ("mode", ")+:"), ("on", True)), "[a-c].?")],
        ),
    ],
)
def test_what_is_read(text, choices):
    assert parse(text) == tuple(choices)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a class such as AdamW .*, but got ''"),
        ("AdamW+", "expected a class .*, but got ''"),
        ("+AdamW", r"expected a class .*, but got '\+AdamW'"),
        ("Adam W", r"expected \(ARGUMENTS\), .* after a class, but got 'W'"),
        ("AdamW:", "but got ':'"),
        ("AdamW:a:b", "but got ':b'"),
        ("AdamW(lr=1", r"but got '\(lr=1'"),
        ("AdamW(lr=((1,),))", r"but got '\(lr="),
        ("AdamW(lr=)", "'AdamW\\(lr=\\)' is not a call"),
        ("AdamW(#'\n)+1+(#'\n)", "is not a call"),
        ("AdamW(0.1)", r"AdamW\(0.1\) has no name: write arguments as AdamW\(lr="),
        ("AdamW(lr=__import__('os'))", r"AdamW\(lr=__import__\('os'\)\) is not a literal"),
        ("AdamW(lr=x)", r"AdamW\(lr=x\) is not a literal"),
        ("AdamW(lr={[]: 1})", "is not a literal"),
        ("AdamW(lr=1, lr=2)", r"AdamW\(lr=2\) is given twice"),
        ("AdamW(**{'lr': 1})", "is not supported"),
    ],
)
def test_what_is_not_understood_is_named_in_one_line(text, told):
    with pytest.raises(ValueError, match=told) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


@given(text=st.text("AdamW:+(=1,')*.# \n\\"))
def test_any_text_is_read_or_a_value_error(text):
    try:
        choices = parse(text)
    except ValueError:
        return
    assert choices


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("AdamW", [NAMES]),
        ("Muon:matrices+AdamW:rest", [("0.weight", "1.weight"), OTHERS]),
        ("AdamW+Muon:matrices", [OTHERS, ("0.weight", "1.weight")]),
        ("SGD:0.*+Adam:*.weight+AdamW", [NAMES[1:3], ("embedding.weight", "1.weight", "head.weight"), ("1.bias",)]),
        ("Adam:*.weight+SGD:*", [(*NAMES[:2], "1.weight", "head.weight"), ("0.bias", "1.bias")]),
    ],
)
def test_the_first_that_matches_takes_a_parameter_and_the_rest_is_what_is_left(text, taken):
    assert assign(parse(text), NAMES, MATRICES) == tuple(taken)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("SGD:*.gain+AdamW", r"SGD:\*.gain matches no parameter; there are embedding.weight, .* and 2 more"),
        ("SGD:*+Muon:matrices", "Muon:matrices takes no parameter: other choices take all that it matches"),
        ("SGD+AdamW", "AdamW:rest takes no parameter"),
        ("SGD:*.bias+Muon:matrices", "no class takes embedding.weight, head.weight; add one for the rest"),
        ("SGD:0.WEIGHT+AdamW", "matches no parameter"),
    ],
)
def test_a_choice_without_parameters_and_parameters_without_one_are_refused(text, told):
    with pytest.raises(ValueError, match=told):
        assign(parse(text), NAMES, MATRICES)


def test_embeddings_and_the_head_are_no_matrices_tied_or_not():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    assert matrix_names(model, model[1].weight) == {"2.weight"}
    assert matrix_names(model) == {"1.weight"}
    model[2].weight = model[0].weight
    assert matrix_names(model) == {"1.weight"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Adm", r"torch.optim has no optimizer 'Adm'; did you mean Adam\?"),
        ("Optimizer", "torch.optim has no optimizer 'Optimizer'"),
        ("nowhere.Adam", r"nowhere.Adam cannot be imported .*; is it installed"),
        ("torch.nn.Linear", "torch.nn has no optimizer 'Linear'"),
    ],
)
def test_what_is_no_optimizer_is_named(name, told):
    with pytest.raises(ValueError, match=told):
        optimizer_class(name)
