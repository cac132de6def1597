//! Products of a stack of experts (mixture of experts), on host memory.

use std::ffi::c_void;
use std::ptr;

use nf4_sys as sys;

use crate::error::{check, check_length, convert};
use crate::int4::Int4Stack;
use crate::kind::Described;
use crate::matmul::{product, reserve_y};
use crate::ops::thread_count;
use crate::{Element, Int4Spec, Matrix, QuantizedRef, Result, Spec};

/// What the experts of a weight are multiplied with. There are as many experts as `ends`, and each
/// has as many of the weight's rows. In [`matmul_grouped_grad`] `x` is the gradient of y.
#[derive(Debug, Clone, Copy)]
pub struct Grouped<'a, T> {
    /// `[_, cols]`; in the gradient `[_, rows of an expert]`.
    pub x: Matrix<'a, T>,
    /// Where the rows of y of each expert end: those of an expert begin where those of the one
    /// before it end.
    pub ends: &'a [i32],
    /// The row of `x` for each row of y; one out of range stands for zeros. Without it, row i for
    /// row i.
    pub x_index: Option<&'a [i32]>,
    /// `[experts, rows of an expert]`, contiguous; `None` in the gradient.
    pub bias: Option<&'a [T]>,
    /// What each row of y is multiplied with, such as the router's weights.
    pub row_scale: Option<&'a [f32]>,
}

impl<'a, T> Grouped<'a, T> {
    /// Rows of x that are sorted by expert, without bias and scales.
    pub fn new(x: Matrix<'a, T>, ends: &'a [i32]) -> Self {
        Grouped {
            x,
            ends,
            x_index: None,
            bias: None,
            row_scale: None,
        }
    }

    /// Rows of y.
    fn m(&self) -> usize {
        self.x_index.map_or(self.x.shape.rows, <[i32]>::len)
    }
}

/// Addresses and sizes, in host or device memory alike.
pub(crate) struct RawGrouped {
    pub dtype: sys::nf4_dtype,
    pub experts: usize,
    pub m: usize,
    pub x: *const c_void,
    pub x_stride: usize,
    pub x_rows: usize,
    pub y: *mut c_void,
    pub y_stride: usize,
    pub ends: *const i32,
    pub x_index: *const i32,
    pub bias: *const c_void,
    pub bias_stride: usize,
    pub row_scale: *const f32,
}

impl RawGrouped {
    pub(crate) fn raw(&self) -> Result<sys::nf4_grouped_args> {
        Ok(sys::nf4_grouped_args {
            struct_size: size_of::<sys::nf4_grouped_args>(),
            dtype: self.dtype,
            experts: convert("experts", self.experts)?,
            m: convert("m", self.m)?,
            x: self.x,
            x_stride: convert("x_stride", self.x_stride)?,
            x_rows: convert("x_rows", self.x_rows)?,
            y: self.y,
            y_stride: convert("y_stride", self.y_stride)?,
            ends: self.ends,
            x_index: self.x_index,
            bias: self.bias,
            bias_stride: convert("bias_stride", self.bias_stride)?,
            row_scale: self.row_scale,
        })
    }
}

/// The product of the rows of each expert with its part of the weight, `[m, rows of an expert]` in
/// row-major order: row i is `row_scale[i] * (x[x_index[i]] W[e]^T + bias[e])` for the expert `e`
/// of the row, and zeros where `ends` gives it none. Ends that decrease give an expert no rows.
///
/// `threads` as in [`matmul`](crate::matmul).
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if an operand does not fit the weight,
/// the experts have not as many rows each, or several do not each begin with a block.
///
/// ```
/// use nf4::{matmul_grouped, quantize, Grouped, Matrix, Spec};
/// // Two experts of two rows each; the first has one row of y, the second two.
/// let values: Vec<f32> = (0..4 * 64).map(|i| if i < 128 { 0.5 } else { 2.0 }).collect();
/// let weight = quantize(&values, Spec::new(4, 64).flat(), 0)?;
/// let x = [1.0f32; 64];
/// let operands = Grouped {
///     x_index: Some(&[0, 0, 7]),
///     row_scale: Some(&[1.0, 0.5, 1.0]),
///     ..Grouped::new(Matrix::new(&x, 1, 64)?, &[1, 3])
/// };
/// assert_eq!(matmul_grouped(&operands, &weight, 0)?, [32.0, 32.0, 64.0, 64.0, 0.0, 0.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_grouped<'a, T: Element>(
    operands: &Grouped<'_, T>,
    weight: impl Into<QuantizedRef<'a>>,
    threads: u32,
) -> Result<Vec<T>> {
    let weight = weight.into();
    let (rows, cols) = weight.shape();
    let of_expert = rows / operands.ends.len().max(1);
    let raw = weight.raw()?;
    run(operands, cols, of_expert, rows, |args| {
        // SAFETY: the parts of the weight were checked when it was made, the operands by `run`;
        // libnf4 refuses experts that do not divide the rows.
        unsafe { sys::nf4_matmul_grouped_cpu(&raw, args, thread_count(threads)) }
    })
}

