//! y = x W^T + bias with a quantized W, on host memory.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check, check_length, convert};
use crate::kind::{Described, Descriptor, HostView};
use crate::ops::thread_count;
use crate::{Element, Error, Result, Weight};

/// A matrix in row-major order that borrows its elements, to be read. There may be gaps
/// between its rows.
///
/// ```
/// use nf4::Matrix;
/// let values = [1.0f32, 2.0, 0.0, 3.0, 4.0];
/// assert!(Matrix::with_stride(&values, 2, 2, 3).is_ok()); // rows [1, 2] and [3, 4]
/// let error = Matrix::new(&values, 2, 2).unwrap_err();
/// assert_eq!(error.detail(), "values has 5 elements; expected 4");
/// # Ok::<(), nf4::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) shape: Shape,
}

/// A matrix in row-major order that borrows its elements, to be written. What is between its
/// rows is left as it is.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    pub(crate) values: &'a mut [T],
    pub(crate) shape: Shape,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// `rows` contiguous rows of `cols` elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `values` has another length than `rows * cols`.
    pub fn new(values: &'a [T], rows: usize, cols: usize) -> Result<Self> {
        Self::with_stride(values, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements, each `stride` elements from the next.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `stride` is less than `cols`, or `values` ends before the
    /// last row does or goes on for more than `stride` after it began.
    pub fn with_stride(values: &'a [T], rows: usize, cols: usize, stride: usize) -> Result<Self> {
        let shape = Shape::new(values.len(), rows, cols, stride)?;
        Ok(Matrix { values, shape })
    }
}

impl<'a, T: Element> MatrixMut<'a, T> {
    /// `rows` contiguous rows of `cols` elements.
    ///
    /// # Errors
    /// As [`Matrix::new`].
    pub fn new(values: &'a mut [T], rows: usize, cols: usize) -> Result<Self> {
        Self::with_stride(values, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements, each `stride` elements from the next.
    ///
    /// # Errors
    /// As [`Matrix::with_stride`].
    pub fn with_stride(
        values: &'a mut [T],
        rows: usize,
        cols: usize,
        stride: usize,
    ) -> Result<Self> {
        let shape = Shape::new(values.len(), rows, cols, stride)?;
        Ok(MatrixMut { values, shape })
    }
}

/// The shape of a matrix that was checked against the length of its slice. This is what keeps
/// the C side inside of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

impl Shape {
    fn new(length: usize, rows: usize, cols: usize, stride: usize) -> Result<Self> {
        if stride < cols {
            return Err(Error::InvalidArgument(format!(
                "stride is {stride}; expected at least {cols}"
            )));
        }
        let most = product("rows * stride", rows, stride)?;
        let least = if rows == 0 { 0 } else { most - (stride - cols) };
        if (least..=most).contains(&length) {
            return Ok(Shape { rows, cols, stride });
        }
        if least == most {
            check_length("values", length, most)?;
        }
        Err(Error::InvalidArgument(format!(
            "values has {length} elements; expected {least} to {most}"
        )))
    }

    pub(crate) fn check(&self, name: &str, rows: usize, cols: usize) -> Result<()> {
        if (self.rows, self.cols) == (rows, cols) {
            return Ok(());
        }
        let (ours, other) = (self.rows, self.cols);
        Err(Error::InvalidArgument(format!(
            "{name} is of {ours} x {other} elements; expected {rows} x {cols}"
        )))
    }
}

pub(crate) fn product(name: &str, a: usize, b: usize) -> Result<usize> {
    a.checked_mul(b).ok_or_else(|| {
        Error::InvalidArgument(format!("{name} is {a} * {b}; expected what fits usize"))
    })
}

/// The operands of a matmul, host or device memory alike.
pub(crate) struct Operands<T> {
    pub m: usize,
    pub x: *const T,
    pub x_stride: usize,
    pub bias: *const T,
    pub y: *mut T,
    pub y_stride: usize,
}

impl<T: Element> Operands<T> {
    pub(crate) fn raw(&self) -> Result<sys::nf4_matmul_args> {
        Ok(sys::nf4_matmul_args {
            struct_size: size_of::<sys::nf4_matmul_args>(),
            dtype: T::DTYPE.as_raw(),
            reserved: 0,
            m: convert("m", self.m)?,
            x: self.x.cast(),
            x_stride: convert("x_stride", self.x_stride)?,
            bias: self.bias.cast(),
            y: self.y.cast(),
            y_stride: convert("y_stride", self.y_stride)?,
            lora: ptr::null(),
        })
    }

    /// The same beside an adapter, which they point to.
    pub(crate) fn raw_with(&self, lora: &sys::nf4_lora) -> Result<sys::nf4_matmul_args> {
        Ok(sys::nf4_matmul_args {
            lora,
            ..self.raw()?
        })
    }
}

/// `x` times the transpose of a weight, plus a bias: `x` has the weight's `cols` columns and
/// the result, in row-major order, its `rows`; `bias` has as many elements. Sums are in
/// binary32, each is rounded once.
///
/// `threads`: how many to use at most; 0 means one for each processor. No bit depends on it.
///
/// # Errors
/// [`Error::InvalidArgument`] if `x` or `bias` does not fit the weight.
///
/// ```
/// use nf4::{matmul, quantize, Matrix, Spec};
/// let weight = quantize(&[0.5f32; 3 * 64], Spec::new(3, 64).flat(), 0)?;
/// let x = [1.0f32; 2 * 64];
/// let y = matmul(Matrix::new(&x, 2, 64)?, &weight, Some(&[0.0, 1.0, 2.0]), 0)?;
/// assert_eq!(y, [32.0, 33.0, 34.0, 32.0, 33.0, 34.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul<'a, T: Element>(
    x: Matrix<'_, T>,
    weight: impl Weight<'a>,
    bias: Option<&[T]>,
    threads: u32,
) -> Result<Vec<T>> {
    let weight = weight.into_view();
    check_operands(&weight, &x, bias)?;
    let (rows, _) = weight.shape();
    let mut y = reserve_y(x.shape.rows, rows)?;
    // SAFETY: the vector has room for that many elements, and nobody else has it.
    unsafe { matmul_raw(&weight, &x, bias, y.as_mut_ptr(), rows, threads) }?;
    // SAFETY: libnf4 has written every element.
    unsafe { y.set_len(x.shape.rows * rows) };
    Ok(y)
}

/// An empty vector with room for `m * rows` elements.
pub(crate) fn reserve_y<T>(m: usize, rows: usize) -> Result<Vec<T>> {
    let length = product("m * rows", m, rows)?;
    let mut y = Vec::new();
    y.try_reserve_exact(length)
        .map_err(|error| Error::InvalidArgument(format!("y has {length} elements: {error}")))?;
    Ok(y)
}

/// Writes the product that [`matmul`] gives to `y`, which has as many rows as `x` and as many
/// columns as the weight has rows.
///
/// # Errors
/// [`Error::InvalidArgument`] if `x`, `bias` or `y` does not fit the weight or each other.
///
/// ```
/// use nf4::{matmul_into, quantize, Matrix, MatrixMut, Spec};
/// let weight = quantize(&[0.5f32; 2 * 64], Spec::new(2, 64).flat(), 0)?;
/// let (x, mut y) = ([half::f16::ONE; 2 * 64], [half::f16::ZERO; 5]);
/// let mut with_gap = MatrixMut::with_stride(&mut y, 2, 2, 3)?;
/// matmul_into(Matrix::new(&x, 2, 64)?, &weight, None, &mut with_gap, 0)?;
/// assert_eq!(y.map(|each| each.to_f32()), [32.0, 32.0, 0.0, 32.0, 32.0]);
/// # Ok::<(), nf4::Error>(())
/// ```
pub fn matmul_into<'a, T: Element>(
    x: Matrix<'_, T>,
    weight: impl Weight<'a>,
    bias: Option<&[T]>,
    y: &mut MatrixMut<'_, T>,
    threads: u32,
) -> Result<()> {
    let weight = weight.into_view();
    check_operands(&weight, &x, bias)?;
    y.shape.check("y", x.shape.rows, weight.shape().0)?;
    // SAFETY: the slice reaches to the end of the last row, as was checked when the matrix was
    // made; it is borrowed mutably.
    unsafe {
        let first = y.values.as_mut_ptr();
        matmul_raw(&weight, &x, bias, first, y.shape.stride, threads)
    }
}

pub(crate) fn check_operands<T: Element>(
    weight: &impl HostView,
    x: &Matrix<'_, T>,
    bias: Option<&[T]>,
) -> Result<()> {
    let (rows, cols) = weight.shape();
    x.shape.check("x", x.shape.rows, cols)?;
    bias.map_or(Ok(()), |bias| check_length("bias", bias.len(), rows))
}

/// # Safety
/// `check_operands` has passed, and `y` can be written for as many rows as `x` has, of as many
/// elements as the weight has rows, `y_stride` apart. It need not be initialised; on success
/// these elements are.
unsafe fn matmul_raw<T: Element>(
    weight: &impl HostView,
    x: &Matrix<'_, T>,
    bias: Option<&[T]>,
    y: *mut T,
    y_stride: usize,
    threads: u32,
) -> Result<()> {
    let args = Operands {
        m: x.shape.rows,
        x: x.values.as_ptr(),
        x_stride: x.shape.stride,
        bias: bias.map_or(ptr::null(), <[T]>::as_ptr),
        y,
        y_stride,
    };
    // SAFETY: the parts of the weight, and x against its slice, were checked when they were
    // made, the bias and the shapes by check_operands; all of those are only read, and `y` is as
    // the caller promises, so it is none of them.
    check(unsafe {
        let (weight, args) = (weight.raw()?, args.raw()?);
        (weight.functions().matmul_cpu)(&weight, &args, thread_count(threads))
    })
}
