//! A safe interface to libnf4, which quantizes, dequantizes and multiplies 4-bit weights on the CPU
//! and the GPU: NormalFloat (NF4), FP4 and integers.
//!
//! NF4 and FP4 weights have the layout of bitsandbytes, and dequantize is bit-equal to its CUDA
//! kernels. Integer weights have the layouts of GPTQ, AWQ and compressed-tensors.
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
//! - [`quantize`] makes a weight and [`dequantize`] returns its values. [`matmul`] computes x W^T +
//!   bias for a [`Matrix`] x, which borrows a slice. [`matmul_batch`] computes several products in one
//!   call.
//! - [`matmul_grad`] computes the gradient of x. [`matmul_lora`] and [`matmul_grad_lora`] compute the
//!   product and the gradient with a low-rank adapter, [`Lora`]; [`lora_grad`] computes the gradients
//!   of the adapter's matrices.
//! - [`matmul_grouped`] multiplies each row of x by one of a stack of experts, as [`Grouped`] assigns
//!   them. [`matmul_grouped_grad`] computes its gradient.
//! - [`quantize_into`], [`dequantize_into`], [`matmul_into`] and the other functions whose names end
//!   in `_into` write to the caller's buffers, in any [`Memory`]: slices on the [`Host`], the buffers of
//!   cudarc, or raw addresses of a [`device`]. The last argument, `on`, says how the call runs: it is
//!   a number of threads, or a stream.
//! - [`QuantizedTensor`] owns a weight; [`QuantizedRef`] and [`QuantizedMut`] borrow one from
//!   slices, such as those of a mapped file. [`Spec`] is its shape and format.
//! - [`Int4Tensor`], [`Int4Ref`] and [`Int4Spec`] are the same for a weight of integers, which
//!   [`quantize_int4`] makes or a checkpoint's tensors give. dequantize and matmul take either kind of
//!   [`Weight`]. Products of experts take an [`Int4Stack`]. [`Int4Tensor::reordered`] sorts the columns
//!   of a weight with `g_idx` (act order).
//! - [`Spec::matmul_path`] and others say which is faster for a product, on the CPU or a GPU: libnf4's
//!   own kernel, or [`dequantize`] and a dense product of another library. The answer is a [`Path`].
//! - The feature `cudarc` adds the module `cuda`, which has the buffers of that crate; cudarc then
//!   loads CUDA at run time. The feature `cudarc-core` adds the same module and leaves it to another
//!   crate, such as candle, whether cudarc links or loads CUDA. The module [`device`] has raw addresses.
//! - The feature `safetensors` adds the module `checkpoint`, which reads the NF4 and FP4 weights of
//!   files that bitsandbytes, transformers or `nf4 quantize` wrote.
//! - [`device_info`], [`build_info`], [`version`] and others describe the library and the machine.
//!
//! # Building
//! The crate `nf4-sys` links libnf4.so: from the folder in `NF4_LIB_DIR`, else the one that pkg-config
//! finds. With the feature `vendored` it builds libnf4 and links it statically. With the feature
//! `dynamic-loading` libnf4 is loaded when a program first needs it, or by `load`. If it cannot be
//! loaded, functions return `Error::NotLoaded`, and functions that return no [`Result`] abort the
//! process.

mod batch;
#[cfg(feature = "safetensors")]
pub mod checkpoint;
mod costs;
#[cfg(feature = "cudarc-core")]
pub mod cuda;
pub mod device;
mod error;
mod format;
mod global_scale;
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
pub use costs::{load_costs, load_costs_unless_set, set_costs, set_costs_of, CostsFile};
#[cfg(feature = "cudarc-core")]
pub use cudarc;
pub use error::{Error, Result};
pub use format::{DType, E8m0Rule, Element, Format, GlobalScale, CODEBOOK_SIZE, SCALE_CODE_SIZE};
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
