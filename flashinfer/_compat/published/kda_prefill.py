# SPDX-License-Identifier: Apache-2.0
"""The path under which programs import the prefill of Kimi delta attention."""

from flashinfer.recurrent.kda import recurrent_kda as recurrent_kda
from flashinfer.recurrent.kda_wrapper import RecurrentKDAPrefillWorkspace as RecurrentKDAPrefillWorkspace
from flashinfer.recurrent.kda_wrapper import RecurrentKDAPrefillWrapper as RecurrentKDAPrefillWrapper
from flashinfer.utils import get_compute_capability as get_compute_capability
