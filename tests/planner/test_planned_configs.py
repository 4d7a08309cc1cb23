"""Models of Hugging Face are planned from their config, and as from the headers of their checkpoints."""

from __future__ import annotations

import json
import re
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="configs are those of transformers")
pytest.importorskip("typer", reason="the command needs the extra zeroshard[cli]")

from zeroshard.planner import main
from zeroshard.planner.comparison import compare, planner_of
from zeroshard.planner.models import InputError, Model, read_model

ROOT = Path(__file__).parents[2]
NAMES = {
    "DDP": "DDP",
    "torch ZeRO": "torch's `ZeroRedundancyOptimizer`",
    "split": "zeroshard in DDP",
    "split+grads": "zeroshard, gradients sharded",
    "FSDP2": "FSDP2, for comparison",
}
"""Rows of the command, and of the page of comparisons. The README leaves the second out."""

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "dtype": "bfloat16", "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}


def write_config(folder: Path, config: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def write_sparse_shards(folder: Path, model: Model, count: int) -> Path:
    """Write files with the headers of safetensors, and holes in place of values."""
    files: dict[str, str] = {}
    params = [*model.params.items()]
    size = -(-len(params) // count)
    for number in range(count):
        header, end = {}, 0
        for name, param in params[number * size : (number + 1) * size]:
            files[name] = f"model-{number}.safetensors"
            header[name] = {"dtype": "BF16", "shape": [*param.shape], "data_offsets": [end, end + param.nbytes]}
            end += param.nbytes
        text = json.dumps(header).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return index


def test_a_config_and_the_shards_of_its_checkpoint_give_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, LLAMA_3_8B)
    model = read_model(str(config))
    assert sum(param.numel() for param in model.params.values()) == 8_030_261_248
    index = write_sparse_shards(tmp_path, model, 4)
    assert read_model(str(index)).matrices == model.matrices
    tables = []
    for file in (config, index):
        options = ["-o", "Muon:matrices+AdamW:rest", "--ranks", "2,8", "--master-weights", "--memory", "80GiB"]
        monkeypatch.setattr(sys, "argv", ["zeroshard", "plan", str(file), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        shown = capsys.readouterr().out.partition("8,030,261,248 parameters in the model's bfloat16")[2]
        # A checkpoint does not have the frequencies of rotary embeddings, which are computed.
        tables.append(re.sub(r"buffers \d+ bytes,\s", "", shown))
    assert tables[0] == tables[1]
    assert tables[0].count("level  ") == 2


def test_a_tied_head_is_there_once_and_no_matrix(tmp_path: Path) -> None:
    found = read_model(str(write_config(tmp_path, GPT2).parent))
    assert sum(param.numel() for param in found.params.values()) == 124_439_808
    assert len(found.matrices) == 48
    assert all(name.startswith("transformer.h.") for name in found.matrices)


def test_a_config_without_architectures_has_no_head_and_says_so(tmp_path: Path) -> None:
    found = read_model(str(write_config(tmp_path, {"model_type": "gpt2"})))
    assert found.notes == (f"{tmp_path / 'config.json'} names no architecture: GPT2Model has no head",)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**GPT2, "auto_map": {"AutoModel": "code.Model"}}, r"names code beside it \(auto_map\), which --trust-remote"),
        ({**GPT2, "architectures": ["NoSuchModel"]}, r"transformers .* has no NoSuchModel, which .*config.json names"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ([1], "is no config: it holds a list"),
    ],
    ids=["code beside it", "unknown architecture", "unknown type", "a list"],
)
def test_what_cannot_be_built_is_told_in_one_line(tmp_path: Path, config: object, told: str) -> None:
    with pytest.raises(InputError, match=told) as raised:
        read_model(str(write_config(tmp_path, config)))
    assert "\n" not in str(raised.value)


PAGE = ROOT / "docs" / "planning.md"
SHOWN = re.findall(
    r"^```console\n\$ zeroshard (.*?)(?<!\\)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize(("arguments", "output"), SHOWN)
def test_the_page_shows_what_its_commands_print(arguments: str, output: str) -> None:
    program = [sys.executable, "-W", "ignore", "-c", "from zeroshard.planner import main; main()"]
    command = [*program, *shlex.split(arguments.replace("\\\n", " "))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    assert [line.rstrip() for line in done.stdout.splitlines()] == output.splitlines()


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
def test_pages_have_what_the_command_computes_for_seven_billion_parameters(page: str) -> None:
    model = read_model(str(ROOT / "docs" / "examples" / "configs" / "llama-2-7b"))
    settings = {"dtype": None, "grad_dtype": None, "master_weights": False, "backend": "nccl"}
    rows = {row.name: row for row in compare(planner_of(model, "AdamW", **settings), "AdamW", 8, ("split",), hook=True)}
    table = re.findall(r"^\|(.*?)\|(.*)\|$", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    shown = {name.strip(): [cell.strip(" *") for cell in cells.split("|")] for name, cells in table}
    assert {*NAMES.values()} - {*shown} == ({NAMES["torch ZeRO"]} if page == "README.md" else set())
    for name, label in ((name, label) for name, label in NAMES.items() if label in shown):
        here = rows[name].largest
        sizes = [here.parameters, here.gradients, here.state, here.total, max(rows[name].sent)]
        assert shown[label] == [f"{size / 1e9:.1f}" for size in sizes], label
