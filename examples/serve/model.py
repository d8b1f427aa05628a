# SPDX-License-Identifier: Apache-2.0
"""The model that ``examples/serve`` serves: Llama and its relatives, from random weights or a Hugging Face checkpoint.

Matrix products are torch's; everything between them is flashinfer's: norms, rotary embedding, the paged cache,
attention, the gated activation. So are the experts of models that have them (experts.py), and the layers of
hybrid models that keep a state in place of pages (recurrent.py). A forward pass takes the tokens of many requests as
rows of one matrix.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Protocol, Sequence, Union

import torch
from torch.nn.functional import embedding, linear

import flashinfer
from serve.experts import ExpertLayer, Experts
from serve.linear import BLOCK, SCALE, Fp8Linear, GatedMlp, Linear, Prepared, StoredFp8Linear, Weights
from serve.parallel import TensorParallel
from serve.recurrent import Places, Recurrent, RecurrentLayer, States
from serve.sparse import PAGE_SIZE, Sparse, SparseAttention, SparsePages, block_tables


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotary embedding. ``llama3``: low and high frequency factor and old length of Llama 3.1.
    ``share``: the part of a head that is rotated.
    """

    theta: float = 10000.0
    scale: float = 1.0
    llama3: Optional[tuple[float, float, int]] = None
    share: float = 1.0

    @staticmethod
    def of(config: Mapping[str, Any]) -> Rope:
        """Read the parameters from config.json. Their names differ between releases of transformers."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        kind = rope.get("rope_type", rope.get("type", "default"))
        share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if kind == "default":
            return Rope(theta, share=share)
        if kind == "linear":
            return Rope(theta, rope["factor"], share=share)
        if kind == "llama3":
            old_length = rope["original_max_position_embeddings"]
            factors = (rope["low_freq_factor"], rope["high_freq_factor"], old_length)
            return Rope(theta, rope["factor"], factors, share)
        raise ValueError(f"config.json: rope_type is {kind!r}, expected 'default', 'linear' or 'llama3'")

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate ``q`` and ``k`` of ``(rows, heads, head_dim)`` in place, at the given positions."""
        options: dict[str, Any] = {"rope_scale": self.scale, "rope_theta": self.theta}
        if self.share != 1:
            options["rotary_dim"] = int(q.shape[-1] * self.share)
        if self.llama3 is None:
            flashinfer.apply_rope_pos_ids_inplace(q, k, positions, **options)
            return
        low, high, old_length = self.llama3
        options |= {"low_freq_factor": low, "high_freq_factor": high, "old_context_len": old_length}
        flashinfer.apply_llama31_rope_pos_ids_inplace(q, k, positions, **options)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. The defaults are those of a small model that runs on a laptop.

    ``window`` is the number of keys that a token attends to, itself included, in all layers. A model with windows in
    some layers only is served up to the length of the window: ``max_length``.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_length: int = 2048
    eps: float = 1e-5
    rope: Rope = Rope()
    eos_tokens: tuple[int, ...] = ()
    tied: bool = False  #: True if the embedding is also the output matrix
    window: Optional[int] = None
    has_head_norms: bool = False  #: True if queries and keys are normalised before they are rotated
    experts: Optional[Experts] = None
    sparse: Optional[Sparse] = None  #: latent attention to selected tokens, in all layers
    has_codes: bool = False  #: True for a checkpoint of e4m3 codes in blocks of 128 x 128
    recurrent: Optional[Recurrent] = None  #: layers without attention; attention is gated then, norms count from one

    @staticmethod
    def of(config: Mapping[str, Any]) -> LlamaConfig:
        """Read the sizes from the fields of a Hugging Face config.json."""
        for name, (expected, default) in EXPECTED.items():
            found = default if config.get(name) is None else config[name]
            if found not in expected:
                raise ValueError(f"config.json: {name} is {found!r}, expected {' or '.join(map(repr, expected))}")
        heads = config["num_attention_heads"]
        max_length = config.get("max_position_embeddings", 2048)
        kind = config["model_type"]
        window = config.get("sliding_window", 4096 if kind == "mistral" else None)
        is_partly_windowed = kind.startswith("qwen") and config.get("use_sliding_window") and window
        return LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_qo_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            max_length=min(max_length, window) if is_partly_windowed else max_length,
            eps=config.get("rms_norm_eps", 1e-6),
            rope=Rope.of(config),
            eos_tokens=tokens_of(config.get("eos_token_id")),
            tied=config.get("tie_word_embeddings", False),
            window=window if kind in ("mistral", "mixtral") else None,
            has_head_norms=kind in ("qwen3", "qwen3_moe", "qwen3_next"),
            experts=Experts.of(config) if kind in ("mixtral", "qwen3_moe", "qwen3_next") else None,
            recurrent=Recurrent.of(config) if kind == "qwen3_next" else None,
            has_codes=has_codes(config),
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that have pages."""
        others = self.recurrent.layers if self.recurrent else ()
        return tuple(i for i in range(self.num_layers) if i not in others)


#: Supported values of fields of config.json, and the default of a missing field. The architectures differ in biases,
#: which are found among the weights, in norms of heads, in attention windows and in experts.
EXPECTED: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "model_type": (("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen3_next"), None),
    "hidden_act": (("silu",), "silu"),
}


def has_codes(config: Mapping[str, Any]) -> bool:
    """Return True for e4m3 codes in blocks, False for 16 bits; raise ``ValueError`` for other codes."""
    found = config.get("quantization_config")
    if found is None:
        return False
    fields = found if isinstance(found, dict) else {}
    is_known = fields.get("quant_method") == "fp8" and fields.get("weight_block_size") == [BLOCK, BLOCK]
    if not is_known or fields.get("activation_scheme", "dynamic") != "dynamic":
        text = f"expected None, or 'fp8' with weight_block_size [{BLOCK}, {BLOCK}]"
        raise ValueError(f"config.json: quantization_config is {found!r}, {text}")
    return True


def tokens_of(field: Union[int, Sequence[int], None]) -> tuple[int, ...]:
    """Return the tokens of an ``eos_token_id`` as a tuple: none, one or several."""
    return () if field is None else (field,) if isinstance(field, int) else tuple(field)


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights except biases, which only some models have."""
    query_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_qo_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config.vocab_size, hidden)}
    if not config.tied:
        shapes["lm_head"] = (config.vocab_size, hidden)
    whole: dict[str, tuple[int, ...]] = {}  # shapes by whole names: not all end in weight
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        if config.recurrent is not None and i in config.recurrent.layers:
            whole |= {f"{layer}.{name}": shape for name, shape in config.recurrent.shapes(hidden).items()}
        elif config.sparse is not None:
            whole |= {f"{layer}.{name}": shape for name, shape in config.sparse.shapes(hidden, heads).items()}
        else:
            shapes |= {
                f"{layer}.self_attn.q_proj": (query_size * (2 if config.recurrent else 1), hidden),
                f"{layer}.self_attn.k_proj": (kv_size, hidden),
                f"{layer}.self_attn.v_proj": (kv_size, hidden),
                f"{layer}.self_attn.o_proj": (hidden, query_size),
            }
            if config.has_head_norms:
                shapes |= {f"{layer}.self_attn.{name}_norm": (config.head_dim,) for name in "qk"}
        if has_experts(config, i):
            assert config.experts is not None
            shapes |= {f"{layer}.{name}": shape for name, shape in config.experts.shapes(hidden).items()}
            if config.experts.groups[0]:
                whole[f"{layer}.{config.experts.prefix}.gate.e_score_correction_bias"] = (config.experts.num_experts,)
        else:
            shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    shapes["model.norm"] = (hidden,)
    return {**{f"{name}.weight": shape for name, shape in shapes.items()}, **whole}


