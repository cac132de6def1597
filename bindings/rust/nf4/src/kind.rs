//! The kinds of weight, codebooks and integers: the C functions of each, and the traits of weights.

use std::ffi::c_void;

use nf4_sys as sys;
use sys::{
    nf4_dtype, nf4_grouped_args, nf4_int4_tensor, nf4_matmul_args, nf4_path, nf4_status,
    nf4_stream, nf4_tensor,
};

use crate::error::check;
use crate::memory::sealed::Sealed;
use crate::memory::{Access, Memory};
use crate::Result;

/// The C functions of a product of a weight `W` with the arguments `A`.
pub struct Functions<W, A> {
    workspace_size: unsafe extern "C" fn(*const W, *const A, *mut usize) -> nf4_status,
    path: unsafe extern "C" fn(*const W, *const A, i32, *mut nf4_path) -> nf4_status,
    cpu: unsafe extern "C" fn(*const W, *const A, i32) -> nf4_status,
    launch: unsafe extern "C" fn(*const W, *const A, *mut c_void, usize, nf4_stream) -> nf4_status,
}

impl<W, A> Functions<W, A> {
    /// Multiplies.
    ///
    /// # Safety
    /// The pointers of `weight` and `args` are addresses of `access`, of buffers that have the lengths
    /// that the two ask for; what is written overlaps nothing else.
    pub(crate) unsafe fn run<M: Memory>(
        &self,
        access: Access<'_, M>,
        weight: &W,
        args: &A,
    ) -> Result<()> {
        M::run(
            access,
            // SAFETY: both structs live through the call; the rest is as the caller promises.
            |_, threads| unsafe { (self.cpu)(weight, args, threads) },
            // SAFETY: as above; libnf4 checks the size of the workspace.
            |scratch, stream| unsafe {
                (self.launch)(weight, args, scratch.first, scratch.bytes, stream)
            },
        )
    }

    /// The bytes of workspace that a launch needs. Of the pointers in the structs only that to an
    /// adapter is followed, which the caller of this function keeps alive.
    pub(crate) fn workspace_bytes(&self, weight: &W, args: &A) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: all three live through the call, and the struct_size of both structs is set.
        check(unsafe { (self.workspace_size)(weight, args, &mut bytes) })?;
        Ok(bytes)
    }

    /// The path of a product on a `device`. The pointers are as in `workspace_bytes`.
    pub(crate) fn path(&self, weight: &W, args: &A, device: i32) -> Result<nf4_path> {
        let mut path = 0;
        // SAFETY: as in workspace_bytes.
        check(unsafe { (self.path)(weight, args, device, &mut path) })?;
        Ok(path)
    }
}

macro_rules! functions {
    ($workspace_size:ident, $path:ident, $cpu:ident, $launch:ident) => {
        Functions {
            workspace_size: sys::$workspace_size,
            path: sys::$path,
            cpu: sys::$cpu,
            launch: sys::$launch,
        }
    };
}

/// The C functions of several products in one call.
pub struct BatchFunctions<W> {
    pub(crate) workspace_size: unsafe extern "C" fn(
        *const *const W,
        *const nf4_matmul_args,
        usize,
        *mut usize,
    ) -> nf4_status,
    pub(crate) cpu:
        unsafe extern "C" fn(*const *const W, *const nf4_matmul_args, usize, i32) -> nf4_status,
    pub(crate) launch: unsafe extern "C" fn(
        *const *const W,
        *const nf4_matmul_args,
        usize,
        *mut c_void,
        usize,
        nf4_stream,
    ) -> nf4_status,
}

/// The C functions of dequantize.
pub struct DequantFunctions<W> {
    pub(crate) cpu: unsafe extern "C" fn(*const W, *mut c_void, nf4_dtype, i32) -> nf4_status,
    pub(crate) launch:
        unsafe extern "C" fn(*const W, *mut c_void, nf4_dtype, nf4_stream) -> nf4_status,
}

/// A descriptor of the C interface, and what libnf4 has for weights of its kind.
pub trait Descriptor: Sized + 'static {
    const DEQUANT: DequantFunctions<Self>;
    const MATMUL: Functions<Self, nf4_matmul_args>;
    const BATCH: BatchFunctions<Self>;
    const GROUPED: Functions<Self, nf4_grouped_args>;
}

impl Descriptor for nf4_tensor {
    const DEQUANT: DequantFunctions<Self> = DequantFunctions {
        cpu: sys::nf4_dequant_cpu,
        launch: sys::nf4_dequant_launch,
    };
    const MATMUL: Functions<Self, nf4_matmul_args> = functions!(
        nf4_matmul_workspace_size,
        nf4_matmul_path,
        nf4_matmul_cpu,
        nf4_matmul_launch
    );
    const BATCH: BatchFunctions<Self> = BatchFunctions {
        workspace_size: sys::nf4_matmul_batch_workspace_size,
        cpu: sys::nf4_matmul_batch_cpu,
        launch: sys::nf4_matmul_batch_launch,
    };
    const GROUPED: Functions<Self, nf4_grouped_args> = functions!(
        nf4_matmul_grouped_workspace_size,
        nf4_matmul_grouped_path,
        nf4_matmul_grouped_cpu,
        nf4_matmul_grouped_launch
    );
}

