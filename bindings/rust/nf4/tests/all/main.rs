//! The tests of the crate, in one program that can be carried to a machine with a GPU.

mod arguments;
mod batch;
mod common;
#[cfg(feature = "cudarc")]
mod cuda;
#[cfg(feature = "cudarc")]
mod cuda_batch;
mod dequantize;
mod device;
mod device_slices;
mod e2m1;
mod gradient;
mod grouped;
mod info;
mod int4;
mod int4_arguments;
mod int4_common;
mod lora_grad;
#[cfg(feature = "cudarc")]
mod lora_grad_cuda;
mod matmul;
mod path;
mod quantize;
mod threads;
