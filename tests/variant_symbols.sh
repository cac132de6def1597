#!/bin/sh
# variant_symbols.sh NM LIBRARY...: a library compiled for an instruction set that not every
# machine has may define global symbols for its lists of kernels alone. Anything else, such as an
# inline function of a shared header, might be linked in place of the portable version.
set -eu
nm=$1
shift
status=0
for library; do
  symbols=$("$nm" -C --defined-only --extern-only "$library")
  leaked=$(printf '%s\n' "$symbols" | grep -E '^[0-9a-f]+ ' |
    grep -v -E ' (nf4::cpu::k(Avx2|Avx512|Avx512Bf16|Neon|NeonBf16)(Dequant|Quantize|Matmul|MatmulOfBf16)|__odr_asan.*)$' || true)
  if [ -n "$leaked" ]; then
    printf '%s leaks:\n%s\n' "$library" "$leaked"
    status=1
  fi
done
exit $status
