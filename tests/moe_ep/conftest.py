# SPDX-License-Identifier: Apache-2.0
"""Limits of waits, as in tests of the exchanges below."""

from ..comm.conftest import short_waits as short_waits
