# SPDX-License-Identifier: Apache-2.0
"""Definitions made of calls over page tables and of latent attention, and their references."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import flashinfer
from flashinfer.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

from ..mla.test_mla import F16, SCALE, Latent
from ..mla.test_mla import close as close_latent
from ..trace.schema import validate
from .test_front_doors import Tables, close


def run_definition(definition: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """The reference as text, executed."""
    validate(definition)
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    names = inspect.signature(scope["run"]).parameters
    assert list(names) == list(definition["inputs"])
    return scope["run"](**{name: arguments[name] for name in names})


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
def test_decode_calls(layout, pair):
    call = Tables("cpu", layout)
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")
    arguments: dict[str, Any] = dict(zip(names, call.decode, strict=True))
    if pair:
        arguments["kv_cache"] = tuple(call.cache.unbind(1))
    arguments |= {"bmm1_scale": 0.2, "bmm2_scale": 2.0, "kv_layout": layout, "window_left": 7}
    for api in (xqa_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache):
        definition = api.fi_trace(**arguments)
        inputs = arguments | dict(zip(("k_cache", "v_cache"), call.cache.unbind(1), strict=True))
        expected = run_definition(definition, inputs)
        close(api(**arguments), [expected.float()])


def test_xqa():
    call = Tables("cpu")
    out = torch.empty_like(call.batch.q).unsqueeze(1)
    call.xqa(out, q_scale=0.5, sliding_win_size=7)
    k, v = call.cache.unbind(1)
    arguments = {"q": call.batch.q.unsqueeze(1), "k_cache": k, "v_cache": v, "page_table": call.tables}
    arguments |= {"seq_lens": call.pages.lens.unsqueeze(1), "output": out, "q_scale": 0.5, "sliding_win_size": 7}
    rest = {"workspace_buffer": call.workspace, "semaphores": call.workspace, "num_kv_heads": 2, "page_size": 16}
    definition = flashinfer.xqa.fi_trace(**arguments, **rest)
    close(out, [run_definition(definition, {"kv_scale": 1.0, "rcp_out_scale": 1.0} | arguments).float()])


def test_latent_attention():
    batch = Latent("cpu")
    wrapper = batch.wrapper(True)
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    arguments = dict(zip(names, batch.arguments, strict=True))
    definition = wrapper.run.fi_trace(wrapper, **arguments)
    assert definition["name"].startswith("mla_paged_h16_ckv512_kpe64_ps16")
    tables = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), batch.tables, strict=True))
    result = run_definition(definition, {**arguments, **tables, "causal": True, "sm_scale": SCALE})
    assert result.dtype == F16
    out, lse = wrapper.run(*batch.arguments, return_lse=True)
    close_latent((out, lse), (result.float(), lse))
