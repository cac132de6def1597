# ./dev wheel and ./dev release. Read by ./dev, as install.sh is.
# shellcheck shell=bash disable=SC2154

readonly DIST=$ROOT/dist WHEEL_MOST=$((23 * 1000 * 1000))

# The version, which meson.build has; tests compare that of nf4.h and of Cargo.toml with it.
version() { sed -n "s/^  version: '\(.*\)',\$/\1/p" meson.build; }

# For drivers of CUDA 12. sm_89 runs the machine code of sm_86, to which that of its own is equal to the byte. Arm
# machines have an A100, Orin (87, by 86 or PTX), Grace, Thor (110, by PTX) or GB10 (121, by 120).
readonly ARCHS_12=75-ptx,75,80,86,90,100,120 ARM_ARCHS_12=80-ptx,80,86,90,100,120

# wheel [--cpu|--arm] [-D...]: an sdist of what is committed, and a wheel from it, into dist/. The wheel
# runs where glibc is that of this machine or later, on Python 3.10 and later. Drivers of CUDA 12 load it; with
# NF4_CUDA_DRIVER=13 those of CUDA 13 alone, and then that for Arm has no CUDA.
wheel() {
  local cuda=1 option config=() options=() host=() strip=(--strip) built=$CACHE/wheel file problem
  # What a wheel for Arm puts there is not for the next one.
  local -x NF4_CUDA_DRIVER=${NF4_CUDA_DRIVER:-12} NF4_CUDA_RUNTIME=${NF4_CUDA_RUNTIME:-} PATH=$PATH
  local driver=$NF4_CUDA_DRIVER
  [[ $driver = 1[23] ]] || die "NF4_CUDA_DRIVER is $driver, which is neither 12 nor 13"
  for option; do
    case $option in
      --cpu) cuda=0 ;;
      --arm)
        problem=$(arm_problem)
        [ -z "$problem" ] || die "$problem"
        count_proofs wheel
        # Stripped by the linker: auditwheel would run this machine's strip, which does not know Arm.
        host=(_PYTHON_HOST_PLATFORM=linux-aarch64) strip=()
        config+=("--cross-file=$ROOT/packaging/aarch64.ini" -Dc_link_args=-s -Dcpp_link_args=-s
          "-Dc_args=-I$built/headers" "-Dcpp_args=-I$built/headers")
        [ "$driver" = 12 ] || cuda=0
        ;;
      -D*) options+=("$option") ;;
      *) die "wheel takes --cpu, --arm and options of Meson (-D...), not '$option'" ;;
    esac
  done
  virtual_environment
  install_lists 'the build tools' requires
  install 'the packaging tools' "${PACKAGING_PACKAGES[@]}"
  if [ "$cuda" = 1 ]; then
    if [ "$driver" = 12 ] && [ ${#host[@]} = 0 ]; then
      config+=("-Dgpu_archs=$ARCHS_12")
      # These have a cubin for each GPU whose drivers do not unpack zstd (nf4_fatbin.py).
      [ ${#options[@]} -gt 0 ] || local -x NF4_PTX_ZSTD=1
    elif [ "$driver" = 12 ]; then
      arm_cuda_runtime
      config+=("-Dgpu_archs=$ARM_ARCHS_12")
    else
      # A third less to download; every driver that runs CUDA 13 unpacks it.
      config+=(-Dcuda_args=--compress-mode=size)
    fi
    cuda_compiler
    [ -n "$HAVE_CUDA" ] || die 'no nvcc for this machine; ./dev wheel --cpu makes a wheel for the CPU alone'
    say 'compiling CUDA kernels: about 16 minutes on two cores'
  fi
  rm -rf "$built" "$DIST" && mkdir -p "$built/source" "$built/headers" "$DIST"
  # Debian's Python.h includes pyconfig.h from a folder of the machine's name. For the stable ABI that of any
  # 64-bit machine serves.
  ln -s "/usr/include/$(uname -m)-linux-gnu" "$built/headers/aarch64-linux-gnu"
  PYTHONPATH=$PACKAGE/build_backend python -c \
    'import nf4_build, sys; nf4_build.build_sdist(sys.argv[1])' "$DIST" >"$built/log" 2>&1 ||
    { cat "$built/log" >&2 && die 'cannot make the sdist; what it said is above'; }
  # Without pip, which passes several options on from 23.1 alone; Debian 12 has 23.0.
  tar -xf "$DIST/libnf4-$(version).tar.gz" -C "$built/source" --strip-components=1
  (cd "$built/source" && env "${host[@]}" NF4_CUDA=$cuda PYTHONPATH=bindings/python/build_backend python -c \
    'import nf4_build, sys; nf4_build.build_wheel(sys.argv[1], {"setup-args": sys.argv[2:]})' \
    "$built" "${config[@]}" "${options[@]}") >"$built/log" 2>&1 ||
    { cat "$built/log" >&2 && die 'cannot make the wheel; what it said is above'; }
  # The extension module keeps to the stable ABI of 3.10; the build backend names its own Python.
  python -m wheel tags --remove --python-tag cp310 "$built"/*.whl >/dev/null
  python -m auditwheel repair "${strip[@]}" -w "$DIST" "$built"/*.whl >"$built/log" 2>&1 ||
    { cat "$built/log" >&2 && die 'auditwheel refuses the wheel; what it said is above'; }
  file=$(echo "$DIST"/*.whl)
  python tools/sbom.py "$file"
  say "$file: $(($(stat -c %s "$file") / 1000)) kB"
  [ "$(stat -c %s "$file")" -le "$WHEEL_MOST" ] || die "a wheel is to have at most $WHEEL_MOST bytes"
  if [ "$cuda" = 1 ]; then
    python -m zipfile -e "$file" "$built/wheel"
    python tools/cuda_images.py "$built/wheel/nf4/lib/libnf4.so.0" --driver "$driver.0" >&2 ||
      die 'a driver that the wheel is for does not load all of its GPU code'
  fi
  [ ${#host[@]} = 0 ] || bash tests/packaging/wheel_arm.sh "$CACHE/wheel-arm" "$file" >&2 || die 'the wheel does not work'
}

# try_tarball TARBALL: its C++ and ABI tests and its examples, on the CPU.
try_tarball() {
  local folder=$CACHE/tarball catch2
  catch2=$(catch2_include)
  rm -rf "$folder" && mkdir -p "$folder" && tar -xf "$1" -C "$folder" --strip-components=1
  meson setup "$folder/build" "$folder" -Dcuda=disabled -Dtests=enabled -Dexamples=enabled \
    "-Dcatch2_include=${catch2:+$ROOT/$catch2}" >"$folder/log" 2>&1 || { cat "$folder/log" >&2 && return 1; }
  meson compile -C "$folder/build" >"$folder/log" 2>&1 || { cat "$folder/log" >&2 && return 1; }
  meson test -C "$folder/build" --no-rebuild -q --print-errorlogs >&2
}

# release [--dry-run [options of wheel]]: all that is published, in dist/, and its checksums; then the
# tag. Nothing is uploaded. A dry run goes on where something is not ready, and makes no tag.
release() {
  local dry='' number tag crates=$CACHE/crates arm file problem
  number=$(version) tag=v$number
  if [ "${1:-}" = --dry-run ]; then
    dry=1
    shift
  fi
  unready() { if [ -n "$dry" ]; then say "not ready: $*"; else die "$*"; fi; }
  [ $# = 0 ] || unready "a release has every kernel; $* is for --dry-run"
  grep -q "^## \[$number\] - 20" CHANGELOG.md ||
    unready "CHANGELOG.md has no section '## [$number] - <date>'"
  [ -z "$(git status --porcelain)" ] || unready 'there are changes that are not committed'
  [ -z "$(git tag -l "$tag")" ] || unready "there is a tag $tag"
  install_tests
  python tests/abi/freeze.py --check >&2 || unready 'the header of this version is not frozen'
  python tests/gpu/record.py --release >&2 || unready 'no GPU has run all of this code'
  problem=$(arm_problem)
  if [ -z "$problem" ]; then
    wheel --arm
    # Out of the way of the other wheel, which makes dist/ anew.
    arm=$CACHE/arm-wheel && rm -rf "$arm" && mkdir -p "$arm" && mv "$DIST"/*.whl "$arm/"
  else
    arm='' && unready "there is no wheel for 64-bit Arm: $problem"
  fi
  wheel "$@"
  file=$(echo "$DIST"/*.whl)
  bash tests/packaging/wheel.sh "$CACHE/wheel-user" "$file" >&2 || die 'the wheel does not work'
  ! grep -q '<skipped' "$CACHE/wheel-user/results.xml" ||
    unready 'the wheel was not tried in every language; what was skipped is above'
  try_tarball "$DIST/libnf4-$number.tar.gz" || die 'the tarball does not pass its tests'
  # Empty: cargo keeps the crates that it unpacked to verify others by this path and their version.
  rm -rf "$crates"
  NF4_LIB_DIR=$CACHE/wheel-user/$(cd "$CACHE/wheel-user" && echo lib/python*/site-packages/nf4/lib) \
    CARGO_TARGET_DIR=$crates cargo package --workspace --exclude nf4-examples --exclude nf4-candle-bench --allow-dirty -q >&2
  cp "$crates/package/"*"-$number.crate" "$DIST/" && rm -rf "$crates"
  [ -z "$arm" ] || mv "$arm"/*.whl "$DIST/"
  (cd "$DIST" && sha256sum -- * >SHA256SUMS && cat SHA256SUMS)
  if [ -n "$dry" ]; then
    say "a dry run: no tag $tag"
  else
    git tag -a "$tag" -m "libnf4 $number"
    say "tagged $tag; publish dist/ with twine and cargo publish, and push the tag"
  fi
}
