# SPDX-License-Identifier: Apache-2.0
"""The warm-up of vLLM 0.33 around layers of experts: nested contexts of the autotuner, and files for the next start."""

from __future__ import annotations

import pytest
import torch

from flashinfer import autotune, autotune_v2, autotune_v2_reload
from flashinfer.autotuner import AutoTuner, set_autotune_process_group
from flashinfer.fused_moe.utils import get_hybrid_num_tokens_buckets

from .layers import BF16
from .vllm_calls import apply, halves_swapped, plain, three


@pytest.fixture
def forgotten():
    AutoTuner.get().clear_cache()
    yield AutoTuner.get()
    AutoTuner.get().clear_cache()
    set_autotune_process_group(None)


def measured(tuner: AutoTuner) -> set[int]:
    """Return the token counts that have been measured."""
    return {key.nearest_profile[0][0] for key in tuner.profiling_cache}


@pytest.mark.parametrize("is_managed", [True, False], ids=["autotune_v2", "autotune"])
def test_warm_up(forgotten, tmp_path, is_managed):
    """A dummy run in nested contexts, whose results another start reads; what it chooses changes no result."""
    tuner, most = forgotten, 300
    matrices = three(4, 96, 64, "cpu", BF16)
    w1 = halves_swapped(torch.cat(matrices[:2], dim=1))

    def serve(tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 64, generator=generator).to(BF16)
        weights, ids = torch.rand(tokens, 4, generator=generator).topk(2)
        return apply(x, w1, matrices[2], weights, ids, **plain(BF16))

    counts = (1, 9, 17, 100, 256, most, 511)  # all below the first power of two that was not measured
    before = [serve(tokens) for tokens in counts]

    def start() -> None:
        set_autotune_process_group(None)
        if is_managed:
            context = autotune_v2(mode="tune", cache_root=tmp_path, skip_ops={"fp4_gemm"})
        else:
            context = autotune(tune_mode=True, skip_ops={"fp4_gemm"})
        with torch.inference_mode(), context:
            buckets = get_hybrid_num_tokens_buckets(most)
            with autotune(tuning_buckets=buckets, round_up=True):
                serve(most)

    start()
    assert measured(tuner) == set(get_hybrid_num_tokens_buckets(most))
    if is_managed:
        autotune_v2_reload()
    else:
        assert tuner._dirty
        tuner.save_configs(str(tmp_path / "rank0.json"))
        assert not tuner._dirty
    tuner.reset_statistics()
    assert all(torch.equal(a, serve(tokens)) for a, tokens in zip(before, counts, strict=True))
    assert not tuner.stats.cache_misses

    tuner.clear_cache()
    if is_managed:
        start()
    else:
        assert tuner.load_configs(str(tmp_path / "rank0.json"))
    tuner.reset_statistics()
    assert all(torch.equal(a, serve(tokens)) for a, tokens in zip(before, counts, strict=True))
    assert not tuner.stats.cache_misses and not tuner._dirty
