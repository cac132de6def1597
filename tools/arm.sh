# The CPU tests for 64-bit Arm, under emulation: a step of ./dev test, and one of ./dev nightly. The CUDA runtime of its
# wheel. Read by ./dev, as install.sh is.
# shellcheck shell=bash disable=SC2154

readonly BUILD_ARM=$ROOT/build-arm ARM_PACKAGES=(g++-aarch64-linux-gnu qemu-user)

have_arm() { have aarch64-linux-gnu-g++ && have qemu-aarch64; }

# arm_problem: why there is no compiler or no emulator, after apt has tried where they are missing; or
# nothing.
arm_problem() {
  have_arm || apt_install --no-install-recommends "${ARM_PACKAGES[@]}" || true
  have_arm ||
    echo "no aarch64-linux-gnu-g++ or no qemu-aarch64 (apt install ${ARM_PACKAGES[*]})"
}

# arm_cuda_runtime: fetches the runtime of CUDA 12 for 64-bit Arm, whatever this machine is, and sets NF4_CUDA_RUNTIME,
# by which the build backend composes a toolkit.
arm_cuda_runtime() {
  local folder=$CACHE/cuda12-arm wheel='nvidia-cuda-runtime-cu12==12.9.*' pins
  pins=$(python tools/pins.py --no-deps "$wheel") || die "$wheel is not pinned for this Python"
  if [ "$(cat "$folder/pins" 2>/dev/null)" != "$pins" ]; then
    say "fetching the CUDA runtime for 64-bit Arm: $wheel"
    rm -rf "$folder" && mkdir -p "$folder"
    python -m pip download -q --no-deps --only-binary=:all: --platform manylinux2014_aarch64 --require-hashes \
      -r <(echo "$pins") -d "$folder" >&2 || die "pip could not download $wheel; what it said is above"
    python -m zipfile -e "$folder"/*.whl "$folder"
    echo "$pins" >"$folder/pins"
  fi
  export NF4_CUDA_RUNTIME=$folder/nvidia/cuda_runtime
}

# build_arm TARGET: at -O1, which compiles in half the time; what is tested are the same instructions.
build_arm() {
  local catch2 problem cross=()
  problem=$(arm_problem)
  [ -z "$problem" ] || skip "$problem"
  virtual_environment
  catch2=$(catch2_include)
  [ -n "$catch2" ] || skip 'pip could not install Catch2, and that of the system is not for 64-bit Arm'
  [ -e "$BUILD_ARM/build.ninja" ] || cross=(--cross-file packaging/aarch64.ini)
  configure "$BUILD_ARM" "${cross[@]}" -Dcuda=disabled -Dtests=enabled -Doptimization=1 \
    "-Dcatch2_include=$catch2"
  meson compile -C "$BUILD_ARM" "$1"
}

readonly EMULATOR="qemu-aarch64 -L /usr/aarch64-linux-gnu"

# arm_variants FOLDER: of each test of a variant a hundredth of its cases, which takes seconds.
arm_variants() {
  build_arm check_variants
  NF4_TEST_PARTS=100 $EMULATOR "$BUILD_ARM/tests/check_variants" \
    '"every variant*"~"*larger*"~"*whole vectors*"' -r junit -o "$1/arm.xml"
}

# All of the C++ tests, but for the stack's size, which is another processor's, and fork() with threads, which hangs in
# the emulator: a tenth of the random cases, as emulation takes up to a hundred times as long.
step_arm_long() {
  build_arm check
  mkdir -p "$CACHE/arm"
  NF4_TEST_PARTS=10 check_files "$BUILD_ARM" "$CACHE/arm" '~[stack]~[fork]~[.]' "$EMULATOR"
}
