# SPDX-License-Identifier: Apache-2.0
"""Published paths of the steps of the split form of the gated delta rule."""
