# SPDX-License-Identifier: Apache-2.0
"""Compiler options of several tests."""

#: ptxas options: report kernel and bytes of each spill, and fail.
NO_SPILLS = "-Xptxas=--warn-on-spills -Xptxas=--warning-as-error"
