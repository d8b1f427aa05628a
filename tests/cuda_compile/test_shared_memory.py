# SPDX-License-Identifier: Apache-2.0
"""Shared memory of attention kernels: the rule that refuses head dimensions agrees with the kernels' constants."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashinfer.jit import env
from flashinfer.jit.attention.shared_memory import Heads, decode_bytes, prefill_bytes, shared_limit

SOURCE = """
#include <flashinfer/attention/decode/producer.cuh>
#include <flashinfer/attention/prefill/shape.cuh>
using namespace flashinfer;
using namespace flashinfer::attention;
using flashinfer::device::SharedLimitOf;
template <int QK, int VO, typename KV, bool LATENT>
struct Stub {
  using DTypeQ = __half;
  using DTypeKV = KV;
  static constexpr int HEAD_DIM_QK = QK, HEAD_DIM_VO = VO;
  static constexpr bool SHARED_KV = LATENT;
  static constexpr PosEncodingMode POS_ENCODING = PosEncodingMode::kNone;
};
template <typename P, int TILE>
constexpr int PrefillBytes() {
  using Tr = prefill::Traits<P, TILE>;
  return Tr::FIXED + (P::SHARED_KV ? 2 : 1) * 16 * Tr::ROW_BYTES;
}
"""
TARGETS = [(7, "5"), (8, "0"), (8, "6"), (8, "7"), (9, "0a"), (10, "0a"), (10, "3a"), (11, "0a"), (12, "0f")]
KINDS = {"__half": (2, 4), "__nv_fp8_e4m3": (1, 4), "uint8_t": (2, 8)}  # bytes of a number, bytes of a row's offset
PAIRS = [(64, 64), (80, 48), (128, 128), (192, 128), (256, 256), (448, 256), (64, 256), (512, 512), (336, 320)]


def compiled(nvcc: Path, folder: Path, lines: list[str]) -> subprocess.CompletedProcess:
    source = folder / "unit.cu"
    source.write_text(SOURCE + "\n".join(lines))
    flags = ["-std=c++17", "-arch=sm_90a", "--expt-relaxed-constexpr", "-cubin", f"-I{env.FLASHINFER_INCLUDE_DIR}"]
    command = [nvcc, *flags, source, "-o", folder / "unit.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_sizes(nvcc, tmp_path):
    lines = [
        f'static_assert(SharedLimitOf({major}{minor.rstrip("af")}0) == {shared_limit((major, minor))}, "");'
        for major, minor in TARGETS
    ]
    limit = shared_limit((9, "0a"))
    cases = [((*pair, *sizes, False), kind) for kind, sizes in KINDS.items() for pair in PAIRS]
    cases += [((576, 512, *sizes, True), kind) for kind, sizes in list(KINDS.items())[:2]]
    compared = 0
    for (qk, vo, kv_bytes, offset_bytes, is_latent), kind in cases:
        heads = Heads(qk, vo, 2, kv_bytes, offset_bytes, is_latent)
        stub = f"Stub<{qk}, {vo}, {kind}, {str(is_latent).lower()}>"
        for tile in (16, 64, 128) if vo <= 256 else (16, 64):
            bytes_needed = prefill_bytes(heads, tile)
            assert bytes_needed <= limit, (heads, tile)
            lines.append(f'static_assert(PrefillBytes<{stub}, {tile}>() == {bytes_needed}, "{tile}");')
            compared += 1
        if vo <= 256 and not is_latent:
            expected = decode_bytes(heads)
            lines.append(f'static_assert(decode::Traits<{stub}, 1>::SHARED_BYTES == {expected}, "decode");')
    result = compiled(nvcc, tmp_path, lines)
    assert result.returncode == 0, result.stderr
    assert compared == 3 * (7 * 3 + 2 * 2) + 2 * 2


@pytest.mark.parametrize("head_dim, fits", [(1152, True), (1168, False)])
def test_the_largest_heads(nvcc, tmp_path, head_dim, fits):
    """Check that the assertion in the kernel fails exactly where the rule says so."""
    heads = Heads(head_dim, head_dim, 2, 2, 4, False)
    assert (prefill_bytes(heads, 64) <= shared_limit((9, "0a"))) == fits
    stub = f"Stub<{head_dim}, {head_dim}, __half, false>"
    result = compiled(nvcc, tmp_path, [f"constexpr int BYTES = PrefillBytes<{stub}, 64>();"])
    assert (result.returncode == 0) == fits, result.stderr
    assert fits or "do not fit into shared memory" in result.stderr
