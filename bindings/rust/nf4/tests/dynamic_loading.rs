//! libnf4 loaded at run time: files that are not it are refused, each with its reason, and then the
//! library is loaded and used. One test, since a process loads it once.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nf4::{Error, Spec};

/// Set in the processes that the test starts.
const CHILD: &str = "NF4_TEST_CHILD";

/// A library of the C source `text`.
fn compiled(folder: &Path, name: &str, text: &str) -> PathBuf {
    let (source, library) = (folder.join(format!("{name}.c")), folder.join(name));
    std::fs::write(&source, text).expect("the folder can be written");
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(made.expect("cc runs").success());
    library
}

fn refused(path: &Path) -> String {
    // SAFETY: what is loaded has no code that runs by itself.
    let error = unsafe { nf4::load_from(path) }.expect_err("this is not libnf4");
    error.to_string()
}

/// This program where NF4_LIBRARY is `library`, and no function was called before one that returns no
/// Result.
fn version_in_a_process(library: &Path) -> Output {
    process()
        .env("NF4_LIBRARY", library)
        .output()
        .expect("it runs")
}

fn process() -> Command {
    let mut program = Command::new(env::current_exe().expect("it has a path"));
    program.arg("--nocapture").env(CHILD, "1");
    program
}

#[test]
fn the_library_is_loaded_once_and_by_name() {
    let library = env::var_os("NF4_LIBRARY").expect("NF4_LIBRARY is the library to test with");
    if env::var_os(CHILD).is_some() {
        assert!(nf4::version_string().starts_with("0."));
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    assert!(version_in_a_process(Path::new(&library)).status.success());
    let aborted = version_in_a_process(&folder.join("none.so"));
    assert!(!aborted.status.success());
    assert!(String::from_utf8_lossy(&aborted.stderr).contains("set NF4_LIBRARY"));

    // Nothing is loaded from the current folder, neither by default nor by a bare name.
    let planted =
        "#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { _Exit(77); }";
    compiled(folder, "libnf4.so.0", planted);
    assert_eq!(
        version_in_a_process(&folder.join("libnf4.so.0"))
            .status
            .code(),
        Some(77)
    );
    for named in ["", "libnf4.so.0"] {
        let mut program = process();
        program
            .env("NF4_LIBRARY", named)
            .env_remove("LD_LIBRARY_PATH")
            .current_dir(folder);
        assert_ne!(program.output().expect("it runs").status.code(), Some(77));
    }

    env::set_var("NF4_LIBRARY", folder.join("none.so"));
    let error = nf4::quantize(&[0.0; 64], Spec::new(1, 64), 1).unwrap_err();
    assert!(matches!(error, Error::NotLoaded(_)), "{error:?}");
    assert!(error.detail().contains("none.so") && error.detail().contains("set NF4_LIBRARY"));
    assert_eq!(nf4::device_info(0).status, Err(error));

    let text = refused(&compiled(folder, "other.so", "int other;"));
    assert!(
        text.contains("other.so is not the libnf4") && text.contains("nf4_version"),
        "{text}"
    );
    let later = compiled(
        folder,
        "later.so",
        "int nf4_version(void) { return 10907; }",
    );
    assert!(refused(&later).ends_with("is libnf4 1.9.7; this crate needs 0.1"));
    let earlier = "int nf4_version(void) { return 9; }";
    let text = refused(&compiled(folder, "earlier.so", earlier));
    assert!(
        text.ends_with("is libnf4 0.0.9; this crate needs 0.1"),
        "{text}"
    );
    // Its minor version, and a later one, would do.
    let version = nf4_version_of_header();
    for (name, version) in [("partial.so", version), ("next.so", version + 100)] {
        let partial = format!("int nf4_version(void) {{ return {version}; }}");
        let text = refused(&compiled(folder, name, &partial));
        let not_ours = format!("{name} is not the libnf4");
        assert!(text.contains(&not_ours) && text.contains("nf4_"), "{text}");
    }

    // SAFETY: it is libnf4.
    unsafe { nf4::load_from(&library) }.expect("libnf4 is loaded");
    let values: Vec<f32> = (0..256).map(|i| (i as f32 * 0.1).sin()).collect();
    let weight = nf4::quantize(&values, Spec::new(4, 64), 1).expect("quantize runs");
    let back: Vec<f32> = nf4::dequantize(&weight, 1).expect("dequantize runs");
    assert!(values.iter().zip(&back).all(|(a, b)| (a - b).abs() < 0.2));
    assert_eq!(nf4::load(), Ok(()));
    assert_eq!(refused(Path::new(&library)), "libnf4 is loaded already");
}

fn nf4_version_of_header() -> i32 {
    nf4_sys::NF4_VERSION_MAJOR * 10_000 + nf4_sys::NF4_VERSION_MINOR * 100
}
