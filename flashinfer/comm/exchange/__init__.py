# SPDX-License-Identifier: Apache-2.0
"""Exchanges of tokens between ranks: the table they go through, one-sided and two-sided."""
