# SPDX-License-Identifier: Apache-2.0
"""The published path of :mod:`flashinfer.trace.apply.adapt`."""

from flashinfer.trace.apply.adapt import adapt_and_call as adapt_and_call
from flashinfer.trace.apply.adapt import build_candidate_kwargs as build_candidate_kwargs
from flashinfer.trace.apply.adapt import extract_input_dtypes as extract_input_dtypes
from flashinfer.trace.apply.adapt import ordered_input_values as ordered_input_values
from flashinfer.trace.apply.adapt import output_dests as output_dests
