#!/usr/bin/env bash
# Builds the virtual environment of SGLang's tests, once a machine: tests/sglang/setup.sh FOLDER. Prints its interpreter.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="$1"
sglang=0.5.23
if [ ! -f "$folder/.sglang-$sglang" ]; then
  echo "installing SGLang $sglang into $folder (about 3.5 GB, a few minutes)" >&2
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet -r "$here/requirements.txt" >&2
  "$folder/bin/python" -m pip install --quiet --no-deps "sglang==$sglang" torchvision==0.28.0 \
    mooncake-transfer-engine-non-cuda==0.3.13.post1 >&2
  touch "$folder/.sglang-$sglang"
fi
if ! ldconfig -p | grep -q libibverbs.so.1; then
  echo "libibverbs1 is missing, which Mooncake's library needs: apt-get install libibverbs1" >&2
  exit 1
fi
echo "$folder/bin/python"
