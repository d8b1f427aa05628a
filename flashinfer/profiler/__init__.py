# SPDX-License-Identifier: Apache-2.0
"""Profiling: time a labelled region of a program, or trace the inside of a kernel.

``profile_kernel`` times what runs inside a ``with`` block, and ``profile_session`` collects many such blocks into a
table, a Chrome trace and a picture. ``export_to_perfetto_trace`` turns the buffer that an
instrumented kernel filled into a timeline.
"""

from .region import KernelProfile, profile_kernel
from .session import ProfileSession, Span, profile_session
from .trace import EventType, Tag, decode_tag, export_to_perfetto_trace

__all__ = [
    "EventType",
    "KernelProfile",
    "ProfileSession",
    "Span",
    "Tag",
    "decode_tag",
    "export_to_perfetto_trace",
    "profile_kernel",
    "profile_session",
]
