# SPDX-License-Identifier: Apache-2.0
"""Calls made from the definitions of example.py: inputs, the text of the reference, and the arguments of the API."""

from __future__ import annotations

import functools
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch

from flashinfer.fi_trace import traced_functions
from flashinfer.trace.definition import axis_values

from . import example

# Sizes of variable axes and values of numbers without a default; seq_len = ppf * pph * ppw.
SIZES = {"nnz": 9, "batch_size": 2, "seq_len": 24, "num_tokens": 48, "num_heads": 3, "dim0": 3, "dim1": 129}
# A ragged batch, and a paged cache with some of its pages in use; head_dim = rope_dim + k_nope_dim.
SIZES |= {
    "indptr_len": 3,
    "max_position": 64,
    "q_nope_dim": 32,
    "k_nope_dim": 32,
    "no_rope_dim": 32,
    "max_seq_len": 64,
    "head_dim": 96,
    "v_heads": 1,
    "v_dim": 80,
}
SIZES |= {"num_pages": 7, "num_indices": 4, "num_slots": 8, "num_states": 5, "qo_len": 5, "kv_len": 9}
SIZES |= {"num_rows": 128, "M": 128, "max_len": 64, "num_speculative": 3}
SIZES |= {"nnz_kv": 9, "num_bits": 45, "num_cols": 128, "m": 3}
SIZES |= {"total_tokens": 9, "num_requests": 2, "num_offsets": 3}
NUMBERS = {"epilogue_tile_m": 128, "nnz": 9, "page_size": 16, "ppf": 2, "pph": 3, "ppw": 4, "factor": 3.14}
NUMBERS |= {"k_scale": 0.5, "v_scale": 0.25, "top_k": 50, "top_p": 0.9}
CUDA_ONLY = {"scale", "fused_rmsnorm_silu", "fused_qk_rmsnorm_rope"}

#: Sizes of one definition where others must fit each other: sequences of one token, or of four. None: the op's choice.
SIZES_OF: dict[str, dict[str, Any]] = {
    "compute_paged_mqa_logits_schedule": {"num_rows": None},
    "fused_kda_decode_h12_d128": {"num_tokens": 3, "num_sequences": 3},
    "gdn_mtp_h8_hv16_k128_v128": {"seq_len": 4},
    "gdn_replayssm_commit_h8_hv16_k128_v128": {"num_layers": 2, "pool_size": 5, "seq_len": 4},
    "packed_fused_kda_decode_h12_d128": {"num_tokens": 3, "num_sequences": 3, "num_offsets": 4},
    "recurrent_kda_h12_hv12_k128_v128": {"batch_size": 3, "num_sequences": 3, "seq_len": 1},
}
SIZES_OF |= {
    f"mm_M1_16_K{k}_N{n}{kind}_n{n}_k{k}": {"M": 3}  # 1 to 16 tokens
    for k, n, kind in [
        (6144, 256, ""),
        (7168, 128, ""),
        *((7168, n, kind) for n in (256, 384, 896) for kind in ("", "_bf16")),
    ]
}
#: Values of one definition: slots that are no two sequences', numbers of accepted tokens, options. "made": any numbers.
VALUES_OF: dict[str, dict[str, Any]] = {
    "fused_kda_decode_h12_d128": {"state_indices": [2, 5, 1]},
    "gdn_mtp_h8_hv16_k128_v128": {"intermediate_states_buffer": "made"},
    "gdn_replayssm_commit_h8_hv16_k128_v128": {
        "state_indices": [3, 1],
        "accept_lens": [4, 2],
        "track_state_indices": [0, -1],
        "track_steps": [1, 1],
    },
    "packed_fused_kda_decode_h12_d128": {
        "state_indices": [[2], [5], [1]],
        "query_start_loc": [0, 1, 2, 3],
        "num_accepted_tokens": [1, 1, 1],
    },
    "packed_kda_decode_h12_d128": {"state_indices": [4, 2]},
    "recurrent_kda_h12_hv12_k128_v128": {
        "use_gate_in_kernel": True,
        "lower_bound": -5.0,
        "cu_seqlens": None,
        "ssm_state_indices": [6, -1, 2],
        "num_accepted_tokens": None,
    },
}


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    """Return the dtype; the description gives it if the schema has no word for it."""
    _, marker, truth = entry.get("description", "").rpartition("really ")
    return getattr(torch, truth if marker else entry["dtype"])


def copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return copies of tensors: references of some in-place operators change their arguments."""
    return {name: copy_of(value) for name, value in values.items()}


def copy_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(copy_of, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def tensors_of(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a value; a cache may be a pair, described by one of its halves."""
    return value if isinstance(value, tuple) else (value,)


def named(definition: dict[str, Any], outputs: Any) -> dict[str, Any]:
    """Return outputs by name; a single one may be a pair."""
    several = isinstance(outputs, tuple) and len(definition["outputs"]) > 1
    return dict(zip(definition["outputs"], outputs if several else (outputs,), strict=True))


def as_declared(value: Any, entry: dict[str, Any]) -> Any:
    """Return bytes as the 8-bit type of the definition: on the CPU, quantisers return bytes."""
    is_bytes = isinstance(value, torch.Tensor) and value.dtype == torch.uint8
    return value.view(torch.float8_e4m3fn) if is_bytes and entry.get("dtype") == "float8_e4m3fn" else value


class Call:
    """A call made from a definition alone."""

    def __init__(self, definition: dict[str, Any], device: str) -> None:
        self.definition, self.device = definition, device
        self.api = traced_functions[definition["tags"][0].removeprefix("fi_api:")]
        templates = getattr(self.api._trace_template, "templates", (self.api._trace_template,))
        named = [template for template in templates if definition["name"].startswith(template.prefix)]
        self.template = max(named, key=lambda template: len(template.prefix))
        self.name = self.api.__name__
        self.text = self._function("reference", "run")
        sizes = SIZES | SIZES_OF.get(definition["name"], {})
        self.axes = {name: axis.get("value", sizes.get(name)) for name, axis in definition["axes"].items()}
        self.given = self._given()
        self.inputs = self._inputs()
        self.axes |= axis_values(self.template, self.arguments())

    def _function(self, field: str, name: str) -> Any:
        scope: dict[str, Any] = {}
        exec(self.definition[field], scope)
        return scope[name]

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        shape = [self.axes[axis] for axis in entry["shape"]]
        return torch.rand(shape, device=self.device).add(0.5).to(dtype_of(entry))

    def _value(self, value: Any, entry: dict[str, Any]) -> Any:
        """Return what a table above gives for an input."""
        if isinstance(value, list):
            return torch.tensor(value, dtype=dtype_of(entry), device=self.device)
        return self._tensor(entry) if value == "made" else value

    def _offsets(self, entry: dict[str, Any]) -> torch.Tensor:
        return self._tensor(entry).sort().values

    def _given(self) -> dict[str, Any]:
        """Return the API arguments that ``init`` makes, without sizes of variable axes that ``init`` derives."""
        if "init" not in self.definition:
            return {}
        init = self._function("init", "init")
        parameters = inspect.signature(init).parameters
        fixed = {name for name, axis in self.definition["axes"].items() if "value" in axis}
        wanted = [
            name
            for name, p in parameters.items()
            if self.axes.get(name) is not None and (name in fixed or p.default is p.empty or p.default != 0)
        ]
        return init(**{name: self.axes[name] for name in wanted}, device=self.device)

    def _inputs(self) -> dict[str, Any]:
        defaults = inspect.signature(self.text).parameters
        made: dict[str, Any] = {}
        values = VALUES_OF.get(self.definition["name"], {})
        for name, entry in self.definition["inputs"].items():
            if name in values:
                made[name] = self._value(values[name], entry)
                continue
            spec = self.template.inputs[name]
            value, index = self.given.get(name), getattr(spec, "tuple_idx", None)
            if value is None and spec.param in self.given:
                value = self.given[spec.param]
                if index is not None:
                    value = value[index] if index < len(value) else None
            if value is not None:
                made[name] = value
            elif name in self.given or (self.given and spec.optional):
                made[name] = None if entry["shape"] is not None else defaults[name].default
            elif entry["shape"] is not None:
                made[name] = (self._offsets if name.endswith("indptr") else self._tensor)(entry)
            elif defaults[name].default is defaults[name].empty:
                made[name] = NUMBERS[name] if name in NUMBERS else self.axes[name]
            else:
                made[name] = defaults[name].default
        return made

    def reference_arguments(self) -> dict[str, Any]:
        """Return inputs by the names of the reference or of the API."""
        parameters = inspect.signature(self.template.reference).parameters
        arguments: dict[str, Any] = dict.fromkeys(set(parameters) & {"workspace_buffer"})
        for name, value in copied(self.inputs).items():
            spec = self.template.inputs[name]
            if name in parameters or spec.param not in parameters:
                arguments[name] = value
            elif getattr(spec, "tuple_idx", None) is None:
                arguments[spec.param] = value
            else:
                arguments[spec.param] = (*arguments.get(spec.param, ()), value)
        return arguments

    def expected(self) -> dict[str, torch.Tensor]:
        return named(self.definition, self.text(*copied(self.inputs).values()))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the API, with copies of the tensors that it writes to."""
        parameters = inspect.signature(self.api).parameters
        arguments: dict[str, Any] = {}
        for name, value in self.inputs.items():
            spec = self.template.inputs[name]
            parameter = spec.param or name
            value = copy_of(value) if parameter in self._overwritten() else value
            if getattr(spec, "tuple_idx", None) is None:
                arguments[parameter] = value
            elif value is not None or not spec.optional:  # elements of a tuple are separate inputs, in order
                arguments[parameter] = (*arguments.get(parameter, ()), value)
        arguments |= {name: v for name, v in self.given.items() if name in parameters and name not in arguments}
        arguments |= {name: self.axes[name] for name in self.axes if name in parameters and name not in arguments}
        if self.axes.get("heads_first"):
            arguments["kv_layout"] = "HND"
        if "return_lse" in parameters:
            arguments["return_lse"] = "lse" in self.definition["outputs"]
        for entry in self.definition["outputs"].values():
            buffer = entry.get("param")
            if buffer and buffer not in arguments and parameters[buffer].default is inspect.Parameter.empty:
                arguments[buffer] = self._tensor(entry)
        return arguments

    def actual(self) -> dict[str, torch.Tensor]:
        arguments = self.arguments()
        return self.outputs(arguments, self.api(**arguments))

    def outputs(self, arguments: dict[str, Any], result: Any) -> dict[str, torch.Tensor]:
        returned = iter(() if result is None else result if isinstance(result, (tuple, list)) else (result,))
        found = {name: self._output(spec, arguments, returned) for name, spec in self.template.outputs.items()}
        return {name: as_declared(value, self.definition["outputs"][name]) for name, value in found.items()}

    @staticmethod
    def _output(spec: Any, arguments: dict[str, Any], returned: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return the next returned tensor, or else the argument that the call wrote to."""
        value = next(returned, None)
        if value is not None:
            return value
        index = getattr(spec, "tuple_idx", None)
        return arguments[spec.param] if index is None else arguments[spec.param][index]

    def _overwritten(self) -> set[str]:
        return {entry.get("param") for entry in self.definition["outputs"].values()}


