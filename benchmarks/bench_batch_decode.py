# SPDX-License-Identifier: Apache-2.0
"""The batched cases of ``bench_decode.py``, under the name of the development guide.

python benchmarks/bench_batch_decode.py [--device cpu] [--json FILE]
"""

from __future__ import annotations

import sys

import bench_decode

if __name__ == "__main__":
    sys.argv[1:1] = ["-k", "batch_decode"]
    bench_decode.main()
