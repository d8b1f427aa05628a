# SPDX-License-Identifier: Apache-2.0
"""The package under which published code finds decisions for SM12x; there are no kernels for it here."""
