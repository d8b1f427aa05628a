# SPDX-License-Identifier: Apache-2.0
"""Write the list of tactics that must not be tried: run each of them where it can do no harm.

flashinfer generate-tactics-blocklist -o blocklist.json
FLASHINFER_TACTICS_BLOCKLIST=blocklist.json python serve.py

A child process runs the tactics of one operator. A tactic is listed if it raises, gives wrong numbers, ends the process
(an illegal memory access) or does not return in time; the child is then replaced, and the next tactic follows.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import re
import tempfile
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Union

import torch

from .._compat.unsupported import UnsupportedError
from .._runtime.errors import ArgumentError
from ..trace.check import default_tolerances
from .blocklist import TacticsBlocklist
from .profiles import OptimizationProfile
from .runner import TunableRunner
from .tactics import to_json

__all__ = ["PROBE_FUNCTIONS", "Probe", "Sizes", "generate"]

_log = logging.getLogger("flashinfer")
_START = 600.0  # seconds for a process to start and make the inputs; a busy machine imports torch for ten


@dataclass(frozen=True)
class Sizes:
    """Sizes of an expert layer; ``rows`` tokens are in a product."""

    rows: int
    hidden_size: int
    intermediate_size: int
    device: str


@dataclass(frozen=True)
class Probe:
    """An operator with the inputs of one call. ``output`` is the input that is written, ``expected`` its values."""

    custom_op: str
    runners: Sequence[TunableRunner]
    inputs: list[Any]
    output: torch.Tensor
    expected: torch.Tensor

    def trials(self) -> Iterator[tuple[TunableRunner, Any]]:
        """Yield each runner with each of its tactics, in the same order in every process."""
        for runner in self.runners:
            for tactic in runner.get_valid_tactics(self.inputs, OptimizationProfile([], [])):
                yield runner, tactic


def _normal(*shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same values on every device
    return torch.randn(shape, generator=generator).to(device)


def probe_bf16(sizes: Sizes) -> Probe:
    """Make the first product of an expert in bfloat16."""
    from ..gemm.tuning import CublasLtBf16Runner, OwnBf16Runner

    a = _normal(sizes.rows, sizes.hidden_size, device=sizes.device).bfloat16()
    b = (_normal(2 * sizes.intermediate_size, sizes.hidden_size, device=sizes.device) / 16).bfloat16().T
    out = torch.empty(sizes.rows, 2 * sizes.intermediate_size, dtype=torch.bfloat16, device=sizes.device)
    inputs = [a, b, None, False, out, None]
    return Probe("bf16_gemm", [CublasLtBf16Runner(), OwnBf16Runner()], inputs, out, a.float() @ b.float())


def probe_fp8(sizes: Sizes) -> Probe:
    """Make the first product of an expert in float8_e4m3fn with one scale per tensor."""
    from ..gemm.tuning import OwnFp8Runner

    a = _normal(1, sizes.rows, sizes.hidden_size, device=sizes.device).to(torch.float8_e4m3fn)
    b = _normal(1, 2 * sizes.intermediate_size, sizes.hidden_size, device=sizes.device).to(torch.float8_e4m3fn).mT
    scales = [torch.full((), x, device=sizes.device) for x in (0.5, 0.125)]
    out = torch.empty(1, sizes.rows, 2 * sizes.intermediate_size, dtype=torch.bfloat16, device=sizes.device)
    expected = torch.bmm(a.float(), b.float()) * (0.5 * 0.125)
    return Probe("fp8_gemm", [OwnFp8Runner()], [a, b, *scales, out, None], out, expected)


def probe_bf16_relu2(sizes: Sizes) -> Probe:
    """Make the first product of an expert in bfloat16 whose activation is not gated: half as many columns."""
    return probe_bf16(replace(sizes, intermediate_size=sizes.intermediate_size // 2))


def probe_nothing(sizes: Sizes) -> Probe:
    """Raise the error of a format whose kernels need a Blackwell GPU."""
    raise UnsupportedError("generate: quant_modes must be formats with kernels here, got one of Blackwell GPUs")


#: Operators whose tactics :func:`generate` runs, by the published names of formats and kernels.
PROBE_FUNCTIONS: dict[str, Callable[[Sizes], Probe]] = {
    "NvFP4xNvFP4": probe_nothing,
    "Fp8-Block": probe_nothing,
    "NvFP4-CUTLASS": probe_nothing,
    "Fp8-PerTensor-CUTLASS": probe_fp8,
    "BF16-CUTLASS": probe_bf16,
    "BF16-Relu2-CUTLASS": probe_bf16_relu2,
}


def _device_name(device: str) -> str:
    """Return the name of a GPU as part of the name of a file; that of the CPU is cpu."""
    made = torch.device(device)
    return re.sub(r"\W+", "_", torch.cuda.get_device_name(made)) if made.type == "cuda" else made.type


def _run_trials(function: Callable[[Sizes], Probe], sizes: Sizes, first: int, results: Connection) -> None:
    """Run the trials from ``first`` on: say which begins, then whether it is good. The body of a child process."""
    probe = function(sizes)
    tolerance = 4 * max(default_tolerances(probe.output.dtype))
    size = probe.expected.abs().max().item() or 1.0
    for i, (runner, tactic) in enumerate(probe.trials()):
        if i < first:
            continue
        key = f"{probe.custom_op}::{type(runner).__name__}"
        results.send((i, key, to_json(tactic), None))
        problem = ""
        try:
            probe.output.fill_(float("nan"))
            runner.forward(probe.inputs, tactic=tactic)
            if probe.output.is_cuda:
                torch.cuda.synchronize(probe.output.device)
            error = (probe.output.float() - probe.expected).abs().max().item()
            if not error <= tolerance * size:
                problem = f"is wrong by {error:.3g}"
        except Exception as error:
            problem = f"raises {type(error).__name__}: {error}"
        results.send((i, key, to_json(tactic), problem))
    results.send(None)


def _bad_tactics(function: Callable[[Sizes], Probe], sizes: Sizes, timeout: float) -> Iterator[tuple[str, Any, str]]:
    """Yield key, tactic and problem of each trial that fails, with a new process after each that ends a process."""
    spawn = multiprocessing.get_context("spawn")
    first, is_done = 0, False
    while not is_done:
        here, there = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_run_trials, args=(function, sizes, first, there), daemon=True)
        child.start()
        there.close()
        running: Optional[tuple[str, Any]] = None
        try:
            while True:
                if not here.poll(timeout if running is not None else max(timeout, _START)):
                    raise TimeoutError
                message = here.recv()
                if message is None:
                    is_done = True
                    break
                first, key, tactic, problem = message
                running = (key, tactic) if problem is None else None
                if problem:
                    yield key, tactic, problem
        except (EOFError, ConnectionError, TimeoutError) as error:
            if running is None:  # no trial is to blame: the inputs cannot be made on this device
                raise RuntimeError(f"generate: {function.__name__} failed in its process; its error is above") from None
            problem = f"does not return in {timeout} s" if isinstance(error, TimeoutError) else "ends the process"
            yield (*running, problem)
            first += 1
        finally:
            child.kill()
            child.join()
            here.close()


def _check_writable(path: Path) -> None:
    """Raise ArgumentError unless a file can be made at ``path``: to find out after the trials would lose their time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"generate: output must be a file that can be written, got {path!s} ({reason})") from error


