# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.engines.ranks NAME RANK SIZE STORE``: one rank of a case of two processes, joined by gloo."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).parents[2]
SECONDS = 240


def on_ranks(function: Callable[[Any, int], None], size: int = 2) -> None:
    """Run ``function(group, rank)`` of ``ranks_lane`` in ``size`` processes; raise with the text of one that fails."""
    with tempfile.TemporaryDirectory(prefix="engine-ranks-") as folder:
        command = [sys.executable, "-m", "tests.engines.ranks", function.__name__]
        options = {"cwd": ROOT, "stderr": subprocess.STDOUT, "stdout": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen([*command, str(rank), str(size), f"{folder}/store"], **options) for rank in range(size)
        ]
        try:
            texts = [process.communicate(timeout=SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, texts, strict=True):
            if process.returncode:
                raise AssertionError(f"{function.__name__}: a rank ended with {process.returncode}\n{text[-3000:]}")


def main() -> None:
    name, rank, size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    from .prepare import prepare

    prepare()
    import torch.distributed as dist

    from . import ranks_lane

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    getattr(ranks_lane, name)(dist.group.WORLD, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
