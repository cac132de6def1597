//! 4-bit weights on the CPU and the GPU, NormalFloat (NF4), FP4 and integers: safe Rust over
//! libnf4.
//!
//! NF4 and FP4 weights are in the layout of bitsandbytes, and dequantize is bit-equal to its CUDA
//! kernels. Integer weights are in those of GPTQ, AWQ and compressed-tensors.
//!
//! ```
//! use nf4::{dequantize, quantize, Spec};
//!
//! let values: Vec<f32> = (0..4096).map(|i| (i as f32 * 0.1).sin()).collect();
//! let weight = quantize(&values, Spec::new(64, 64), 0)?;
//! assert!(weight.bits_per_weight() < 4.2);
//! let back: Vec<half::f16> = dequantize(&weight, 0)?;
//! assert_eq!(back.len(), values.len());
//! # Ok::<(), nf4::Error>(())
//! ```
//!
//! - [`quantize`] and [`dequantize`]; [`matmul`]: x W^T + bias of a [`Matrix`], which borrows a slice.
//!   [`matmul_batch`]: several products in one call.
//! - [`matmul_grad`]: the gradient of x. [`matmul_lora`] and [`matmul_grad_lora`]: with a low-rank
//!   adapter, [`Lora`], beside the weight; [`lora_grad`]: the gradients of its matrices.
//! - [`matmul_grouped`]: a stack of experts, each with the rows of [`Grouped`] that are its own;
//!   [`matmul_grouped_grad`]: its gradient.
//! - [`quantize_into`], [`dequantize_into`], [`matmul_into`] and the other functions whose names end
//!   in `_into` write to the caller's buffers, in any [`Memory`]: slices on the [`Host`], the buffers of
//!   cudarc, raw addresses of a [`device`]. Each takes as its last argument how it runs: a number of
//!   threads, or a stream.
//! - [`QuantizedTensor`] owns a weight; [`QuantizedRef`] and [`QuantizedMut`] borrow one from
//!   slices, such as those of a mapped file. [`Spec`] is its shape and format.
//! - [`Int4Tensor`], [`Int4Ref`] and [`Int4Spec`]: the same of a weight of integers, made by
//!   [`quantize_int4`] or from a checkpoint's tensors. dequantize and matmul take either
//!   [`Weight`], and products of experts an [`Int4Stack`]; [`Int4Tensor::reordered`] sorts the columns
//!   of a weight with `g_idx`.
//! - [`Spec::matmul_path`] and others say whether a product takes less time by libnf4's own kernel or
//!   by [`dequantize`] and a dense product of another library: a [`Path`], for the CPU or a GPU.
//! - Feature `cudarc`: the module `cuda`, the buffers of that crate, which loads CUDA; `cudarc-core`:
//!   the same beside a crate that has cudarc link it, such as candle. [`device`]: raw addresses.
//! - Feature `safetensors`: the module `checkpoint` reads the weights of files that bitsandbytes,
//!   transformers or `nf4 quantize` wrote.
//! - [`device_info`], [`build_info`], [`version`] and others describe the library and the machine.
//!
//! # Building
//! The crate `nf4-sys` links libnf4.so: from the folder in `NF4_LIB_DIR`, else as pkg-config
//! finds it; with the feature `vendored` it builds libnf4 and links it statically. With the
//! feature `dynamic-loading` libnf4 is loaded when a program first needs it, or by `load`; where it
//! cannot be, calls return `Error::NotLoaded`, and those that return no [`Result`] abort.

mod batch;
#[cfg(feature = "safetensors")]
pub mod checkpoint;
#[cfg(feature = "cudarc-core")]
pub mod cuda;
pub mod device;
mod error;
mod format;
mod gradient;
mod grouped;
mod info;
mod int4;
mod kind;
mod lora;
mod lora_grad;
mod matmul;
mod matrix;
mod memory;
mod ops;
mod path;
mod scales;
mod spec;
mod tensor;

pub use batch::{
    matmul_batch, matmul_batch_into, matmul_batch_workspace_bytes, matmul_joined_into, Product,
    ProductOf,
};
#[cfg(feature = "cudarc-core")]
pub use cudarc;
pub use error::{Error, Result};
pub use format::{DType, Element, Format, CODEBOOK_SIZE, SCALE_CODE_SIZE};
pub use gradient::{
    matmul_grad, matmul_grad_into, matmul_grad_lora, matmul_grad_lora_into, matmul_lora,
    matmul_lora_into,
};
pub use grouped::{
    matmul_grouped, matmul_grouped_grad, matmul_grouped_grad_into, matmul_grouped_into, Grouped,
    GroupedOf,
};
pub use info::{
    build_info, codebook, cpu_variant, device_info, scale_code, version, version_string,
    DeviceInfo, Version,
};
pub use int4::{
    quantize_int4, quantize_int4_into, reorder_int4_into, Columns, ColumnsOf, Int4Layout, Int4Mut,
    Int4Of, Int4Parts, Int4PartsMut, Int4PartsOf, Int4PartsRef, Int4Ref, Int4Scheme, Int4Sizes,
    Int4Spec, Int4Stack, Int4StackOf, Int4Tensor, ReadInt4Parts, WriteInt4Parts,
};
pub use kind::{Described, Experts, Weight};
pub use lora::{Lora, LoraOf};
pub use lora_grad::{lora_grad, lora_grad_into, LoraGrad, LoraGradOf};
pub use matmul::{matmul, matmul_into};
pub use matrix::{Matrix, MatrixMut, MatrixOf};
pub use memory::{Call, Host, LaunchOf, Memory, Read, Threads, Workspace, Write};
#[cfg(feature = "dynamic-loading")]
pub use nf4_sys::{load, load_from, LoadError};
pub use ops::{dequantize, dequantize_into, quantize, quantize_into};
pub use path::{Path, Place};
pub use scales::{ReadScales, Scales, ScalesMut, ScalesOf, ScalesRef, WriteScales};
pub use spec::{Sizes, Spec};
pub use tensor::{QuantizedMut, QuantizedOf, QuantizedRef, QuantizedTensor};
