//! Matrices in any memory, and new outputs on the host.

use crate::error::{check_length, product};
use crate::memory::sealed::Sealed;
use crate::memory::{Access, Host, HostAccess, Read, Write};
use crate::{Error, Result};

/// A matrix in row-major order, in the buffer `B`. There may be gaps between its rows. On the host
/// its names are [`Matrix`] and [`MatrixMut`].
#[derive(Debug, Clone, Copy)]
pub struct MatrixOf<B> {
    pub(crate) values: B,
    pub(crate) shape: Shape,
}

/// A matrix that borrows its elements, to be read.
///
/// ```
/// use nf4::Matrix;
/// let values = [1.0f32, 2.0, 0.0, 3.0, 4.0];
/// assert!(Matrix::with_stride(&values, 2, 2, 3).is_ok()); // rows [1, 2] and [3, 4]
/// let error = Matrix::new(&values, 2, 2).unwrap_err();
/// assert_eq!(error.detail(), "values has 5 elements; expected 4");
/// # Ok::<(), nf4::Error>(())
/// ```
pub type Matrix<'a, T> = MatrixOf<&'a [T]>;
/// A matrix that borrows its elements, to be written. Elements between its rows are not written.
pub type MatrixMut<'a, T> = MatrixOf<&'a mut [T]>;

impl<B: Read> MatrixOf<B> {
    /// `rows` contiguous rows of `cols` elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the length of `values` is not `rows * cols`.
    pub fn new(values: B, rows: usize, cols: usize) -> Result<Self> {
        Self::with_stride(values, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements, each `stride` elements from the next.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `stride` is less than `cols`, or if the length of `values` is
    /// less than `(rows - 1) * stride + cols` or more than `rows * stride`.
    pub fn with_stride(values: B, rows: usize, cols: usize, stride: usize) -> Result<Self> {
        let shape = Shape::new(values.length(), rows, cols, stride)?;
        Ok(MatrixOf { values, shape })
    }

    pub(crate) fn address<'a>(
        &'a self,
        name: &str,
        access: &Access<'a, B::Memory>,
    ) -> Result<*const B::Element> {
        self.values.address(name, access)
    }
}

impl<B: Write> MatrixOf<B> {
    pub(crate) fn address_mut<'a>(
        &'a mut self,
        name: &str,
        access: &Access<'a, B::Memory>,
    ) -> Result<*mut B::Element> {
        self.values.address_mut(name, access)
    }
}

/// The shape of a matrix that was checked against the length of its buffer. This is what keeps
/// the C side inside of it.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
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

/// A new output on the host, which an operation fills: memory for `length` elements.
pub(crate) struct Fresh<T> {
    values: Vec<T>,
    length: usize,
}

impl<T> Fresh<T> {
    pub(crate) fn new(name: &str, length: usize) -> Result<Self> {
        let mut values = Vec::new();
        values.try_reserve_exact(length).map_err(|error| {
            Error::InvalidArgument(format!("{name} has {length} elements: {error}"))
        })?;
        Ok(Fresh { values, length })
    }

    /// A y of `m` rows and `cols` columns.
    pub(crate) fn matrix(m: usize, cols: usize) -> Result<MatrixOf<Self>> {
        let y = Self::new("y", product("m * rows", m, cols)?)?;
        MatrixOf::new(y, m, cols)
    }

    /// # Safety
    /// Every element was written.
    pub(crate) unsafe fn assume_written(mut self) -> Vec<T> {
        // SAFETY: there is room for them, and the caller promises the rest.
        unsafe { self.values.set_len(self.length) };
        self.values
    }
}

impl<T: crate::Element> Fresh<T> {
    /// Fills it with zeros, which libnf4 may leave.
    pub(crate) fn zeroed(mut self) -> Self {
        // SAFETY: there is room for so many elements, of types whose zero is all bits 0.
        unsafe { self.values.as_mut_ptr().write_bytes(0, self.length) };
        self
    }
}

impl<T> Sealed for Fresh<T> {}

impl<T> Read for Fresh<T> {
    type Element = T;
    type Memory = Host;

    fn length(&self) -> usize {
        self.length
    }

    fn address<'a>(&'a self, _: &str, _: &HostAccess<'a>) -> Result<*const T> {
        Ok(self.values.as_ptr())
    }
}

impl<T> Write for Fresh<T> {
    fn address_mut<'a>(&'a mut self, _: &str, _: &HostAccess<'a>) -> Result<*mut T> {
        Ok(self.values.as_mut_ptr())
    }
}

impl<T> MatrixOf<Fresh<T>> {
    /// # Safety
    /// As for [`Fresh::assume_written`].
    pub(crate) unsafe fn assume_written(self) -> Vec<T> {
        // SAFETY: as the caller promises.
        unsafe { self.values.assume_written() }
    }
}
