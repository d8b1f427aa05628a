# SPDX-License-Identifier: Apache-2.0
"""Published path of a decode step that is fused with the layers around it."""
