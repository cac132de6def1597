//! The buffers and streams of the crate cudarc.
//!
//! The operations of this crate launch on them. The weights are a [`CudaTensor`], a [`CudaRef`] and
//! others; all other operands are in `CudaSlice`, `CudaView` and `CudaViewMut` of cudarc. The last
//! argument of an operation, `on`, is a stream, or a [`Launch`] with a workspace. An operation enqueues
//! its work and returns.
//!
//! The operations are safe: lengths, element types and contexts are checked, and cudarc tracks events,
//! which keep a buffer alive and order its uses across streams.
//!
//! cudarc loads the CUDA driver at its first use, and panics if there is none: call
//! [`device_info`](crate::device_info) first.
//!
//! ```
//! use nf4::cuda::CudaTensor;
//! use nf4::cudarc::driver::CudaContext;
//!
//! if let Err(reason) = nf4::device_info(0).status {
//!     println!("skipped: {reason}");
//!     return Ok(());
//! }
//! let stream = CudaContext::new(0)?.default_stream();
//! let values: Vec<f32> = (0..4096).map(|i| (i as f32).sin()).collect();
//! let weight = nf4::quantize(&values, nf4::Spec::new(64, 64), 0)?;
//!
//! let on_gpu = CudaTensor::upload(&stream, &weight)?;
//! let mut out = stream.alloc_zeros::<half::bf16>(values.len())?;
//! nf4::dequantize_into(&on_gpu, &mut out, &stream)?;
//! let back = stream.clone_dtoh(&out)?;
//! stream.synchronize()?;
//! assert_eq!(back, nf4::dequantize::<half::bf16>(&weight, 0)?);
//! # Ok::<(), nf4::Error>(())
//! ```
//!
//! Several products go in one call, which is one launch if x has few rows:
//!
//! ```
//! use half::bf16;
//! use nf4::cuda::{CudaTensor, Launch};
//! use nf4::cudarc::driver::{CudaSlice, CudaStream};
//! use nf4::{matmul_batch_into, MatrixOf, ProductOf};
//! use std::sync::Arc;
//!
//! /// The outputs of q, k and v for m rows of x. The workspace has as many bytes as
//! /// `spec().matmul_workspace_bytes::<bf16>(m)` gives for the weight that needs most.
//! fn qkv(
//!     x: &CudaSlice<bf16>,
//!     m: usize,
//!     weights: &[CudaTensor; 3],
//!     workspace: &mut CudaSlice<u8>,
//!     stream: &Arc<CudaStream>,
//! ) -> nf4::Result<Vec<CudaSlice<bf16>>> {
//!     let outputs = weights.iter().map(|weight| stream.alloc_zeros(m * weight.spec().rows));
//!     let mut y = outputs.collect::<Result<Vec<_>, _>>()?;
//!     let (mut products, mut to) = (Vec::new(), Vec::new());
//!     for (weight, y) in weights.iter().zip(&mut y) {
//!         products.push(ProductOf::new(MatrixOf::new(x, m, weight.spec().cols)?, weight));
//!         to.push(MatrixOf::new(y, m, weight.spec().rows)?);
//!     }
//!     let on = Launch::new(stream).workspace(workspace.as_view_mut());
//!     matmul_batch_into(&products, &mut to, on)?;
//!     Ok(y)
//! }
//! ```
//!
//! The routing of experts stays on the GPU. These experts are integers:
//!
//! ```
//! use half::bf16;
//! use nf4::cuda::{CudaGrouped, CudaInt4Stack, Launch};
//! use nf4::cudarc::driver::{CudaSlice, CudaStream};
//! use nf4::{matmul_grouped_into, MatrixOf};
//! use std::sync::Arc;
//!
//! /// Row i of y is the product of row token_of_row[i] of x with the first expert e for which i < ends[e].
//! fn experts(
//!     x: &CudaSlice<bf16>,
//!     tokens: usize,
//!     weight: &CudaInt4Stack<'_>,
//!     ends: &CudaSlice<i32>,
//!     token_of_row: &CudaSlice<i32>,
//!     stream: &Arc<CudaStream>,
//! ) -> nf4::Result<CudaSlice<bf16>> {
//!     let (spec, m) = (weight.spec(), token_of_row.len());
//!     let bytes = spec.matmul_grouped_workspace_bytes::<bf16>(weight.experts(), m)?;
//!     let mut workspace = stream.alloc_zeros::<u8>(bytes.max(1))?;
//!     let mut y = stream.alloc_zeros::<bf16>(m * spec.rows)?;
//!     let operands = CudaGrouped {
//!         x_index: Some(token_of_row.as_view()),
//!         ..CudaGrouped::new(MatrixOf::new(x.as_view(), tokens, spec.cols)?, ends.as_view())
//!     };
//!     let on = Launch::new(stream).workspace(workspace.as_view_mut());
//!     matmul_grouped_into(&operands, weight, &mut MatrixOf::new(&mut y, m, spec.rows)?, on)?;
//!     Ok(y)
//! }
//! ```

mod buffer;
mod int4;
mod memory;
mod tensor;

use cudarc::driver::{CudaView, CudaViewMut};

pub use buffer::CudaBuffer;
pub use int4::{
    CudaInt4Mut, CudaInt4Parts, CudaInt4PartsMut, CudaInt4PartsRef, CudaInt4Ref, CudaInt4Stack,
    CudaInt4Tensor,
};
pub use memory::{Cuda, Launch};
pub use tensor::{CudaMut, CudaRef, CudaScales, CudaScalesMut, CudaScalesRef, CudaTensor};

/// A matrix in a buffer on the GPU, to be read.
pub type CudaMatrix<'a, T> = crate::MatrixOf<CudaView<'a, T>>;
/// A matrix in a buffer on the GPU, to be written.
pub type CudaMatrixMut<'a, T> = crate::MatrixOf<CudaViewMut<'a, T>>;
/// An adapter in buffers on the GPU.
pub type CudaLora<'a, A> = crate::LoraOf<CudaView<'a, A>>;
/// The operands of [`lora_grad_into`](crate::lora_grad_into), in buffers on the GPU.
pub type CudaLoraGrad<'a, T> = crate::LoraGradOf<CudaView<'a, T>>;
/// One of the products of [`matmul_batch_into`](crate::matmul_batch_into), in buffers on the GPU.
pub type CudaProduct<'a, T, W> = crate::ProductOf<CudaView<'a, T>, W>;
/// The operands of [`matmul_grouped_into`](crate::matmul_grouped_into), in buffers on the GPU.
pub type CudaGrouped<'a, T> =
    crate::GroupedOf<CudaView<'a, T>, CudaView<'a, i32>, CudaView<'a, f32>>;
