# Sourced by .ci/run and .ci/nightly: a fresh virtual environment with the tested versions, removed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment="$(mktemp -d)"
trap 'rm -rf "$environment"' EXIT

step() { printf '\n== %s\n' "$*"; }

step "environment: $("${PYTHON:-python3}" --version)"
"${PYTHON:-python3}" -m venv "$environment"
export PATH="$environment/bin:$PATH"
step "install"
python -m pip install --quiet -c constraints.txt -e '.[test]' mypy ruff