def has_experts(config: LlamaConfig, layer: int) -> bool:
    return config.experts is not None and layer not in config.experts.dense_layers


def random_weights(
    config: LlamaConfig, device: Union[str, torch.device], seed: int = 0, dtype: torch.dtype = torch.float32
) -> Weights:
    """Return random weights, scaled so that logits have a realistic size."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in shapes_of(config).items():
        if name.endswith("bias"):
            weights[name] = 0.1 * torch.randn(shape, generator=generator, device=device, dtype=dtype)
            continue
        if len(shape) == 1:
            counts_from_one = config.recurrent is not None and not name.endswith("linear_attn.norm.weight")
            weights[name] = torch.full(shape, 0.0 if counts_from_one else 1.0, device=device, dtype=dtype)
            continue
        weight = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        weights[name] = weight if name.startswith("model.embed_tokens") else weight * shape[1] ** -0.5
    return weights


def load_checkpoint(folder: Path, device: Union[str, torch.device]) -> tuple[LlamaConfig, Weights]:
    """Load configuration and weights from a folder that ``save_pretrained`` wrote or that was downloaded from the Hub.

    Raises ``ValueError`` for a checkpoint that is of another architecture, incomplete or damaged.
    """
    fields = read_json(folder / "config.json")
    try:
        config = LlamaConfig.of(fields)
    except KeyError as error:
        raise ValueError(f"config.json: has no {error.args[0]}, expected that of a Llama model") from error
    if (folder / "generation_config.json").is_file():  # chat models list their end-of-text tokens here
        stops = read_json(folder / "generation_config.json").get("eos_token_id")
        config = replace(config, eos_tokens=config.eos_tokens if stops is None else tokens_of(stops))
    weights = read_weights(folder, device)
    config = replace(config, tied=config.tied and "lm_head.weight" not in weights)  # a stored matrix has priority
    for name, shape in shapes_of(config).items():
        if name not in weights:
            raise ValueError(f"{folder}: has no tensor {name}, expected one of shape {shape}")
        if weights[name].shape != shape:
            raise ValueError(f"{folder}: {name} has shape {tuple(weights[name].shape)}, config.json has {shape}")
        if weights[name].dtype is torch.float8_e4m3fn:
            check_scale(folder, name, shape, weights.get(name + SCALE))
    return config, weights


def check_scale(folder: Path, name: str, shape: tuple[int, ...], scale: Optional[torch.Tensor]) -> None:
    """Raise ``ValueError`` if the scales of e4m3 codes are not those of blocks."""
    expected = tuple(-(-size // BLOCK) for size in shape)
    found = None if scale is None else tuple(scale.shape)
    if found != expected:
        raise ValueError(f"{folder}: {name}{SCALE} has shape {found}, expected {expected}: blocks of {BLOCK} x {BLOCK}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def read_weights(folder: Path, device: Union[str, torch.device]) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        shards = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    else:  # what else is there may be the same weights under other names
        shards = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{folder}: has no *.safetensors, expected the weights there")
    weights: dict[str, torch.Tensor] = {}
    for shard in shards:
        try:
            found = load_file(shard, device=str(device))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{shard}: cannot be read: {error}") from error
        weights |= {name: weight for name, weight in found.items() if not name.startswith("mtp.")}  # guesses ahead
    return weights


class Rows(Protocol):
    """Inputs of a forward pass, on the model's device. ``serve.Batch`` implements this protocol."""

    tokens: torch.Tensor  #: ``(rows,)``
    positions: torch.Tensor  #: ``(rows,)`` position of each token in its request
    batch_indices: torch.Tensor  #: ``(rows,)`` request of each token
    last_rows: torch.Tensor  #: ``(batch,)`` last row of each request; logits are computed for these rows
    kv_indptr: torch.Tensor  #: ``(batch + 1,)`` offset of each request's first page in kv_indices
    kv_indices: torch.Tensor  #: pages of all requests
    kv_last_page_len: torch.Tensor  #: ``(batch,)`` tokens in the last page, including the tokens of this pass
    qo_indptr: torch.Tensor  #: ``(batch + 1,)`` first row of each request, then the number of rows
    slots: torch.Tensor  #: ``(batch,)`` slots of the requests in the recurrent layers' states


