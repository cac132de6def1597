# Programs in Rust, Go and Node on the wheel that is installed, by their pages' commands as they stand.
# Read by wheel.sh, which has what is used here and not defined.
# shellcheck shell=bash disable=SC2154

# language NAME PROGRAM...: a function of that name in a folder of its own, where there are the programs.
language() {
  local name=$1 program
  for program in "${@:2}"; do
    have "$program" || { skipped "$name" "no $program" && return; }
  done
  rm -rf "${folder:?}/$name" && mkdir "$folder/$name"
  (cd "$folder/$name" && PATH=$folder/bin:$PATH && "in_$name")
  passed "$name"
}

# A page of commands, in a shell of its own.
commands() { block "$@" | sh -e >log 2>&1 || { cat log >&2 && return 1; }; }

# printed PATTERN: in what the last commands printed, which is shown otherwise.
printed() { grep -q "$1" log || { cat log >&2 && return 1; }; }

# toml WORD: the page's block, with this clone's path; quoted, it may have any characters.
toml() {
  local text
  text=$(block docs/rust.md toml "$1")
  printf '%s\n' "${text//libnf4\/bindings/"$root"/bindings}"
}

# cargo_package WORD: a Cargo.toml with the page's dependencies.
cargo_package() {
  printf '[package]\nname = "app"\nedition = "2021"\n[workspace]\n' >Cargo.toml
  toml "$1" >>Cargo.toml
}

in_Rust() {
  export CARGO_TARGET_DIR=$folder/Rust/target
  mkdir src
  cp "$root/Cargo.lock" .  # crates that lie here already
  block docs/rust.md rust 'fn main() -> nf4' >src/main.rs
  cargo_package 'nf4" }'
  toml 'nf4-sys =' >>Cargo.toml
  block docs/rust.md rust DEP_NF4_LIB_DIR >build.rs
  commands docs/rust.md sh 'export NF4_LIB_DIR'
  printed '^1024 outputs'
  target/debug/app >log && printed '^1024 outputs'  # without cargo, by the rpath of build.rs
  cargo_package dynamic-loading
  commands docs/rust.md sh 'export NF4_LIBRARY'
  printed '^1024 outputs'
}

in_Go() {
  block docs/go-and-node.md go 'package main' >main.go
  commands docs/go-and-node.md sh 'go build'
  printed 'y\[1\] is 0.338'
}

in_Node() {
  block docs/go-and-node.md js koffi >main.js
  commands docs/go-and-node.md sh 'npm install'
  printed 'y\[1\] is 0.338'
}

language Rust cargo
language Go go cc pkg-config
# koffi is downloaded.
if ! have npm || npm ping >"$folder/npm.log" 2>&1; then
  language Node node npm
else
  skipped Node 'no registry to install koffi from'
fi
