# SPDX-License-Identifier: Apache-2.0
"""Building everything ahead of time: the list of families, and the build that packages them.

FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" python -m flashinfer.aot --out-dir aot
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
from pathlib import Path
from typing import Iterable, Iterator, Optional, Union

from .jit import JitSpec, build_jit_specs
from .jit import env as jit_env
from .jit.activation import gen_activation_modules as gen_activation_modules
from .jit.attention import gen_decode_modules as gen_decode_modules
from .jit.attention import gen_mla_modules as gen_mla_modules
from .jit.attention import gen_prefill_modules as gen_prefill_modules
from .jit.cascade import gen_cascade_modules as gen_cascade_modules
from .jit.concat_ops import gen_concat_ops_modules as gen_concat_ops_modules
from .jit.norm import gen_norm_modules as gen_norm_modules
from .jit.page import gen_page_modules as gen_page_modules
from .jit.progress import ProgressBar
from .jit.quantization import gen_quantization_modules as gen_quantization_modules
from .jit.rope import gen_rope_modules as gen_rope_modules
from .jit.sampling import gen_sampling_modules as gen_sampling_modules
from .jit.scale import gen_scale_modules as gen_scale_modules
from .jit.topk import gen_topk_modules as gen_topk_modules
from .knobs import knobs

#: Families, in the order of the docs: ``flashinfer.<family>`` is the API, ``gen_<family>_modules`` what AOT builds.
FAMILIES = (
    *("scale", "norm", "activation", "concat_ops", "rope", "page", "quantization", "cascade", "sampling", "topk"),
    *("decode", "prefill", "mla"),
)


def gen_family_modules(family: str, backend: str = "cuda") -> Iterator[JitSpec]:
    """The default modules of one family for one backend."""
    return globals()[f"gen_{family}_modules"](backend)


def gen_all_modules(families: Iterable[str] = FAMILIES) -> list[JitSpec]:
    """Every module AOT pre-builds, each once."""
    return list({spec.name: spec for family in families for spec in gen_family_modules(family)}.values())


def register_default_modules() -> int:
    """Make the default modules known to ``jit_spec_registry``; returns how many there are."""
    return len(gen_all_modules())


def family_module(family: str) -> object:
    """The Python module of a family."""
    return importlib.import_module(f"flashinfer.{family}")


def copy_built_kernels(jit_specs: Iterable[JitSpec], out_dir: Path) -> None:
    """Copy each built library to ``out_dir/<name>/<name>.so``."""
    for spec in jit_specs:
        target = out_dir / spec.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, target / spec.library_name)


def compile_and_package_modules(
    out_dir: Optional[Path],
    build_dir: Path,
    project_root: Optional[Path] = None,
    config: Optional[dict] = None,
    verbose: bool = False,
    skip_prebuilt: bool = True,
) -> list[JitSpec]:
    """Build all modules for the targets of ``FLASHINFER_CUDA_ARCH_LIST`` in one parallel graph.

    Parameters
    ----------
    out_dir
        Where ``<name>/<name>.so`` go; None leaves them in ``build_dir``.
    build_dir
        Stands in for the cache directory during the build.
    project_root
        Tree with ``csrc`` and ``include``; default: the package's own.
    config
        ``{"families": [...]}`` limits what is built.
    """
    if not knobs.cuda_arch_list:
        raise RuntimeError(
            "aot: FLASHINFER_CUDA_ARCH_LIST is not set, expected the targets to build for, e.g. '8.0 9.0a'"
        )
    build_dir = build_dir.absolute()  # ninja runs elsewhere
    rebound: dict[str, Path] = {
        "FLASHINFER_JIT_DIR": build_dir / "cached_ops",
        "FLASHINFER_GEN_SRC_DIR": build_dir / "generated",
    }
    if project_root is not None:
        rebound["FLASHINFER_CSRC_DIR"] = project_root / "csrc"
        rebound["FLASHINFER_INCLUDE_DIR"] = project_root / "include"
    vars(jit_env).update(rebound)
    try:
        specs = gen_all_modules((config or {}).get("families", FAMILIES))
        build_jit_specs(specs, verbose=verbose, skip_prebuilt=skip_prebuilt, progress=ProgressBar)
        if out_dir is not None:
            copy_built_kernels((s for s in specs if not (skip_prebuilt and s.is_aot)), out_dir)
        return specs
    finally:
        for name in rebound:
            del vars(jit_env)[name]


def main(argv: Optional[list[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flashinfer.aot", description=__doc__)
    parser.add_argument("--out-dir", type=Path, help="where <name>/<name>.so go; default: stay in the build directory")
    parser.add_argument("--build-dir", type=Path, default=Path("build") / "aot", help="objects and ninja files")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="build only this family (repeatable)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the commands")
    args = parser.parse_args(argv)
    specs = compile_and_package_modules(
        args.out_dir, args.build_dir, config={"families": args.family or FAMILIES}, verbose=args.verbose
    )
    where: Union[Path, str] = args.out_dir or args.build_dir
    print(f"built {len(specs)} modules for {os.environ['FLASHINFER_CUDA_ARCH_LIST']} in {where}")


if __name__ == "__main__":
    main()
