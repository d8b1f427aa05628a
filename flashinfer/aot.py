# SPDX-License-Identifier: Apache-2.0
"""Building everything ahead of time: the list of families, and the build that packages them.

FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" python -m flashinfer.aot --out-dir aot
FLASHINFER_CUDA_ARCH_LIST=9.0a python -m flashinfer.aot --out-dir aot --fa2-head-dim 64,64 --f16-dtype bfloat16
python -m flashinfer.aot --out-dir aot --cpu-target x86-64-v3 native --family norm --family rope

All modules are one parallel graph, with as many jobs as cores and free memory allow (MAX_JOBS overrides it). A build
that was interrupted goes on where it stopped. FLASHINFER_AOT_DIR=aot lets the package load from the result.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence, Union

import torch

from ._compat.unsupported import needs
from ._runtime.checks import canonicalize_torch_dtype
from ._runtime.errors import ArgumentError
from ._runtime.knobs import knobs
from .compilation_context import CompilationContext as CompilationContext
from .jit import (
    JitSpec,
    build_jit_specs,
    gen_batch_decode_module,
    gen_batch_prefill_module,
    gen_single_decode_module,
    gen_single_prefill_module,
)
from .jit import env as jit_env
from .jit.activation import gen_activation_modules as gen_activation_modules
from .jit.api_log_stats import gen_api_log_stats_modules as gen_api_log_stats_modules
from .jit.attention import gen_decode_modules as gen_decode_modules
from .jit.attention import gen_mla_modules as gen_mla_modules
from .jit.attention import gen_prefill_modules as gen_prefill_modules
from .jit.attention.generate import has_hopper_target, hopper_serves
from .jit.cascade import gen_cascade_modules as gen_cascade_modules
from .jit.comm import gen_comm_modules as gen_comm_modules
from .jit.concat_ops import gen_concat_ops_modules as gen_concat_ops_modules
from .jit.context import current_compilation_context
from .jit.cpp_ext import get_cuda_version as get_cuda_version
from .jit.cpu_targets import check_target, target_tag
from .jit.fused_moe import gen_fused_moe_modules as gen_fused_moe_modules
from .jit.gemm import gen_gemm_modules as gen_gemm_modules
from .jit.indexer import gen_indexer_modules as gen_indexer_modules
from .jit.manifest import files_of
from .jit.mhc import gen_mhc_modules as gen_mhc_modules
from .jit.norm import gen_norm_modules as gen_norm_modules
from .jit.page import gen_page_modules as gen_page_modules
from .jit.prebuilt import record_modules, recorded_sources
from .jit.progress import ProgressBar
from .jit.quantization import gen_quantization_modules as gen_quantization_modules
from .jit.recurrent import gen_recurrent_modules as gen_recurrent_modules
from .jit.rope import gen_rope_modules as gen_rope_modules
from .jit.sampling import gen_sampling_modules as gen_sampling_modules
from .jit.scale import gen_scale_modules as gen_scale_modules
from .jit.topk import gen_topk_modules as gen_topk_modules
from .jit.xqa import gen_xqa_module as gen_xqa_module

#: Families, in the order of the docs: ``flashinfer.<family>`` is the API, ``gen_<family>_modules`` what AOT builds.
FAMILIES = (
    *("scale", "norm", "activation", "concat_ops", "rope", "page", "quantization", "cascade", "sampling", "topk"),
    *("decode", "prefill", "mla", "gemm", "fused_moe", "recurrent", "mhc", "indexer", "comm"),
    "api_log_stats",
)
_ATTENTION = ("decode", "prefill", "mla")
#: Families that a published option adds; ``add_misc`` adds those that no option names.
_ADDED_BY = {"add_act": ("activation",), "add_comm": ("comm",), "add_moe": ("gemm", "fused_moe")}
_MISC = tuple(f for f in FAMILIES if f not in itertools.chain(_ATTENTION, *_ADDED_BY.values()))
_XQA_PAGES, _XQA_HEAD_DIMS, _XQA_GROUPS = (16, 32, 64, 128), (64, 128, 256), (1, 2, 4, 8)

logger = logging.getLogger("flashinfer.jit")

# Modules of the published package that this package does not have.
gen_cudnn_fmha_module = needs("gen_cudnn_fmha_module", "pre-built cuDNN kernels, which this package does not have", "")
gen_spdlog_module = needs("gen_spdlog_module", "the library spdlog, which no module here uses", "")


def gen_family_modules(family: str, backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the default modules of one family for one backend."""
    if family not in FAMILIES:
        raise ArgumentError(f"gen_family_modules: family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return globals()[f"gen_{family}_modules"](backend)


def gen_default_modules(families: Iterable[str] = FAMILIES) -> list[JitSpec]:
    """Return every module that AOT pre-builds, each once."""
    return _each_once(spec for family in families for spec in gen_family_modules(family))


def _each_once(specs: Iterable[JitSpec]) -> list[JitSpec]:
    return list({spec.name: spec for spec in specs}.values())


def gen_attention_modules(
    head_dims: Sequence[tuple[int, int]] = ((128, 128),),
    f16_dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16),
    f8_dtypes: Sequence[torch.dtype] = (),
    soft_caps: Sequence[bool] = (False,),
    device: str = "cuda",
) -> Iterator[JitSpec]:
    """Yield decode and prefill modules for the head dimensions, query dtypes, 16- or 8-bit cache dtypes and soft caps.

    A module serves every window and every page size. For 9.0a there are Hopper prefill modules besides.
    """
    for (qk, vo), q_dtype, soft_cap in itertools.product(head_dims, f16_dtypes, soft_caps):
        for kv_dtype in (q_dtype, *f8_dtypes):
            dtypes, ids = (q_dtype, kv_dtype, q_dtype), torch.int32
            yield gen_single_decode_module(*dtypes, qk, vo, 0, False, soft_cap, device=device)
            yield gen_batch_decode_module(*dtypes, ids, qk, vo, 0, False, soft_cap, device=device)
            yield gen_single_prefill_module("fa2", *dtypes, qk, vo, 0, False, soft_cap, False, device=device)
            yield gen_batch_prefill_module("fa2", *dtypes, ids, qk, vo, 0, False, soft_cap, False, device=device)
            if device == "cuda" and has_hopper_target() and hopper_serves(dtypes, qk, vo, 0):
                yield gen_single_prefill_module("fa3", *dtypes, qk, vo, 0, False, soft_cap, False, device=device)
                yield gen_batch_prefill_module("fa3", *dtypes, ids, qk, vo, 0, False, soft_cap, False, device=device)