/// The gradient of [`matmul_grouped`] with respect to the rows of x that its rows of y were made
/// of, `[m, cols]` in row-major order: row i is `row_scale[i] * grad_y[x_index[i]] W[e]` for the
/// expert `e` of the row, and zeros where `ends` gives it none. The rows of x that several rows of
/// y were made of get the sum of theirs, which is the caller's to form.
///
/// # Errors
/// As [`matmul_grouped`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is
/// a bias.
///
/// ```
/// use nf4::{matmul_grouped_grad, quantize, Grouped, Matrix, Spec};
/// let values: Vec<f32> = (0..4 * 64).map(|i| if i < 128 { 0.5 } else { 2.0 }).collect();
/// let weight = quantize(&values, Spec::new(4, 64).flat(), 0)?;
/// let grad_y = [1.0f32, 2.0, 3.0, 4.0];
/// let operands = Grouped::new(Matrix::new(&grad_y, 2, 2)?, &[1, 2]);
/// let grad_x = matmul_grouped_grad(&operands, &weight, 0)?;
/// assert_eq!((grad_x[0], grad_x[64]), (1.5, 14.0));
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_grouped_grad<'a, T: Element>(
    operands: &Grouped<'_, T>,
    weight: impl Into<QuantizedRef<'a>>,
    threads: u32,
) -> Result<Vec<T>> {
    let weight = weight.into();
    let (rows, cols) = weight.shape();
    let of_expert = rows / operands.ends.len().max(1);
    let raw = weight.raw()?;
    run(operands, of_expert, cols, rows, |args| {
        // SAFETY: as in matmul_grouped.
        unsafe { sys::nf4_matmul_grouped_grad_cpu(&raw, args, thread_count(threads)) }
    })
}

/// [`matmul_grouped`] with experts of integers, as many as `ends`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if an operand does not fit the weight.
///
/// ```
/// use half::f16;
/// use nf4::{matmul_grouped_int4, ColumnsOf, Grouped, Int4Layout, Int4PartsRef, Int4Spec};
/// use nf4::{Int4Stack, Matrix};
/// // Two experts of one row of eight codes; all zero points are 8.
/// let spec = Int4Spec::new(Int4Layout::CompressedTensors, 1, 8).group_size(Some(8));
/// let parts = Int4PartsRef {
///     packed: &[0x9999_9999, 0xAAAA_AAAA],
///     scales: &[f16::ONE.to_bits(), f16::ONE.to_bits()],
///     zeros: None,
///     columns: ColumnsOf::InOrder,
/// };
/// let x = [1.0f32; 16];
/// let operands = Grouped::new(Matrix::new(&x, 2, 8)?, &[1, 2]);
/// let y = matmul_grouped_int4(&operands, Int4Stack::new(spec, 2, parts)?, 0)?;
/// assert_eq!(y, [8.0, 16.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_grouped_int4<T: Element>(
    operands: &Grouped<'_, T>,
    weight: Int4Stack<'_>,
    threads: u32,
) -> Result<Vec<T>> {
    let (rows, cols) = weight.expert_shape();
    check_length("ends", operands.ends.len(), weight.experts())?;
    let of_all = product("experts * rows", weight.experts(), rows)?;
    let raw = weight.raw()?;
    run(operands, cols, rows, of_all, |args| {
        // SAFETY: the parts of the stack were checked when it was made, the operands by `run`.
        unsafe { sys::nf4_int4_matmul_grouped_cpu(&raw, args, thread_count(threads)) }
    })
}

