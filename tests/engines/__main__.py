# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.engines``: run published engines on CPU tensors (``make engines``).

    python -m tests.engines            run all cases, print the table
    python -m tests.engines sampler    run one
    python -m tests.engines --write    and write docs/engines.md

Not part of the tests: it fetches wheels of 380 MB. A case whose engine cannot be imported fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- table of the lane: begin -->", "<!-- end -->"

#: Packages of servers, parsers and schedulers, which attention, sampling and experts do not need.
STUBBED = [
    "IPython",
    "aiohttp",
    "anthropic",
    "av",
    "blake3",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "compressed_tensors",
    "cpuinfo",
    "datasets",
    "decord",
    "dill",
    "diskcache",
    "fastapi",
    "gguf",
    "gguf",
    "hf_transfer",
    "interegular",
    "kernels",
    "lark",
    "llguidance",
    "mistral_common",
    "modelscope",
    "ninja_build",
    "numba",
    "openai",
    "openai_harmony",
    "orjson",
    "outlines_core",
    "partial_json_parser",
    "prometheus_client",
    "prometheus_fastapi_instrumentator",
    "psutil",
    "py_cpuinfo",
    "pybase64",
    "pycountry",
    "requests",
    "sentencepiece",
    "setproctitle",
    "setuptools_scm",
    "sgl_kernel",
    "sgl_fa4",
    "smg_grpc_proto",
    "soundfile",
    "starlette",
    "tiktoken",
    "timm",
    "torch_memory_saver",
    "torchao",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "triton",
    "urllib3",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xgrammar",
    "zmq",
]
STUBBED_PARTS = (
    *("vllm.entrypoints", "vllm.parser", "vllm.v1.structured_output", "sglang.srt.entrypoints", "sglang.kernels"),
    *("sglang.srt.configs.unlimited_ocr", "sglang.srt.configs.deepseek_ocr"),
)


def write(lines: list[str]) -> None:
    head, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text("\n".join([head + BEGIN, "", *lines, "", END + rest.partition(END)[2]]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines")
    parser.add_argument("names", nargs="*", help="cases, all by default")
    parser.add_argument("--write", action="store_true", help="write the table to docs/engines.md")
    options = parser.parse_args()
    os.environ.setdefault("FLASHINFER_CPU_BACKENDS", "any")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import transformers  # noqa: F401  before the stubs: it looks for the packages that they stand for

    from . import fetch, stubs

    sys.path.insert(0, str(fetch.source_folder()))
    sys.path.append(str(fetch.helper_folder()))
    stubs.install(STUBBED, STUBBED_PARTS)
    from . import sglang_lane, vllm_lane  # noqa: F401
    from .table import CASES, rows

    results, failed = {}, 0
    for each in CASES:
        name = each.run.__name__
        if options.names and name not in options.names:
            continue
        try:
            each.run()
            results[name] = "agrees"
        except Exception as error:
            failed += 1
            results[name] = f"fails: {type(error).__name__}"
            traceback.print_exc()
    lines = rows(results)
    print("\n".join(lines))
    if options.write:
        write(lines)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
