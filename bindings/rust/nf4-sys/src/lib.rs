//! Raw bindings to libnf4, generated from its header `nf4/nf4.h` alone.
//!
//! The header is the manual: it describes memory, ownership, threads, alignment and errors. The
//! comments below are those of the header. The crate `nf4` has a safe interface.
//!
//! # Linking
//! The build links the library of the folder in the environment variable `NF4_LIB_DIR`, else the one
//! that pkg-config has as `nf4`. With the feature `vendored` it builds libnf4 and links it
//! statically. With the feature `dynamic-loading` it links nothing: the first call loads
//! libnf4, and `load` says why it cannot be loaded.
#![no_std]
#![allow(non_camel_case_types, non_upper_case_globals, missing_docs)]
#![allow(clippy::missing_safety_doc)]
#![allow(rustdoc::broken_intra_doc_links, rustdoc::invalid_html_tags)]

/// Declares the functions that bindgen found: they are linked.
#[cfg(not(feature = "dynamic-loading"))]
macro_rules! functions {
    ($($declarations:tt)*) => { extern "C" { $($declarations)* } };
}

#[cfg(feature = "dynamic-loading")]
#[macro_use]
mod loaded;
#[cfg(feature = "dynamic-loading")]
pub use loaded::{load, load_from, LoadError};

#[rustfmt::skip]
mod bindings;

pub use bindings::*;
