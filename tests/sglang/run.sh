#!/usr/bin/env bash
# Tests on real SGLang servers, in an environment that is built once a machine: tests/sglang/run.sh all|smoke PYTHON.
# smoke: a colocated and a disaggregated job. all: those, and the engine contract. Exit status 3: its environment cannot be built here.
set -euo pipefail
cd "$(dirname "$0")/../.."
what="$1" python="$2" status=0
interpreter="$(tests/sglang/setup.sh)" || status=$?
if [ "$status" = 3 ]; then
  echo "NOT RUN: tests on real SGLang: its environment could not be built here (see above)" >&2
  exit 3
elif [ "$status" != 0 ]; then
  exit "$status"
fi
tests=(tests/sglang)
[ "$what" = smoke ] || tests+=(tests/engine_contract)
PEARL_SGLANG_PYTHON="$interpreter" "$python" -m pytest -rs -p no:cacheprovider "${tests[@]}" -k "sglang and not stand-in" -m "" --durations=10
