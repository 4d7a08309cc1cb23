"""The text: bytes of source files, and the batches that every rank takes from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from errors import InputError

LIMIT = 8 * 1024 * 1024
"""Bytes read at most: far more than a short run sees, and read in a blink."""

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


def read_corpus(path: Path, least: int, limit: int = LIMIT) -> bytes:
    """Read a text file, or the text files of a folder in alphabetical order.

    Args:
        path: file or folder. In a folder, hidden files, installed packages and whatever is not UTF-8 are passed over.
        least: bytes that are needed.
        limit: bytes after which reading ends.

    Returns:
        Between ``least`` and ``limit`` bytes.

    Raises:
        InputError: if there is no such path, no text in it, or too little of it.
    """
    if not path.exists():
        raise InputError(f"there is no file or folder {str(path)!r}; name one that holds text with --data")
    pieces: list[bytes] = []
    size = 0
    for file in _files(path):
        text = _text(file, limit - size)
        pieces.append(text)
        size += len(text)
        if size >= limit:
            break
    if not size:
        kind = "no text files (UTF-8)" if path.is_dir() else "no text (UTF-8)"
        raise InputError(f"{str(path)!r} holds {kind}; name a file or folder that does with --data")
    if size < least:
        raise InputError(
            f"{str(path)!r} holds {size} bytes of text, but one context needs {least}; name more with --data"
        )
    return b"".join(pieces)


class Batches:
    """Batches drawn from a text by step number alone, so that any number of ranks shares the same global batch.

    Args:
        text: the corpus.
        sequences: of the global batch; a multiple of every world size that is used.
        context: bytes per sequence.
        seed: of the drawing.
    """

    def __init__(self, text: bytes, sequences: int, context: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sequences, self._context, self._seed = sequences, context, seed

    def of(self, step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's share of a step's global batch.

        Returns:
            Inputs and targets, int64, ``(sequences / world_size, context)`` each.

        Raises:
            ValueError: if the global batch cannot be divided evenly.
        """
        if self._sequences % world_size:
            raise ValueError(f"{self._sequences} sequences cannot be divided evenly to {world_size} ranks")
        drawing = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        last = self._text.numel() - self._context - 1
        starts = torch.randint(0, last + 1, (self._sequences,), generator=drawing)[rank::world_size]
        windows = torch.stack([self._text[start : start + self._context + 1] for start in starts.tolist()]).long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


def _text(file: Path, limit: int) -> bytes:
    """The file's first bytes, or nothing if they are not text or cannot be read."""
    try:
        with file.open("rb") as opened:
            found = opened.read(limit)
        # A character may be cut at the limit, so the end is not held against the file.
        found[: max(0, len(found) - 4) if len(found) == limit else None].decode()
    except UnicodeDecodeError as error:
        # The same cut may fall within the last character that was looked at.
        return found if len(found) == limit and error.start >= limit - 8 else b""
    except OSError:
        return b""
    return b"" if b"\0" in found else found
