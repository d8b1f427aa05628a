# SPDX-License-Identifier: Apache-2.0
"""Published paths of attention kernels in the CuTe DSL, which this package does not have."""
