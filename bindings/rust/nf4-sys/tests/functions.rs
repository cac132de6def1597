//! Every function of nf4.h is bound, and the library that is linked is of the header.

use std::ffi::CStr;
use std::fs;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The functions that nf4.h declares: the name before the parenthesis after NF4_API.
fn declared_functions(header: &str) -> Vec<&str> {
    header
        .split("NF4_API ")
        .skip(1)
        .filter_map(|declaration| declaration.split('(').next()?.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("nf4_"))
        .collect()
}

#[test]
fn every_function_is_bound() {
    let header = read("../../../include/nf4/nf4.h");
    let bindings = read("src/bindings.rs");
    let functions = declared_functions(&header);
    assert!(functions.contains(&"nf4_version") && functions.contains(&"nf4_dequant_launch"));
    let missing: Vec<_> = functions
        .iter()
        .filter(|name| !bindings.contains(&format!("pub fn {name}(")))
        .collect();
    assert!(
        missing.is_empty(),
        "in nf4.h but not in src/bindings.rs: {missing:?}"
    );
}

#[test]
fn the_library_is_of_the_version_of_the_header() {
    // SAFETY: no arguments; the text is static and never NULL.
    let (number, text) = unsafe {
        (
            nf4_sys::nf4_version(),
            CStr::from_ptr(nf4_sys::nf4_version_string()),
        )
    };
    let expected = [
        nf4_sys::NF4_VERSION_MAJOR,
        nf4_sys::NF4_VERSION_MINOR,
        nf4_sys::NF4_VERSION_PATCH,
    ];
    assert_eq!(
        number,
        expected[0] * 10_000 + expected[1] * 100 + expected[2]
    );
    assert_eq!(
        text.to_str(),
        Ok(expected.map(|part| part.to_string()).join(".").as_str())
    );
}
