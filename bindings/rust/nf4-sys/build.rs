//! Finds libnf4: the folder `NF4_LIB_DIR`, else what pkg-config knows as `nf4`.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

const HELP: &str = "\
Build libnf4 and set NF4_LIB_DIR to the folder that holds libnf4.so, for example in a clone of it

    meson setup build-pkg -Dcuda=disabled && meson compile -C build-pkg
    export NF4_LIB_DIR=$PWD/build-pkg/lib

or install it where pkg-config finds nf4.pc (see PKG_CONFIG_PATH).";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=NF4_LIB_DIR");
    // docs.rs has no libnf4, and links nothing.
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    match env::var_os("NF4_LIB_DIR") {
        Some(folder) => link_folder(Path::new(&folder)),
        None => link_installed(),
    }
}

fn link_folder(folder: &Path) {
    if !folder.join("libnf4.so").is_file() {
        fail(&format!(
            "NF4_LIB_DIR is {}, which holds no libnf4.so.",
            folder.display()
        ));
    }
    let search = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if let Err(error) = link_into(folder, &search) {
        fail(&format!(
            "Cannot link {} into {}: {error}.",
            folder.display(),
            search.display()
        ));
    }
    println!(
        "cargo:rerun-if-changed={}",
        folder.join("libnf4.so").display()
    );
    println!("cargo:rustc-link-search=native={}", search.display());
    println!("cargo:rustc-link-lib=dylib=nf4");
}

/// Makes links to the library in `search`, under the names of all its versions. Cargo
/// puts search paths inside its target folder, and only those, on the loader's path of
/// what it runs: so `cargo test` and `cargo run` find libnf4 and no rpath is needed.
fn link_into(folder: &Path, search: &Path) -> io::Result<()> {
    let folder = folder.canonicalize()?;
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name();
        let target = folder.join(&name);
        if name.to_string_lossy().starts_with("libnf4.so") && target.is_file() {
            let link = search.join(&name);
            if link.symlink_metadata().is_ok() {
                fs::remove_file(&link)?;
            }
            std::os::unix::fs::symlink(&target, &link)?;
        }
    }
    Ok(())
}

fn link_installed() {
    let next = next_incompatible();
    let found = pkg_config::Config::new()
        .range_version(env!("CARGO_PKG_VERSION")..next.as_str())
        .cargo_metadata(false)
        .probe("nf4");
    let paths = match found {
        Ok(library) => library.link_paths,
        Err(error) => fail(&format!(
            "NF4_LIB_DIR is not set and pkg-config does not find nf4: {error}"
        )),
    };
    let holds_it = |folder: &&PathBuf| folder.join("libnf4.so").is_file();
    match paths.iter().find(holds_it) {
        Some(folder) => link_folder(folder),
        // pkg-config names no folder where the linker and the loader search anyway.
        None => println!("cargo:rustc-link-lib=dylib=nf4"),
    }
}

/// The first version whose ABI may be another: until 1.0 a minor version may break it.
fn next_incompatible() -> String {
    let number = |text: &str| -> u32 { text.parse().expect("cargo's versions are numbers") };
    match number(env!("CARGO_PKG_VERSION_MAJOR")) {
        0 => format!("0.{}.0", number(env!("CARGO_PKG_VERSION_MINOR")) + 1),
        major => format!("{}.0.0", major + 1),
    }
}

fn fail(reason: &str) -> ! {
    eprintln!("nf4-sys: {reason}\n\n{HELP}\n");
    std::process::exit(1);
}
