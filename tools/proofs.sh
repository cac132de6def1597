# ./dev fuzz, and what docs/reliability.md counts. Read by ./dev, as install.sh is.
# shellcheck shell=bash disable=SC2154

# proved PROOF COUNT: a line for docs/reliability.md.
proved() { [ -z "${NF4_PROOFS:-}" ] || echo "$*" >>"$NF4_PROOFS"; }

# fuzz [RUNS]
fuzz() {
  local runs=${1:-10000000}
  [[ $runs =~ ^[0-9]+$ ]] || die "fuzz takes a number of runs, not '$runs'"
  configure_sanitizers >&2
  meson compile -C "$BUILD_ASAN" fuzz_api >&2
  build_library
  install_tests
  python_environment
  fuzz_both "$runs" "$CACHE/fuzz" $RANDOM
}

# fuzz_both RUNS FOLDER SEED: side by side, the arguments of every function of nf4.h, and a tenth as
# many checkpoints, which take longer. Reports and findings are left in FOLDER.
fuzz_both() {
  local runs=$1 folder=$2 seed=$3 arguments status=0
  mkdir -p "$folder"
  "$BUILD_ASAN/tests/fuzz/fuzz_api" "$runs" --seed "$seed" --corpus tests/fuzz/corpus/api.hex \
    --report "$folder/arguments.json" &
  arguments=$!
  if python tests/fuzz/fuzz_checkpoint.py $((runs / 10)) --seed "$seed" --report "$folder/checkpoints.json"; then
    proved fuzz-checkpoints $((runs / 10))
  else
    status=1
  fi
  if wait $arguments; then proved fuzz-arguments "$runs"; else status=1; fi
  cat "$folder/arguments.json" "$folder/checkpoints.json"
  return $status
}
