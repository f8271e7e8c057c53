#!/usr/bin/env bash
# Tests on real SGLang servers, in an environment that is built once a machine: tests/sglang/run.sh all|smoke PYTHON.
# smoke: every way that weights come, colocated jobs and a disaggregated one. all: those, the demo and the engine contract. Exit status 3: its environment cannot be built here.
set -euo pipefail
cd "$(dirname "$0")/../.."
what="$1" python="$2" status=0
interpreter="$(services/rollout_worker/engines/sglang/cpu/setup.sh)" || status=$?
if [ "$status" = 3 ]; then
  echo "NOT RUN: tests on real SGLang: its environment could not be built here (see above)" >&2
  exit 3
elif [ "$status" != 0 ]; then
  exit "$status"
fi
tests=(tests/sglang/test_weights.py tests/sglang/test_whole_job.py)
[ "$what" = smoke ] || tests=(tests/sglang tests/engine_contract)
PEARL_SGLANG_PYTHON="$interpreter" "$python" -m pytest -rs -p no:cacheprovider "${tests[@]}" -k "sglang and not stand-in" -m "" --durations=10
