#!/usr/bin/env bash
# Makes a folder that installs this package, and all that it needs, on a machine without a network:
#
#   bash scripts/offline_prepare.sh FOLDER                             the package and its requirements, torch included
#   REQUIREMENTS=no bash scripts/offline_prepare.sh FOLDER             the package alone
#   AOT="--cpu-target x86-64-v3" bash scripts/offline_prepare.sh FOLDER    and modules that are compiled already
#
# FLASHINFER_CUDA_ARCH_LIST adds compiled CUDA modules for these targets. Python and its platform must be those of the
# other machine. Copy the folder there and run its offline_install.sh.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels=$folder/wheels
mkdir -p "$wheels"
python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" "$root"
if [ "${REQUIREMENTS:-yes}" != no ]; then
  python -m pip download --dest "$wheels" --requirement "$root/requirements.txt"
fi
if [ -n "${AOT:-}${FLASHINFER_CUDA_ARCH_LIST:-}" ]; then
  python -m build --no-isolation --wheel --outdir "$wheels" "-Caot=${AOT:-}" "$root/flashinfer-jit-cache"
fi
cp "$root/scripts/offline_install.sh" "$folder/"
(cd "$folder" && sha256sum wheels/* offline_install.sh > SHA256SUMS)
echo "$(ls "$wheels" | wc -l) wheels in $folder, $(du -sh "$folder" | cut -f1)"
