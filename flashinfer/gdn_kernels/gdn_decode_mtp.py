# SPDX-License-Identifier: Apache-2.0
"""Launcher of the verification of several tokens, and the sizes that published callers pass to it."""

from flashinfer.recurrent.gdn_launchers import get_mtp_config as get_mtp_config
from flashinfer.recurrent.gdn_launchers import get_tile_v_mtp as get_tile_v_mtp
from flashinfer.recurrent.gdn_launchers import get_vec_size_mtp as get_vec_size_mtp
from flashinfer.recurrent.gdn_launchers import run_mtp_decode as run_mtp_decode
