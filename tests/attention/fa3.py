# SPDX-License-Identifier: Apache-2.0
"""Types, tolerances and lengths that the tests of the Hopper prefill kernels share."""

import torch

F16, BF16 = torch.float16, torch.bfloat16
TOLERANCE = {F16: 2e-3, BF16: 1.6e-2}
#: Requests shorter than a tile and longer than several, without keys, with fewer keys than queries.
QO_LENS, KV_LENS = [1, 17, 300, 3, 40, 129], [9, 333, 700, 0, 30, 129]
