#!/bin/sh
# Prints the Python to build the virtual environment with: the first that really runs (a pyenv shim can exist and
# fail), is CPython 3.12 or newer, and can make virtual environments. Tried in turn: $PYTHON, python3.13, python3.12,
# python3, then those that pyenv holds, the newest first.
set -u

usable='
import sys, sysconfig
import ensurepip, venv
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
sys.exit(not (sys.version_info >= (3, 12) and sys.implementation.name == "cpython" and not free_threaded))
'

try() {
    if "$1" -c "$usable" >/dev/null 2>&1 </dev/null; then
        command -v "$1"
        exit 0
    fi
}

if [ -n "${PYTHON:-}" ]; then try "$PYTHON"; fi
for name in python3.13 python3.12 python3; do
    try "$name"
done

versions="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
if [ -d "$versions" ]; then
    # "3.12.1" sorts by its numbers; what follows them (a suffix such as "t" or "-dev") comes later.
    for version in $(ls "$versions" | grep '^3\.[0-9]' | sort -t. -k1,1nr -k2,2nr -k3,3nr); do
        try "$versions/$version/bin/python"
    done
fi

echo "jaxrl needs CPython 3.12 or newer with venv, and none was found (tried \$PYTHON, python3.13, python3.12," \
    "python3 and pyenv's); install one, or name it: make PYTHON=/path/to/python3" >&2
exit 1
