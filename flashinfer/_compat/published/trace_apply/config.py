# SPDX-License-Identifier: Apache-2.0
"""The published path of the definitions of :mod:`flashinfer.trace.apply.solutions`."""

from flashinfer.trace.apply.solutions import Definition as Definition
