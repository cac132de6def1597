//! libnf4 loaded at run time, once for the process and never unloaded.

extern crate std;

use core::fmt;
use std::env;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::format;
use std::path::Path;
use std::string::{String, ToString};
use std::sync::OnceLock;

use libloading::Library;

use crate::bindings::{Functions, NF4_VERSION_MAJOR, NF4_VERSION_MINOR};

/// Defines the functions that bindgen found: each calls the one of the library, from a
/// table of them all, and aborts the process where the library cannot be loaded. They have the types
/// of linked ones.
macro_rules! functions {
    ($(
        $(#[$about:meta])*
        pub fn $name:ident($($argument:ident: $of:ty),* $(,)?) $(-> $result:ty)?;
    )*) => {
        $(
            $(#[$about])*
            pub unsafe extern "C" fn $name($($argument: $of),*) $(-> $result)? {
                (crate::loaded::functions().$name)($($argument),*)
            }
        )*

        pub(crate) struct Functions {
            $($name: unsafe extern "C" fn($($of),*) $(-> $result)?,)*
            // Their code lives as long as this.
            _library: libloading::Library,
        }

        impl Functions {
            /// # Safety
            /// The library is libnf4 of the header's version.
            pub(crate) unsafe fn of(library: libloading::Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                    _library: library,
                })
            }
        }
    };
}

const SONAME: &str = "libnf4.so.0";

static LOADED: OnceLock<Functions> = OnceLock::new();

/// Says why libnf4 cannot be loaded, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadError(String);

impl LoadError {
    /// Returns the text.
    pub fn detail(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for LoadError {}

/// Loads libnf4, unless it is loaded. It loads the file that the environment variable `NF4_LIBRARY`
/// names, or `libnf4.so.0` from the folders in which the system's loader searches.
///
/// The first call of any other function does the same. If libnf4 cannot be loaded, that call prints
/// the error and aborts the process.
///
/// # Errors
/// The file cannot be loaded, or is not a libnf4 of this crate's version.
pub fn load() -> Result<(), LoadError> {
    try_functions().map(|_| ())
}

/// Loads libnf4 from a file. Call it before any other function.
///
/// # Errors
/// The file is not a libnf4 of this crate's version, or libnf4 is loaded already.
///
/// # Safety
/// Loading a library runs its code: the file has to be libnf4.
pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<(), LoadError> {
    // SAFETY: as promised by the caller.
    let functions = unsafe { open(path.as_ref().as_os_str()) }?;
    LOADED
        .set(functions)
        .map_err(|_| LoadError("libnf4 is loaded already".to_string()))
}

pub(crate) fn functions() -> &'static Functions {
    match try_functions() {
        Ok(functions) => functions,
        Err(error) => panic!("{error}"),
    }
}

fn try_functions() -> Result<&'static Functions, LoadError> {
    if let Some(functions) = LOADED.get() {
        return Ok(functions);
    }
    let chosen = env::var_os("NF4_LIBRARY").filter(|path| !path.is_empty());
    // SAFETY: the user, or who installed the system, says that this is libnf4.
    let functions = unsafe { open(&chosen.unwrap_or_else(|| OsString::from(SONAME))) }?;
    Ok(LOADED.get_or_init(|| functions))
}

/// # Safety
/// The file is libnf4, of any version.
unsafe fn open(path: &OsStr) -> Result<Functions, LoadError> {
    let shown = Path::new(path).display();
    let not_ours = |error| {
        let reason = reason(error);
        LoadError(format!("{shown} is not the libnf4 of this crate: {reason}"))
    };
    // SAFETY: the caller says that the file is libnf4, which may run its code when it is loaded;
    // nf4_version is of this type in all versions.
    let (library, number) = unsafe {
        let library = Library::new(path).map_err(|error| {
            LoadError(format!(
                "cannot load {shown}: {}; set NF4_LIBRARY to the path of libnf4.so.0, which \
                 `python -c 'import nf4; print(nf4.get_library())'` prints",
                reason(error)
            ))
        })?;
        let number = library
            .get::<unsafe extern "C" fn() -> i32>(b"nf4_version\0")
            .map_err(not_ours)?();
        (library, number)
    };
    // A later version of the same major one has all that this one has (docs/abi.md).
    if number / 10_000 != NF4_VERSION_MAJOR || number / 100 % 100 < NF4_VERSION_MINOR {
        return Err(LoadError(format!(
            "{shown} is libnf4 {}.{}.{}; this crate needs {NF4_VERSION_MAJOR}.{NF4_VERSION_MINOR}",
            number / 10_000,
            number / 100 % 100,
            number % 100
        )));
    }
    // SAFETY: it is of the header's version.
    unsafe { Functions::of(library) }.map_err(not_ours)
}

/// The message of the system's loader.
fn reason(error: libloading::Error) -> String {
    match error.source() {
        Some(said) => said.to_string(),
        None => error.to_string(),
    }
}
