//! Tells which way a product is expected to take less time.

use std::ptr::NonNull;

use nf4_sys as sys;

use crate::device::{DeviceInt4Tensor, DevicePtr};
use crate::error::{check, convert};
use crate::grouped::nowhere;
use crate::kind::{self, Described, Descriptor};
use crate::{ColumnsOf, Element, Int4PartsOf, Int4Spec, Result, Spec};

/// A way to compute a product. Both give the same numbers within the errors that `nf4.h` lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// libnf4's function computes the product, and reads the packed weight.
    Fused,
    /// The caller dequantizes into its memory, and another library, such as cuBLAS, multiplies.
    /// This is also the answer for a product that a GPU's launch refuses, such as `f32` with more
    /// than 16 rows of x.
    Dense,
}

/// Says where a product runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The functions on host memory run it.
    Cpu,
    /// The GPU with this index runs it, as CUDA counts them in this process.
    Gpu(usize),
}

/// Returns the answer of `query`, which gets the device and where to write.
fn ask(place: Place, query: impl FnOnce(i32, &mut sys::nf4_path) -> Result<()>) -> Result<Path> {
    let device = match place {
        Place::Cpu => sys::NF4_DEVICE_CPU,
        Place::Gpu(index) => convert("the index of the GPU", index)?,
    };
    let mut path = 0;
    query(device, &mut path)?;
    Ok(if path == sys::NF4_PATH_DENSE {
        Path::Dense
    } else {
        Path::Fused
    })
}

fn matmul_path<T: Element>(weight: &impl Described, m: usize, place: Place) -> Result<Path> {
    let (rows, cols) = weight.shape();
    let (weight, args) = (weight.raw()?, kind::contiguous::<T>(m, cols, rows).raw()?);
    ask(place, |device, path| {
        // SAFETY: all of them live through the call, and the struct_size of each struct is set.
        check(unsafe { (weight.functions().matmul_path)(&weight, &args, device, path) })
    })
}

/// The answers are for weights with the codebook of their format, and for contiguous rows, all
/// aligned to 16 bytes. An answer stays the same for the life of the process, and takes about a
/// microsecond.
impl Spec {
    /// Tells which way `m` rows of x times a weight take less time. With no rows it is
    /// [`Path::Fused`].
    ///
    /// # Errors
    /// It fails as [`Spec::sizes`] does, and with
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m` rows are too many. A GPU
    /// that cannot be used gives what [`device_info`](crate::device_info) says of it.
    ///
    /// ```
    /// use nf4::{Path, Place, Spec};
    /// let spec = Spec::new(14336, 4096);
    /// assert_eq!(spec.matmul_path::<half::bf16>(512, Place::Cpu)?, Path::Fused);
    /// if nf4::device_info(0).usable() {
    ///     // A launch takes up to 16 rows of f32.
    ///     assert_eq!(spec.matmul_path::<f32>(17, Place::Gpu(0))?, Path::Dense);
    /// }
    /// # Ok::<(), nf4::Error>(())
    /// ```
    pub fn matmul_path<T: Element>(&self, m: usize, place: Place) -> Result<Path> {
        matmul_path::<T>(self, m, place)
    }

    /// Tells the same with an adapter of `rank`.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_path`] does, and if `rank` is not 1 to 128.
    pub fn matmul_lora_path<T: Element>(
        &self,
        m: usize,
        rank: usize,
        place: Place,
    ) -> Result<Path> {
        ask(place, |device, path| {
            // SAFETY: as above.
            self.adapted::<T>(m, rank, false, |weight, args| unsafe {
                sys::nf4_matmul_path(weight, args, device, path)
            })
        })
    }

    /// Tells the same of the gradient of `m` rows of x, with an adapter of `rank`; 0 means none.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_path`] does, and if `rank` is more than 128.
    pub fn matmul_grad_path<T: Element>(
        &self,
        m: usize,
        rank: usize,
        place: Place,
    ) -> Result<Path> {
        ask(place, |device, path| {
            // SAFETY: as above.
            self.adapted::<T>(m, rank, true, |weight, args| unsafe {
                sys::nf4_matmul_grad_path(weight, args, device, path)
            })
        })
    }

    /// Tells the same of `m` rows of y, and of so many experts, with `x_index`. The dense way
    /// dequantizes all experts.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_path`] does, and if `experts` is out of range.
    pub fn matmul_grouped_path<T: Element>(
        &self,
        experts: usize,
        m: usize,
        place: Place,
    ) -> Result<Path> {
        let args = nowhere::<T>(experts, m, self.cols, self.rows).raw()?;
        let weight = self.descriptor()?;
        ask(place, |device, path| {
            // SAFETY: as above.
            check(unsafe { sys::nf4_matmul_grouped_path(&weight, &args, device, path) })
        })
    }

    /// Tells the same of their gradient.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_grouped_path`] does.
    pub fn matmul_grouped_grad_path<T: Element>(
        &self,
        experts: usize,
        m: usize,
        place: Place,
    ) -> Result<Path> {
        let args = nowhere::<T>(experts, m, self.rows, self.cols).raw()?;
        let weight = self.descriptor()?;
        ask(place, |device, path| {
            // SAFETY: as above.
            check(unsafe { sys::nf4_matmul_grouped_grad_path(&weight, &args, device, path) })
        })
    }
}

/// These functions are the same as those of [`Spec`].
impl Int4Spec {
    /// Tells which way `m` rows of x times a weight with this order of columns take less time. With
    /// no rows it is [`Path::Fused`].
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_path`] and [`Int4Spec::sizes`] do.
    ///
    /// ```
    /// use nf4::{ColumnsOf, Int4Layout, Int4Spec, Path, Place};
    /// let spec = Int4Spec::new(Int4Layout::Gptq, 14336, 4096);
    /// let path = spec.matmul_path::<half::f16>(ColumnsOf::InOrder, 512, Place::Cpu)?;
    /// assert_eq!(path, Path::Fused);
    /// # Ok::<(), nf4::Error>(())
    /// ```
    pub fn matmul_path<T: Element>(
        &self,
        columns: ColumnsOf<()>,
        m: usize,
        place: Place,
    ) -> Result<Path> {
        let parts = Int4PartsOf {
            packed: (),
            scales: (),
            zeros: None,
            columns,
        };
        let index = DevicePtr::from_raw(NonNull::dangling().as_ptr());
        let parts = parts.map(|()| DevicePtr::NULL, |()| DevicePtr::NULL, |()| index);
        matmul_path::<T>(&DeviceInt4Tensor { spec: *self, parts }, m, place)
    }

    /// Tells the same of `m` rows of y, and of so many experts of this spec, with `x_index`. The
    /// dense way dequantizes all experts.
    ///
    /// # Errors
    /// It fails as [`Int4Spec::matmul_path`] does, and if `experts` is out of range.
    pub fn matmul_grouped_path<T: Element>(
        &self,
        experts: usize,
        m: usize,
        place: Place,
    ) -> Result<Path> {
        let args = nowhere::<T>(experts, m, self.cols, self.rows).raw()?;
        let weight = self.descriptor()?;
        ask(place, |device, path| {
            // SAFETY: as above.
            check(unsafe { sys::nf4_int4_matmul_grouped_path(&weight, &args, device, path) })
        })
    }
}
