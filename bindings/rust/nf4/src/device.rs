//! Raw device memory for CUDA code of any kind: slices of addresses, and a stream.
//!
//! The operations of this crate launch on them: their argument `on` is a [`Stream`], or a [`Launch`]
//! with a workspace. They return when the work is enqueued, not when it is done. With the feature
//! `cudarc`, the module `cuda` has the buffers of that crate, which need no unsafe code.
//!
//! # Safety
//! The launches are safe functions, so the unsafe constructors have all of the requirements. A caller
//! of `from_raw_parts` or [`Stream::from_raw`] guarantees these for every later use in safe code:
//! - The memory stays valid until all work that was enqueued on it has ended. Neither the end of a
//!   borrow nor the drop of a slice waits for that work.
//! - No two launches on different streams race on it: if one of them writes, an event or a
//!   synchronization orders them. A workspace is written, so launches that share one are ordered, too.
//! - The stream is alive at each launch on it.
//!
//! A slice can be used for many launches. Here two launches share one workspace:
//!
//! ```
//! use half::bf16;
//! use nf4::device::{DeviceSlice, DeviceSliceMut, DeviceTensor, Launch, Stream};
//! use nf4::{matmul_into, MatrixOf};
//!
//! /// y = down(up(x)), m rows each. The workspace has as many bytes as
//! /// `spec().matmul_workspace_bytes::<bf16>(m)` gives for the weight that needs more.
//! fn mlp(
//!     (x, m): (DeviceSlice<bf16>, usize),
//!     (up, down): (DeviceTensor, DeviceTensor),
//!     mut hidden: DeviceSliceMut<bf16>,
//!     y: DeviceSliceMut<bf16>,
//!     mut workspace: DeviceSliceMut<u8>,
//!     stream: Stream,
//! ) -> nf4::Result<()> {
//!     let x = MatrixOf::new(x, m, up.spec().cols)?;
//!     let to = &mut MatrixOf::new(hidden.reborrow(), m, up.spec().rows)?;
//!     let on = Launch::new(stream).workspace(workspace.reborrow());
//!     matmul_into(x, up, None, to, on)?;
//!     let x = MatrixOf::new(&hidden, m, down.spec().cols)?;
//!     let to = &mut MatrixOf::new(y, m, down.spec().rows)?;
//!     matmul_into(x, down, None, to, Launch::new(stream).workspace(workspace))
//! }
//! ```

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use nf4_sys as sys;
use sys::{nf4_status, nf4_stream};

use crate::error::check;
use crate::memory::sealed::Sealed;
use crate::memory::{LaunchOf, Memory, Read, Scratch, Write};
use crate::{Int4PartsOf, QuantizedOf, Result, ScalesOf};

/// The memory of [`DeviceSlice`] and [`DeviceSliceMut`].
#[derive(Debug, Clone, Copy)]
pub enum Device {}

/// Says how a launch runs: the stream and a workspace.
pub type Launch<'c> = LaunchOf<Stream, DeviceSliceMut<'c, u8>>;

/// The scales of a weight in device memory.
pub type DeviceScales =
    ScalesOf<DeviceSlice<f32>, DeviceSlice<u8>, DeviceSlice<f32>, DeviceSlice<f32>>;
/// A quantized weight in device memory, to be read.
pub type DeviceTensor = QuantizedOf<DeviceSlice<u8>, DeviceScales, DeviceSlice<f32>>;
/// The scales of a weight in device memory, to be written. `code` is read.
pub type DeviceScalesMut<'a> = ScalesOf<
    DeviceSliceMut<'a, f32>,
    DeviceSliceMut<'a, u8>,
    DeviceSlice<f32>,
    DeviceSliceMut<'a, f32>,
>;
/// A quantized weight in device memory, to be written.
pub type DeviceTensorMut<'a> =
    QuantizedOf<DeviceSliceMut<'a, u8>, DeviceScalesMut<'a>, DeviceSlice<f32>>;
