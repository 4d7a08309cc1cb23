"""Tests for the list of public names: a change for users is a change of the list."""

from __future__ import annotations

from public_names import LIST, public_names


def test_public_names_are_those_of_the_committed_list() -> None:
    # Given the list, and the packages as they are,
    listed = LIST.read_text(encoding="utf-8").splitlines()

    # When their public names are read,
    found = public_names()

    # Then a name or a signature that has changed is in the list too: python tools/public_names.py --write.
    assert found == listed