class Attention:
    """Attention of one layer, over pages."""

    def __init__(self, config: LlamaConfig, weights: Weights, prefix: str, linear: type[Linear]) -> None:
        self.config = config
        self.qkv = linear.of(weights, f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj")
        self.out = linear.of(weights, f"{prefix}.self_attn", "o_proj")
        self.head_norms: Optional[tuple[torch.Tensor, torch.Tensor]] = None
        if config.has_head_norms:
            norms = (weights[f"{prefix}.self_attn.{name}_norm.weight"] for name in "qk")
            self.head_norms = (next(norms), next(norms))

    def __call__(self, x: torch.Tensor, rows: Rows, cache: torch.Tensor, attention: Any) -> torch.Tensor:
        """Append the new keys and values to their pages, then attend to all keys of each request."""
        config, gate = self.config, None
        is_gated = config.recurrent is not None
        heads = (config.num_qo_heads * (2 if is_gated else 1), config.num_kv_heads, config.num_kv_heads)
        q, k, v = self.qkv(x).view(len(x), -1, config.head_dim).split(heads, dim=1)
        if is_gated:  # a gate lies behind each query
            q, gate = q.unflatten(1, (config.num_qo_heads, 2)).unbind(2)
        if self.head_norms is not None:
            norm = rmsnorm_of(config)
            q, k = (norm(x, w, config.eps) for x, w in zip((q, k), self.head_norms, strict=True))
        config.rope.rotate(q, k, rows.positions)
        flashinfer.append_paged_kv_cache(
            k, v, rows.batch_indices, rows.positions, cache, rows.kv_indices, rows.kv_indptr, rows.kv_last_page_len
        )
        out = attention.run(q, cache)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.out(out.reshape(len(x), -1))


class Layer:
    """Attention or a recurrent layer, then the MLP. The model runs the norm before each, fused with the addition."""

    def __init__(self, config: LlamaConfig, weights: Weights, index: int, linear: type[Linear]) -> None:
        prefix = f"model.layers.{index}"
        self.input_norm = weights[f"{prefix}.input_layernorm.weight"]
        self.post_attention_norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        self.attention: Union[Attention, SparseAttention, None] = None
        self.recurrent: Optional[RecurrentLayer] = None
        if config.recurrent is not None and index in config.recurrent.layers:
            self.recurrent = RecurrentLayer(config.recurrent, weights, prefix, config.eps, linear)
        elif config.sparse is not None:
            self.attention = SparseAttention(config, weights, prefix, linear)
        else:
            self.attention = Attention(config, weights, prefix, linear)
        self.experts: Optional[ExpertLayer] = None
        if has_experts(config, index):
            assert config.experts is not None
            self.experts = ExpertLayer(config.experts, weights, prefix, linear)
        else:
            self.dense = GatedMlp(weights, f"{prefix}.mlp", linear)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x) if self.experts is None else self.experts(x)


