//! Finds libnf4: the folder `NF4_LIB_DIR`, else what pkg-config knows as `nf4`. With the feature
//! `vendored` it builds libnf4 with Meson instead, and links it statically. With the feature
//! `dynamic-loading` there is nothing to link.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

const HELP: &str = "\
Set NF4_LIB_DIR to the folder that holds libnf4.so or libnf4.so.0: that of the Python package,

    export NF4_LIB_DIR=$(python -c 'import nf4, os; print(os.path.dirname(nf4.get_library()))')

or, in a clone, that of a build:

    meson setup build-pkg -Dcuda=disabled && meson compile -C build-pkg
    export NF4_LIB_DIR=$PWD/build-pkg/lib

Or install it where pkg-config finds nf4.pc (see PKG_CONFIG_PATH). The feature `vendored` builds it,
and with the feature `dynamic-loading` only a program that runs needs it.";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=NF4_LIB_DIR");
    // docs.rs has no libnf4, and links nothing.
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    let feature = |name: &str| env::var_os(format!("CARGO_FEATURE_{name}")).is_some();
    match (feature("VENDORED"), feature("DYNAMIC_LOADING")) {
        (true, true) => {
            eprintln!("nf4-sys: the features vendored and dynamic-loading exclude each other.");
            std::process::exit(1);
        }
        (true, false) => return link_vendored(),
        (false, true) => return,
        (false, false) => {}
    }
    match env::var_os("NF4_LIB_DIR") {
        Some(folder) => link_folder(Path::new(&folder)),
        None => link_installed(),
    }
}

/// The library in a folder: a wheel has no link for the linker.
fn library_in(folder: &Path) -> Option<PathBuf> {
    ["libnf4.so", "libnf4.so.0"]
        .map(|name| folder.join(name))
        .into_iter()
        .find(|path| path.is_file())
}

fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
}

fn link_folder(folder: &Path) {
    let Some(library) = library_in(folder) else {
        fail(&format!(
            "NF4_LIB_DIR is {}, which holds no libnf4.so.",
            folder.display()
        ));
    };
    let search = out_dir();
    if let Err(error) = link_into(folder, &search) {
        fail(&format!(
            "Cannot link {} into {}: {error}.",
            folder.display(),
            search.display()
        ));
    }
    println!("cargo:rerun-if-changed={}", library.display());
    println!("cargo:rustc-link-search=native={}", search.display());
    println!("cargo:rustc-link-lib=dylib=nf4");
    // DEP_NF4_LIB_DIR is for the rpath of programs that start without cargo. A relative rpath would
    // begin where the program is started.
    let absolute = std::path::absolute(folder)
        .unwrap_or_else(|error| fail(&format!("NF4_LIB_DIR is {}: {error}.", folder.display())));
    println!("cargo:lib_dir={}", absolute.display());
}

/// Makes links to the library in `search`, under the names of all its versions. Cargo
/// puts search paths inside its target folder, and only those, on the loader's path of
/// what it runs: so `cargo test` and `cargo run` find libnf4 and no rpath is needed.
fn link_into(folder: &Path, search: &Path) -> io::Result<()> {
    let folder = folder.canonicalize()?;
    let link = |name: &str, target: &Path| -> io::Result<()> {
        let link = search.join(name);
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link)?;
        }
        std::os::unix::fs::symlink(target, &link)
    };
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name();
        let target = folder.join(&name);
        let name = name.to_string_lossy();
        if name.starts_with("libnf4.so") && target.is_file() {
            link(&name, &target)?;
        }
    }
    match library_in(&folder) {
        Some(library) => link("libnf4.so", &library),
        None => Ok(()),
    }
}

/// Builds the sources around this crate, in a clone or a git dependency, or those of NF4_SOURCE_DIR.
fn link_vendored() {
    println!("cargo:rerun-if-env-changed=NF4_SOURCE_DIR");
    println!("cargo:rerun-if-env-changed=NF4_MESON_OPTIONS");
    let source = env::var_os("NF4_SOURCE_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.."),
        PathBuf::from,
    );
    if !source.join("include/nf4/nf4.h").is_file() {
        fail(&format!(
            "the feature vendored needs the sources of libnf4, which are not in {}: \
             use a git dependency, or set NF4_SOURCE_DIR to a clone.",
            source.display()
        ));
    }
    for folder in ["include", "lib", "meson.build", "meson.options"] {
        println!("cargo:rerun-if-changed={}", source.join(folder).display());
    }
    let (build, prefix) = (out_dir().join("meson"), out_dir().join("prefix"));
    // A build folder of other options or of a broken run would be kept by Meson.
    let _ = fs::remove_dir_all(&build);
    let options = env::var("NF4_MESON_OPTIONS").unwrap_or_default();
    meson(
        Command::new("meson")
            .args(["setup", "--libdir=lib", "-Ddefault_library=static"])
            .arg(format!("--prefix={}", prefix.display()))
            .args(options.split_whitespace())
            .arg(&build)
            .arg(&source),
    );
    meson(Command::new("meson").args(["compile", "-C"]).arg(&build));
    meson(
        Command::new("meson")
            .args(["install", "--quiet", "--no-rebuild", "-C"])
            .arg(&build),
    );
    link_static(&prefix);
}

fn meson(command: &mut Command) {
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => fail(&format!(
            "Meson cannot build libnf4:\n{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
        Err(error) => fail(&format!(
            "the feature vendored builds libnf4 with Meson, which does not run ({error}): \
             pip install meson ninja."
        )),
    }
}

/// Links what nf4.pc of a prefix with the static library names.
fn link_static(prefix: &Path) {
    let lib = prefix.join("lib");
    let text = fs::read_to_string(lib.join("pkgconfig/nf4.pc"))
        .unwrap_or_else(|error| fail(&format!("cannot read nf4.pc: {error}")));
    let libs = text.lines().find_map(|line| line.strip_prefix("Libs:"));
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=static=nf4");
    for word in libs.unwrap_or_default().split_whitespace() {
        if let Some(folder) = word.strip_prefix("-L").filter(|word| !word.contains('$')) {
            println!("cargo:rustc-link-search=native={folder}");
        } else if let Some(name) = word.strip_prefix("-l").filter(|name| *name != "nf4") {
            println!("cargo:rustc-link-lib={name}");
        }
    }
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
    match paths.iter().find(|folder| library_in(folder).is_some()) {
        Some(folder) => link_folder(folder),
        // pkg-config names no folder where the linker searches anyway.
        None => {
            println!("cargo:rustc-link-lib=dylib=nf4");
            if let Ok(folder) = pkg_config::get_variable("nf4", "libdir") {
                println!("cargo:lib_dir={folder}");
            }
        }
    }
}

/// The first version whose ABI may be another (docs/abi.md).
fn next_incompatible() -> String {
    let major: u32 = env!("CARGO_PKG_VERSION_MAJOR")
        .parse()
        .expect("cargo's versions are numbers");
    format!("{}.0.0", major + 1)
}

fn fail(reason: &str) -> ! {
    eprintln!("nf4-sys: {reason}\n\n{HELP}\n");
    std::process::exit(1);
}
