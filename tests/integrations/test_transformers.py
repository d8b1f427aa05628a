# SPDX-License-Identifier: Apache-2.0
"""Models of ``transformers`` give the same results with our attention as with torch's."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from flashinfer.integrations.transformers import attention, register
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from flashinfer.testing import assert_close

LAYER = SimpleNamespace(is_causal=True)


def qkv(device, q_len, kv_len, batch=2):
    shapes = [(batch, q_len, 4, 64), (batch, kv_len, 2, 64), (batch, kv_len, 2, 64)]
    return [torch.randn(shape, device=device).half().transpose(1, 2) for shape in shapes]  # strides of projections


def expected(q, k, v, mask, **options):
    k, v = (x.float().repeat_interleave(2, dim=1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, attn_mask=mask, **options)
    return out.transpose(1, 2).to(q.dtype)


@pytest.mark.parametrize("q_len, kv_len, causal", [(9, 9, True), (1, 20, False), (5, 30, False)])
def test_without_a_mask(device, q_len, kv_len, causal):
    q, k, v = qkv(device, q_len, kv_len)
    out, weights = attention(LAYER, q, k, v, None, is_causal=causal, scaling=0.2)
    assert weights is None
    assert_close(out, expected(q, k, v, None, is_causal=causal, scale=0.2))


def test_with_a_mask(device):
    q, k, v = qkv(device, 6, 20)
    mask = torch.rand(2, 1, 6, 20, device=device) < 0.5
    mask[..., 0] = True
    assert_close(attention(LAYER, q, k, v, mask)[0], expected(q, k, v, mask))
    mask[..., 1] = False  # the plan of the first call holds the old mask
    assert_close(attention(LAYER, q, k, v, mask)[0], expected(q, k, v, mask))


@pytest.mark.parametrize("batch, q_len", [(0, 3), (2, 0)])
def test_nothing_to_do(device, batch, q_len):
    q, k, v = qkv(device, q_len, 8, batch)
    for mask in (None, torch.ones(batch, 1, q_len, 8, dtype=torch.bool, device=device)):
        assert attention(LAYER, q, k, v, mask)[0].shape == (batch, q_len, 4, 64)


def test_masks_that_are_added(device):
    q, k, v = qkv(device, 6, 20)
    mask = torch.rand(2, 1, 6, 20, device=device) < 0.5
    mask[..., 0] = True
    for lowest in (torch.finfo(torch.float16).min, float("-inf")):
        added = torch.where(mask, 0.0, lowest).half()
        assert_close(attention(LAYER, q, k, v, added)[0], expected(q, k, v, mask))


def test_a_mask_of_inference_mode(device, monkeypatch):
    """Check masks of inference mode, which have no version counter: only layers of one pass share a plan."""
    plans = []
    plan = BatchPrefillWithPagedKVCacheWrapper.plan
    monkeypatch.setattr(
        BatchPrefillWithPagedKVCacheWrapper, "plan", lambda *args, **kwargs: plans.append(plan(*args, **kwargs))
    )
    layers = [SimpleNamespace(is_causal=True, layer_idx=i) for i in range(3)]
    q, k, v = qkv(device, 6, 20)
    with torch.inference_mode():
        mask = torch.rand(2, 1, 6, 20, device=device) < 0.5
        mask[..., 0] = True
        for _ in range(2):
            for layer in layers:
                assert_close(attention(layer, q, k, v, mask)[0], expected(q, k, v, mask))
            mask.logical_not_()
            mask[..., 0] = True
    assert len(plans) == 2


def test_threads(device, monkeypatch):
    """Check that a plan made by another thread between plan and run of this thread has no effect."""
    plan = BatchPrefillWithPagedKVCacheWrapper.plan
    q, k, v = qkv(device, 6, 6)
    other = threading.Thread(target=lambda: attention(LAYER, *qkv(device, 9, 9), None))

    def interrupted(*args, **kwargs):
        plan(*args, **kwargs)
        if threading.current_thread() is threading.main_thread():
            other.start()
            other.join()

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "plan", interrupted)
    assert_close(attention(LAYER, q, k, v, None)[0], expected(q, k, v, None, is_causal=True))


def test_a_cache_longer_than_its_contents(device):
    """Check a static cache longer than its contents: ``transformers`` passes no mask in the first pass."""
    q, k, v = qkv(device, 7, 16)
    out = attention(LAYER, q, k, v, None)[0]
    assert_close(out, expected(q, k[:, :, :7], v[:, :, :7], None, is_causal=True))


def test_soft_cap(device):
    q, k, v = qkv(device, 3, 8)
    cap, k_heads, v_heads = 2.0, *(x.float().repeat_interleave(2, dim=1) for x in (k, v))
    logits = cap * torch.tanh(q.float() @ k_heads.transpose(2, 3) / 8 / cap)
    out = attention(LAYER, q, k, v, None, is_causal=False, softcap=cap)[0]
    assert_close(out, (logits.softmax(-1) @ v_heads).transpose(1, 2).half())


def test_sinks(device):
    q, k, v = qkv(device, 3, 8)
    k_heads, v_heads = (x.float().repeat_interleave(2, dim=1) for x in (k, v))
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0], device=device)
    logits = torch.cat([q.float() @ k_heads.transpose(2, 3) / 8, sinks.view(4, 1, 1).expand(2, 4, 3, 1)], dim=-1)
    out = attention(LAYER, q, k, v, None, is_causal=False, s_aux=sinks)[0]
    assert_close(out, (logits.softmax(-1)[..., :-1] @ v_heads).transpose(1, 2).half())


@pytest.mark.parametrize(
    "change, text",
    [
        ({"dropout": 0.1}, "dropout must be 0"),
        ({"position_bias": torch.zeros(4)}, "position_bias must be None"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 2, 3])},
            "position_ids must start again .* got cu_seq_lens_q of 2 sequences",
        ),
        ({"attention_mask": torch.ones(2, 1, 3, 8)}, "must have dtype torch.bool .* got torch.float32"),
        (
            {"attention_mask": torch.ones(2, 1, 3, 8, dtype=torch.int64)},
            "must have dtype torch.bool .* got torch.int64",
        ),
        ({"attention_mask": torch.ones(2, 4, 3, 8, dtype=torch.bool)}, "one mask for all heads"),
        (
            {"attention_mask": torch.ones(3, 1, 3, 8, dtype=torch.bool)},
            r"shape \(2, 1, 3, 8\) .* got .*shape \(3, 1, 3, 8\)",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 2, 8, dtype=torch.bool)},
            r"shape \(2, 1, 3, 8\) .* got .*shape \(2, 1, 2, 8\)",
        ),
        (
            {"attention_mask": torch.ones(2, 1, 3, 7, dtype=torch.bool)},
            r"shape \(2, 1, 3, 8\) .* got .*shape \(2, 1, 3, 7\)",
        ),
    ],
    ids=["dropout", "bias", "packed", "numbers to add", "integers", "mask per head", "requests", "queries", "keys"],
)
def test_what_is_refused(change, text):
    q, k, v = qkv("cpu", 3, 8)
    with pytest.raises(ValueError, match=text):
        attention(LAYER, q, k, v, **{"attention_mask": None, **change})


@pytest.mark.parametrize("name", ["query", "key", "value", "s_aux"])
def test_gradients_are_refused(name):
    """Check each input alone: adapters on the values leave queries without a gradient."""
    q, k, v = qkv("cpu", 3, 8)
    tensors = {"query": q, "key": k, "value": v, "s_aux": torch.zeros(4)}
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
        attention(LAYER, attention_mask=None, **tensors)
    with torch.no_grad():
        attention(LAYER, attention_mask=None, **tensors)


# Whole models ---------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", reason="models come from transformers")
    register()
    register()  # a repeated registration, as by two libraries of one program
    register("fi")
    return module


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
#: Name -> configuration class, implementation to compare with, our name, and more sizes.
MODELS = {
    "llama": ("LlamaConfig", "sdpa", "flashinfer", {}),
    "mistral": ("MistralConfig", "sdpa", "fi", {"sliding_window": 8}),
    "gpt_oss": ("GptOssConfig", "eager", "flashinfer", {"sliding_window": 8, **EXPERTS}),
    "llama4": (
        "Llama4TextConfig",
        "eager",
        "flashinfer",
        {"attention_chunk_size": 8, "intermediate_size_mlp": 192, **EXPERTS},
    ),
}


@pytest.fixture(params=MODELS)
def pair(request, transformers, tmp_path):
    """Return a model with torch's attention, and the same checkpoint with ours: plain, with a window, with sinks and
    windows in every other layer, with keys in chunks.
    """
    config, implementation, name, options = MODELS[request.param]
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    made = getattr(transformers, config)(**SIZES, **options, initializer_range=0.1)
    theirs = auto.from_config(made, attn_implementation=implementation).eval()
    theirs.save_pretrained(tmp_path)
    ours = auto.from_pretrained(tmp_path, attn_implementation=name, dtype=torch.float32).eval()
    assert ours.config._attn_implementation == name
    return theirs, ours


def left_padded(lengths):
    tokens = torch.randint(1, 256, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": tokens * mask, "attention_mask": mask.long()}


@torch.no_grad()
def test_logits(pair):
    theirs, ours = pair
    for lengths in ([7, 7], [20, 3, 11]):
        batch = left_padded(lengths)
        is_token = batch["attention_mask"].bool()  # logits at padding positions are not used
        assert_close(ours(**batch).logits[is_token], theirs(**batch).logits[is_token], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_text(pair, cache):
    theirs, ours = pair
    batch = left_padded([20, 3, 11])
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    try:
        expected = theirs.generate(**batch, **options)
    except TypeError as error:
        pytest.skip(f"this release of transformers cannot: {error}")
    assert torch.equal(ours.generate(**batch, **options), expected)


@torch.no_grad()
def test_layers_share_a_plan(pair, monkeypatch):
    plans = []
    plan = BatchPrefillWithPagedKVCacheWrapper.plan
    monkeypatch.setattr(
        BatchPrefillWithPagedKVCacheWrapper, "plan", lambda *a, **options: plans.append(plan(*a, **options))
    )
    ours = pair[1]
    ours(**left_padded([5, 9]))
    assert len(plans) == len(set(getattr(ours.config, "layer_types", None) or ["one kind"]))


@torch.no_grad()
def test_images_of_a_batch(transformers):
    """Check vision towers, which pack the images of a batch: no patch sees another image."""
    sizes = {"depth": 2, "embed_dim": 256, "hidden_size": 128, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2}
    made = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(**sizes)
    tower = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    ours = tower._from_config(made, attn_implementation="flashinfer").eval()
    patches, grid = torch.randn(40, 3 * 2 * 8 * 8), torch.tensor([[1, 4, 4], [1, 6, 4]])
    together = ours(patches, grid_thw=grid).pooler_output
    apart = [ours(patches[:16], grid_thw=grid[:1]).pooler_output, ours(patches[16:], grid_thw=grid[1:]).pooler_output]
    assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Bloom", "Falcon"])
def test_models_with_attention_of_their_own_are_refused(transformers, family):
    """Check models with their own attention code, which misread our masks or do not know our name."""
    made = getattr(transformers, f"{family}Config")(vocab_size=256, hidden_size=64, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=f"must be 'eager' or what else {family}ForCausalLM has .* got 'flashinfer'"):
        transformers.AutoModelForCausalLM.from_config(made, attn_implementation="flashinfer")


@torch.no_grad()
def test_torch_compile(transformers):
    """Check torch.compile: a graph ends at an attention call and continues after it. Layers share their code."""
    ours = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}), attn_implementation="flashinfer"
    ).eval()
    compiled = torch.compile(ours, backend="aot_eager")
    for lengths in ([7, 7], [9, 4]):
        batch = left_padded(lengths)
        assert_close(compiled(**batch, use_cache=False).logits, ours(**batch, use_cache=False).logits)
    torch.compiler.reset()
    with pytest.raises(Exception, match="attention is planned on the host"):
        torch.compile(ours, backend="aot_eager", fullgraph=True)(**batch, use_cache=False)
    torch.compiler.reset()
