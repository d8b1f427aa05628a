# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the replacement of ops by solutions, :mod:`flashinfer.trace.apply`."""

from flashinfer.trace.apply import disable_apply as disable_apply
from flashinfer.trace.apply import enable_apply as enable_apply
from flashinfer.trace.apply import is_enabled as is_enabled
from flashinfer.trace.apply import stats as stats
