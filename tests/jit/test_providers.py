# SPDX-License-Identifier: Apache-2.0
"""Pre-built modules of several distributions: which are taken, which library serves a target, where a call goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flashinfer.jit import env as jit_env
from flashinfer.jit import load, providers
from flashinfer.jit.providers import ModuleByDevice

VERSION = "0.7.2.post1"


@pytest.fixture
def shim(monkeypatch, tmp_path):
    """Return a function that installs the companion, with the providers of a description."""
    monkeypatch.setattr(jit_env, "__version__", VERSION)
    monkeypatch.delenv("FLASHINFER_AOT_DIR", raising=False)
    jit_env._warn_companion.cache_clear()
    providers._warn_provider.cache_clear()

    def install(version: str = f"{VERSION}+cu130", **changes: dict) -> list[SimpleNamespace]:
        made = []
        for name in ("sm80", "sm90a", "sm120f"):
            folder = tmp_path / name
            (folder / "op").mkdir(parents=True, exist_ok=True)
            (folder / "op" / "op.so").write_bytes(name.encode())
            (folder / "index.json").write_text(json.dumps({"schema": 1, "modules": {"op/op.so": {"version": VERSION}}}))
            facts = {
                "provider_id": name,
                "distribution": f"flashinfer-jit-cache-{name}",
                "version": version,
                "jit_cache_dir": str(folder),
                "cuda_architectures": [name],
                "modules": ["op"],
            }
            made.append(SimpleNamespace(**{**facts, **changes.get(name, {})}))
        module = ModuleType("flashinfer_jit_cache")
        module.__version__ = version  # type: ignore[attr-defined]
        module.get_jit_cache_providers = lambda: made  # type: ignore[attr-defined]
        module.__spec__ = SimpleNamespace(name="flashinfer_jit_cache")  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, "flashinfer_jit_cache", module)
        return made

    return install


@pytest.fixture
def targets(monkeypatch):
    return lambda *given: monkeypatch.setattr(jit_env.current_compilation_context, "TARGET_CUDA_ARCHS", set(given))


def test_folders_of_all_providers(shim, tmp_path):
    shim()
    found = jit_env.FLASHINFER_AOT_PROVIDERS
    assert [one.provider_id for one in found] == ["sm120f", "sm80", "sm90a"]
    assert found[2] == jit_env.AOTProvider(
        "sm90a",
        "flashinfer-jit-cache-sm90a",
        f"{VERSION}+cu130",
        tmp_path / "sm90a",
        frozenset({"sm90a"}),
        frozenset({"op"}),
    )
    package = Path(jit_env.__file__).resolve().parent.parent
    assert package / "data" / "aot" == jit_env.FLASHINFER_AOT_DIR
    assert (jit_env.FLASHINFER_AOT_DIR, *(one.jit_cache_dir for one in found)) == jit_env.FLASHINFER_AOT_DIRS
    assert jit_env.cache_dir(jit_env.FLASHINFER_BASE_DIR) == jit_env.FLASHINFER_CACHE_DIR


def test_a_library_for_each_target(shim, targets, tmp_path):
    shim()
    targets((8, "6"), (9, "0a"), (8, "0"))
    found = jit_env.get_aot_artifacts("op")
    assert [(one.provider_id, one.cuda_architectures) for one in found] == [
        ("sm80", frozenset({"sm80"})),
        ("sm90a", frozenset({"sm90a"})),
    ]
    assert jit_env.get_aot_path("op") == tmp_path / "sm80" / "op" / "op.so"
    assert jit_env.get_aot_artifacts("other") == ()
    assert jit_env.get_aot_path("other") == jit_env.FLASHINFER_AOT_DIR / "other" / "other.so"


def test_own_modules_come_first(shim, targets, tmp_path, monkeypatch):
    shim()
    targets((9, "0a"))
    own = tmp_path / "own"
    monkeypatch.setenv("FLASHINFER_AOT_DIR", str(own))
    (own / "op").mkdir(parents=True)
    (own / "op" / "op.so").write_bytes(b"")
    assert jit_env.get_aot_artifacts("op") == (jit_env.AOTArtifact("flashinfer-python", own / "op" / "op.so", None),)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"version": "0.7.1+cu130"}, "flashinfer-jit-cache-sm90a is ignored: its version is 0.7.1"),
        ({"version": f"{VERSION}+cu129"}, r"and that of flashinfer_jit_cache is 0\.7\.2\.post1\+cu130"),
        ({"cuda_architectures": ["hopper"]}, "Invalid CUDA architecture"),
        ({"jit_cache_dir": "/nonexistent"}, "has no index.json"),
    ],
    ids=str,
)
def test_ignored_providers(shim, changes, text, caplog):
    import re

    shim(sm90a=changes)
    for _ in range(2):
        assert [one.provider_id for one in jit_env.FLASHINFER_AOT_PROVIDERS] == ["sm120f", "sm80"]
    (record,) = caplog.records
    assert re.search(text, record.getMessage())


def test_a_shim_of_another_release(shim, caplog):
    shim("0.7.1")
    assert jit_env.FLASHINFER_AOT_PROVIDERS == ()
    assert "flashinfer_jit_cache 0.7.1 is ignored" in caplog.text


def test_modules_that_lack_a_target_are_compiled(workshop, shim, targets):
    shim()
    targets((9, "0a"), (10, "0a"))
    spec = workshop.spec("op", "cuda")
    assert spec.aot_artifacts == () and not spec.is_aot
    targets((8, "0"), (9, "0a"))
    assert [one.provider_id for one in spec.aot_artifacts] == ["sm80", "sm90a"] and spec.is_aot
    assert len(spec.get_library_paths()) == 2


def test_calls_go_to_the_library_of_the_device(monkeypatch):
    """Check the choice by devices that are not here."""
    capabilities = {0: (8, 6), 1: (9, 0), 2: (12, 1)}
    monkeypatch.setattr(providers.probes, "get_compute_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(providers, "_devices", lambda values: [v.device for v in values if hasattr(v, "device")])
    made = {name: SimpleNamespace(run=lambda *_, name=name: name) for name in ("sm80", "sm90a", "sm120f")}
    module = ModuleByDevice((frozenset({name}), one) for name, one in made.items())
    on = [SimpleNamespace(device=torch.device("cuda", index)) for index in range(3)]
    assert [module.run(1, x) for x in on] == ["sm80", "sm90a", "sm120f"]
    assert module.run(5) == "sm90a"  # the current device
    with pytest.raises(AttributeError, match="has a function 'other'"):
        _ = module.other
    capabilities[3] = (10, 0)
    with pytest.raises(RuntimeError, match="has code for SM100"):
        module.run(SimpleNamespace(device=torch.device("cuda", 3)))


def test_several_libraries_load_as_one(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "load", lambda path: SimpleNamespace(path=path))
    artifacts = [jit_env.AOTArtifact(name, tmp_path / name, frozenset({name})) for name in ("sm80", "sm90a")]
    assert load._load_artifacts(artifacts[:1]).path == tmp_path / "sm80"
    both = load._load_artifacts(artifacts)
    assert isinstance(both, ModuleByDevice) and len(both._modules) == 2
