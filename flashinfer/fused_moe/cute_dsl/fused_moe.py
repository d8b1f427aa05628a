# SPDX-License-Identifier: Apache-2.0
"""The path under which published code reaches the tuner of expert layers."""

from ...autotuner import AutoTuner as AutoTuner
