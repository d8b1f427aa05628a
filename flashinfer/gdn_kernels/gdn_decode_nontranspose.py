# SPDX-License-Identifier: Apache-2.0
"""Launcher of a decode step on states with keys before values."""

from flashinfer.recurrent.gdn_launchers import run_nontranspose_decode as run_nontranspose_decode
