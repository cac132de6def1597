//! Addresses of cudarc's buffers for one launch.

use std::cell::RefCell;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut,
    DeviceSlice, SyncOnDrop,
};
use nf4_sys as sys;
use sys::{nf4_status, nf4_stream};

use super::buffer::CudaBuffer;
use crate::error::check;
use crate::memory::sealed::Sealed;
use crate::memory::{LaunchOf, Memory, Read, Scratch, Write};
use crate::{Error, Result};

/// The memory of cudarc's buffers.
#[derive(Debug, Clone, Copy)]
pub enum Cuda {}

/// Says how a launch on cudarc's buffers runs: the stream and a workspace. A stream converts into it.
pub type Launch<'c> = LaunchOf<&'c CudaStream, CudaViewMut<'c, u8>>;

impl<'c> From<&'c CudaStream> for Launch<'c> {
    fn from(stream: &'c CudaStream) -> Self {
        Launch::new(stream)
    }
}

impl<'c> From<&'c Arc<CudaStream>> for Launch<'c> {
    fn from(stream: &'c Arc<CudaStream>) -> Self {
        Launch::new(stream)
    }
}

/// Addresses for one launch on a stream. Taking one makes the stream wait for the work of
/// others on that buffer; dropping this tells others to wait for the launch. So it is
/// dropped after the launch.
#[doc(hidden)]
#[derive(Debug)]
pub struct CudaAccess<'a> {
    launch: Launch<'a>,
    guards: RefCell<Vec<SyncOnDrop<'a>>>,
}

impl<'a> CudaAccess<'a> {
    fn read<T, B: DevicePtr<T>>(&self, name: &str, buffer: &'a B) -> Result<*const T> {
        check_context(name, buffer.stream().context(), self.launch.stream)?;
        let (address, guard) = buffer.device_ptr(self.launch.stream);
        self.guards.borrow_mut().push(guard);
        Ok(address as usize as *const T)
    }

    fn write<T, B: DevicePtrMut<T>>(&self, name: &str, buffer: &'a mut B) -> Result<*mut T> {
        check_context(name, buffer.stream().context(), self.launch.stream)?;
        let (address, guard) = buffer.device_ptr_mut(self.launch.stream);
        self.guards.borrow_mut().push(guard);
        Ok(address as usize as *mut T)
    }
}

fn check_context(name: &str, context: &CudaContext, stream: &CudaStream) -> Result<()> {
    if context == stream.context().as_ref() {
        return Ok(());
    }
    let (theirs, ours) = (context.ordinal(), stream.context().ordinal());
    Err(Error::InvalidArgument(format!(
        "{name} is memory of another CUDA context (device {theirs}) than the stream's ({ours})"
    )))
}

impl Sealed for Cuda {}

impl Memory for Cuda {
    type Call<'c> = Launch<'c>;
    type Access<'a> = CudaAccess<'a>;

    fn access<'c: 'a, 'a>(launch: Launch<'c>, _workspace_bytes: usize) -> CudaAccess<'a> {
        CudaAccess {
            launch,
            guards: RefCell::new(Vec::with_capacity(8)),
        }
    }

    /// cudarc frees or reuses the buffers only after what `access` records.
    fn run(
        mut access: CudaAccess<'_>,
        _cpu: impl FnOnce(Scratch, i32) -> nf4_status,
        launch: impl FnOnce(Scratch, nf4_stream) -> nf4_status,
    ) -> Result<()> {
        let Launch { stream, workspace } = &mut access.launch;
        let mut scratch = Scratch {
            first: std::ptr::null_mut(),
            bytes: 0,
        };
        let mut _guard = None;
        if let Some(workspace) = workspace {
            check_context("workspace", workspace.stream().context(), stream)?;
            scratch.bytes = DeviceSlice::len(workspace);
            let (address, guard) = workspace.device_ptr_mut(stream);
            scratch.first = address as usize as *mut _;
            _guard = Some(guard);
        }
        // A wait that failed above is reported here, before anything is enqueued.
        stream.context().bind_to_thread()?;
        check(launch(scratch, stream.cu_stream().cast()))
    }
}

/// A buffer of cudarc, and whether it is written.
macro_rules! cuda_buffer {
    ([$($generics:tt)*] $buffer:ty) => {
        impl<$($generics)*> Sealed for $buffer {}

        impl<$($generics)*> Read for $buffer {
            type Element = T;
            type Memory = Cuda;

            fn length(&self) -> usize {
                DeviceSlice::len(self)
            }

            fn address<'a>(&'a self, name: &str, access: &CudaAccess<'a>) -> Result<*const T> {
                access.read(name, self)
            }
        }
    };
    ([$($generics:tt)*] $buffer:ty, written) => {
        cuda_buffer!([$($generics)*] $buffer);

        impl<$($generics)*> Write for $buffer {
            fn address_mut<'a>(
                &'a mut self,
                name: &str,
                access: &CudaAccess<'a>,
            ) -> Result<*mut T> {
                access.write(name, self)
            }
        }
    };
}

cuda_buffer!([T] CudaView<'_, T>);
cuda_buffer!([T] CudaViewMut<'_, T>, written);
cuda_buffer!([T] CudaSlice<T>, written);
cuda_buffer!([T] CudaBuffer<T>, written);
