# SPDX-License-Identifier: Apache-2.0
"""Matrix products: dense, batched and grouped, with 16-bit, 32-bit and scaled 8-bit operands."""
