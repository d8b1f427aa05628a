# SPDX-License-Identifier: Apache-2.0
"""A report about this machine for bug reports: ``flashinfer collect-env`` or ``python -m flashinfer.collect_env``.

Only the standard library is imported here, so the file also runs alone on a machine where the package is broken. Each
probe is guarded: one that fails says why in its own section. Nothing is written and nothing is fetched.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Optional

__all__ = ["collect_env_info", "format_report", "main"]

Section = dict[str, Any]

_PACKAGES = (
    "apache-tvm-ffi",
    "ninja",
    "numpy",
    "jinja2",
    "filelock",
    "click",
    "packaging",
    "requests",
    "tabulate",
    "tqdm",
    "safetensors",
    "triton",
    "cuda-python",
    "cupti-python",
    "nvidia-cuda-nvcc",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass",
    "nvidia-nvshmem-cu12",
    "mpi4py",
    "vllm",
    "sglang",
    "tensorrt-llm",
)
_LIBRARIES = ("cudart", "cublas", "cublasLt", "cudnn", "nccl", "nvrtc", "cupti", "nvshmem_host")
_VARIABLES = re.compile(
    r"^(FLASHINFER_|CUDA_|TORCH_|NCCL_|NVSHMEM_|OMP_|PYTORCH_)|^(CC|CXX|MAX_JOBS|PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX)$"
)
# Variables of the families above can carry credentials of a registry or a logging service.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|_KEY$", re.I)


def _run(*command: str) -> Optional[str]:
    """Output of a command; None when it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else None


def _installed(distribution: str) -> Optional[str]:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flashinfer() -> Section:
    package = importlib.import_module("flashinfer")
    env = importlib.import_module("flashinfer.jit.env")
    own = package.__version__
    section: Section = {
        "flashinfer": own,
        "commit": importlib.import_module("flashinfer.version").__git_commit__,
        "location": str(Path(package.__file__ or "").parent),
        "cache": str(env.FLASHINFER_CACHE_DIR),
        "workspace": str(env.FLASHINFER_WORKSPACE_DIR),
        "pre-built modules": str(env.FLASHINFER_AOT_DIR),
    }
    for companion in ("flashinfer-jit-cache", "flashinfer-cubin"):
        version = _installed(companion)
        # The part after + names the CUDA release a wheel was built with; it does not have to agree.
        differs = version is not None and version.split("+")[0] != own.split("+")[0]
        section[companion] = f"{version} (does not match {own})" if differs else version or "not installed"
    return section


def _platform() -> Section:
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.M)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.M)
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": model.group(1) if model else platform.processor() or platform.machine(),
        "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": f"{int(memory.group(1)) / 2**20:.1f} GiB" if memory else "unknown",
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gpu() -> Section:
    columns = "index,name,compute_cap,memory.total,driver_version"
    table = _run("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader")
    if not table:
        return {"gpus": "none found (no working nvidia-smi)"}
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    section: Section = {"driver": rows[0][-1]}
    for index, name, capability, memory, _ in rows:
        section[f"gpu {index}"] = f"{name}, compute capability {capability}, {memory}"
    return section


def _toolkit() -> Section:
    try:
        toolchain = importlib.import_module("flashinfer.jit.cpp_ext")
        nvcc, cxx, ninja = toolchain.find_nvcc(), toolchain.find_cxx(), toolchain.find_ninja()
    except (ImportError, RuntimeError):  # run alone, where the package would look in more places; or no ninja
        nvcc, cxx, ninja = (shutil.which(name) for name in ("nvcc", "c++", "ninja"))
    nvcc_text = (_run(str(nvcc), "--version") if nvcc else None) or ""
    release = re.search(r"release (\S+), (V\S+)", nvcc_text)
    return {
        "CUDA_HOME": os.environ.get("CUDA_HOME", os.environ.get("CUDA_PATH", "unset")),
        "nvcc": str(nvcc) if nvcc else "not found; CPU modules and pre-built CUDA modules still work",
        "nvcc release": f"{release.group(1)} ({release.group(2)})" if release else "unknown",
        "host compiler": f"{cxx}: {((_run(str(cxx), '--version') or '?').splitlines())[0]}" if cxx else "not found",
        "ninja": f"{ninja}: {_run(str(ninja), '--version')}" if ninja else "not found",
    }


