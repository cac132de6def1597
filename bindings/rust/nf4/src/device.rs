//! Raw device memory, for CUDA code of any kind: slices of addresses and a stream.
//!
//! The operations of this crate launch on them: `on` is a [`Stream`], or a [`Launch`] with a workspace.
//! They return when the work is enqueued, not when it is done. With the feature `cudarc`, the module
//! `cuda` has the buffers of that crate, which need no unsafe code.

use std::ffi::c_void;
use std::fmt;

use nf4_sys as sys;
use sys::{nf4_status, nf4_stream};

use crate::error::check;
use crate::memory::sealed::Sealed;
use crate::memory::{LaunchOf, Memory, Read, Scratch, Write};
use crate::{Int4PartsOf, QuantizedOf, Result, ScalesOf};

/// The memory of [`DeviceSlice`] and [`DeviceSliceMut`].
#[derive(Debug, Clone, Copy)]
pub enum Device {}

/// How a launch runs.
pub type Launch = LaunchOf<Stream, DeviceSliceMut<u8>>;

/// The scales of a weight in device memory.
pub type DeviceScales =
    ScalesOf<DeviceSlice<f32>, DeviceSlice<u8>, DeviceSlice<f32>, DeviceSlice<f32>>;
/// A quantized weight in device memory, to be read.
pub type DeviceTensor = QuantizedOf<DeviceSlice<u8>, DeviceScales, DeviceSlice<f32>>;
/// The scales of a weight in device memory, to be written. `code` is read.
pub type DeviceScalesMut =
    ScalesOf<DeviceSliceMut<f32>, DeviceSliceMut<u8>, DeviceSlice<f32>, DeviceSliceMut<f32>>;
/// A quantized weight in device memory, to be written.
pub type DeviceTensorMut = QuantizedOf<DeviceSliceMut<u8>, DeviceScalesMut, DeviceSlice<f32>>;
/// The parts of a weight of integers in device memory, to be read.
pub type DeviceInt4Parts = Int4PartsOf<DeviceSlice<u32>, DeviceSlice<u16>, DeviceSlice<i32>>;
/// The parts of a weight of integers in device memory, to be written. The index is read.
pub type DeviceInt4PartsMut =
    Int4PartsOf<DeviceSliceMut<u32>, DeviceSliceMut<u16>, DeviceSlice<i32>>;

/// Elements in device memory that launches read. It owns nothing, and the host cannot dereference it.
pub struct DeviceSlice<T> {
    first: *const T,
    length: usize,
}

/// Elements in device memory that launches write. It owns nothing, and the host cannot dereference it.
pub struct DeviceSliceMut<T> {
    first: *mut T,
    length: usize,
}

impl<T> DeviceSlice<T> {
    /// No elements.
    pub const EMPTY: Self = DeviceSlice {
        first: std::ptr::null(),
        length: 0,
    };

    /// `length` elements from `first`, such as cudaMalloc returns.
    ///
    /// # Safety
    /// Until the work of all launches that the slice is given to has finished, the elements are memory
    /// that the GPU of their stream can reach, alive, and written by nothing but what is ordered
    /// before or after them.
    pub const unsafe fn from_raw_parts(first: *const T, length: usize) -> Self {
        DeviceSlice { first, length }
    }
}

impl<T> DeviceSliceMut<T> {
    /// No elements.
    pub const EMPTY: Self = DeviceSliceMut {
        first: std::ptr::null_mut(),
        length: 0,
    };

    /// `length` elements from `first`, such as cudaMalloc returns.
    ///
    /// # Safety
    /// Until the work of all launches that the slice is given to has finished, the elements are memory
    /// that the GPU of their stream can reach, alive, and used by nothing else but what is ordered
    /// before or after them. That holds for a workspace too: launches that share one and run at the
    /// same time may never end. No other slice of a launch overlaps them.
    pub const unsafe fn from_raw_parts(first: *mut T, length: usize) -> Self {
        DeviceSliceMut { first, length }
    }
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<T> {}

/// What both slices have.
macro_rules! device_slice {
    ($slice:ident) => {
        // SAFETY: the address is never dereferenced on the host.
        unsafe impl<T> Send for $slice<T> {}
        // SAFETY: as above.
        unsafe impl<T> Sync for $slice<T> {}

        impl<T> fmt::Debug for $slice<T> {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                let ($slice { first, length }, name) = (self, stringify!($slice));
                write!(formatter, "{name}({first:p}, {length})")
            }
        }

        impl<T> Sealed for $slice<T> {}

        impl<T> Read for $slice<T> {
            type Element = T;
            type Memory = Device;

            fn length(&self) -> usize {
                self.length
            }

            fn address(&self, _: &str, _: &Launch) -> Result<*const T> {
                Ok(self.first.cast())
            }
        }
    };
}

device_slice!(DeviceSlice);
device_slice!(DeviceSliceMut);

impl<T> Write for DeviceSliceMut<T> {
    fn address_mut(&mut self, _: &str, _: &Launch) -> Result<*mut T> {
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

    /// From a `cudaStream_t` or `CUstream`.
    ///
    /// # Safety
    /// It is a live stream at every launch that it is given to.
    pub const unsafe fn from_raw(stream: *mut c_void) -> Self {
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

impl From<Stream> for Launch {
    fn from(stream: Stream) -> Self {
        Launch::new(stream)
    }
}

impl Sealed for Device {}

impl Memory for Device {
    type Call<'c> = Launch;
    type Access<'a> = Launch;

    fn access<'c: 'a, 'a>(call: Launch, _workspace_bytes: usize) -> Launch {
        call
    }

    fn run(
        access: Launch,
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
