#!/usr/bin/env bash
# Builds the virtual environment of the verifiers adapter's test, once a machine, and prints its interpreter. It stays outside of the
# checkout: tests/integration/verifiers_setup.sh [FOLDER]; without FOLDER below the user's cache. Exit status 3: cannot be had.
# `make verifiers-test` does that and runs the test.
set -euo pipefail
version=0.4.0
folder="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/pearl/verifiers-$version}"
mkdir -p "$folder"
exec 9>"$folder.lock"
flock 9 # two checkouts may ask at once
if [ ! -f "$folder/.pearl" ]; then
  echo "verifiers: installing verifiers $version into $folder (once a machine)" >&2
  "${PYTHON:-python3}" -m venv --clear "$folder"
  if ! "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "verifiers==$version" >&2; then
    echo "verifiers: the environment could not be built: pip's words are above" >&2
    exit 3
  fi
  touch "$folder/.pearl"
fi
echo "$folder/bin/python"