def gen_attention(
    f16_dtype_: Sequence[torch.dtype],
    f8_dtype_: Sequence[torch.dtype],
    fa2_head_dim_: Sequence[tuple[int, int]],
    fa3_head_dim_: Sequence[tuple[int, int]],
    use_sliding_window_: Sequence[bool],
    use_logits_soft_cap_: Sequence[bool],
    has_sm90: bool,
    has_sm100: bool,
    add_gemma: bool,
    add_oai_oss: bool,
) -> Iterator[JitSpec]:
    """Yield what :func:`gen_attention_modules` yields, by the published arguments. One kernel serves all targets here.

    Windows and the ``fa3`` head dimensions add no modules; ``add_gemma`` adds head dimension 256 with a soft cap, and
    ``add_oai_oss`` head dimension 64.
    """
    yield from gen_attention_modules(fa2_head_dim_, f16_dtype_, f8_dtype_, use_logits_soft_cap_)
    if add_gemma:
        yield from gen_attention_modules([(256, 256)], f16_dtype_, (), [True])
    if add_oai_oss:
        yield from gen_attention_modules([(64, 64)], f16_dtype_, (), [False])


def gen_fa2(
    dtype_qo: torch.dtype,
    dtype_kv: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
    prefill_only: bool = False,
) -> Iterator[JitSpec]:
    """Yield decode and prefill modules of one kind, or those of prefill; windows add no modules."""
    dtypes, dims, ids = (dtype_qo, dtype_kv, dtype_qo), (head_dim_qk, head_dim_vo), torch.int32
    window, cap = use_sliding_window, use_logits_soft_cap
    yield gen_single_prefill_module("fa2", *dtypes, *dims, 0, window, cap, False)
    yield gen_batch_prefill_module("fa2", *dtypes, ids, *dims, 0, window, cap, False)
    if not prefill_only:
        yield gen_single_decode_module(*dtypes, *dims, 0, window, cap)
        yield gen_batch_decode_module(*dtypes, ids, *dims, 0, window, cap)


