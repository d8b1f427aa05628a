# SPDX-License-Identifier: Apache-2.0
"""Every cell of the table of attention calls and features (matrix.py), and the page generated from it."""

from __future__ import annotations

import pytest
import torch

import flashinfer

from . import calls, matrix

CELLS = [
    pytest.param(api, feature, id=f"{api.title}-{feature.title}")
    for api in matrix.APIS
    for feature in matrix.FEATURES
    if feature.title in api.features or feature.title in api.refused
]


@pytest.mark.parametrize("api, feature", CELLS)
def test_cell(device, api, feature):
    if not api.is_run(feature, device):
        pytest.skip("a module that is built on GPUs, or with FLASHINFER_TEST_ATTENTION_FULL=1")
    batch = api.batch(feature, device)
    what = api.what(feature, batch)
    if feature.title in api.refused:
        error, text = api.refused[feature.title]
        with pytest.raises(error, match=text):
            api.call(batch, what, **feature.options)
    elif device not in feature.devices:
        with pytest.raises(ValueError, match=f"must be one of .* on {device}"):
            api.call(batch, what, **feature.options)
    else:
        calls.check(api.call(batch, what, **feature.options), batch.expected(what), batch.dtype, feature.tolerance)


def test_features_have_names():
    titles = {feature.title for feature in matrix.FEATURES}
    for api in matrix.APIS:
        assert set(api.features) | set(api.refused) <= titles, api.title


def test_page_is_current():
    assert matrix.PAGE.read_text() == matrix.page(), "run python -m tests.attention.matrix --write"


@pytest.mark.parametrize("backend", ["fa3", "cudnn", "trtllm-gen"])
def test_other_backends_are_refused(device, backend):
    if backend == "fa3" and device == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("fa3 runs on this GPU")
    api = next(x for x in matrix.APIS if x.title == "single prefill")
    batch = api.batch(matrix.FEATURES[0], device)
    with pytest.raises(NotImplementedError, match=f"backend must be fa2 .*, got '{backend}'.*usable: fa2"):
        flashinfer.single_prefill_with_kv_cache(batch.q, *batch.dense(), backend=backend)
