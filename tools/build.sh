# Functions of ./dev that compile, and set up Python on the build. ./dev reads this file.
# shellcheck shell=bash disable=SC2119,SC2120,SC2154  # build takes options, which most of its callers have not

# configure DIRECTORY OPTIONS: anew where the tools have changed since; options given before
# stay in force.
configure() {
  local directory=$1 tools
  shift
  tools="$(command -v meson) $(command -v nvcc || true)"
  if [ ! -e "$directory/build.ninja" ]; then
    meson setup "$directory" "$@"
  elif [ "$(cat "$directory/.dev-tools" 2>/dev/null)" != "$tools" ]; then
    meson setup --wipe "$directory" "$@"
  elif [ $# -gt 0 ]; then
    meson configure "$directory" "$@"
  fi
  echo "$tools" >"$directory/.dev-tools"
}

# prepare OPTIONS: all that it takes to compile, and build/ configured.
prepare() {
  have c++ || have g++ || have clang++ ||
    die 'a C++17 compiler is needed; on Debian and Ubuntu: apt install g++'
  virtual_environment
  install_lists 'the build tools' requires
  local options=()
  [ -e "$BUILD/build.ninja" ] || options=(-Dpython_extension=auto)
  if wants_cuda "$@"; then
    cuda_compiler
    if [ -z "$HAVE_CUDA" ]; then
      say "no nvcc, and no wheels with one for $(uname -m): this build has no GPU backend." \
        'With an nvcc on PATH, ./dev build -Dcuda=enabled adds it'
      options+=(-Dcuda=disabled)
    fi
  fi
  configure "$BUILD" "${options[@]}" "$@" >&2
}

# build OPTIONS: everything that compiles, and all of it as it is to run.
build() {
  want_whole_kernels
  build_with "${KERNELS[@]}" "$@"
}

build_with() {
  virtual_environment
  local catch2
  catch2=$(catch2_include)
  prepare -Dtests=enabled -Dexamples=enabled "-Dcatch2_include=$catch2" "$@"
  compile
}

# compile TARGETS. Of quick kernels ptxas notes 200 times that wgmma is serialized, as they are not optimized.
compile() {
  if is_quick; then
    meson compile -C "$BUILD" "$@" 2>&1 | sed '/(C7520)/d' >&2
  else
    meson compile -C "$BUILD" "$@" >&2
  fi
}

# Kernels for every GPU take most of all the time. Where none is to run them, the tests, the demo and a bench of the
# CPU have each family for one GPU (Sm80's as PTX) without many of nvcc's optimizations.
readonly NARROW=75,80-ptx,90 WHOLE=(-Dgpu_archs=all -Dcuda_args=)
is_quick() { grep -qs "^gpu_archs = $NARROW\$" "$BUILD/meson-private/cmd_line.txt"; }
# These set KERNELS, the options of kernels that are all for use, or of those that this machine needs.
want_whole_kernels() {
  KERNELS=()
  ! is_quick || KERNELS=("${WHOLE[@]}")
}
choose_kernels() {
  want_whole_kernels
  have_gpu || ! wants_cuda || want_quick_kernels
}
want_quick_kernels() {
  if [ ! -e "$BUILD/build.ninja" ] || is_quick; then
    virtual_environment
    cuda_compiler
    KERNELS=("-Dgpu_archs=$NARROW" "-Dcuda_args=$(quick_kernels)")
  fi
}
build_here() {
  choose_kernels
  build_with "${KERNELS[@]}"
}
# The option for that, if nvcc has it.
quick_kernels() { [[ $("${CUDACXX:-nvcc}" --help 2>&1) != *--Ofast-compile* ]] || echo --Ofast-compile=max; }

# The library alone: it needs no Catch2.
build_library() {
  choose_kernels
  prepare "${KERNELS[@]}"
  compile nf4:shared_library
}

# Python on the library that was just built. Of what pip has not compiled, the first process to import it leaves the
# others bytecode: without, each of those that import torch takes ten seconds more.
python_environment() {
  virtual_environment
  unset PYTHONDONTWRITEBYTECODE
  export NF4_LIBRARY=$LIBRARY PYTHONPATH=$PACKAGE:$EXTENSION${PYTHONPATH:+:$PYTHONPATH}
}
