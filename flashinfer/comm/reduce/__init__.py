# SPDX-License-Identifier: Apache-2.0
"""The fused all-reduce: its op, arguments, workspaces and older calls."""
