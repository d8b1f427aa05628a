# SPDX-License-Identifier: Apache-2.0
"""Preparation of a process that imports an engine: its sources on the path, empty modules for what is missing."""

from __future__ import annotations

import os
import sys

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
    "urllib3",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xgrammar",
    "zmq",
]
STUBBED_PARTS = (
    *("vllm.entrypoints", "vllm.parser", "vllm.v1.structured_output", "sglang.srt.entrypoints", "sglang.kernels.jit"),
    *("sglang.srt.configs.unlimited_ocr", "sglang.srt.configs.deepseek_ocr"),
)


def prepare() -> None:
    """Put the engines on ``sys.path``, with Triton's interpreter and empty modules for the rest."""
    os.environ.setdefault("FLASHINFER_CPU_BACKENDS", "any")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then takes Triton as it finds it, without asking for a driver
    import transformers  # noqa: F401  before the stubs: it looks for the packages that they stand for

    from . import fetch, stubs

    sys.path.insert(0, str(fetch.source_folder()))
    sys.path += [str(fetch.helper_folder()), str(fetch.interpreter_folder())]
    stubs.install(STUBBED, STUBBED_PARTS)
