# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks share, and what creating and waiting for it needs."""
