#!/usr/bin/env bash
# Print the first usable Python 3.11 to 3.13 that can make a virtual environment, or one line that says what to install.
# Usage: find_python.sh [PREFERRED]
set -eu

in_range='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
without_venv=""
for candidate in ${1:-} python3 python3.12 python3.11 python3.13; do
    "$candidate" -c "$in_range" 2>/dev/null || continue
    if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "$candidate"
        exit 0
    fi
    without_venv=${without_venv:-$("$candidate" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')}
done
if [ -n "$without_venv" ]; then
    echo "copyhold: Python's venv package is missing: apt-get install python3-venv (or $without_venv)" >&2
else
    echo "copyhold: no Python 3.11 to 3.13 found: apt-get install python3 python3-venv, or pass PYTHON=/path/to/python" >&2
fi
exit 1
