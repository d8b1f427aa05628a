# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports :mod:`flashinfer.moe_ep.validation`."""

from flashinfer.moe_ep.errors import MoEEpArchError as MoEEpArchError
from flashinfer.moe_ep.validation import validate_arch_for_backend as validate_arch_for_backend
from flashinfer.moe_ep.validation import validate_mega_arch as validate_mega_arch
from flashinfer.moe_ep.validation import validate_mega_arch_sm90 as validate_mega_arch_sm90
