#!/usr/bin/env bash
# The steps of a user with a wheel, in an environment that has nothing else: the pages' Python and a
# checkpoint on the command line, without a compiler; then programs in C by get_library(), pkg-config and
# CMake, without LD_LIBRARY_PATH, and in other languages (languages.sh).
#
#   wheel.sh FOLDER WHEEL [REQUIREMENTS]
#
# FOLDER is made anew, and gets results.xml (JUnit). The wheel's requirements are downloaded, or lie in the folder
# REQUIREMENTS.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(realpath -m "$1") wheel=$(realpath "$2") requirements=${3:-}
unset PYTHONPATH NF4_LIBRARY LD_LIBRARY_PATH
began=$(date +%s%N)
# block PAGE LANGUAGE WORD: the page's first block in a language that has the word.
block() {
  # shellcheck disable=SC2016  # `...` is Markdown
  python3 -c 'import re, sys
page, language, word = sys.argv[1:]
blocks = re.findall(rf"^```{language}\n(.*?)^```", open(page).read(), re.M | re.S)
print(next(block for block in blocks if word in block))' "$root/$1" "$2" "$3"
}
result() { last=$1 results+="<testcase classname=\"wheel\" name=\"$1\">${2:-}</testcase>"; }
passed() { result "$1" && echo "ok: $1 ($((($(date +%s%N) - began) / 1000000)) ms)"; }
skipped() { result "$1" "<skipped message=\"$2\"/>" && echo "skipped: $1: $2"; }
results=''
# At the end, whatever that is: set -e ends it at what fails, which follows on the last result.
report() {
  [ $? = 0 ] || result "what follows on: ${last:-nothing}" '<failure/>'
  echo "<testsuite>$results</testsuite>" >"$folder/results.xml"
}
have() { command -v "$1" >/dev/null; }

python3 -m venv --clear "$folder"
trap report EXIT
cd "$folder"
if [ -n "$requirements" ]; then
  echo "$requirements" >"$(bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/requirements.pth"
  bin/pip install -q --no-index "$wheel"
else
  bin/pip install -q --disable-pip-version-check "$wheel"
fi
passed 'installed'

installed=$(echo lib/python3.*/site-packages)
hardening=$root/tests/abi/hardening.py
python3 "$root/tools/sbom.py" --check "$wheel"
python3 "$hardening" --fortified "$installed/nf4/lib/libnf4.so.0" >hardening.txt || { cat hardening.txt >&2 && exit 1; }
for extension in "$installed"/_nf4_fast.*; do
  [ ! -e "$extension" ] || python3 "$hardening" "$extension" >hardening.txt || { cat hardening.txt >&2 && exit 1; }
done
passed 'what it holds is listed, and hardened'

# The Python of docs/python.md, with nothing but the environment on PATH.
block docs/python.md python numpy >start.py
env PATH="$PWD/bin" NF4_BITSANDBYTES=0 python start.py
env PATH="$PWD/bin" nf4 --version
env PATH="$PWD/bin" nf4 inspect model.safetensors >/dev/null
env PATH="$PWD/bin" nf4 doctor >doctor.txt
grep -qF "$PWD/$installed/nf4/lib/libnf4.so.0" doctor.txt
passed 'Python and the command line, without a compiler'

include=$(bin/python -c 'import nf4; print(nf4.get_include())')
library=$(bin/python -c 'import nf4; print(nf4.get_library())')
example=$root/examples/c/host_matmul.c
cc -std=c99 "$example" -I"$include" "$library" "-Wl,-rpath,$(dirname "$library")" -lm -o by_path
./by_path >/dev/null
cc -std=c99 "$root/examples/c/host_dlopen.c" -I"$include" -ldl -lm -o by_dlopen
./by_dlopen "$library" >/dev/null
passed 'C by its path and by dlopen'

if have pkg-config; then
  # The C of docs/c.md as it stands; then from another folder.
  mkdir first
  block docs/c.md c nf4_matmul_cpu >first/first.c
  (cd first && block docs/c.md sh first.c | PATH=$folder/bin:$PATH sh -e >/dev/null)
  (cd / && "$folder/first/first" >/dev/null)
  ! readelf -d first/first | grep -E '(RUNPATH|RPATH).*\[[^/]' || exit 1
  passed 'C of docs/c.md'
  # The commands at the top of examples.
  for each in c/host_matmul.c cpp/host_moe.cpp; do
    {
      block docs/building.md sh prefix= | grep -v '^cmake '
      sed -n 's|^[ /*]*   \(eval ".*\)".*|\1 -o \\"\\$folder/by_its_head\\""|p' "$root/examples/$each"
    } >head.sh
    (cd "$root/examples/${each%/*}" && folder=$folder PATH=$folder/bin:$PATH sh -e "$folder/head.sh")
    ./by_its_head >/dev/null
    rm by_its_head
  done
  passed 'examples by their own commands'
else
  skipped 'C of docs/c.md' 'no pkg-config'
  skipped 'examples by their own commands' 'no pkg-config'
fi

mkdir app
cd app
cp "$example" app.c
block docs/building.md cmake find_package >CMakeLists.txt
for word in 'prefix=' '"cc app.c'; do block docs/building.md sh "$word"; done >page.sh
echo 'cmake --build build' >>page.sh
# page PATTERN: the page's commands, but for those that match.
page() { grep -v "$1" page.sh | PATH=$folder/bin:$PATH sh -e >/dev/null; }
if have pkg-config; then
  page '^cmake '
  ./app >/dev/null
  passed 'C by pkg-config'
else
  skipped 'C by pkg-config' 'no pkg-config'
fi
if have cmake; then
  page '^eval '
  build/app >/dev/null
  passed 'C by CMake'
else
  skipped 'C by CMake' 'no cmake'
fi
# shellcheck source=tests/packaging/languages.sh
source "$root/tests/packaging/languages.sh"
