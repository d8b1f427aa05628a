# SPDX-License-Identifier: Apache-2.0
"""Module paths under which published code looks for Triton kernels; ours are the native ones."""

from . import cascade as cascade
