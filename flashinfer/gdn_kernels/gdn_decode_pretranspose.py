# SPDX-License-Identifier: Apache-2.0
"""Launcher of a decode step on states with values before keys."""

from flashinfer.recurrent.gdn_launchers import run_pretranspose_decode as run_pretranspose_decode
