# ./dev gpu: what runs on a GPU alone, and its builds. Read by ./dev, as install.sh is.
# shellcheck shell=bash disable=SC2154

readonly BUILD_PTX=$ROOT/build-ptx BUILD_RACE=$ROOT/build-race

# What a GPU run needs besides the build: the tests on PTX alone, which is what GPUs to come
# will compile and the only way to run here what is meant for others; those for racecheck, which
# does not see what a warp's meeting orders (lib/cuda/ptx/mbarrier.cuh); and the Rust example. Both
# builds have a format that only core/formats.hpp knows.
# build_gpu OPTIONS: those of the library, such as -Dgpu_archs=75-ptx,90 for a Hopper GPU alone.
build_gpu() {
  local catch2 problem format=-DNF4_TEST_FORMAT=1000
  build -Dgpu_archs=all "$@"
  catch2=$(catch2_include)
  configure "$BUILD_PTX" -Dtests=enabled -Dgpu_archs=75-ptx,80-ptx "-Dcpp_args=$format" "-Dcuda_args=$format" \
    "-Dcatch2_include=$catch2" >&2
  meson compile -C "$BUILD_PTX" check_cuda >&2
  configure "$BUILD_RACE" -Dtests=enabled -Dgpu_archs=75,80,90,100,120 "-Dcpp_args=$format" \
    "-Dcuda_args=$format -DNF4_RACECHECK" "-Dcatch2_include=$catch2" >&2
  meson compile -C "$BUILD_RACE" check_cuda >&2
  build_families
  [ $# -gt 0 ] || check_kernels --write
  python3 tests/gpu/sources.py >"$BUILD/gpu-sources"
  problem=$(rust_problem)
  [ -z "$problem" ] || { say "the Rust example is left out: $problem" && return; }
  NF4_LIB_DIR=$BUILD/lib CARGO_TARGET_DIR=$CACHE/rust cargo build --locked -q -p nf4-examples >&2
  build_candle
}

# check_kernels OPTIONS: of the build, by tools/kernel_table.py.
check_kernels() {
  have cuobjdump || install_disassembler
  virtual_environment
  python tools/kernel_table.py "$LIBRARY" "$@"
}

# Builds for this GPU what a T4, RTX cards and an A100 run (bench/nf4bench/families_cases.py).
build_families() {
  build_family Sm80 163 99
  build_family Sm75 64
}

# build_family FAMILY KIB...: its kernels alone as machine code of this GPU, or Hopper's where there is none, compiled
# once; and into build-FAMILY-KIB the library and its tests, in which a CTA may have so much shared memory.
build_family() {
  local family=$1 build=$ROOT/build-${1,,} arch catch2 into kib
  shift
  virtual_environment
  cuda_compiler
  catch2=$(catch2_include)
  arch=$(! have_gpu || nvidia-smi --query-gpu=compute_cap --format=csv,noheader | sed -n '1s/[.]//p')
  for kib; do
    into=$build-$kib
    configure "$build" -Dcuda=enabled -Dtests=enabled -Dpython_extension=disabled "-Dgpu_family=$family" \
      "-Dgpu_archs=${arch:-90}" "-Dshared_memory=$kib" "-Dcatch2_include=$catch2" >&2
    meson compile -C "$build" nf4:shared_library check_cuda >&2
    mkdir -p "$into/lib" "$into/tests"
    cp -L "$build/lib/libnf4.so" "$into/lib/"
    find "$build/tests" -name check_cuda -type f -exec cp {} "$into/tests/" \;
  done
}

# nf4-candle's tests with CUDA into .cache/rust/candle, or there why not. candle compiles kernels of its
# own for one GPU, and links what the compiler's wheels lack.
build_candle() {
  local into=$CACHE/rust/candle toolkit=${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}} name program
  rm -rf "$into" && mkdir -p "$into"
  if [ ! -e "$toolkit/lib64/libcublas.so" ]; then
    echo "no CUDA toolkit with cuBLAS in $toolkit" >"$into/skipped"
  elif ! have_gpu && [ -z "${CUDA_COMPUTE_CAP:-}" ]; then
    echo 'no GPU to compile for, nor CUDA_COMPUTE_CAP' >"$into/skipped"
  else
    NF4_LIB_DIR=$BUILD/lib CARGO_TARGET_DIR=$CACHE/rust cargo test --locked -q -p nf4-candle --features cuda \
      --test cuda --test llama --no-run --message-format=json >"$into/json"
    sed -n 's/.*"name":"\(cuda\|llama\)".*"executable":"\([^"]*\)".*/\1 \2/p' "$into/json" |
      while read -r name program; do cp "$program" "$into/$name"; done
  fi
}

# gpu [--build OPTIONS | --prebuilt]: builds all and runs it; --build only builds; --prebuilt only runs,
# on what `./dev gpu --build` made and with the Python that is on PATH. --unverified WHY runs
# nothing: the record and the pages say that the code has changed.
gpu() {
  if [ "${1:-}" = --unverified ]; then
    install_tests
    python tests/gpu/record.py "$@"
    python bench/readme_table.py
    return
  fi
  if [ "${1:-}" = --build ]; then
    build_gpu "${@:2}"
    return
  fi
  if [ "${1:-}" = --prebuilt ]; then
    shift
    export NF4_LIBRARY=$LIBRARY PYTHONPATH=$PACKAGE:$EXTENSION${PYTHONPATH:+:$PYTHONPATH}
  else
    build_gpu
    have compute-sanitizer || install 'compute-sanitizer' "${SANITIZER_PACKAGES[@]}"
    install_tests
    install_interop
    python_environment
  fi
  python3 tests/gpu/run.py "$@"
}
