//! The kinds of weight, codebooks and integers: one set of operations over both.

use std::ffi::c_void;
use std::ptr;

use nf4_sys as sys;
use sys::{nf4_dtype, nf4_matmul_args, nf4_path, nf4_status, nf4_stream};

use crate::error::check;
use crate::matmul::Operands;
use crate::{Element, Int4Ref, Int4Tensor, QuantizedRef, Result};

/// The C functions of a kind of weight, whose descriptor is `W`.
pub struct Functions<W> {
    pub dequant_cpu: unsafe extern "C" fn(*const W, *mut c_void, nf4_dtype, i32) -> nf4_status,
    pub dequant_launch:
        unsafe extern "C" fn(*const W, *mut c_void, nf4_dtype, nf4_stream) -> nf4_status,
    pub matmul_workspace_size:
        unsafe extern "C" fn(*const W, *const nf4_matmul_args, *mut usize) -> nf4_status,
    pub matmul_path:
        unsafe extern "C" fn(*const W, *const nf4_matmul_args, i32, *mut nf4_path) -> nf4_status,
    pub matmul_cpu: unsafe extern "C" fn(*const W, *const nf4_matmul_args, i32) -> nf4_status,
    pub matmul_launch: unsafe extern "C" fn(
        *const W,
        *const nf4_matmul_args,
        *mut c_void,
        usize,
        nf4_stream,
    ) -> nf4_status,
    pub batch_workspace_size: unsafe extern "C" fn(
        *const *const W,
        *const nf4_matmul_args,
        usize,
        *mut usize,
    ) -> nf4_status,
    pub batch_cpu:
        unsafe extern "C" fn(*const *const W, *const nf4_matmul_args, usize, i32) -> nf4_status,
    pub batch_launch: unsafe extern "C" fn(
        *const *const W,
        *const nf4_matmul_args,
        usize,
        *mut c_void,
        usize,
        nf4_stream,
    ) -> nf4_status,
}

/// A descriptor of the C interface.
pub trait Descriptor: Sized + 'static {
    const FUNCTIONS: Functions<Self>;

    fn functions(&self) -> Functions<Self> {
        Self::FUNCTIONS
    }
}

impl Descriptor for sys::nf4_tensor {
    const FUNCTIONS: Functions<Self> = Functions {
        dequant_cpu: sys::nf4_dequant_cpu,
        dequant_launch: sys::nf4_dequant_launch,
        matmul_workspace_size: sys::nf4_matmul_workspace_size,
        matmul_path: sys::nf4_matmul_path,
        matmul_cpu: sys::nf4_matmul_cpu,
        matmul_launch: sys::nf4_matmul_launch,
        batch_workspace_size: sys::nf4_matmul_batch_workspace_size,
        batch_cpu: sys::nf4_matmul_batch_cpu,
        batch_launch: sys::nf4_matmul_batch_launch,
    };
}

impl Descriptor for sys::nf4_int4_tensor {
    const FUNCTIONS: Functions<Self> = Functions {
        dequant_cpu: sys::nf4_int4_dequant_cpu,
        dequant_launch: sys::nf4_int4_dequant_launch,
        matmul_workspace_size: sys::nf4_int4_matmul_workspace_size,
        matmul_path: sys::nf4_int4_matmul_path,
        matmul_cpu: sys::nf4_int4_matmul_cpu,
        matmul_launch: sys::nf4_int4_matmul_launch,
        batch_workspace_size: sys::nf4_int4_matmul_batch_workspace_size,
        batch_cpu: sys::nf4_int4_matmul_batch_cpu,
        batch_launch: sys::nf4_int4_matmul_batch_launch,
    };
}

/// What has a descriptor.
pub trait Described {
    type Raw: Descriptor;

    /// Its pointers are only to be read through. Every call on a weight makes one, which checks
    /// the version of the library.
    fn raw(&self) -> Result<Self::Raw>;

    /// Rows and columns.
    fn shape(&self) -> (usize, usize);
}

/// A borrowed weight in host memory, of parts that were checked.
pub trait HostView: Described + Copy {}

/// A weight of any kind in host memory, to be read: a [`QuantizedRef`], an [`Int4Ref`], or a
/// reference to the tensor that owns one.
///
/// ```
/// use nf4::{dequantize, quantize, quantize_int4, Int4Layout, Int4Scheme, Int4Spec, Spec, Weight};
/// fn first<'a>(weight: impl Weight<'a>) -> nf4::Result<f32> {
///     Ok(dequantize::<f32>(weight, 0)?[0])
/// }
/// let values = [0.5f32; 128];
/// assert_eq!(first(&quantize(&values, Spec::new(1, 128).flat(), 0)?)?, 0.5);
/// let spec = Int4Spec::new(Int4Layout::GptqV2, 1, 128);
/// let weight = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
/// assert!((first(&weight)? - 0.5).abs() < 1e-3);
/// # Ok::<(), nf4::Error>(())
/// ```
pub trait Weight<'a> {
    /// What borrows its parts.
    type View: HostView;

    /// Borrows its parts.
    fn into_view(self) -> Self::View;
}

impl<'a, W: Into<QuantizedRef<'a>>> Weight<'a> for W {
    type View = QuantizedRef<'a>;

    fn into_view(self) -> Self::View {
        self.into()
    }
}

impl<'a> Weight<'a> for Int4Ref<'a> {
    type View = Self;

    fn into_view(self) -> Self {
        self
    }
}

impl<'a> Weight<'a> for &'a Int4Tensor {
    type View = Int4Ref<'a>;

    fn into_view(self) -> Self::View {
        self.view()
    }
}

/// Workspace of a matmul_launch of `m` contiguous rows, in bytes.
pub(crate) fn matmul_workspace_bytes<T: Element>(
    weight: &impl Described,
    m: usize,
) -> Result<usize> {
    let (rows, cols) = weight.shape();
    let args = contiguous::<T>(m, cols, rows);
    let (weight, args, mut bytes) = (weight.raw()?, args.raw()?, 0);
    // SAFETY: all three live through the call, and the struct_size of both structs is set.
    check(unsafe { (weight.functions().matmul_workspace_size)(&weight, &args, &mut bytes) })?;
    Ok(bytes)
}

/// `m` contiguous rows of x and y, nowhere.
pub(crate) fn contiguous<T>(m: usize, x_stride: usize, y_stride: usize) -> Operands<T> {
    Operands {
        m,
        x: ptr::null(),
        x_stride,
        bias: ptr::null(),
        y: ptr::null_mut(),
        y_stride,
    }
}
