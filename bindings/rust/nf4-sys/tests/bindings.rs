//! The committed bindings are those that bindgen makes of nf4.h today.
//!
//! `NF4_BLESS=1` rewrites them. Needs libclang, which `LIBCLANG_PATH` can point to.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn header() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../include/nf4/nf4.h")
}

fn committed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bindings.rs")
}

/// Where the compiler keeps stddef.h: a libclang alone does not bring its own.
fn compiler_headers() -> Option<String> {
    let output = Command::new("cc")
        .arg("-print-file-name=include")
        .output()
        .ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    Some(format!("-idirafter{}", folder.trim()))
}

/// The functions are the argument of a macro, which links them or loads them.
fn generate() -> String {
    bindgen::Builder::default()
        .header(header().to_str().expect("a path in UTF-8"))
        .clang_args(compiler_headers())
        .clang_arg("-fparse-all-comments")
        .allowlist_item("(nf4|NF4)_.*")
        .default_macro_constant_type(bindgen::MacroTypeVariation::Signed)
        .rust_target(bindgen::RustTarget::stable(81, 0).expect("a known Rust version"))
        .formatter(bindgen::Formatter::Prettyplease)
        .use_core()
        .merge_extern_blocks(true)
        .layout_tests(true)
        .derive_debug(true)
        .derive_copy(true)
        .disable_header_comment()
        .raw_line("// Made from include/nf4/nf4.h by bindgen; do not edit. To remake it:")
        .raw_line("// NF4_BLESS=1 cargo test -p nf4-sys --test bindings")
        .generate()
        .expect("bindgen reads nf4.h")
        .to_string()
        .replace("\nextern \"C\" {\n", "\nfunctions! {\n")
}

/// Is there a libclang? One that was asked for by name has to load.
fn libclang_loads() -> bool {
    match clang_sys::load() {
        Ok(()) => true,
        Err(reason) => {
            assert!(
                env::var_os("LIBCLANG_PATH").is_none(),
                "LIBCLANG_PATH is set, but: {reason}"
            );
            // The test harness hides what the print macros write in a test that passes.
            let line = format!("skipped: no libclang ({reason})\n");
            std::io::stderr()
                .write_all(line.as_bytes())
                .expect("stderr takes a line");
            false
        }
    }
}

#[test]
fn committed_bindings_are_current() {
    if !libclang_loads() {
        return;
    }
    let generated = generate();
    if env::var_os("NF4_BLESS").is_some_and(|value| value == "1") {
        fs::write(committed(), &generated).expect("src/bindings.rs can be written");
    }
    let current = fs::read_to_string(committed()).expect("src/bindings.rs can be read");
    assert!(
        current == generated,
        "src/bindings.rs is not what bindgen makes of nf4.h; \
         NF4_BLESS=1 cargo test -p nf4-sys --test bindings remakes it"
    );
}
