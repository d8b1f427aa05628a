# SPDX-License-Identifier: Apache-2.0
"""Steps of ``transformers`` with its own attention, for bench_serve.py: the same sizes, weights and lengths.

A decode step is one call of the model on a static cache and the choice of the most likely tokens; a prefill is one call
on all prompts. Nothing is compiled or captured: that is what a program gets which calls the model.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Optional

import torch
from serve.model import LlamaConfig, has_experts, random_weights


def why_not() -> Optional[str]:
    """Return why ``transformers`` cannot be measured here, or None."""
    try:
        import transformers
    except ImportError as error:
        return f"transformers cannot be imported: {error}"
    if int(transformers.__version__.split(".")[0]) < 5:
        return f"transformers {transformers.__version__} is too old: 5 or newer is needed"
    return None


def names_of(config: LlamaConfig) -> tuple[str, dict[str, Any]]:
    """Return the family in transformers, and the fields of its configuration that not all families have."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if config.rope.llama3 is not None:
        low, high, length = config.rope.llama3
        rope |= {"rope_type": "llama3", "factor": config.rope.scale, "low_freq_factor": low, "high_freq_factor": high}
        rope["original_max_position_embeddings"] = length
    more: dict[str, Any] = {"rope_parameters": rope}
    experts = config.experts
    if experts is not None:
        more |= {"num_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
        more |= {"moe_intermediate_size": experts.intermediate_size, "norm_topk_prob": experts.renormalize}
        more["mlp_only_layers"] = sorted(experts.dense_layers)
    if config.recurrent is not None:
        sizes, layers = config.recurrent, range(config.num_layers)
        rope["partial_rotary_factor"] = config.rope.share
        more["layer_types"] = ["linear_attention" if i in sizes.layers else "full_attention" for i in layers]
        more |= {"linear_num_key_heads": sizes.num_key_heads, "linear_num_value_heads": sizes.num_value_heads}
        more["linear_conv_kernel_dim"] = sizes.num_taps
        more["shared_expert_intermediate_size"] = 0 if experts is None else experts.shared_size
        return "Qwen3Next", more
    if experts is not None:
        return "Qwen3Moe", more
    return "Qwen3" if config.has_head_norms else "Llama", more


def stack_experts(config: LlamaConfig, weights: dict[str, torch.Tensor]) -> None:
    """Join the experts of a layer in place: transformers has two tensors of all of them."""
    experts = config.experts
    for layer in range(config.num_layers):
        if experts is None or not has_experts(config, layer):
            continue
        prefix = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [weights.pop(f"{prefix}.{i}.{name}.weight") for i in range(experts.num_experts)] for name in experts.names
        )
        weights[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        weights[f"{prefix}.down_proj"] = torch.stack(downs)


def reference_model(config: LlamaConfig, dtype: torch.dtype, device: Any) -> Any:
    """Return the model of transformers with the weights of ``random_weights``."""
    import transformers

    family, more = names_of(config)
    sizes = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_qo_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_length,
        rms_norm_eps=config.eps,
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
        **more,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(sizes)
    weights = dict(random_weights(config, device, dtype=dtype))
    stack_experts(config, weights)
    model.load_state_dict(weights, strict=not config.tied, assign=True)
    if config.tied:
        model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=sizes).to(device)
    empty = [name for name, x in itertools.chain(model.named_parameters(), model.named_buffers()) if x.is_meta]
    if empty:
        raise RuntimeError(f"transformers has tensors that no weight fills: {', '.join(empty[:4])}")
    return model.eval()


def seconds_of(step: Any, count: int) -> float:
    """Return the time of a step, which waits for its tokens; a first one is not timed."""
    step()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


@torch.inference_mode()
def decode_seconds(model: Any, requests: int, keys: int, steps: int) -> float:
    """Return the time of a decode step with ``keys`` tokens of each request; what the cache has does not matter."""
    from transformers import StaticCache

    sizes, device, dtype = model.config, model.device, model.dtype
    cache = StaticCache(config=sizes, max_cache_len=keys + steps + 1)
    shape = (requests, sizes.num_key_value_heads, keys - 1, sizes.head_dim)
    tokens = torch.zeros(requests, 1, dtype=torch.long, device=device)
    if getattr(sizes, "layer_types", None) and "linear_attention" in sizes.layer_types:
        model(tokens.expand(-1, keys - 1).contiguous(), past_key_values=cache, logits_to_keep=1)
    else:
        for layer in range(sizes.num_hidden_layers):
            cache.update(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)), layer)
    position = keys - 1

    def step() -> None:
        nonlocal tokens, position
        positions = torch.full((requests, 1), position, device=device)
        logits = model(tokens, past_key_values=cache, position_ids=positions, use_cache=True).logits
        tokens, position = logits[:, -1].argmax(-1, keepdim=True), position + 1
        tokens.tolist()

    return seconds_of(step, steps)


@torch.inference_mode()
def prefill_seconds(model: Any, requests: int, keys: int) -> float:
    """Return the time of one call on prompts of ``keys`` tokens."""
    tokens = torch.zeros(requests, keys, dtype=torch.long, device=model.device)

    def step() -> None:
        model(tokens, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()

    return seconds_of(step, 2)
