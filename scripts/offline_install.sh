#!/usr/bin/env bash
# Installs what offline_prepare.sh has put beside this file. Asks no network; words after it go to pip:
#
#   bash FOLDER/offline_install.sh [--target DIR] [--no-deps]
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
(cd "$folder" && sha256sum --check --quiet SHA256SUMS) || { echo "offline_install: a file is damaged; copy it again" >&2; exit 1; }
packages=(flashinfer-python)
if compgen -G "$folder/wheels/flashinfer_jit_cache-*" > /dev/null; then packages+=(flashinfer-jit-cache); fi
python -m pip install --no-index --find-links "$folder/wheels" "$@" "${packages[@]}"