def gen_fa3(
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    use_sliding_window: bool,
    use_logits_soft_cap: bool,
) -> Iterator[JitSpec]:
    """Yield the Hopper prefill modules of one kind; none for targets or sizes that have no such kernel."""
    dtypes, dims = (dtype_q, dtype_kv, dtype_o), (head_dim_qk, head_dim_vo)
    if has_hopper_target() and hopper_serves(dtypes, *dims, 0):
        window, cap = use_sliding_window, use_logits_soft_cap
        yield gen_single_prefill_module("fa3", *dtypes, *dims, 0, window, cap, False)
        yield gen_batch_prefill_module("fa3", *dtypes, torch.int32, *dims, 0, window, cap, False)


def gen_xqa(
    input_type_: Sequence[torch.dtype],
    fp8_kv_cache_: Sequence[bool],
    token_per_page_: Sequence[int],
    head_size_: Sequence[int],
    head_grp_size_: Sequence[int],
    use_sliding_window_: Sequence[bool],
    has_sm90: bool,
    has_sm100: bool,
    has_sm120: bool,
    has_sm121: bool,
) -> Iterator[JitSpec]:
    """Yield the modules of ``xqa`` for each combination, each once; one kernel serves all targets here."""
    options = (input_type_, fp8_kv_cache_, token_per_page_, head_size_, head_grp_size_, use_sliding_window_)
    found = {}
    for dtype, is_fp8, page_size, head_dim, group, window in itertools.product(*options):
        cache = torch.float8_e4m3fn if is_fp8 else dtype
        spec = gen_xqa_module(dtype, cache, page_size, head_dim, group, window, dtype, device="cuda")
        found[spec.name] = spec
    yield from found.values()


