# SPDX-License-Identifier: Apache-2.0
"""The published path of :mod:`flashinfer.trace.apply.calls`."""

from flashinfer.trace.apply.calls import bind_namespace as bind_namespace
from flashinfer.trace.apply.calls import build_extractor_maps as build_extractor_maps
from flashinfer.trace.apply.calls import extract_axes as extract_axes
