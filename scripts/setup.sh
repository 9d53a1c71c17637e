#!/bin/sh
# Makes or renews the virtual environment that `make` uses: scripts/setup.sh FOLDER EXTRA
# TORCH_INDEX_URL, if set, is where torch comes from (pip's --index-url).
set -eu
venv=$1
extra=$2
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { echo "torch_nvfp4: $*"; }
pip() { "$venv/bin/python" -m pip "$@"; }

find_python() {
    found=""
    for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        # A name on PATH proves little: it may be a version manager's shim, or lack the venv package.
        if ! version=$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null); then
            found="$found, $candidate (does not run)"
        elif ! "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
            found="$found, $candidate (is $version)"
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            found="$found, $candidate (is $version without venv)"
        else
            python=$candidate
            return
        fi
    done
    found=${found#, }
    say "needs Python 3.11 to 3.14 with its venv module; found: ${found:-no python3}" >&2
    exit 1
}

# A stamp says from which files, and for which folder, an extra was installed; 'dev' contains every other extra.
want=$(cat pyproject.toml setup.py constraints.txt; pwd)
want=$(printf '%s' "$want" | cksum)
has() { [ "$(cat "$venv/.installed-$1" 2>/dev/null)" = "$want" ]; }
runs() { "$venv/bin/python" -c 'import pip' 2>/dev/null; }
same_torch() {
    [ -z "${TORCH_INDEX_URL:-}" ] || [ ! -e "$venv/.torch-index" ] ||
        [ "$(cat "$venv/.torch-index")" = "$TORCH_INDEX_URL" ]
}

# What an interrupted install left is not trusted: pip takes a half-written package for a whole one.
if [ -e "$venv/.unfinished" ] || ! same_torch || ! runs; then
    find_python
    say "making $venv with $python ($version)"
    rm -rf "$venv/bin"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.unfinished"
    "$python" -m venv "$venv"
elif has "$extra" || has dev; then
    exit 0
fi
touch "$venv/.unfinished"

torch=$(grep '^torch==' constraints.txt)
if ! pip show -q torch 2>/dev/null; then
    say "downloading $torch from ${TORCH_INDEX_URL:-the default index}; on Linux the default build is CUDA's, several GB." \
        "TORCH_INDEX_URL picks another, such as the CPU build: see pytorch.org/get-started"
    if [ -n "${TORCH_INDEX_URL:-}" ]; then
        pip install --index-url "$TORCH_INDEX_URL" "$torch"
    fi
    echo "${TORCH_INDEX_URL:-default}" >"$venv/.torch-index"
fi
pip install -c constraints.txt "$torch" setuptools
say "installing what the extra '$extra' needs"
# Without isolation the build uses the pinned setuptools of the environment, and downloads no second one.
pip install -c constraints.txt --no-build-isolation -e ".[$extra]"

echo "$want" >"$venv/.installed-$extra"
rm "$venv/.unfinished"
