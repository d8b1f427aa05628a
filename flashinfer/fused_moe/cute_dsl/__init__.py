# SPDX-License-Identifier: Apache-2.0
"""The package under which published code finds helpers of mixture-of-experts layers; kernels are native here."""
