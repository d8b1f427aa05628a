# SPDX-License-Identifier: Apache-2.0
"""Importing the package again in one process, as plugin loaders and notebooks do: ops, log, hooks of CUDA graphs."""

import os
import textwrap
from pathlib import Path

import torch

import flashinfer
from flashinfer import api_logging
from flashinfer.dump import graph

from ..fresh_process import run_python

AGAIN = """
    import gc, logging, os, sys
    import torch

    logger = logging.getLogger("flashinfer.api")
    mine = logging.NullHandler()
    logger.addHandler(mine)
    original = torch.cuda.CUDAGraph.replay
    x, weight = torch.ones(2, 64), torch.ones(64)

    def forget(prefix):
        for name in [name for name in sys.modules if name == prefix or name.startswith(prefix + ".")]:
            del sys.modules[name]
        gc.collect()

    for number, level in enumerate(["0", "1", "10", "3", "10"]):
        forget("flashinfer")
        os.environ["FLASHINFER_LOGLEVEL"] = level
        os.environ["FLASHINFER_LOGDEST"] = f"{sys.argv[1]}/log_{number}.txt"
        import flashinfer
        assert flashinfer.rmsnorm(x, weight).shape == x.shape
        assert len(logger.handlers) == 2 and mine in logger.handlers, logger.handlers

    from flashinfer.dump import graph
    replay = torch.cuda.CUDAGraph.replay                       # the hook of the last import, and the only one
    assert replay.__globals__ is vars(graph) and replay.__wrapped__ is original
    flashinfer.api_logging._restore_cuda_graph_hooks()
    assert torch.cuda.CUDAGraph.replay is original

    norm = sys.modules["flashinfer.norm.rmsnorm"]
    compiled = torch.compile(lambda x: norm.rmsnorm(x, weight), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), flashinfer.rmsnorm(x, weight))

    forget("flashinfer.api_logging")                           # this module alone
    os.environ |= {"FLASHINFER_LOGLEVEL": "1", "FLASHINFER_LOGDEST": f"{sys.argv[1]}/log_alone.txt"}
    from flashinfer.api_logging import flashinfer_api
    flashinfer_api(lambda x: x)(1)
    assert len(logger.handlers) == 2, logger.handlers
"""


def test_importing_again(tmp_path):
    variables = {
        "FLASHINFER_DUMP_DIR": str(tmp_path / "dumps"),
        "PYTHONPATH": os.pathsep.join([str(Path(flashinfer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    run = run_python(["-c", textwrap.dedent(AGAIN), tmp_path], env={**os.environ, **variables})
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "log_0.txt").exists(), "level 0 writes nothing, also after imports with other levels"
    logs = [(tmp_path / f"log_{number}.txt").read_text() for number in (1, 2, 3, 4, "alone")]
    assert [text.count("commit ") for text in logs] == [1] * 5, "each import has one destination"
    assert ["rmsnorm" in text for text in logs] == [True, True, True, True, False]


def test_hooks_that_others_have_wrapped_stay():
    class Graph:
        def capture_begin(self): ...
        def capture_end(self): ...
        def replay(self): ...

    original = dict(vars(Graph))
    graph.install_graph_hooks(Graph)
    ours = Graph.replay
    Graph.replay = theirs = lambda self: ours(self)
    graph.restore_graph_hooks(Graph)
    assert Graph.replay is theirs and Graph.capture_begin is original["capture_begin"]
    graph.restore_graph_hooks(Graph)  # a second call does nothing
    api_logging._restore_cuda_graph_hooks()
    assert "flashinfer" not in torch.cuda.CUDAGraph.replay.__module__
