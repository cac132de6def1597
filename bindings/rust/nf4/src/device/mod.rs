//! Launches on raw device memory, for CUDA code of any kind.
//!
//! These functions are unsafe: they cannot check the memory behind an address. They return when the
//! work is enqueued, not when it is done. With the feature `cudarc`, the module
//! `cuda` has safe ones for the buffers of that crate.

use std::ffi::c_void;
use std::fmt;

use nf4_sys as sys;

mod gradient;
mod grouped;
mod int4;

pub use gradient::{
    lora_grad_launch, matmul_grad_launch, matmul_grad_lora_launch, matmul_lora_launch, DeviceLora,
    DeviceLoraGrad,
};
pub use grouped::{
    matmul_grouped_grad_launch, matmul_grouped_int4_launch, matmul_grouped_launch, DeviceGrouped,
};
pub use int4::{
    quantize_int4_launch, reorder_int4_launch, DeviceColumns, DeviceInt4Parts, DeviceInt4Tensor,
};

use crate::batch::RawBatch;
use crate::error::check;
use crate::kind::{Described, Descriptor};
use crate::matmul::Operands;
use crate::{Element, Result, ScalesOf, Spec};

/// A device address of elements of `T`. It owns nothing, and the host cannot dereference it.
#[repr(transparent)]
pub struct DevicePtr<T>(*mut T);

impl<T> DevicePtr<T> {
    /// NULL, good for weights of no elements.
    pub const NULL: Self = Self::from_raw(std::ptr::null_mut());

    /// From a pointer such as cudaMalloc returns.
    pub const fn from_raw(address: *mut T) -> Self {
        DevicePtr(address)
    }

    /// From a `CUdeviceptr`.
    pub const fn from_address(address: u64) -> Self {
        Self::from_raw(address as usize as *mut T)
    }

    /// The pointer that the C interface takes.
    pub const fn as_raw(self) -> *mut T {
        self.0
    }
}

// SAFETY: the address is never dereferenced on the host.
unsafe impl<T> Send for DevicePtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for DevicePtr<T> {}

impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePtr<T> {}

impl<T> PartialEq for DevicePtr<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<T> Eq for DevicePtr<T> {}

impl<T> fmt::Debug for DevicePtr<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DevicePtr({:p})", self.0)
    }
}

/// A CUDA stream: `cudaStream_t` and `CUstream` are the same pointer. It owns nothing.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(sys::nf4_stream);

impl Stream {
    /// The legacy default stream of the device that holds the memory.
    pub const LEGACY_DEFAULT: Self = Stream(std::ptr::null_mut());

    /// From a `cudaStream_t` or `CUstream`.
    pub const fn from_raw(stream: *mut c_void) -> Self {
        Stream(stream.cast())
    }

    /// The pointer that the C interface takes.
    pub const fn as_raw(self) -> *mut c_void {
        self.0.cast()
    }
}

// SAFETY: a handle; CUDA takes it from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// The scales of a weight in device memory.
pub type DeviceScales = ScalesOf<DevicePtr<f32>, DevicePtr<u8>, DevicePtr<f32>, DevicePtr<f32>>;

/// A quantized weight in device memory. The sizes of its buffers are not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Shape and format; [`Spec::sizes`] gives the sizes of the parts.
    pub spec: Spec,
    /// The codes, two in a byte.
    pub packed: DevicePtr<u8>,
    /// The scales.
    pub scales: DeviceScales,
    /// 16 floats that replace the codebook of the format.
    pub codebook: Option<DevicePtr<f32>>,
}

/// A weight of any kind in device memory: a [`DeviceTensor`] or a [`DeviceInt4Tensor`].
pub trait DeviceWeight: Described {}

impl DeviceWeight for DeviceTensor {}

impl Described for DeviceTensor {
    type Raw = sys::nf4_tensor;