/// The parts of a weight of integers in device memory, to be read.
pub type DeviceInt4Parts = Int4PartsOf<DeviceSlice<u32>, DeviceSlice<u16>, DeviceSlice<i32>>;
/// The parts of a weight of integers in device memory, to be written. The index is read.
pub type DeviceInt4PartsMut<'a> =
    Int4PartsOf<DeviceSliceMut<'a, u32>, DeviceSliceMut<'a, u16>, DeviceSlice<i32>>;

/// Elements in device memory that launches read. It owns nothing, and the host cannot dereference it.
pub struct DeviceSlice<T> {
    first: *const T,
    length: usize,
}

/// Elements in device memory that launches write. It owns nothing, and the host cannot dereference it.
/// A launch takes a reference to it, or what [`DeviceSliceMut::reborrow`] gives.
pub struct DeviceSliceMut<'a, T> {
    first: *mut T,
    length: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

impl<T> DeviceSlice<T> {
    /// No elements.
    pub const EMPTY: Self = DeviceSlice {
        first: std::ptr::null(),
        length: 0,
    };

    /// Makes a slice of `length` elements from the address `first`, such as one of cudaMalloc.
    ///
    /// # Safety
    /// The caller guarantees the following for all launches to which safe code passes the slice, a copy
    /// or a part of it. Until the work of these launches has ended, the elements are valid memory that
    /// the GPU of their streams can reach. Nothing writes them in that time, except work that is ordered
    /// before or after the launches; this includes launches on other streams.
    pub const unsafe fn from_raw_parts(first: *const T, length: usize) -> Self {
        DeviceSlice { first, length }
    }

    /// Returns a part, such as one expert of a stack.
    ///
    /// # Panics
    /// If `range` is not within the slice.
    pub fn slice(self, range: Range<usize>) -> Self {
        check_range(&range, self.length);
        DeviceSlice {
            first: self.first.wrapping_add(range.start),
            length: range.len(),
        }
    }
}

impl<T> DeviceSliceMut<'_, T> {
    /// No elements.
    pub const EMPTY: Self = DeviceSliceMut {
        first: std::ptr::null_mut(),
        length: 0,
        borrowed: PhantomData,
    };

    /// Makes a slice of `length` elements from the address `first`, such as one of cudaMalloc.
    ///
    /// # Safety
    /// The caller guarantees the following for all launches to which safe code passes the slice or a
    /// part of it. Until the work of these launches has ended, the elements are valid memory that the
    /// GPU of their streams can reach. Nothing else uses them in that time, except work that is ordered
    /// before or after the launches; this includes launches on other streams. No other slice of a launch
    /// overlaps them.
    ///
    /// All of this is also required of a workspace: launches that share one and run at the same time
    /// may never end. The caller chooses the lifetime of the slice; its end does not wait for a launch.
    pub const unsafe fn from_raw_parts(first: *mut T, length: usize) -> Self {
        DeviceSliceMut {
            first,
            length,
            borrowed: PhantomData,
        }
    }

    /// Returns the same elements for one more use. This slice can be used again when the result is
    /// dropped.
    ///
    /// ```compile_fail,E0499
    /// fn both(mut workspace: nf4::device::DeviceSliceMut<u8>) {
    ///     let (one, other) = (workspace.reborrow(), workspace.reborrow());
    ///     assert_eq!(one, other);
    /// }
    /// ```
    pub fn reborrow(&mut self) -> DeviceSliceMut<'_, T> {
        self.slice_mut(0..self.length)
    }

    /// Returns a part, such as one expert of a stack.
    ///
    /// # Panics
    /// If `range` is not within the slice.
    pub fn slice_mut(&mut self, range: Range<usize>) -> DeviceSliceMut<'_, T> {
        check_range(&range, self.length);
        DeviceSliceMut {
            first: self.first.wrapping_add(range.start),
            length: range.len(),
            borrowed: PhantomData,
        }
    }

    /// Returns the address of the first element.
    pub const fn as_mut_ptr(&mut self) -> *mut T {
        self.first
    }
}

