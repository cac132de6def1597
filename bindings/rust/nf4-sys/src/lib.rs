//! Raw bindings to libnf4, generated from its header `nf4/nf4.h` and nothing else.
//!
//! The header is the manual: memory, ownership, threads, alignment and errors are
//! described there, and the comments below are its own. For a safe interface see the
//! crate `nf4`.
//!
//! # Linking
//! The build looks in the folder that the environment variable `NF4_LIB_DIR` names,
//! else asks pkg-config for `nf4`.
#![no_std]
#![allow(non_camel_case_types, non_upper_case_globals, missing_docs)]
#![allow(rustdoc::broken_intra_doc_links, rustdoc::invalid_html_tags)]

#[rustfmt::skip]
mod bindings;

pub use bindings::*;
