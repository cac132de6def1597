//! Products of a stack of experts (mixture of experts), on host memory.

use std::ffi::c_void;
use std::ptr;

use nf4_sys as sys;

use crate::error::{check, check_length, convert};
use crate::kind::Described;
use crate::matmul::reserve_y;
use crate::ops::thread_count;
use crate::{Element, Matrix, QuantizedRef, Result, Spec};

/// What the experts of a weight are multiplied with. There are as many experts as `ends`, and each
/// has as many of the weight's rows.
#[derive(Debug, Clone, Copy)]
pub struct Grouped<'a, T> {
    /// `[_, cols]`.
    pub x: Matrix<'a, T>,
    /// Where the rows of y of each expert end: those of an expert begin where those of the one
    /// before it end.
    pub ends: &'a [i32],
    /// The row of `x` for each row of y; one out of range stands for zeros. Without it, row i for
    /// row i.
    pub x_index: Option<&'a [i32]>,
    /// `[experts, rows of an expert]`, contiguous.
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
    let (experts, m, x) = (operands.ends.len(), operands.m(), &operands.x);
    x.shape.check("x", x.shape.rows, cols)?;
    if let Some(bias) = operands.bias {
        check_length("bias", bias.len(), rows)?;
    }
    if let Some(row_scale) = operands.row_scale {
        check_length("row_scale", row_scale.len(), m)?;
    }
    let columns = rows / experts.max(1);
    let mut y = reserve_y::<T>(m, columns)?;
    // SAFETY: there is room for so many elements, of types whose zero is all bits 0.
    unsafe {
        y.as_mut_ptr().write_bytes(0, m * columns);
        y.set_len(m * columns);
    }
    let args = RawGrouped {
        dtype: T::DTYPE.as_raw(),
        experts,
        m,
        x: x.values.as_ptr().cast(),
        x_stride: x.shape.stride,
        x_rows: x.shape.rows,
        y: y.as_mut_ptr().cast(),
        y_stride: columns,
        ends: operands.ends.as_ptr(),
        x_index: operands.x_index.map_or(ptr::null(), <[i32]>::as_ptr),
        bias: operands.bias.map_or(ptr::null(), <[T]>::as_ptr).cast(),
        bias_stride: columns,
        row_scale: operands.row_scale.map_or(ptr::null(), <[f32]>::as_ptr),
    };
    // SAFETY: the parts of the weight, and x against its slice, were checked when they were made, the
    // other lengths here; libnf4 refuses experts that do not divide the rows, and reads no row of x
    // that is out of range.
    check(unsafe {
        sys::nf4_matmul_grouped_cpu(&weight.raw()?, &args.raw()?, thread_count(threads))
    })?;
    Ok(y)
}

impl Spec {
    /// Workspace of a [`matmul_grouped_launch`](crate::device::matmul_grouped_launch) of `m` rows of
    /// y and so many experts with `x_index`, in bytes, and never more for fewer rows. Without
    /// `x_index` none is needed.
    ///
    /// # Errors
    /// As [`Spec::sizes`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m` or
    /// `experts` is out of range.
    pub fn matmul_grouped_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = RawGrouped {
            dtype: T::DTYPE.as_raw(),
            experts,
            m,
            x: ptr::null(),
            x_stride: self.cols,
            x_rows: m,
            y: ptr::null_mut(),
            y_stride: self.rows,
            ends: ptr::null(),
            x_index: ptr::NonNull::dangling().as_ptr(),
            bias: ptr::null(),
            bias_stride: 0,
            row_scale: ptr::null(),
        };
        let mut bytes = 0;
        // SAFETY: all of them live through the call, and the struct_size of each struct is set.
        check(unsafe {
            sys::nf4_matmul_grouped_workspace_size(&self.descriptor()?, &args.raw()?, &mut bytes)
        })?;
        Ok(bytes)
    }
}
