//! Questions about a product before it runs: the workspace of its launch on a GPU, and whether its own
//! kernel or a dense product takes less time.

use std::ptr;

use nf4_sys as sys;

use crate::error::{check, convert};
use crate::kind::{Descriptor, Functions, GRAD, GROUPED_GRAD};
use crate::lora::RawLora;
use crate::matmul::Operands;
use crate::{grouped, lora_grad, ColumnsOf, Element, Int4Spec, Result, Spec};

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

impl Place {
    /// The number of the device in the C interface.
    fn device(self) -> Result<i32> {
        match self {
            Place::Cpu => Ok(sys::NF4_DEVICE_CPU),
            Place::Gpu(index) => convert("the index of the GPU", index),
        }
    }
}

impl Path {
    fn from_raw(path: sys::nf4_path) -> Self {
        if path == sys::NF4_PATH_DENSE {
            Path::Dense
        } else {
            Path::Fused
        }
    }
}

/// The path of a product of `weight`.
fn ask<W, A>(functions: &Functions<W, A>, weight: &W, args: &A, place: Place) -> Result<Path> {
    let path = functions.path(weight, args, place.device()?);
    path.map(Path::from_raw)
}

/// The arguments of a product of contiguous rows beside an adapter, without addresses.
struct Adapted {
    args: sys::nf4_matmul_args,
    lora: sys::nf4_lora,
}

impl Adapted {
    fn new<T: Element>(cols: usize, rank: usize, operands: Operands<T>) -> Result<Self> {
        let lora = RawLora {
            dtype: T::DTYPE.as_raw(),
            rank,
            scale: 1.0,
            a: ptr::null(),
            a_stride: cols,
            b: ptr::null(),
            b_stride: rank,
            product: ptr::null_mut(),
        };
        Ok(Adapted {
            args: operands.raw()?,
            lora: lora.raw()?,
        })
    }

    /// They point to the adapter.
    fn args(&mut self) -> &sys::nf4_matmul_args {
        self.args.lora = &self.lora;
        &self.args
    }

    /// The same without the adapter where its rank is 0.
    fn args_if_any(&mut self) -> &sys::nf4_matmul_args {
        if self.lora.rank != 0 {
            return self.args();
        }
        &self.args
    }
}

/// The functions that end in `workspace_bytes` give the bytes of workspace of a launch on a GPU; the
/// functions on the host need none. More rows never need less.
impl Spec {
    fn product<T: Element>(&self, m: usize) -> Result<sys::nf4_matmul_args> {
        Operands::<T>::contiguous(m, self.cols, self.rows).raw()
    }

    fn adapted<T: Element>(&self, m: usize, rank: usize) -> Result<Adapted> {
        Adapted::new::<T>(
            self.cols,
            rank,
            Operands::contiguous(m, self.cols, self.rows),
        )
    }

    fn gradient<T: Element>(&self, m: usize, rank: usize) -> Result<Adapted> {
        Adapted::new::<T>(
            self.cols,
            rank,
            Operands::contiguous(m, self.rows, self.cols),
        )
    }

    fn grouped<T: Element>(&self, experts: usize, m: usize) -> Result<sys::nf4_grouped_args> {
        grouped::nowhere::<T>(experts, m, self.cols, self.rows)
    }

    fn grouped_gradient<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<sys::nf4_grouped_args> {
        grouped::nowhere::<T>(experts, m, self.rows, self.cols)
    }

    /// Returns the workspace of a [`matmul_into`](crate::matmul_into) of `m` contiguous rows: 0 for up
    /// to 8 rows.
    ///
    /// # Errors
    /// It fails as [`Spec::sizes`] does, and if `m` rows are too many.
    pub fn matmul_workspace_bytes<T: Element>(&self, m: usize) -> Result<usize> {
        sys::nf4_tensor::MATMUL.workspace_bytes(&self.descriptor()?, &self.product::<T>(m)?)
    }

    /// Returns the workspace of a [`matmul_lora_into`](crate::matmul_lora_into) of `m` contiguous rows
    /// with an adapter of `rank`.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_workspace_bytes`] does, and if `rank` is not 1 to 128.
    pub fn matmul_lora_workspace_bytes<T: Element>(&self, m: usize, rank: usize) -> Result<usize> {
        let mut adapted = self.adapted::<T>(m, rank)?;
        sys::nf4_tensor::MATMUL.workspace_bytes(&self.descriptor()?, adapted.args())
    }

