# SPDX-License-Identifier: Apache-2.0
"""Trace templates and the reference of every op, one module per family."""
