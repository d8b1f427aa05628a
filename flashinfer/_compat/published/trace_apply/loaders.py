# SPDX-License-Identifier: Apache-2.0
"""The published path of the loader of :mod:`flashinfer.trace.apply.solutions`."""

from flashinfer.trace.apply.solutions import load as load
