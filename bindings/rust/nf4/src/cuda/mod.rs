//! Launches on the buffers and streams of the crate cudarc.
//!
//! They are safe: lengths, element types and contexts are checked, and cudarc's own tracking
//! of events keeps a buffer alive, and in order, across streams. They enqueue and return.
//!
//! cudarc loads the CUDA driver at its first use, and panics where there is none: ask
//! [`device_info`](crate::device_info) first.
//!
//! ```
//! use nf4::cuda::{self, CudaTensor};
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
//! cuda::dequantize_into(&on_gpu.view(), &mut out.as_view_mut(), &stream)?;
//! let back = stream.clone_dtoh(&out)?;
//! stream.synchronize()?;
//! assert_eq!(back, nf4::dequantize::<half::bf16>(&weight, 0)?);
//! # Ok::<(), nf4::Error>(())
//! ```

mod access;
mod batch;
mod buffer;
mod grouped;
mod int4;
mod int4_stack;
mod lora_grad;
mod ops;
mod tensor;

pub use batch::{matmul_batch_into, matmul_joined_into, CudaProduct};
pub use grouped::{
    matmul_grouped_grad_into, matmul_grouped_int4_into, matmul_grouped_into, CudaGrouped,
};
pub use int4::{quantize_int4_into, reorder_int4_into, CudaInt4Mut, CudaInt4Ref, CudaInt4Tensor};
pub use int4_stack::CudaInt4Stack;
pub use lora_grad::{lora_grad_into, CudaLoraGrad};
pub use ops::{dequantize_into, matmul_grad_into, matmul_into, quantize_into};
pub use tensor::{CudaMut, CudaRef, CudaScalesMut, CudaScalesRef, CudaTensor};

/// A weight of any kind in buffers on the GPU, to be read: a [`CudaRef`] or a [`CudaInt4Ref`].
pub trait CudaWeight: access::Readable {}