def _torch() -> Section:
    torch = importlib.import_module("torch")
    section: Section = {
        "version": torch.__version__,
        "built for CUDA": torch.version.cuda or "no (CPU build)",
        "CUDA available": torch.cuda.is_available(),
        "C++ ABI": int(torch.compiled_with_cxx11_abi()),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        section["cuDNN"] = torch.backends.cudnn.version()
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            section[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)}, sm{major}{minor}"
    return section


def _cudnn_frontend() -> Section:
    version = _installed("nvidia-cudnn-frontend")
    if version is None:
        return {"installed": "no"}
    return {"installed": version, "backend": importlib.import_module("cudnn").backend_version()}


def _libraries() -> Section:
    """List the copy of each GPU library that this process has loaded, and other copies that could be loaded instead."""
    loaded = re.findall(r"\s(/\S+\.so[.\d]*)$", _read("/proc/self/maps"), re.M)
    cached = re.findall(r"=> (\S+)$", _run("ldconfig", "-p") or "", re.M)
    wheels = [p for folder in sys.path for p in glob.glob(f"{folder}/nvidia/*/lib/*.so*")]
    toolkit = glob.glob(f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64/*.so*")
    section: Section = {}
    for name in _LIBRARIES:
        own = re.compile(rf"/lib{name}[-.][^/]*$")
        here = sorted({p for p in loaded if own.search(p)})
        others = sorted({p for p in [*cached, *wheels, *toolkit] if own.search(p)} - set(here))
        if here or others:
            section[f"lib{name}"] = {"loaded": here or "no", "on disk": others or "no other copy"}
    return section or {"libraries": "none loaded, none on disk"}


def _packages() -> Section:
    versions = {name: _installed(name) for name in _PACKAGES}
    return {name: version for name, version in versions.items() if version}


def _variables() -> Section:
    shown = {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.search(k)}
    return {k: "(set, not shown)" if _SECRET.search(k) else v for k, v in shown.items()}


def _topology() -> Section:
    return {"matrix": _run("nvidia-smi", "topo", "-m") or "not available"}


_SECTIONS: dict[str, Callable[[], Section]] = {
    "FlashInfer": _flashinfer,
    "Python / Platform": _platform,
    "GPU / Driver": _gpu,
    "CUDA Toolkit": _toolkit,
    "PyTorch": _torch,
    "cuDNN Frontend": _cudnn_frontend,
    "GPU Libraries: loaded vs on disk": _libraries,  # after PyTorch, which loads them
    "Relevant Packages": _packages,
    "Environment Variables": _variables,
    "GPU Topology": _topology,
}


def collect_env_info() -> dict[str, Section]:
    """Run every probe.

    Returns
    -------
    dict[str, dict]
        Section title -> fact -> value, as JSON has them. A probe that failed has the single fact ``error``.
    """
    report: dict[str, Section] = {}
    for title, probe in _SECTIONS.items():
        try:
            report[title] = probe()
        except Exception as error:  # the report must be complete even on a broken machine
            report[title] = {"error": f"{type(error).__name__}: {error}"}
    return report


def format_report(report: dict[str, Section]) -> str:
    """Format the report as text, one block per section."""
    lines = ["FlashInfer environment report", ""]
    for title, facts in report.items():
        lines.append(f"==== {title} ====")
        width = max((len(name) for name in facts), default=0)
        for name, value in facts.items():
            if isinstance(value, dict):
                value = "; ".join(f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in value.items())
            lines.append(f"{name:<{width}}  " + str(value).replace("\n", "\n" + " " * (width + 2)))
        lines.append("")
    return "\n".join(lines)


def main(arguments: Optional[list[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashinfer.collect_env", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    report = collect_env_info()
    print(json.dumps(report, indent=2) if options.json else format_report(report))


if __name__ == "__main__":
    # Run as a plain file, this folder would come first on the path and hide standard modules such as `trace`.
    here = Path(__file__).resolve().parent
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]
    main()
