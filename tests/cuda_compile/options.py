# SPDX-License-Identifier: Apache-2.0
"""Compiler options of several tests."""

#: ptxas options: report kernel and bytes of each spill, and fail.
NO_SPILLS = "-Xptxas=--warn-on-spills -Xptxas=--warning-as-error"

#: Less optimisation, where the question is whether code compiles at all: a third of the time less.
COMPILES = "-Xcicc=-O1 -Xptxas=-O1"
