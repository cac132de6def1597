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
//! - [`quantize`] and [`dequantize`]; [`quantize_into`] and [`dequantize_into`] write to the caller's
//!   buffers.
//! - [`matmul`] and [`matmul_into`]: x W^T + bias on [`Matrix`] and [`MatrixMut`], which borrow
//!   slices. [`matmul_batch`] and [`matmul_batch_into`]: several in one call.
//! - [`matmul_grad`]: the gradient of x. [`matmul_lora`] and [`matmul_grad_lora`]: with a low-rank
//!   adapter, [`Lora`], beside the weight; [`lora_grad`]: the gradients of its matrices.
//! - [`matmul_grouped`]: a stack of experts, each with the rows of [`Grouped`] that are its own;
//!   [`matmul_grouped_grad`]: its gradient; [`matmul_grouped_int4`]: of integers, an [`Int4Stack`].
//! - [`QuantizedTensor`] owns a weight; [`QuantizedRef`] and [`QuantizedMut`] borrow one from
//!   slices, such as those of a mapped file. [`Spec`] is its shape and format.
//! - [`Int4Tensor`], [`Int4Ref`] and [`Int4Spec`]: the same of a weight of integers, made by
//!   [`quantize_int4`] or from a checkpoint's tensors. dequantize and matmul take either
//!   [`Weight`]; [`Int4Tensor::reordered`] sorts the columns of one with `g_idx`.
//! - [`Spec::matmul_path`] and others say whether a product takes less time by libnf4's own kernel or
//!   by [`dequantize`] and a dense product of another library: a [`Path`], for the CPU or a GPU.
//! - [`device`]: unsafe launches on raw device pointers and a stream. Feature `cudarc`: the
//!   module `cuda`, safe ones on the buffers of that crate, which loads CUDA; `cudarc-core`: the same
//!   beside a crate that has cudarc link it, such as candle.
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
mod lora_grad;
mod matmul;
mod ops;
mod path;
mod scales;
mod spec;
mod tensor;

pub use batch::{matmul_batch, matmul_batch_into, Product};
#[cfg(feature = "cudarc-core")]
pub use cudarc;
pub use error::{Error, Result};
pub use format::{DType, Element, Format, CODEBOOK_SIZE, SCALE_CODE_SIZE};
pub use gradient::{matmul_grad, matmul_grad_into, matmul_grad_lora, matmul_lora, Lora};
pub use grouped::{matmul_grouped, matmul_grouped_grad, matmul_grouped_int4, Grouped};
pub use info::{
    build_info, codebook, cpu_variant, device_info, scale_code, version, version_string,
    DeviceInfo, Version,
};
pub use int4::{
    quantize_int4, quantize_int4_into, reorder_int4_into, Columns, ColumnsOf, Int4Layout, Int4Mut,
    Int4Parts, Int4PartsMut, Int4PartsOf, Int4PartsRef, Int4Ref, Int4Scheme, Int4Sizes, Int4Spec,
    Int4Stack, Int4Tensor,
};
pub use kind::Weight;
pub use lora_grad::{lora_grad, lora_grad_into, LoraGrad};
pub use matmul::{matmul, matmul_into, Matrix, MatrixMut};
#[cfg(feature = "dynamic-loading")]
pub use nf4_sys::{load, load_from, LoadError};
pub use ops::{dequantize, dequantize_into, quantize, quantize_into, Workspace};
pub use path::{Path, Place};
pub use scales::{Scales, ScalesMut, ScalesOf, ScalesRef};
pub use spec::{Sizes, Spec};
pub use tensor::{QuantizedMut, QuantizedRef, QuantizedTensor};
