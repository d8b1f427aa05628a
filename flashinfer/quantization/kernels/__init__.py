# SPDX-License-Identifier: Apache-2.0
"""Module paths under which published code looks for constants of quantising kernels."""