/// Checks the operands, calls libnf4 on them and a new y, and returns that. `of_all`: rows of all
/// experts.
fn run<T: Element>(
    operands: &Grouped<'_, T>,
    x_columns: usize,
    y_columns: usize,
    of_all: usize,
    call: impl FnOnce(&sys::nf4_grouped_args) -> sys::nf4_status,
) -> Result<Vec<T>> {
    let (experts, m, x) = (operands.ends.len(), operands.m(), &operands.x);
    x.shape.check("x", x.shape.rows, x_columns)?;
    if let Some(bias) = operands.bias {
        check_length("bias", bias.len(), of_all)?;
    }
    if let Some(row_scale) = operands.row_scale {
        check_length("row_scale", row_scale.len(), m)?;
    }
    let mut y = reserve_y::<T>(m, y_columns)?;
    // SAFETY: there is room for so many elements, of types whose zero is all bits 0.
    unsafe {
        y.as_mut_ptr().write_bytes(0, m * y_columns);
        y.set_len(m * y_columns);
    }
    let args = RawGrouped {
        dtype: T::DTYPE.as_raw(),
        experts,
        m,
        x: x.values.as_ptr().cast(),
        x_stride: x.shape.stride,
        x_rows: x.shape.rows,
        y: y.as_mut_ptr().cast(),
        y_stride: y_columns,
        ends: operands.ends.as_ptr(),
        x_index: operands.x_index.map_or(ptr::null(), <[i32]>::as_ptr),
        bias: operands.bias.map_or(ptr::null(), <[T]>::as_ptr).cast(),
        bias_stride: of_all / experts.max(1),
        row_scale: operands.row_scale.map_or(ptr::null(), <[f32]>::as_ptr),
    };
    // x against its slice was checked when it was made, the other lengths above; libnf4 reads no
    // row of x that is out of range.
    check(call(&args.raw()?))?;
    Ok(y)
}

/// Operands without addresses, for a query of a launch with x_index.
pub(crate) fn nowhere<T: Element>(
    experts: usize,
    m: usize,
    x_stride: usize,
    y_stride: usize,
) -> RawGrouped {
    RawGrouped {
        dtype: T::DTYPE.as_raw(),
        experts,
        m,
        x: ptr::null(),
        x_stride,
        x_rows: m,
        y: ptr::null_mut(),
        y_stride,
        ends: ptr::null(),
        x_index: ptr::NonNull::<i32>::dangling().as_ptr(),
        bias: ptr::null(),
        bias_stride: 0,
        row_scale: ptr::null(),
    }
}

/// The bytes that `query` says; it gets the arguments and where to write.
fn workspace_bytes(
    args: &RawGrouped,
    query: impl FnOnce(&sys::nf4_grouped_args, &mut usize) -> sys::nf4_status,
) -> Result<usize> {
    let mut bytes = 0;
    check(query(&args.raw()?, &mut bytes))?;
    Ok(bytes)
}

impl Spec {
    /// Workspace of a [`matmul_grouped_launch`](crate::device::matmul_grouped_launch) of `m` rows of
    /// y and so many experts, in bytes, and never more for fewer rows, or without `x_index`.
    ///
    /// # Errors
    /// As [`Spec::sizes`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m` or
    /// `experts` is out of range.
    pub fn matmul_grouped_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = nowhere::<T>(experts, m, self.cols, self.rows);
        let raw = self.descriptor()?;
        // SAFETY: all of them live through the call, and the struct_size of each struct is set.
        workspace_bytes(&args, |args, bytes| unsafe {
            sys::nf4_matmul_grouped_workspace_size(&raw, args, bytes)
        })
    }

    /// The same of a [`matmul_grouped_grad_launch`](crate::device::matmul_grouped_grad_launch).
    ///
    /// # Errors
    /// As [`Spec::matmul_grouped_workspace_bytes`].
    pub fn matmul_grouped_grad_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = nowhere::<T>(experts, m, self.rows, self.cols);
        let raw = self.descriptor()?;
        // SAFETY: as above.
        workspace_bytes(&args, |args, bytes| unsafe {
            sys::nf4_matmul_grouped_grad_workspace_size(&raw, args, bytes)
        })
    }
}

impl Int4Spec {
    /// Workspace of a [`matmul_grouped_int4_launch`](crate::device::matmul_grouped_int4_launch) of
    /// `m` rows of y and so many experts of this spec, in bytes, and never more for fewer rows, or
    /// without `x_index`.
    ///
    /// # Errors
    /// As [`Int4Spec::sizes`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m`
    /// or `experts` is out of range.
    pub fn matmul_grouped_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = nowhere::<T>(experts, m, self.cols, self.rows);
        let raw = self.descriptor()?;
        // SAFETY: as above.
        workspace_bytes(&args, |args, bytes| unsafe {
            sys::nf4_int4_matmul_grouped_workspace_size(&raw, args, bytes)
        })
    }
}
