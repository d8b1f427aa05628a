# SPDX-License-Identifier: Apache-2.0
"""Forked processes, as workers of a server: kernels run in them with threads, whatever ran before the fork."""

from __future__ import annotations

import multiprocessing

import torch

import flashinfer


def test_kernels_run_in_a_child():
    """Check a child process, where the threads of the parent's kernels do not exist."""
    x, weight = torch.randn(512, 1024), torch.ones(1024)  # large enough for several threads
    expected = flashinfer.rmsnorm(x, weight)

    def run():
        for _ in range(2):
            assert torch.equal(flashinfer.rmsnorm(x, weight), expected)
        assert torch.get_num_threads() == threads

    threads = torch.get_num_threads()
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0
    assert torch.equal(flashinfer.rmsnorm(x, weight), expected) and torch.get_num_threads() == threads
