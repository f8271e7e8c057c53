#!/usr/bin/env bash
# Builds a virtual environment in which SGLang runs on CPUs, once a machine, and prints its interpreter: setup.sh [FOLDER].
# Without FOLDER: $PEARL_SGLANG_ENV, or else a folder below the user's cache, named after what is installed in it.
# setup.sh --built builds nothing, and exits with status 4 where it is not there.
# Exit status 3: packages cannot be had (no network, or not from this registry).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
torch=2.13.0
wanted="$(cat "$here/requirements.txt" <(echo "$torch") | sha256sum | cut -c1-12)"
built=""
[ "${1:-}" != --built ] || { built=1; shift; }
folder="${1:-${PEARL_SGLANG_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/pearl/sglang-$wanted}}"
stamp="$folder/.pearl-$wanted"
if [ -n "$built" ]; then
  [ -f "$stamp" ] || exit 4
  echo "$folder/bin/python"
  exit
fi
mkdir -p "$folder"
exec 9>"$folder.lock"
flock 9 # two checkouts may ask at once
if [ ! -f "$stamp" ]; then
  echo "sglang: installing SGLang 0.5.23 for CPUs into $folder (3.5 GB; two to five minutes, once a machine)" >&2
  "${PYTHON:-python3}" -m venv --clear "$folder"
  pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
  if ! "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch" >&2 ||
    ! "${pip[@]}" --no-deps -r "$here/requirements.txt" >&2; then
    echo "sglang: the environment could not be built: pip's words are above" >&2
    exit 3
  fi
  touch "$stamp"
fi
if ! ldconfig -p | grep -q libibverbs.so.1; then # Mooncake's library needs it; without it, nothing is disaggregated
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq libibverbs1; } >&2 || true
  fi
  ldconfig -p | grep -q libibverbs.so.1 ||
    echo "sglang: libibverbs1 is missing (apt-get install libibverbs1): tests of prefill and decode servers are left out" >&2
fi
echo "$folder/bin/python"