def gen_all_modules(
    f16_dtype_: Sequence[torch.dtype],
    f8_dtype_: Sequence[torch.dtype],
    fa2_head_dim_: Sequence[tuple[int, int]],
    fa3_head_dim_: Sequence[tuple[int, int]],
    use_sliding_window_: Sequence[bool],
    use_logits_soft_cap_: Sequence[bool],
    sm_capabilities: Mapping[str, bool],
    add_comm: bool,
    add_gemma: bool,
    add_oai_oss: bool,
    add_moe: bool,
    add_act: bool,
    add_misc: bool,
    add_xqa: bool,
) -> list[JitSpec]:
    """Return the modules that published options name, each once, as :func:`get_default_config` spells the options.

    Parameters
    ----------
    f16_dtype_, f8_dtype_, fa2_head_dim_, fa3_head_dim_, use_sliding_window_, use_logits_soft_cap_, add_gemma,
    add_oai_oss
        Kinds of attention modules, as in :func:`gen_attention`; those of MLA come with any of them.
    sm_capabilities : Mapping[str, bool]
        As :func:`detect_sm_capabilities` returns it. Modules for architectures that it does not have are left out.
    add_comm, add_moe, add_act, add_misc, add_xqa : bool
        Communication; products and experts; activations; all other families; ``xqa``.
    """
    sm90, sm100, sm120, sm121 = (sm_capabilities.get(f"sm{each}", False) for each in (90, 100, 120, 121))
    dims, windows = (fa2_head_dim_, fa3_head_dim_), use_sliding_window_
    kinds = (f16_dtype_, f8_dtype_, *dims, windows, use_logits_soft_cap_, sm90, sm100, add_gemma, add_oai_oss)
    found = [*gen_attention(*kinds)]
    found += gen_mla_modules() if found else []
    if add_xqa:
        is_fp8 = [False, *(dtype == torch.float8_e4m3fn for dtype in f8_dtype_)]
        sizes = (_XQA_PAGES, _XQA_HEAD_DIMS, _XQA_GROUPS)
        found += gen_xqa(f16_dtype_, is_fp8, *sizes, windows, sm90, sm100, sm120, sm121)
    found += gen_default_modules(_families_of(add_act=add_act, add_comm=add_comm, add_moe=add_moe, add_misc=add_misc))
    majors = {int(name.removeprefix("sm")) // 10 for name, is_there in sm_capabilities.items() if is_there}
    return _each_once(
        spec
        for spec in found
        if spec.supported_major_versions is None or not majors.isdisjoint(spec.supported_major_versions)
    )


def _families_of(add_misc: bool, **added: bool) -> list[str]:
    """Return the families besides attention that options add, in the order of FAMILIES."""
    chosen = {family for option, is_added in added.items() if is_added for family in _ADDED_BY[option]}
    return [family for family in FAMILIES if family in chosen or (add_misc and family in _MISC)]


def get_default_config() -> dict[str, Any]:
    """Return the kinds of attention modules that published builds have, by the names of their options."""
    return {
        "fa2_head_dim": [(64, 64), (128, 128), (256, 256)],
        "fa3_head_dim": [(192, 128), (64, 64), (128, 128), (256, 256)],
        "f16_dtype": [torch.float16, torch.bfloat16],
        "f8_dtype": [torch.float8_e4m3fn],
        "use_sliding_window": [False, True],
        "use_logits_soft_cap": [False, True],
        "add_comm": True,
        "add_gemma": True,
        "add_oai_oss": True,
        "add_moe": True,
        "add_act": True,
        "add_misc": True,
        "add_xqa": True,
    }


def detect_sm_capabilities() -> dict[str, bool]:
    """Tell for ``"sm80"``, ``"sm90"`` and later architectures whether the targets have it."""
    targets = {(major, int(minor.rstrip("af"))) for major, minor in current_compilation_context.TARGET_CUDA_ARCHS}
    known = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1))
    return {f"sm{major}{minor}": (major, minor) in targets for major, minor in known}


def register_default_modules() -> int:
    """Register the default modules with ``jit_spec_registry``; return their number."""
    return len(gen_default_modules())


def _place(spec: JitSpec, library: str) -> Path:
    """Return the path of a library below the output folder: those of a CPU target are in a folder of the target."""
    return Path(target_tag(spec.cpu_target) if spec.backend == "cpu" else "", spec.name, library)


def copy_built_kernels(jit_specs: Iterable[JitSpec], out_dir: Path) -> None:
    """Copy each built library to ``out_dir/<name>/<name>.so``; ``out_dir/index.json`` has release, targets, sources.

    A library appears complete or not at all, so that programs may load from the folder, and other builds write to it,
    meanwhile.
    """
    recorded = {}
    for spec in jit_specs:
        place = _place(spec, spec.library_name)
        target = out_dir / place
        target.parent.mkdir(parents=True, exist_ok=True)
        # The manifest is read first: if another build replaces the library, its sources differ, and it is not loaded.
        sources = recorded_sources(files_of(spec.jit_library_path))
        with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as private:
            part = Path(private) / target.name
            shutil.copy2(spec.jit_library_path, part)
            os.replace(part, target)
        recorded[str(place)] = {"targets": _targets_of(spec), "sources": sources}
    if recorded:
        record_modules(out_dir, recorded)


def _targets_of(spec: JitSpec) -> list[str]:
    if spec.backend == "cpu":
        return [target_tag(spec.cpu_target)]
    return [f"{major}{minor}" for major, minor in spec.cuda_targets]


def select_modules(config: dict[str, Any]) -> list[JitSpec]:
    """Return the modules that a configuration of :func:`compile_and_package_modules` names, each once per target."""
    backends = [("cuda", "")] if knobs.cuda_arch_list else []
    backends += [("cpu", check_target(target)) for target in config.get("cpu_targets", ())]
    specs: list[JitSpec] = []
    for backend, target in backends:
        found = [spec for family in config.get("families", FAMILIES) for spec in gen_family_modules(family, backend)]
        if "attention" in config:
            found += gen_attention_modules(**config["attention"], device=backend)
        specs += [replace(spec, cpu_target=target) for spec in {spec.name: spec for spec in found}.values()]
    if not specs:
        families = ", ".join(config.get("families", FAMILIES))
        raise ArgumentError(f"aot: families must have modules for the targets, got {families} for the CPU alone")
    return specs