    /// Returns the workspace of a [`matmul_grad_into`](crate::matmul_grad_into) of `m` contiguous rows
    /// if `rank` is 0, else that of a [`matmul_grad_lora_into`](crate::matmul_grad_lora_into).
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_workspace_bytes`] does, and if `rank` is more than 128.
    pub fn matmul_grad_workspace_bytes<T: Element>(&self, m: usize, rank: usize) -> Result<usize> {
        let mut gradient = self.gradient::<T>(m, rank)?;
        GRAD.workspace_bytes(&self.descriptor()?, gradient.args_if_any())
    }

    /// Returns the workspace of a [`matmul_grouped_into`](crate::matmul_grouped_into) of `m` rows of y
    /// and this number of experts. It is also enough without `x_index`.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_workspace_bytes`] does, and if `experts` is out of range.
    pub fn matmul_grouped_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = self.grouped::<T>(experts, m)?;
        sys::nf4_tensor::GROUPED.workspace_bytes(&self.descriptor()?, &args)
    }

    /// Returns the workspace of a [`matmul_grouped_grad_into`](crate::matmul_grouped_grad_into) of `m`
    /// rows of grad_x and this number of experts. It is also enough without `x_index`.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_grouped_workspace_bytes`] does.
    pub fn matmul_grouped_grad_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = self.grouped_gradient::<T>(experts, m)?;
        GROUPED_GRAD.workspace_bytes(&self.descriptor()?, &args)
    }

    /// Tells which way is faster for `m` rows of x and a weight of this spec. With no rows it is
    /// [`Path::Fused`].
    ///
    /// The answers of this function and of those below are for weights with the codebook of their
    /// format, and for contiguous rows, all aligned to 16 bytes. An answer stays the same until
    /// [`set_costs`](crate::set_costs) or [`load_costs`](crate::load_costs) is called, and takes about a
    /// microsecond.
    ///
    /// # Errors
    /// It fails as [`Spec::sizes`] does, and with
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `m` rows are too many. A GPU
    /// that cannot be used gives the error that [`device_info`](crate::device_info) has as `status`.
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
        let (weight, args) = (self.descriptor()?, self.product::<T>(m)?);
        ask(&sys::nf4_tensor::MATMUL, &weight, &args, place)
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
        let (weight, mut adapted) = (self.descriptor()?, self.adapted::<T>(m, rank)?);
        ask(&sys::nf4_tensor::MATMUL, &weight, adapted.args(), place)
    }

    /// Tells the same for the gradient of `m` rows of x, with an adapter of `rank`; 0 means none.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_path`] does, and if `rank` is more than 128.
    pub fn matmul_grad_path<T: Element>(
        &self,
        m: usize,
        rank: usize,
        place: Place,
    ) -> Result<Path> {
        let (weight, mut gradient) = (self.descriptor()?, self.gradient::<T>(m, rank)?);
        ask(&GRAD, &weight, gradient.args_if_any(), place)
    }

    /// Tells the same for [`lora_grad_into`](crate::lora_grad_into) with an adapter of `rank` of a
    /// weight of this shape, if both gradients are wanted, in the type `G`. The dense way is two
    /// products of dense matrices.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_lora_path`] does, and if `G` is neither `T` nor `f32`.
    pub fn lora_grad_path<T: Element, G: Element>(
        &self,
        m: usize,
        rank: usize,
        place: Place,
    ) -> Result<Path> {
        let mut args = lora_grad::nowhere::<T, G>((rank, 1.0), m, (self.rows, self.cols))?;
        // Both are wanted, which is all that is read of them.
        args.da = ptr::NonNull::<G>::dangling().as_ptr().cast();
        args.db = args.da;
        let (device, mut path) = (place.device()?, 0);
        // SAFETY: both live through the call, and the struct_size is set; no address is followed.
        check(unsafe { sys::nf4_lora_grad_path(&args, device, &mut path) })?;
        Ok(Path::from_raw(path))
    }

    /// Tells the same for `m` rows of y and this number of experts, with `x_index`. The dense way
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
        let (weight, args) = (self.descriptor()?, self.grouped::<T>(experts, m)?);
        ask(&sys::nf4_tensor::GROUPED, &weight, &args, place)
    }

    /// Tells the same for the gradient of a product of experts.
    ///
    /// # Errors
    /// It fails as [`Spec::matmul_grouped_path`] does.
    pub fn matmul_grouped_grad_path<T: Element>(
        &self,
        experts: usize,
        m: usize,
        place: Place,
    ) -> Result<Path> {
        let (weight, args) = (self.descriptor()?, self.grouped_gradient::<T>(experts, m)?);
        ask(&GROUPED_GRAD, &weight, &args, place)
    }
}

/// The same questions about weights of integers.
impl Int4Spec {
    /// Returns the bytes of workspace of a [`matmul_grouped_into`](crate::matmul_grouped_into) on a GPU
    /// of `m` rows of y and this number of experts of this spec. They are also enough without `x_index`.
    ///
    /// # Errors
    /// It fails as [`Int4Spec::sizes`] does, and if `m` or `experts` is out of range.
    pub fn matmul_grouped_workspace_bytes<T: Element>(
        &self,
        experts: usize,
        m: usize,
    ) -> Result<usize> {
        let args = grouped::nowhere::<T>(experts, m, self.cols, self.rows)?;
        sys::nf4_int4_tensor::GROUPED.workspace_bytes(&self.descriptor()?, &args)
    }

    /// Tells which way is faster for `m` rows of x and a weight with this order of columns. With no
    /// rows it is [`Path::Fused`].
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
        let args = Operands::<T>::contiguous(m, self.cols, self.rows).raw()?;
        let weight = self.nowhere(columns, false)?;
        ask(&sys::nf4_int4_tensor::MATMUL, &weight, &args, place)
    }

    /// Tells the same for `m` rows of y and this number of experts of this spec, with `x_index`. The
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
        let args = grouped::nowhere::<T>(experts, m, self.cols, self.rows)?;
        ask(
            &sys::nf4_int4_tensor::GROUPED,
            &self.descriptor()?,
            &args,
            place,
        )
    }
}