    fn raw(&self) -> Result<Self::Raw> {
        let mut raw = self.spec.descriptor()?;
        raw.packed = self.packed.as_raw().cast();
        raw.codebook = self
            .codebook
            .map_or(std::ptr::null(), |entries| entries.as_raw());
        let table = |code: DevicePtr<f32>| code.as_raw().cast_const();
        self.scales
            .map(
                DevicePtr::as_raw,
                DevicePtr::as_raw,
                table,
                DevicePtr::as_raw,
            )
            .set_in(&mut raw);
        Ok(raw)
    }

    fn shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }
}

/// Enqueues on `stream`: dequantize `weight` into the `rows * cols` elements of `out`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for arguments that libnf4 can check, or
/// any other variant; then nothing was enqueued.
///
/// # Safety
/// Until the work on the stream has finished:
/// - the parts of `weight` are memory that the GPU of `stream` can reach, at least as large
///   as [`Spec::sizes`] says (and 256 floats of `code`, one of `offset`, 16 of `codebook`) or
///   [`Int4Spec::sizes`](crate::Int4Spec::sizes) (and an index of `cols` groups or a permutation
///   of the columns), alive, and written by nothing;
/// - `out` is such memory for `rows * cols` elements of `T`, used by nothing else, and no
///   part of the weight;
/// - `stream` is a live stream, or [`Stream::LEGACY_DEFAULT`].
pub unsafe fn dequant_launch<T: Element>(
    weight: &impl DeviceWeight,
    out: DevicePtr<T>,
    stream: Stream,
) -> Result<()> {
    let weight = weight.raw()?;
    // SAFETY: the descriptor lives through the call; the rest is as the caller promises.
    check(unsafe {
        (weight.functions().dequant_launch)(
            &weight,
            out.as_raw().cast(),
            T::DTYPE.as_raw(),
            stream.0,
        )
    })
}

/// Enqueues on `stream`: quantize the `rows * cols` elements of `values` into the buffers of
/// `weight`. The bytes equal those of [`quantize`](crate::quantize).
///
/// # Errors
/// As [`dequant_launch`]; after [`Error::Cuda`](crate::Error::Cuda) the outputs are
/// unspecified.
///
/// # Safety
/// Until the work on the stream has finished:
/// - `values`, and `code` and `codebook` of the weight, are memory that the GPU of `stream`
///   can reach, at least as large as needed, alive, and written by nothing;
/// - the other parts of `weight`, and `workspace` for `workspace_bytes` bytes, are such
///   memory, used by nothing else; no two of all these overlap;
/// - `stream` is a live stream, or [`Stream::LEGACY_DEFAULT`].
///
/// [`Spec::workspace_bytes`] says how much workspace is needed; it is aligned to 16 bytes.
pub unsafe fn quantize_launch<T: Element>(
    values: DevicePtr<T>,
    weight: &DeviceTensor,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let weight = weight.raw()?;
    // SAFETY: the descriptor lives through the call; the rest is as the caller promises.
    check(unsafe {
        sys::nf4_quantize_launch(
            values.as_raw().cast(),
            T::DTYPE.as_raw(),
            &weight,
            workspace.as_raw().cast(),
            workspace_bytes,
            stream.0,
        )
    })
}

/// The operands of a product beside the weight, in device memory; buffer sizes are not checked.
/// Strides are the distance between rows, in elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceMatmul<T> {
    /// Rows of `x` and of `y`.
    pub m: usize,
    /// `[m, cols]`.
    pub x: DevicePtr<T>,
    /// At least the columns of the weight.
    pub x_stride: usize,
    /// `[rows]` of the weight.
    pub bias: Option<DevicePtr<T>>,
    /// `[m, rows]`.
    pub y: DevicePtr<T>,
    /// At least the rows of the weight.
    pub y_stride: usize,
}

impl<T: Element> DeviceMatmul<T> {
    fn raw(&self) -> Operands<T> {
        Operands {
            m: self.m,
            x: self.x.as_raw().cast_const(),
            x_stride: self.x_stride,
            bias: self
                .bias
                .map_or(std::ptr::null(), |bias| bias.as_raw().cast_const()),
            y: self.y.as_raw(),
            y_stride: self.y_stride,
        }
    }
}