class Llama:
    """A decoder of the Llama architecture.

    Parameters
    ----------
    config : LlamaConfig
    weights : Mapping[str, torch.Tensor]
        Weights, keyed by their names in Hugging Face checkpoints. If ``tied``, the embedding is ``lm_head.weight``.
    dtype : torch.dtype
        Dtype of the computation: float16 or bfloat16; on the CPU also float32.
    device : Union[str, torch.device]
    fp8 : bool
        Quantise projections and experts to e4m3 in blocks of 128 x 128; ``dtype`` is bfloat16 then.
    parallel : Optional[TensorParallel]
        The ranks that share the model; ``config`` and ``weights`` are those of the whole model.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: Union[str, torch.device],
        parallel: Optional[TensorParallel] = None,
        fp8: bool = False,
    ) -> None:
        if parallel is not None and config.sparse is not None:
            raise ValueError("tensor parallel: the model has sparse attention, expected heads that ranks can share")
        self.parallel = parallel
        self.num_parameters = sum(weight.numel() for name, weight in weights.items() if not name.endswith(SCALE))
        if parallel is not None:
            config, weights = parallel.split(config, weights)
        if fp8 or config.has_codes:
            check_fp8(config, dtype, torch.device(device))
        weights = Prepared(weights, device, dtype)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.embedding = weights["model.embed_tokens.weight"]
        linear = Fp8Linear if fp8 else StoredFp8Linear if config.has_codes else Linear
        self.fp8 = fp8 or config.has_codes
        self.layers = [Layer(config, weights, i, linear) for i in range(config.num_layers)]
        self.norm = weights["model.norm.weight"]
        self.head = self.embedding if config.tied else weights["lm_head.weight"]
        if parallel is not None:
            parallel.attach(config.hidden_size, dtype, self.device)

    def new_cache(self, num_pages: int, page_size: int) -> Union[torch.Tensor, SparsePages]:
        """Allocate empty pages of keys and values: ``(attention layers, pages, 2, page_size, kv heads, head_dim)``."""
        c = self.config
        if c.sparse is not None:
            if page_size != self.page_size:
                raise ValueError(f"new_cache: page_size is {page_size}, expected {self.page_size} for sparse attention")
            return SparsePages.empty(c.num_layers, num_pages, self.dtype, self.device)
        shape = (len(c.attention_layers), num_pages, 2, page_size, c.num_kv_heads, c.head_dim)
        try:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        except RuntimeError as error:  # torch's error only describes its allocator
            size = math.prod(shape) * self.dtype.itemsize / 2**30
            raise MemoryError(
                f"a cache of {num_pages} pages takes {size:,.1f} GiB, which {self.device} lacks"
            ) from error

    @property
    def page_size(self) -> int:
        """Tokens of a page, where the caller does not choose."""
        return 16 if self.config.sparse is None else PAGE_SIZE

    def new_states(self, slots: int) -> Optional[States]:
        """Allocate the states of so many requests, or None if all layers have pages."""
        sizes = self.config.recurrent
        return None if sizes is None else States.empty(sizes, slots, self.dtype, self.device)

    def forward(self, rows: Rows, cache: Any, attention: Any, states: Optional[States] = None) -> torch.Tensor:
        """Return the logits ``(batch, vocab_size)`` of the last row of each request, float32.

        ``attention`` is a wrapper that was planned for these rows. ``cache`` and ``states`` are results of
        :meth:`new_cache` and :meth:`new_states`.
        """
        eps, recurrent = self.config.eps, self.config.recurrent
        residual = embedding(rows.tokens, self.embedding)
        x = rmsnorm_of(self.config)(residual, self.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        pages = iter(cache)
        if self.config.sparse is not None:
            attention = block_tables(rows, self.config.max_length)
        slots = iter(() if states is None else zip(states.matrices, states.windows, strict=True))
        places = None if recurrent is None else Places.of(rows, recurrent.num_taps)
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            if layer.recurrent is not None:
                x = layer.recurrent(x, rows, places, *next(slots))
            else:
                assert layer.attention is not None
                x = layer.attention(x, rows, next(pages), attention)
            self.add_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.mlp(x)
            self.add_norm(x, residual, next_norm, eps)
        return linear(x[rows.last_rows], self.head).float()

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Add ``x``, over several ranks the sum of theirs, to ``residual``; ``x`` becomes the norm of that."""
        if self.parallel is not None:
            self.parallel.sum_add_rmsnorm(x, residual, weight, eps)
        elif self.config.recurrent is not None:
            flashinfer.gemma_fused_add_rmsnorm(x, residual, weight, eps)
        else:
            flashinfer.fused_add_rmsnorm(x, residual, weight, eps)


