# SPDX-License-Identifier: Apache-2.0
"""Cache sizes, flush buffers and rotated inputs."""

import pytest
import torch

from flashinfer.testing import cold_cache
from flashinfer.testing.cold_cache import CacheFlush, copy_inputs, distinct_bytes
from flashinfer.testing.utils import calculate_rotation_count, get_l2_cache_size


def test_cache_size_is_plausible(device):
    assert 1 << 20 <= get_l2_cache_size(device) <= 4 << 30


def test_flush_is_larger_than_the_cache(device, monkeypatch):
    monkeypatch.setattr(cold_cache, "get_l2_cache_size", lambda d: 8 << 20)
    flush = CacheFlush(device)
    assert flush._buffer.nbytes >= 16 << 20 and flush._buffer.device.type == device
    flush()


def test_flush_size_can_be_chosen():
    flush = CacheFlush("cpu", 1000)
    flush._buffer.fill_(1)
    flush()
    assert flush._buffer.nbytes == 1000 and not flush._buffer.any()


# A cache of 1000 bytes: the copies must cover five times that.
@pytest.mark.parametrize("size, expected", [(0, 1), (5000, 1), (4999, 2), (2500, 2), (1000, 5), (999, 6)])
def test_rotation_spans_five_caches(monkeypatch, size, expected):
    monkeypatch.setattr(cold_cache, "get_l2_cache_size", lambda d: 1000)
    x = torch.empty(size, dtype=torch.int8)
    assert calculate_rotation_count([x]) == expected
    assert calculate_rotation_count([x, x]) == expected  # one tensor passed twice counts once


def test_rotation_has_a_minimum(monkeypatch):
    monkeypatch.setattr(cold_cache, "get_l2_cache_size", lambda d: 1000)
    assert calculate_rotation_count([torch.empty(4000, dtype=torch.int8)], min_rotations=4) == 4


def test_copies_keep_strides_and_sharing():
    wide = torch.arange(48.0).view(4, 12)
    part = wide[1:, 2:5]
    args, kwargs = copy_inputs(([part, part], {"scale": 2.0}), cuda_only=False)
    assert args[0] is args[1] and kwargs == {"scale": 2.0}
    assert args[0].stride() == part.stride() and torch.equal(args[0], part)
    args[0].zero_()
    assert wide.any() and part.any()


def test_cpu_tensors_are_shared_by_default():
    x = torch.ones(2)
    assert copy_inputs((x,))[0] is x


def test_empty_tensors_have_copies_too():
    assert copy_inputs(torch.empty(0, 3), cuda_only=False).shape == (0, 3)


def test_distinct_bytes_counts_an_address_once():
    x = torch.zeros(4)
    assert distinct_bytes([x, x]) == 16
