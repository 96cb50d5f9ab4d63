#!/usr/bin/env bash
# Collects what a machine without network lacks, to run this package there: wheels for Python 3.11
# and 3.12 on 64-bit Linux, and the sources of Detectron2 0.6. PyTorch and torchvision are expected
# there.
#
#     tools/offline_bundle.sh FOLDER [PACKAGE ...]
#
# Without PACKAGEs it takes all that this package and its tests need; with them, these alone.
# tools/gpu_report.sh --bundle FOLDER uses the result.
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
    echo "usage: $0 FOLDER [PACKAGE ...]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$1
shift
python=${PYTHON:-python3}
pip=("$python" -m pip --disable-pip-version-check --quiet)
mkdir -p "$folder/wheels"
folder=$(cd "$folder" && pwd)
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

if [[ $# -gt 0 ]]; then
    printf '%s\n' "$@" >"$built/requirements.txt"
    closure=(--no-deps)
else
    "$python" "$root/tools/list_requirements.py" >"$built/requirements.txt"
    closure=()
fi

echo "offline_bundle: wheels for this Python"
"${pip[@]}" wheel "${closure[@]}" --wheel-dir "$built" --requirement "$built/requirements.txt"

for wheel in "$built"/*.whl; do
    name=$(basename "$wheel")
    if [[ $name == *-none-any.whl ]]; then
        cp "$wheel" "$folder/wheels/"
        continue
    fi
    IFS=- read -r package version _ <<<"$name"
    for minor in 11 12; do
        echo "offline_bundle: $package $version for Python 3.$minor"
        platforms=()
        for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do
            platforms+=(--platform "manylinux_${glibc}_x86_64")
        done
        "${pip[@]}" download --no-deps --only-binary=:all: --python-version "3.$minor" \
            "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
            --dest "$folder/wheels" "$package==$version"
    done
done

echo "offline_bundle: Detectron2 0.6"
"$python" "$root/tools/install_detectron2.py" --download "$folder"
du -sh "$folder"
