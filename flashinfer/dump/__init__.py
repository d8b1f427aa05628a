# SPDX-License-Identifier: Apache-2.0
"""Tensor dumps of API calls (``FLASHINFER_LOGLEVEL=10``) and their replay.

writer   one directory per call, caps and filters       graph    calls captured in a CUDA graph
files    tensors and records on disk                    replay   calling a dumped function again
codec    arguments as JSON plus tensors                 apis     which functions a replay may call
flat     the same in the form that other tools read     compare  recorded and replayed results
"""

from .graph import clear_graph_dumps, flush_graph_dumps
from .replay import replay_from_dump, replay_main, replay_sequence
from .writer import Dumper, DumpSettings

__all__ = [
    "DumpSettings",
    "Dumper",
    "clear_graph_dumps",
    "flush_graph_dumps",
    "replay_from_dump",
    "replay_main",
    "replay_sequence",
]
