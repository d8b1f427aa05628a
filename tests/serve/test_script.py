# SPDX-License-Identifier: Apache-2.0
"""examples/serve as ``make demo`` runs it, and with a checkpoint."""

from __future__ import annotations

import os
import re

import pytest
import torch

from ..fresh_process import run_python

from .examples_path import EXAMPLES  # isort: skip
from serve import __main__ as command
from serve import addition, engine

CHECK_MODULES = """
import sys
from serve import __main__ as command
from serve import engine
from flashinfer.jit import jit_spec_registry

arguments = sys.argv[1:]
command.main(arguments)
expected = {spec.name for spec in engine.kernel_specs(command.load(command.parse_arguments(arguments))[0])}
assert set(jit_spec_registry.get_all_specs()) == expected, "modules that were not built up front"
"""


def run(folder, *arguments):
    path = [str(EXAMPLES.parent), str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = run_python(arguments, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("more", [[], ["--fp8"]], ids=str)
def test_random_model(tmp_path, device, more):
    """Check that the text of all requests is printed, then the table; each compilation is announced."""
    options = ["--requests", "7", "--max-new-tokens", "6", "--rate", "1000", "--batch-size", "3", "--device", device]
    text = run(tmp_path, "-c", CHECK_MODULES, "--random", *options, *more)
    assert len(re.findall(r"s  #\d .*\[[3-6] tokens\]", text)) == 7 and "the weights are random" in text
    for name in ("device", "model", "kernel builds", "CUDA graphs", "prefill", "decode", "time to first token"):
        assert re.search(rf"^{name} +\S", text, re.M), name
    assert (tmp_path / "serve_timeline.png").read_bytes().startswith(b"\x89PNG")


def test_sums(tmp_path, device):
    """Check the default of ``make demo``: answers that a person can check, and how many are right."""
    pytest.importorskip("safetensors", reason="the weights are safetensors")
    text = run(tmp_path, str(EXAMPLES / "serve"), "--requests", "32", "--rate", "1000", "--device", device)
    lines = re.findall(r"s  #\d+ +(\d+)\+(\d+): [\d ]+ -> (\d+) +(right|wrong)$", text, re.M)
    right = [int(a) + int(b) == int(answer) for a, b, answer, _ in lines]
    assert right == [verdict == "right" for *_, verdict in lines]
    assert sum(right) >= 31
    assert f"right answers             {sum(right)} of 32\n" in text
    page = (tmp_path / "serve.html").read_text()
    assert f"<th>right answers</th><td>{sum(right)} of 32</td>" in page
    a, b, answer, _ = lines[0]
    assert f"{a}+{b}: " in page and f"-&gt; {answer}" in page


@pytest.mark.full
def test_training(tmp_path):
    """Check that two steps of training write a checkpoint that can be served."""
    pytest.importorskip("transformers", reason="has the model that is trained")
    options = ["--steps", "2", "--batch-size", "4", "--device", "cpu", "--out", "trained"]
    text = run(tmp_path, str(EXAMPLES / "train_addition.py"), *options)
    assert re.search(r"^right: [\d.]+% of 2000 pairs that were held out$", text, re.M)
    config, weights = command.load_checkpoint(tmp_path / "trained", "cpu")
    assert config.eos_tokens == (ord("\n"),) and weights["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text, expected",
    [
        ("374+528: 12 10 09 -> 902\n", True),
        ("999+999: 18 19 19 -> 1998\n", True),
        ("374+528: 12 10 09 -> 903\n", False),
        ("374+528: 12 10 09 -> 902", False),
        ("374+528: \ufffd\n", False),
    ],
)
def test_verdicts(text, expected):
    assert addition.is_right(text) == expected
    assert not expected or text == addition.text_of(*map(int, text.partition(":")[0].split("+")))


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--requests", "0"], "--requests: is 0, expected more than 0"),
        (["--rate", "0"], "--rate: is 0, expected more than 0"),
        (["--rate", "nan"], "--rate: is nan, expected more than 0"),
        (["--max-new-tokens", "-3"], "--max-new-tokens: is -3, expected more than 0"),
        (["--batch-size", "x"], "--batch-size: invalid"),
        (["--pages", "1"], "--pages: is 1, expected more than 1"),
        (["--prompts", "empty.txt"], "--prompts: empty.txt has no line of text"),
        (["--device", "meta"], "--device: meta is not here, expected cpu or a CUDA device"),
        (["--prompts", "latin.txt"], "--prompts: latin.txt cannot be read: 'utf-8' codec"),
        (["--prompts", "nowhere.txt"], "--prompts: nowhere.txt cannot be read: No such file"),
        (["--device", "cuda:99"], "--device: cuda:99 is not here, expected cpu or a CUDA device"),
        (["--device", "abacus"], "--device: abacus is not here, expected cpu or a CUDA device"),
        (["--timeline", "."], "--timeline: . is a folder, expected a file in it"),
        (["--timeline", "nowhere/picture.png"], "--timeline: nowhere is no folder"),
        (["--model", "nowhere", "--random"], "--random: not allowed with argument --model"),
        (["--model", "nowhere"], "--model: nowhere has no config.json, expected a Hugging Face checkpoint"),
    ],
)
def test_bad_options(tmp_path, monkeypatch, capsys, arguments, text):
    """Check for a one-line error before anything is built or served."""
    (tmp_path / "empty.txt").write_text("\n  \n")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command.parse_arguments(arguments)
    assert text in capsys.readouterr().err