/// Enqueues on `stream`: `y = x weight^T + bias`, as [`matmul`](crate::matmul). `T` is [`half::f16`] or
/// [`half::bf16`].
///
/// # Errors
/// As [`dequant_launch`].
///
/// # Safety
/// Until the work on the stream has finished:
/// - the parts of `weight` are as [`dequant_launch`] requires, and so are the rows of `x` and the
///   bias;
/// - the rows of `y`, and `workspace` for `workspace_bytes` bytes, are memory that the GPU of
///   `stream` can reach, alive, and used by nothing else but what is enqueued on `stream` before
///   or after this: calls that share a `workspace` and run at the same time may never end; `y`,
///   from its first element to its last, and `workspace` overlap nothing of all this, nor each
///   other, while inputs may;
/// - `stream` is a live stream, or [`Stream::LEGACY_DEFAULT`].
///
/// [`Spec::matmul_workspace_bytes`] and [`DeviceInt4Tensor::matmul_workspace_bytes`] say how much
/// workspace is needed; it is aligned to 16 bytes, and may be [`DevicePtr::NULL`] where that is 0.
pub unsafe fn matmul_launch<T: Element>(
    weight: &impl DeviceWeight,
    operands: &DeviceMatmul<T>,
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let weight = weight.raw()?;
    // SAFETY: the structs live through the call; the rest is as the caller promises.
    check(unsafe {
        (weight.functions().matmul_launch)(
            &weight,
            &operands.raw().raw()?,
            workspace.as_raw().cast(),
            workspace_bytes,
            stream.0,
        )
    })
}

/// Workspace of a [`matmul_batch_launch`] of these products, in bytes: the largest of the products'.
/// Pointers are not read.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there are too many, or a number of
/// one is out of range.
pub fn matmul_batch_workspace_bytes<T: Element>(
    products: &[(impl DeviceWeight, DeviceMatmul<T>)],
) -> Result<usize> {
    let batch = raw_batch(products)?;
    let (weights, mut bytes) = (batch.weights(), 0);
    // SAFETY: the arrays and what they point at live through the call.
    check(unsafe {
        let (weights, args) = (weights.as_ptr(), batch.args.as_ptr());
        (batch.functions().batch_workspace_size)(weights, args, batch.args.len(), &mut bytes)
    })?;
    Ok(bytes)
}

/// Enqueues several products, at most 64, bit-equal to a [`matmul_launch`] for each. Products with few
/// rows of x share a launch, up to four.
///
/// # Errors
/// As [`dequant_launch`], for any of the products; after [`Error::Cuda`](crate::Error::Cuda) the
/// outputs are unspecified.
///
/// # Safety
/// As for [`matmul_launch`], for all of the products at once: no `y` overlaps what another product
/// reads or writes, but that rows of one may lie between rows of another. `workspace` is of
/// [`matmul_batch_workspace_bytes`] or more.
pub unsafe fn matmul_batch_launch<T: Element>(
    products: &[(impl DeviceWeight, DeviceMatmul<T>)],
    workspace: DevicePtr<u8>,
    workspace_bytes: usize,
    stream: Stream,
) -> Result<()> {
    let batch = raw_batch(products)?;
    let weights = batch.weights();
    // SAFETY: the arrays and what they point at live through the call; the rest is as the caller
    // promises.
    check(unsafe {
        (batch.functions().batch_launch)(
            weights.as_ptr(),
            batch.args.as_ptr(),
            batch.args.len(),
            workspace.as_raw().cast(),
            workspace_bytes,
            stream.0,
        )
    })
}

fn raw_batch<T: Element, W: DeviceWeight>(
    products: &[(W, DeviceMatmul<T>)],
) -> Result<RawBatch<W::Raw>> {
    RawBatch::new(
        products.iter().map(|(weight, _)| weight.raw()),
        products.iter().map(|(_, operands)| operands.raw()),
    )
}