@functools.cache
def _definitions() -> dict[str, bytes]:
    """Write every definition once in a process, since most are committed as a hash."""
    with tempfile.TemporaryDirectory() as folder:
        return example.write_all(Path(folder))


def load(name: str, device: str) -> Call:
    """Return a call made from the definition of this name."""
    return Call(json.loads(_definitions()[f"{name}.json"]), device)


#: Definitions from which no call can be made, with the reason and the tests that compare the op with its reference.
NO_CALL = {
    "allreduce_fusion_h4096": "needs the workspace of several ranks; tests/comm compare",
    "decode_cp_a2a_alltoall_h8_cp4_d512_s2": "needs a table of several ranks; tests/comm compare",
    "decode_cp_a2a_lse_reduce_h8_cp4_d512": "needs a table of several ranks; tests/comm compare",
    "moe_a2a_combine_h7168_ep8": "needs a table of several ranks; tests/comm compare",
    "moe_a2a_dispatch_h7168_topk8_ep8": "needs a table of several ranks; tests/comm compare",
    "vllm_all_reduce": "needs the memory of several ranks; tests/comm compare",
}
NAMES = {file.removesuffix(".json") for file in json.loads((example.OUT / example.HASHES).read_text())}

#: Parametrisation of a test by all definitions that make a call. A test compares the definitions with their hashes.
DEFINITIONS = pytest.mark.parametrize("name", sorted(NAMES - NO_CALL.keys()))