def left_out_lines(specs: Iterable[JitSpec]) -> list[str]:
    """Return a line for each module and target that it is not built for, because a block there is too small for it."""
    return [
        f"{spec.name} is not built for {major}.{minor}: it {reason}"
        for spec in specs
        for (major, minor), reason in sorted(spec.left_out.items())
    ]


def compile_and_package_modules(
    out_dir: Union[Path, str, None],
    build_dir: Union[Path, str],
    project_root: Union[Path, str, None] = None,
    config: Optional[dict] = None,
    verbose: bool = False,
    skip_prebuilt: bool = True,
) -> list[JitSpec]:
    """Build all modules for the targets of ``FLASHINFER_CUDA_ARCH_LIST``, and for CPUs, in one parallel graph.

    A module that an earlier, interrupted build has finished in ``build_dir`` is not built again.

    Parameters
    ----------
    out_dir
        Where ``<name>/<name>.so`` go; None leaves them in ``build_dir``.
    build_dir
        Stands in for the cache directory during the build.
    project_root
        Tree with ``csrc`` and ``include``; default: the package's own.
    config
        ``{"families": [...]}`` limits what is built; ``{"attention": {...}}`` adds what
        :func:`gen_attention_modules` makes of these arguments; ``{"cpu_targets": ["x86-64-v3"]}`` adds CPU modules.
    """
    config = config or {}
    if not knobs.cuda_arch_list and not config.get("cpu_targets"):
        raise RuntimeError(
            "aot: FLASHINFER_CUDA_ARCH_LIST must name the targets to build for, e.g. '8.0 9.0a', or --cpu-target a CPU "
            "target, got neither"
        )
    build_dir = Path(build_dir).absolute()  # ninja runs in another directory
    rebound: dict[str, Path] = {
        "FLASHINFER_JIT_DIR": build_dir / "cached_ops",
        "FLASHINFER_GEN_SRC_DIR": build_dir / "generated",
    }
    if project_root is not None:
        root = Path(project_root).absolute()
        rebound |= {"FLASHINFER_CSRC_DIR": root / "csrc", "FLASHINFER_INCLUDE_DIR": root / "include"}
    vars(jit_env).update(rebound)
    try:
        specs = select_modules(config)
        for line in left_out_lines(specs):
            logger.warning("%s", line)
        build_jit_specs(specs, verbose=verbose, skip_prebuilt=skip_prebuilt, progress=ProgressBar)
        if out_dir is not None:
            copy_built_kernels((s for s in specs if not (skip_prebuilt and s.is_aot)), Path(out_dir))
        return specs
    finally:
        for name in rebound:
            del vars(jit_env)[name]


