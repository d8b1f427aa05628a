# SPDX-License-Identifier: Apache-2.0
"""Published path of the shared state of these kernels, of which there is none here."""
