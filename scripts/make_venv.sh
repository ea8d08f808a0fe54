#!/bin/sh
# Makes .venv hold exactly what requirements.lock pins, and this package in editable form. Safe to run again, and after
# an interrupted run: a marker inside .venv tells that its contents cannot be trusted.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
python="$venv/bin/python"
marker="$venv/.incomplete"

if [ -e "$marker" ] || ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    found=$(sh scripts/find_python.sh)
    echo "Making $venv with $("$found" --version)"
    rm -rf "$venv"
    mkdir "$venv"
    : >"$marker"
    "$found" -m venv "$venv"
fi
: >"$marker"

# uv is the fast way; it is pinned in the same lock. Where it cannot be had or fails, pip does the same.
if ! "$venv/bin/uv" --version >/dev/null 2>&1; then
    awk '/^uv==/ { found = 1 } found { print } found && !/\\$/ { exit }' requirements.lock >"$venv/uv.txt"
    "$python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r "$venv/uv.txt" || true
fi
if ! "$venv/bin/uv" pip install --quiet --python "$python" --require-hashes -r requirements.lock; then
    echo "uv could not install; trying pip"
    "$python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
fi
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .

rm -f "$marker"