def test_blank_lines_are_no_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n\n  \ntwo\n")
    assert command.parse_arguments(["--prompts", str(tmp_path / "prompts.txt")]).prompts == ["one", "two"]


@pytest.mark.parametrize("options", [["--max-new-tokens", "5000"], ["--pages", "2"]], ids=["model", "cache"])
def test_requests_that_cannot_be_served(tmp_path, monkeypatch, capsys, options):
    """Check for a one-line error before any text of the other requests."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"serve: submit: the prompt has 42 tokens .* at most \d+ together"):
        command.main(["--device", "cpu", "--random", *options])
    assert capsys.readouterr().out == ""


def test_checkpoints_that_cannot_be_served(tmp_path, capsys):
    """Check for a one-line error without a traceback."""
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(SystemExit, match=r"serve: config.json: model_type is 'mamba', expected 'llama' or"):
        command.main(["--device", "cpu", "--model", str(tmp_path)])


def test_tokenizers_that_cannot_be_read(tmp_path):
    pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        command.CheckpointTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        command.CheckpointTokenizer(tmp_path)


def test_seeds_of_any_size():
    arguments = command.parse_arguments(["--random", "--seed", str(2**64), "--requests", "4"])
    requests = command.make_requests(command.ByteTokenizer(), arguments)
    batch = engine.Batch.of([(request, 1) for request in requests], page_size=16)
    assert len(set(batch.seed.tolist())) == 3  # greedy requests have no seed


def test_checkpoint(tmp_path):
    """Serve a checkpoint written by transformers, with a word tokenizer and prompts from a file."""
    transformers = pytest.importorskip("transformers", reason="writes the checkpoint")
    tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    pytest.importorskip("safetensors", reason="checkpoints are safetensors")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    words = {f"word{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "prompts.txt").write_text("word1 word2 word3\nword4\n")
    options = ["--model", "model", "--prompts", "prompts.txt", "--requests", "3", "--max-new-tokens", "2"]
    text = run(tmp_path, str(EXAMPLES / "serve"), *options, "--device", "cpu", "--timeline", "picture.png")
    assert len(re.findall(r"'word\d+(?: word\d+)?'  \[[12] tokens\]", text)) == 3
    assert (tmp_path / "picture.png").exists()
