# SPDX-License-Identifier: Apache-2.0
"""Products that the published package writes in ``cuda.tile``; here they run on the kernels of this package."""