#: Random models that have names: a small one of the kind of DeepSeek-V3.2, an indexer, latent attention and experts.
RANDOM_MODELS: Mapping[str, LlamaConfig] = {
    "random-deepseek-v3.2": LlamaConfig(
        num_layers=3,
        num_qo_heads=16,
        experts=Experts(16, 4, 64, True, "mlp", ("gate_proj", "up_proj", "down_proj"), frozenset({0}), 64, (4, 2), 2.5),
        sparse=Sparse(query_rank=96, nope_dim=32, value_dim=32, index_heads=8, top_k=32),
    )
}


def check_fp8(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ValueError`` for what the products of e4m3 weights do not take."""
    if dtype is not torch.bfloat16:
        raise ValueError(f"fp8: dtype is {dtype}, expected torch.bfloat16 beside e4m3 weights")
    if device.type == "cuda" and not flashinfer.utils.is_sm90a_supported(device):
        raise ValueError(f"fp8: device is {torch.cuda.get_device_name(device)}, expected Hopper or the CPU")
    sizes = (config.hidden_size, 0 if config.experts is None else config.experts.intermediate_size)
    if config.experts is not None and any(size % BLOCK for size in sizes):
        raise ValueError(f"fp8: hidden size and columns of experts are {sizes}, expected multiples of {BLOCK}")


def rmsnorm_of(config: LlamaConfig) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """Return the norm of a model: weights of hybrid ones count from one."""
    return flashinfer.rmsnorm if config.recurrent is None else flashinfer.gemma_rmsnorm
