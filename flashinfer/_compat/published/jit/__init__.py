# SPDX-License-Identifier: Apache-2.0
"""Published module paths below ``flashinfer.jit``, whose ``__path__`` has this folder; each re-exports."""
