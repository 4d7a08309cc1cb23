"""Reads a model as parameters without values, from a function, a Hugging Face config, or safetensors."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.plan.choices import listed, matrix_names
from zeroshard.plan.groups import read_groups


class InputError(ValueError):
    """Raised if the command cannot use its input. The message is one line for the terminal."""


@dataclass(frozen=True)
class Model:
    """A model without values, or param groups that a function returned in place of one.

    It lists a tied parameter once. ``matrices`` has the names of the 2-D parameters that are neither an embedding nor
    an output head, ``buffers`` is a number of bytes, and ``notes`` are for the reader of the table.
    """

    source: str
    params: Mapping[str, nn.Parameter]
    buffers: int = 0
    matrices: frozenset[str] = frozenset()
    groups: Sequence[Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def one_class(self) -> str | None:
        """The class that all param groups name, as for ``-o``; None if groups name several, or one names none."""
        own = {group.get("optimizer_class") for group in self.groups or [{}]}
        classes = [cls for cls in own if isinstance(cls, type)]
        if len(own) != 1 or not classes:
            return None
        name, module = classes[0].__name__, classes[0].__module__
        if getattr(sys.modules.get(module), name, None) is not classes[0]:
            return None
        return name if f"{module}.".startswith("torch.optim.") else f"{module}.{name}"

    @property
    def has_classes(self) -> bool:
        """True if each param group names its class."""
        return self.groups is not None and all("optimizer_class" in group for group in self.groups)


def read_model(text: str, *, real: bool = False, trust_remote_code: bool = False) -> Model:
    """Read a model, as the command's help says. This reads no weights, and fetches nothing. Raises InputError."""
    found = _read(text, real=real, trust_remote_code=trust_remote_code)
    if not found.params:
        raise InputError(f"{text} has no parameters")
    has_experts = any("experts" in name for name in found.params)
    notes = ["experts are replicated; expert parallelism is not modelled"] if has_experts else []
    return replace(found, notes=(*found.notes, *notes))


GUARD = '; the module is imported, so what it runs as a script should stand below if __name__ == "__main__":'


def _read(text: str, *, real: bool, trust_remote_code: bool) -> Model:
    path = Path(text)
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises if a name is too long
        names = ("config.json", "model.safetensors.index.json", "model.safetensors")
        path = next((path / name for name in names if (path / name).is_file()), path)
        if path.is_dir():
            raise InputError(f"{text} has no {', '.join(names[:-1])} or {names[-1]}")
    if re.match(r"[^:]*\.py(:|$)", text):
        raise InputError(f"{text} is a file of Python: name a function of its module, such as {path.stem}:make_model")
    if os.path.isfile(path):  # noqa: PTH113 - the same
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return _of_safetensors(path)
        return _of_config(path, trust_remote_code=trust_remote_code)
    if re.fullmatch(r"[\w.]+:[A-Za-z_]\w*", text):
        return _of_function(text, real=real)
    if path.suffix in (".json", ".safetensors") or text.startswith((".", "/")):
        raise InputError(f"{text} does not exist: name a file, or the folder of a config.json or a model.safetensors")
    raise InputError(
        f"{text!r} is no file, folder or module:function. For a model on the Hugging Face hub, download its config "
        f"first: hf download {text} config.json --local-dir {path.name or 'model'}"
    )


def _of_module(model: nn.Module, source: str, head: torch.Tensor | None = None) -> Model:
    buffers = sum(buffer.nbytes for buffer in {*model.buffers()})
    return Model(source, dict(model.named_parameters()), buffers, matrix_names(model, head))


def _of_function(text: str, *, real: bool) -> Model:
    module, _, function = text.partition(":")
    imported = _call(lambda: importlib.import_module(module), text, cure=GUARD)
    make = _call(lambda: getattr(imported, function), text)
    made = _call(make, text, "cpu" if real else "meta")
    if isinstance(made, nn.Module):
        found: Model = _call(lambda: _of_module(made, f"the model that {text} returns"), text)
        return found
    try:
        groups = read_groups(made)
    except (TypeError, ValueError) as error:
        raise InputError(f"{text} returns {type(made).__name__}, no model or param groups: {error}") from None
    named = [zip(group.get("param_names", repeat("param")), group["params"], strict=False) for group in groups]
    params = {f"{name}.{number}": param for number, (name, param) in enumerate(chain.from_iterable(named))}
    return Model(f"the param groups that {text} returns", params, groups=groups)


