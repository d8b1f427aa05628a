# SPDX-License-Identifier: Apache-2.0
"""Modules of single kernels, under their published names."""
