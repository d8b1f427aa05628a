# SPDX-License-Identifier: Apache-2.0
"""A model over two processes of the CPU: the tokens of one process, and its logits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..comm.ranks import started_ranks
from . import examples_path  # noqa: F401

from serve.engine import Engine, Request, Sampling, serve  # isort: skip
from serve.experts import Experts  # isort: skip
from serve.model import Llama, LlamaConfig, random_weights  # isort: skip
from serve.parallel import TensorParallel  # isort: skip

EXPERTS = Experts(4, 2, 32, True, "mlp", ("gate_proj", "up_proj", "down_proj"), frozenset({0}))
CONFIGS = {
    "biases and norms of heads": LlamaConfig(64, 64, 96, 2, 4, 2, 64, has_head_norms=True),
    "experts": LlamaConfig(64, 64, 96, 2, 4, 2, 64, experts=EXPERTS),
}


def weights_of(name):
    weights = dict(random_weights(CONFIGS[name], "cpu", seed=3))
    if name.startswith("biases"):
        g = torch.Generator().manual_seed(5)
        for key in [key for key in weights if key.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj")]:
            weights[key.replace("weight", "bias")] = torch.randn(weights[key].shape[0], generator=g)
    return weights


class Watched(Llama):
    """A model that keeps the logits of every pass."""

    def forward(self, *args):
        logits = super().forward(*args)
        self.__dict__.setdefault("seen", []).append(logits.clone())
        return logits


def generate(comm, name):
    """Serve requests that join while others decode, one with random sampling; return tokens and logits."""
    parallel = None if comm is None else TensorParallel(comm)
    model = Watched(CONFIGS[name], weights_of(name), torch.float32, "cpu", parallel)
    engine = Engine(model, num_pages=32, max_prefill_tokens=16)
    numbers = torch.Generator().manual_seed(1)
    requests = []
    for i in range(4):
        prompt = torch.randint(0, 64, (5 + 7 * i,), generator=numbers).tolist()
        sampling = Sampling(0.7, 20, 0.9, seed=4) if i == 2 else Sampling()
        requests.append(Request(prompt, 6, sampling))
    serve(engine, requests, lambda request: None)
    if parallel is not None:
        parallel.close()
    return [request.output for request in requests], torch.cat(model.seen)


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_generate_what_one_does(name):
    tokens, logits = generate(None, name)
    for found, seen in started_ranks(2).run(generate, name):
        assert found == tokens
        torch.testing.assert_close(seen, logits, rtol=1e-4, atol=1e-5)


def too_many_ranks(comm):
    config = LlamaConfig(64, 64, 96, 2, 4, 1, 64)
    Llama(config, random_weights(config, "cpu"), torch.float32, "cpu", TensorParallel(comm))


def test_heads_that_ranks_cannot_share():
    for failure in started_ranks(2).fail(too_many_ranks):
        assert "the model has 1 kv heads, which 2 ranks cannot share" in failure.text


def test_processes_that_torchrun_did_not_start():
    with pytest.raises(ValueError, match="3 processes are needed, torchrun started 1; run torchrun --nproc-per-node 3"):
        TensorParallel.start(3)


def test_torchrun(tmp_path):
    folder = Path(__file__).resolve().parents[2] / "examples" / "serve"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder)]
    options = ["--tensor-parallel", "2", "--device", "cpu", "--requests", "3", "--rate", "1000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and "3 of 3" in done.stdout