/// The gradient of a product, which only codebooks have.
pub(crate) const GRAD: Functions<nf4_tensor, nf4_matmul_args> = functions!(
    nf4_matmul_grad_workspace_size,
    nf4_matmul_grad_path,
    nf4_matmul_grad_cpu,
    nf4_matmul_grad_launch
);
/// The gradient of a product of experts, which only codebooks have.
pub(crate) const GROUPED_GRAD: Functions<nf4_tensor, nf4_grouped_args> = functions!(
    nf4_matmul_grouped_grad_workspace_size,
    nf4_matmul_grouped_grad_path,
    nf4_matmul_grouped_grad_cpu,
    nf4_matmul_grouped_grad_launch
);

impl Descriptor for nf4_int4_tensor {
    const DEQUANT: DequantFunctions<Self> = DequantFunctions {
        cpu: sys::nf4_int4_dequant_cpu,
        launch: sys::nf4_int4_dequant_launch,
    };
    const MATMUL: Functions<Self, nf4_matmul_args> = functions!(
        nf4_int4_matmul_workspace_size,
        nf4_int4_matmul_path,
        nf4_int4_matmul_cpu,
        nf4_int4_matmul_launch
    );
    const BATCH: BatchFunctions<Self> = BatchFunctions {
        workspace_size: sys::nf4_int4_matmul_batch_workspace_size,
        cpu: sys::nf4_int4_matmul_batch_cpu,
        launch: sys::nf4_int4_matmul_batch_launch,
    };
    const GROUPED: Functions<Self, nf4_grouped_args> = functions!(
        nf4_int4_matmul_grouped_workspace_size,
        nf4_int4_matmul_grouped_path,
        nf4_int4_matmul_grouped_cpu,
        nf4_int4_matmul_grouped_launch
    );
}

/// A weight that has a C descriptor. The lengths of its parts were checked when it was made.
pub trait Described: Sealed {
    /// The memory that its parts are in.
    type Memory: Memory;
    /// The C descriptor.
    #[doc(hidden)]
    type Raw: Descriptor;

    /// The descriptor for one call, which only reads its parts. Every call on a weight makes one,
    /// and so checks the version of the library.
    #[doc(hidden)]
    fn raw<'a>(&'a self, access: &Access<'a, Self::Memory>) -> Result<Self::Raw>;

    /// The descriptor without addresses, for queries, which follow none.
    #[doc(hidden)]
    fn nowhere(&self) -> Result<Self::Raw>;
}

/// A weight of any kind in any memory, to be read: a [`QuantizedOf`](crate::QuantizedOf) or an
/// [`Int4Of`](crate::Int4Of), or a reference to one.
///
/// ```
/// use nf4::{dequantize, quantize, quantize_int4, Host, Int4Layout, Int4Scheme, Int4Spec};
/// use nf4::{Spec, Weight};
/// fn first(weight: impl Weight<Memory = Host>) -> nf4::Result<f32> {
///     Ok(dequantize::<f32>(weight, 0)?[0])
/// }
/// let values = [0.5f32; 128];
/// assert_eq!(first(&quantize(&values, Spec::new(1, 128).flat(), 0)?)?, 0.5);
/// let spec = Int4Spec::new(Int4Layout::GptqV2, 1, 128);
/// let weight = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
/// assert!((first(&weight)? - 0.5).abs() < 1e-3);
/// # Ok::<(), nf4::Error>(())
/// ```
pub trait Weight: Described {
    /// Rows and columns.
    #[doc(hidden)]
    fn shape(&self) -> (usize, usize);
}

/// The weights of several experts: a [`QuantizedOf`](crate::QuantizedOf), which has the rows of all
/// of them, or an [`Int4StackOf`](crate::Int4StackOf), or a reference to one.
pub trait Experts: Described {
    /// Rows and columns of each of so many experts.
    ///
    /// # Errors
    /// The weight has another number of experts.
    #[doc(hidden)]
    fn expert_shape(&self, experts: usize) -> Result<(usize, usize)>;
}

impl<W: Described> Described for &W {
    type Memory = W::Memory;
    type Raw = W::Raw;

    fn raw<'a>(&'a self, access: &Access<'a, Self::Memory>) -> Result<Self::Raw> {
        (**self).raw(access)
    }

    fn nowhere(&self) -> Result<Self::Raw> {
        (**self).nowhere()
    }
}

impl<W: Weight> Weight for &W {
    fn shape(&self) -> (usize, usize) {
        (**self).shape()
    }
}

impl<W: Experts> Experts for &W {
    fn expert_shape(&self, experts: usize) -> Result<(usize, usize)> {
        (**self).expert_shape(experts)
    }
}