def _call(function: Callable[[], Any], text: str, device: str = "cpu", cure: str = "") -> Any:  # noqa: ANN401 - what it returns
    """Call a function that may be the user's. An InputError says what it raised, and where."""
    try:
        with torch.device(device):
            return function()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise any exception
        others = [str(Path(file).parent) for file in (__file__, torch.__file__, importlib.__file__)]
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((*others, "<frozen"))]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else text
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if device == "meta" and "meta" in told.lower():
            told += "; the meta device has no values to read while a model is built: --real builds it on the CPU"
        raise InputError(f"{where}: {told}{cure if own else ''}") from None


def _of_config(path: Path, *, trust_remote_code: bool) -> Model:
    import transformers

    config = _json(path)
    if config.get("auto_map") and not trust_remote_code:
        raise InputError(f"{path} names code beside it (auto_map), which --trust-remote-code would run")
    names, options = config.get("architectures") or [], {"trust_remote_code": trust_remote_code}
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path} is no config: its architectures are {names!r}")
    known = getattr(transformers, names[0], None) if names else None
    if names and known is None and not trust_remote_code:
        raise InputError(f"transformers {transformers.__version__} has no {names[0]}, which {path} names")

    def make() -> nn.Module:
        read = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, **options)
        made: nn.Module = known(read) if known else transformers.AutoModel.from_config(read, **options)
        return made.to(read.dtype) if read.dtype else made

    made = _call(make, str(path), "meta")
    head = made.get_output_embeddings()
    found = _of_module(made, f"{type(made).__name__}, of {path}", None if head is None else head.weight)
    if names:
        return found
    return replace(found, notes=(f"{path} names no architecture: {type(made).__name__} has no head",))


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of parameters, by their names in safetensors. The optimizers of torch do not train other dtypes."""

_BUFFERS = re.compile(r"(inv_freq|\.masked_bias|position_ids|running_(mean|var)|num_batches_tracked)$|\.attn\.bias$")
"""Names under which well-known models save buffers; GPT-2's ``attn.bias`` is a mask."""

_EMBEDDINGS = re.compile(r"(^|[._])(wte|wpe|embed\w*|\w*embeddings?|shared)\.weight$")


def _of_safetensors(path: Path) -> Model:
    file_of: dict[str, str] = {}
    if path.suffix == ".json":
        file_of = _json(path).get("weight_map") or {}
        if not file_of or not all(isinstance(file, str) for file in file_of.values()):
            raise InputError(f"{path} is no index: it has no weight_map")
    params, left_out, untrained = dict[str, nn.Parameter](), list[str](), 0
    for file in [path.parent / name for name in dict.fromkeys(file_of.values())] or [path]:
        for name, shape, kind in _header(file):
            if kind in _DTYPES and not _BUFFERS.search(name):
                params[name] = nn.Parameter(torch.empty(shape, dtype=_DTYPES[kind], device="meta"))
            else:
                left_out.append(name)
                untrained += math.prod(shape) if kind not in _DTYPES else 0
    absent = sorted(file_of.keys() - params.keys() - {*left_out})
    if absent:
        raise InputError(f"{path} names the tensor {absent[0]!r}, which {file_of[absent[0]]} does not have")
    if untrained > sum(param.numel() for param in params.values()):
        raise InputError(f"{path}: most of it is of a dtype that is not trained, such as {left_out[0]}")
    two_d = {name: len(param) for name, param in params.items() if param.ndim == 2}
    embeddings = {name: rows for name, rows in two_d.items() if _EMBEDDINGS.search(name)}
    vocabulary = max(embeddings.values(), default=0)
    matrices = frozenset(name for name, rows in two_d.items() if name not in embeddings and rows != vocabulary)
    notes = [f"left out, as buffers or of a dtype that is not trained: {listed(left_out)}"] if left_out else []
    if not embeddings:
        notes.append("no embedding was recognized by its name: --show lists what counts as a matrix")
    return Model(str(path), params, 0, matrices, notes=tuple(notes))


def _header(file: Path) -> list[tuple[str, list[int], str]]:
    """Return the name, shape and dtype of each tensor in a file of safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        if file.open("rb").read(23) == b"version https://git-lfs":
            raise InputError(f"{file} is a pointer of git-lfs, and has no tensors: run git lfs pull in its folder")
        with safe_open(file, framework="pt") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118 - it is no dict
            return [(name, found.get_shape(), found.get_dtype()) for name, found in slices]
    except FileNotFoundError:
        raise InputError(f"{file} is missing") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged: {error}") from None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is no config: it holds a {type(found).__name__}")
    return found