def generate(
    output: Union[str, Path, None] = None,
    quant_modes: Optional[Sequence[str]] = None,
    num_tokens: int = 64,
    num_experts: int = 256,
    hidden_size: int = 7168,
    intermediate_size: int = 2048,
    top_k: int = 8,
    device: str = "cuda:0",
    timeout: float = 300.0,
    probes: Optional[Mapping[str, Callable[[Sizes], Probe]]] = None,
) -> dict[str, list[Any]]:
    """Run every tactic in a process of its own and list those that fail.

    Parameters
    ----------
    output : Optional[str]
        File for :class:`TacticsBlocklist`; default: ``tactics_<name of the GPU>.json``.
    quant_modes : Optional[Sequence[str]]
        Keys of :data:`PROBE_FUNCTIONS`; default: all that have kernels here.
    num_tokens, num_experts, hidden_size, intermediate_size, top_k : int
        Sizes of an expert layer. Products have the rows of all tokens, and the rows that one expert has on average.
    device : str
        Where to run; ``"cpu"`` works too.
    timeout : float
        Seconds for one tactic; the first of a process includes the build of its module.
    probes : Optional[Mapping[str, Callable[[Sizes], Probe]]]
        Operators to run instead of :data:`PROBE_FUNCTIONS`.

    Returns
    -------
    dict
        Tactics by ``op::Runner``; empty if all are good.
    """
    known = PROBE_FUNCTIONS if probes is None else probes
    unknown = [mode for mode in quant_modes or () if mode not in known]
    if unknown:
        raise ArgumentError(
            f"generate: Unknown quant mode: quant_modes must be among {', '.join(known)}, got {unknown}"
        )
    if any(known[mode] is probe_nothing for mode in quant_modes or ()):
        probe_nothing(Sizes(num_tokens, hidden_size, intermediate_size, device))
    output = f"tactics_{_device_name(device)}.json" if output is None else output
    _check_writable(Path(output))
    found: dict[str, list[Any]] = {}
    served = [mode for mode, probe in known.items() if probe is not probe_nothing]
    for mode in served if quant_modes is None else quant_modes:
        for rows in sorted({max(1, num_tokens * top_k // num_experts), num_tokens}):
            sizes = Sizes(rows, hidden_size, intermediate_size, device)
            for key, tactic, problem in _bad_tactics(known[mode], sizes, timeout):
                _log.warning("generate: %s tactic %s with %d rows %s", key, tactic, rows, problem)
                if tactic not in found.setdefault(key, []):
                    found[key].append(tactic)
    TacticsBlocklist.save(output, found)
    return found
