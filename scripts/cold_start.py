#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure how long the eight modules that a Llama-style server touches first take to build, and to load again:

    python3 scripts/cold_start.py                      on the GPU if there is one, else on the CPU
    python3 scripts/cold_start.py --device cpu --jobs 2
    python3 scripts/cold_start.py --cache DIR          with a cache that has the modules: nothing is built

cold    seconds from an empty cache until all eight are built, in one parallel graph, and loaded
warm    seconds of `import flashinfer`, loading and the first call of all eight in a new process, once torch is imported
        and its device is ready; median and best of ``--repeat``, with ``FLASHINFER_DISABLE_JIT=1``

Nothing is downloaded, installed or left behind. The exit status is 1 if a result is wrong, or with ``--check`` if a
limit is exceeded: 20 s cold with 16 jobs and more, else 60 s; 1 s warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COLD_LIMITS, WARM_LIMIT = {16: 20.0, 0: 60.0}, 1.0  #: seconds; those of a cold start by the least number of jobs

#: Runs in a new process. Tensors are made before the clock starts: they are the time of torch and of the device.
CHILD = """
import json, os, sys, time
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
mode, device = sys.argv[1:]
torch.manual_seed(0)
rows, heads, kv_heads, dim, hidden, vocab, page = 32, 32, 8, 128, 4096, 32000, 16
kind = dict(dtype=torch.bfloat16, device=device)
x, residual, weight = torch.randn(rows, hidden, **kind), torch.randn(rows, hidden, **kind), torch.ones(hidden, **kind)
q, k, v = (torch.randn(rows, n, dim, **kind) for n in (heads, kv_heads, kv_heads))
cache = torch.zeros(4, 2, page, kv_heads, dim, **kind)
ids = dict(dtype=torch.int32, device=device)
position = torch.arange(rows, **ids)
of_row, last = torch.zeros(rows, **ids), torch.tensor([page], **ids)
indptr, indices, rows_indptr = torch.tensor([0, 2], **ids), torch.tensor([0, 1], **ids), torch.tensor([0, rows], **ids)
wide, logits = torch.randn(rows, 2 * 14336, **kind), torch.randn(rows, vocab, device=device)
workspaces = [torch.zeros(64 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
is_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
finish()

cpu, start = time.process_time(), time.perf_counter()
import flashinfer
import_s = time.perf_counter() - start
if mode == "cold":
    end = "" if device == "cuda" else "_cpu"
    types = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32"
    attention = types + "_head_dim_qk_128_head_dim_vo_128_posenc_0_use_logits_cap_False" + end
    names = [name + end for name in ("norm", "rope", "page", "activation", "sampling", "topk")]
    names += ["batch_decode_with_kv_cache_" + attention]
    names += ["batch_prefill_with_kv_cache_" + attention + ("_fa3" if is_hopper else "")]
    from flashinfer.aot import FAMILIES, gen_family_modules
    from flashinfer.jit import build_jit_specs

    known = {spec.name: spec for family in FAMILIES for spec in gen_family_modules(family, device)}
    specs, start = [known[name] for name in names], time.perf_counter()
    build_jit_specs(specs)
    for spec in specs:
        spec.build_and_load()
    seconds, spent = time.perf_counter() - start, sum(os.times()[2:4])  # spent: by the compilers
    print(json.dumps({"built": len(specs), "seconds": seconds, "cpu": spent}))
    sys.exit()


def serve():
    flashinfer.fused_add_rmsnorm(x, residual, weight)
    flashinfer.apply_rope_pos_ids_inplace(q, k, position)
    flashinfer.append_paged_kv_cache(k, v, of_row, position, cache, indices, indptr, last)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspaces[0], backend="fa3" if is_hopper else "auto")
    plan = (heads, kv_heads, dim, page)
    prefill.plan(rows_indptr, indptr, indices, last, *plan, causal=True, q_data_type=torch.bfloat16)
    o = prefill.run(q, cache)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspaces[1])
    decode.plan(indptr, indices, last, *plan, q_data_type=torch.bfloat16)
    one = decode.run(q[-1:], cache)
    act = flashinfer.silu_and_mul(wide)
    tokens = flashinfer.sampling_from_logits(logits)
    best = flashinfer.top_k(logits, 8)
    finish()
    return o, one, act, tokens, best


o, one, act, tokens, best = serve()
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
# The last row of the prompt sees what the decoding token sees.
torch.testing.assert_close(o[-1], one[0], rtol=2e-2, atol=2e-2)
gate, up = wide.float().chunk(2, -1)
torch.testing.assert_close(act.float(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=2e-2)
torch.testing.assert_close(best[0].sort(-1).values, logits.topk(8).values.sort(-1).values)
assert x.isfinite().all() and ((0 <= tokens) & (tokens < vocab)).all()
print(json.dumps({"torch": torch_s, "import": import_s, "seconds": seconds, "cpu": cpu}))
"""


def run(mode: str, device: str, cache: str, **variables: str) -> dict[str, Any]:
    """Run the child on a cache and return what it printed last."""
    dropped = ("FLASHINFER_", "PYTHONDONTWRITEBYTECODE")  # an installed package has its bytecode
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": path, "FLASHINFER_WORKSPACE_BASE": cache, "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
    env = kept | own | variables
    done = subprocess.run([sys.executable, "-c", CHILD, mode, device], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"cold_start: the {mode} start failed\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once (MAX_JOBS)")
    parser.add_argument("--repeat", type=int, default=7, help="warm starts")
    parser.add_argument("--cache", help="folder to keep the modules in; default: a temporary one")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    options = parser.parse_args()
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or folder
        cold = run("cold", options.device, cache, MAX_JOBS=str(options.jobs))
        built = f"{cold['built']} of 8 modules built in {cold['seconds']:.1f} s, {options.jobs} jobs"
        print(f"cold: {built}; compilers took {cold['cpu']:.0f} s of processor time")
        warm = [run("warm", options.device, cache, FLASHINFER_DISABLE_JIT="1") for _ in range(options.repeat)]
    times = [start["seconds"] for start in warm]
    least = {name: min(start[name] for start in warm) for name in ("seconds", "cpu", "import", "torch")}
    print(
        f"warm: median {statistics.median(times):.2f} s, best {least['seconds']:.2f} s ({least['cpu']:.2f} s of "
        f"processor time), of which import flashinfer {least['import']:.2f} s; import torch before it "
        f"{least['torch']:.2f} s"
    )
    limit = next(seconds for jobs, seconds in COLD_LIMITS.items() if options.jobs >= jobs)
    slow = [f"cold: {limit:g} s"] * (cold["seconds"] > limit) + [f"warm: {WARM_LIMIT:g} s"] * (
        least["seconds"] > WARM_LIMIT
    )
    if slow:
        print("over the limit of", " and ".join(slow))
    return 1 if slow and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