fn check_range(range: &Range<usize>, length: usize) {
    assert!(
        range.start <= range.end && range.end <= length,
        "the range is {range:?}; expected one within 0..{length}"
    );
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<T> {}

/// The methods of both slices.
macro_rules! device_slice {
    ($slice:ident, $type:ty) => {
        impl<T> $type {
            /// Returns the number of elements.
            pub const fn len(&self) -> usize {
                self.length
            }

            /// Returns whether the slice has no elements.
            pub const fn is_empty(&self) -> bool {
                self.length == 0
            }

            /// Returns the address of the first element.
            pub const fn as_ptr(&self) -> *const T {
                self.first as *const T
            }
        }

        // SAFETY: the address is never dereferenced on the host.
        unsafe impl<T> Send for $type {}
        // SAFETY: as above.
        unsafe impl<T> Sync for $type {}

        impl<T> fmt::Debug for $type {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                let ($slice { first, length, .. }, name) = (self, stringify!($slice));
                write!(formatter, "{name}({first:p}, {length})")
            }
        }

        /// Compares the addresses and the lengths, not the elements.
        impl<T> PartialEq for $type {
            fn eq(&self, other: &Self) -> bool {
                (self.first, self.length) == (other.first, other.length)
            }
        }

        impl<T> Eq for $type {}

        impl<T> Sealed for $type {}

        impl<T> Read for $type {
            type Element = T;
            type Memory = Device;

            fn length(&self) -> usize {
                self.length
            }

            fn address<'a>(&'a self, _: &str, _: &Launch<'a>) -> Result<*const T> {
                Ok(self.as_ptr())
            }
        }
    };
}

device_slice!(DeviceSlice, DeviceSlice<T>);
device_slice!(DeviceSliceMut, DeviceSliceMut<'_, T>);

impl<T> Write for DeviceSliceMut<'_, T> {
    fn address_mut<'a>(&'a mut self, _: &str, _: &Launch<'a>) -> Result<*mut T> {
        Ok(self.first)
    }
}

/// A CUDA stream: `cudaStream_t` and `CUstream` are the same pointer. It owns nothing.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream(nf4_stream);

impl Stream {
    /// The legacy default stream of the device that holds the memory.
    pub const LEGACY_DEFAULT: Self = Stream(std::ptr::null_mut());

    /// Makes a stream from a `cudaStream_t` or `CUstream`.
    ///
    /// # Safety
    /// At each launch to which safe code passes it or a copy of it, it is a stream that has not been
    /// destroyed.
    pub const unsafe fn from_raw(stream: *mut c_void) -> Self {
        Stream(stream.cast())
    }

    /// Returns the pointer that the C interface takes.
    pub const fn as_raw(self) -> *mut c_void {
        self.0.cast()
    }
}

// SAFETY: a handle; CUDA takes it from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl From<Stream> for Launch<'_> {
    fn from(stream: Stream) -> Self {
        Launch::new(stream)
    }
}

impl Sealed for Device {}

impl Memory for Device {
    type Call<'c> = Launch<'c>;
    type Access<'a> = Launch<'a>;

    fn access<'c: 'a, 'a>(call: Launch<'c>, _workspace_bytes: usize) -> Launch<'a> {
        call
    }

    fn run(
        access: Launch<'_>,
        _cpu: impl FnOnce(Scratch, i32) -> nf4_status,
        launch: impl FnOnce(Scratch, nf4_stream) -> nf4_status,
    ) -> Result<()> {
        let workspace = access.workspace.unwrap_or(DeviceSliceMut::EMPTY);
        let scratch = Scratch {
            first: workspace.first.cast(),
            bytes: workspace.length,
        };
        check(launch(scratch, access.stream.0))
    }
}
