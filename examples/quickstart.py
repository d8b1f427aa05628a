# SPDX-License-Identifier: Apache-2.0
"""Run RMSNorm on the GPU, or on the CPU if there is none, and print the path of the compiled module.

python examples/quickstart.py
"""

import torch

import flashinfer
from flashinfer.jit import gen_norm_module

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8, 4096, device=device).to(torch.bfloat16)
weight = torch.rand(4096, device=device).to(torch.bfloat16)

y = flashinfer.rmsnorm(x, weight)  # compiled on the first call, later loaded from the cache

expected = torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), eps=1e-6)
torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
print(f"rmsnorm of {tuple(x.shape)} {x.dtype} on {device} agrees with torch")
print(f"module: {gen_norm_module(device).get_library_path()}")
