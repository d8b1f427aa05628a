# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the recurrent layers: the cases of each part of the family.

python benchmarks/bench_recurrent.py [-k selective] [--device cpu] [--json FILE]
"""

from __future__ import annotations

import bench_gdn_prefill as bench_gdn_prefill
import bench_recurrent_delta as bench_recurrent_delta
import bench_recurrent_mamba as bench_recurrent_mamba
from harness import main

if __name__ == "__main__":
    main()