def parse_bool(s: str) -> bool:
    """Parse ``true`` or ``false`` of a command line."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if s.lower() not in values:
        raise argparse.ArgumentTypeError(f"must be true or false, got {s!r}")
    return values[s.lower()]


def parse_head_dim(head_dim: str) -> tuple[int, int]:
    """Parse ``128,128`` (queries and keys, then values), or ``128`` for both."""
    words = head_dim.split(",")
    if len(words) > 2 or not all(word.strip().isdigit() for word in words):
        raise argparse.ArgumentTypeError(f"must be two numbers such as 192,128, got {head_dim!r}")
    return int(words[0]), int(words[-1])


def parse_dtype(text: str) -> torch.dtype:
    """Parse the name of a dtype, such as ``bfloat16``."""
    try:
        return canonicalize_torch_dtype(text)
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Select what to build: every family by default; the attention options replace the default attention modules."""
    added = _families_of(add_misc=args.add_misc, add_act=args.add_act, add_comm=args.add_comm, add_moe=args.add_moe)
    families = [family for family in args.family or FAMILIES if family in (*_ATTENTION, *added)]
    options = {
        "head_dims": args.fa2_head_dim,
        "f16_dtypes": args.f16_dtype,
        "f8_dtypes": args.f8_dtype,
        "soft_caps": args.use_logits_soft_cap,
    }
    cpu: dict[str, Any] = {"cpu_targets": args.cpu_target} if args.cpu_target else {}
    attention = {name: value for name, value in options.items() if value}
    if not attention:
        return {"families": families, **cpu}
    return {"families": [family for family in families if family not in _ATTENTION], "attention": attention, **cpu}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashinfer.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    switch: dict[str, Any] = {"type": parse_bool, "metavar": "BOOL"}
    dtypes: dict[str, Any] = {"type": parse_dtype, "metavar": "DTYPE", "nargs": "+"}
    families = f"build only this family (repeatable): {', '.join(FAMILIES)}"
    parser.add_argument("--out-dir", help="where <name>/<name>.so go; default: stay in the build directory", **folder)
    parser.add_argument("--build-dir", default=Path("build") / "aot", help="objects and ninja files", **folder)
    parser.add_argument("--family", action="append", choices=FAMILIES, metavar="NAME", help=families)
    targets = "CPU targets: x86-64-v2, x86-64-v3, x86-64-v4, native"
    parser.add_argument("--cpu-target", action="extend", nargs="+", metavar="TARGET", help=targets)
    parser.add_argument("--add-act", default=True, help="activations (default true)", **switch)
    parser.add_argument("--add-comm", default=True, help="communication between GPUs (true)", **switch)
    parser.add_argument("--add-moe", default=True, help="matrix products and experts (true)", **switch)
    parser.add_argument("--add-misc", default=True, help="every other family but attention (true)", **switch)
    parser.add_argument("-v", "--verbose", action="store_true", help="show the commands")
    attention = parser.add_argument_group("attention", "instead of the default modules, one for each combination of")
    head_dims: dict[str, Any] = {"type": parse_head_dim, "metavar": "QK,VO", "nargs": "+"}
    attention.add_argument("--fa2-head-dim", help="such as 64,64 192,128", **head_dims)
    attention.add_argument("--f16-dtype", help="dtypes of queries, such as bfloat16", **dtypes)
    attention.add_argument("--f8-dtype", help="dtypes of caches besides that of queries", **dtypes)
    attention.add_argument("--use-logits-soft-cap", nargs="+", help="false, true or both", **switch)
    for name in ("fa3-head-dim", "use-sliding-window", "add-gemma", "add-oai-oss", "add-xqa"):
        # Options that published build scripts pass. No module here depends on them.
        parser.add_argument(f"--{name}", nargs="+", help=argparse.SUPPRESS)
    return parser


def _summary(specs: Iterable[JitSpec], folder: Path) -> str:
    """Return a line for each kind of target: the number of modules and their size in ``folder``."""
    sizes: dict[str, list[int]] = {}
    for spec in specs:
        library = folder / _place(spec, spec.library_name)
        if library.exists():
            kind = _place(spec, "").parts[0] if spec.backend == "cpu" else f"CUDA {' '.join(_targets_of(spec))}"
            sizes.setdefault(kind, []).append(library.stat().st_size)
    return "\n".join(f"  {kind}: {len(s)} modules, {sum(s) / 2**20:.1f} MiB" for kind, s in sizes.items())


def main(argv: Optional[list[str]] = None) -> None:
    args = _parser().parse_args(argv)
    start = time.monotonic()
    try:
        specs = compile_and_package_modules(args.out_dir, args.build_dir, config=_config_of(args), verbose=args.verbose)
    except (RuntimeError, ValueError, OSError) as error:  # bad targets, no compiler, a failed build, bad folders
        raise SystemExit(str(error)) from error
    where: Union[Path, str] = args.out_dir or args.build_dir
    targets = " ".join([*knobs.cuda_arch_list.split(), *(args.cpu_target or [])])
    print(f"built {len(specs)} modules for {targets} in {where}, {time.monotonic() - start:.0f} s")
    if args.out_dir:
        print(_summary(specs, args.out_dir))


if __name__ == "__main__":
    main()
