//! The tests of the crate, in one program that can be carried to a machine with a GPU.

mod arguments;
mod batch;
mod common;
#[cfg(feature = "cudarc")]
mod cuda;
mod dequantize;
mod device;
mod info;
mod matmul;
mod quantize;
mod threads;
