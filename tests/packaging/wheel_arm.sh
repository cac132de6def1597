#!/usr/bin/env bash
# A wheel for 64-bit Arm on another machine: what it holds is listed and hardened, and programs of each version of the
# ABI, cross-compiled, run on its library, emulated.
#
#   wheel_arm.sh FOLDER WHEEL
#
# FOLDER is made anew. Leaves the number of answers, and whether it failed, for docs/reliability.md.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(realpath -m "$1") wheel=$(realpath "$2") answers=0
leave_count() {
  local failed=$(($? != 0))
  [ -z "${NF4_PROOFS:-}" ] || echo "arm-wheel $answers $failed" >>"$NF4_PROOFS"
}
trap leave_count EXIT
rm -rf "$folder" && mkdir -p "$folder" && cd "$folder"
python3 "$root/tools/sbom.py" --check "$wheel"
python3 -m zipfile -e "$wheel" .
# hardened OPTIONS FILE
hardened() { python3 "$root/tests/abi/hardening.py" "$@" >hardening.txt || { cat hardening.txt && exit 1; }; }
hardened --fortified nf4/lib/libnf4.so.0
hardened _nf4_fast.*
for version in "$root"/tests/abi/v*; do
  aarch64-linux-gnu-gcc -std=c99 "-I$version" "$version/program.c" nf4/lib/libnf4.so.0 -o program
  qemu-aarch64 -L /usr/aarch64-linux-gnu -E "LD_LIBRARY_PATH=$PWD/nf4/lib" ./program >said.txt || { cat said.txt && exit 1; }
  answers=$((answers + $(sed -n 's/^\([0-9]*\) checks, 0 failed$/\1/p' said.txt)))
done
echo "$answers answers"
