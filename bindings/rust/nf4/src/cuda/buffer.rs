//! An allocation on the GPU that may be empty.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    SyncOnDrop, ValidAsZeroBits,
};

use crate::Result;

/// A buffer of a weight that owns its parts on the GPU. It may be empty. Its allocation has at least
/// one element, since CUDA does not allocate 0 bytes.
#[derive(Debug)]
pub struct CudaBuffer<T> {
    memory: CudaSlice<T>,
    length: usize,
}

impl<T: DeviceRepr + ValidAsZeroBits> CudaBuffer<T> {
    pub(super) fn zeros(stream: &Arc<CudaStream>, length: usize) -> Result<Self> {
        Ok(CudaBuffer {
            memory: stream.alloc_zeros(length.max(1))?,
            length,
        })
    }

    pub(super) fn upload(stream: &Arc<CudaStream>, values: &[T]) -> Result<Self> {
        let mut buffer = Self::zeros(stream, values.len())?;
        if !values.is_empty() {
            stream.memcpy_htod(values, &mut buffer.memory)?;
        }
        Ok(buffer)
    }

    pub(super) fn download(&self, stream: &Arc<CudaStream>) -> Result<Vec<T>> {
        let mut values = stream.clone_dtoh(&self.memory)?;
        stream.synchronize()?;
        values.truncate(self.length);
        Ok(values)
    }
}

impl<T> CudaBuffer<T> {
    /// Borrows it to be read.
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.memory.slice(..self.length)
    }

    /// Borrows it to be written.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.slice_mut(..self.length)
    }
}

impl<T> DeviceSlice<T> for CudaBuffer<T> {
    fn len(&self) -> usize {
        self.length
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.memory.stream()
    }
}

impl<T> DevicePtr<T> for CudaBuffer<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.memory.device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for CudaBuffer<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.memory.device_ptr_mut(stream)
    }
}
