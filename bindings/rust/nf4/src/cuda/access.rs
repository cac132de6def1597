//! Addresses of cudarc's buffers for one launch, and what a launch reads of a weight.

use std::cell::RefCell;

use cudarc::driver::{
    CudaContext, CudaStream, CudaView, CudaViewMut, DevicePtr as _, DevicePtrMut as _,
    DeviceSlice as _, SyncOnDrop,
};

use crate::device::{DevicePtr, DeviceWeight, Stream};
use crate::{Error, Result};

/// Buffers of a weight, of lengths that were checked.
pub trait Readable {
    type Device: DeviceWeight;

    /// The weight for one launch.
    fn read<'a>(&'a self, access: &Access<'a>) -> Result<Self::Device>;

    /// Rows and columns.
    fn shape(&self) -> (usize, usize);
}

/// Addresses for one launch on a stream. Taking one makes the stream wait for the work of
/// others on that buffer; dropping this tells others to wait for the launch. So it is
/// dropped after the launch.
pub struct Access<'a> {
    stream: &'a CudaStream,
    guards: RefCell<Vec<SyncOnDrop<'a>>>,
}

impl<'a> Access<'a> {
    pub(super) fn new(stream: &'a CudaStream) -> Self {
        Access {
            stream,
            guards: RefCell::new(Vec::with_capacity(8)),
        }
    }

    pub(super) fn read<T>(&self, name: &str, buffer: &'a CudaView<'_, T>) -> Result<DevicePtr<T>> {
        check_context(name, buffer.stream().context(), self.stream)?;
        let (address, guard) = buffer.device_ptr(self.stream);
        self.guards.borrow_mut().push(guard);
        Ok(DevicePtr::from_address(address))
    }

    pub(super) fn write<T>(
        &self,
        name: &str,
        buffer: &'a mut CudaViewMut<'_, T>,
    ) -> Result<DevicePtr<T>> {
        check_context(name, buffer.stream().context(), self.stream)?;
        let (address, guard) = buffer.device_ptr_mut(self.stream);
        self.guards.borrow_mut().push(guard);
        Ok(DevicePtr::from_address(address))
    }

    pub(super) fn read_optional<T>(
        &self,
        name: &str,
        buffer: &'a Option<CudaView<'_, T>>,
    ) -> Result<Option<DevicePtr<T>>> {
        buffer
            .as_ref()
            .map(|buffer| self.read(name, buffer))
            .transpose()
    }

    /// The address of a workspace, if there is one, and its bytes.
    pub(super) fn workspace(
        &self,
        workspace: Option<&'a mut CudaViewMut<'_, u8>>,
    ) -> Result<(DevicePtr<u8>, usize)> {
        let Some(workspace) = workspace else {
            return Ok((DevicePtr::NULL, 0));
        };
        let bytes = workspace.len();
        Ok((self.write("workspace", workspace)?, bytes))
    }

    /// The stream, with its context current on this thread. A wait that failed above is
    /// reported here, before anything is enqueued.
    pub(super) fn bound_stream(&self) -> Result<Stream> {
        self.stream.context().bind_to_thread()?;
        Ok(Stream::from_raw(self.stream.cu_stream().cast()))
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
