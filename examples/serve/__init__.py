# SPDX-License-Identifier: Apache-2.0
"""A small serving engine; ``python examples/serve --help``."""
