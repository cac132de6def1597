//! An allocation on the GPU that may be empty.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits};

use crate::Result;

/// A buffer of `length` elements. The allocation has one at least: CUDA has none of 0 bytes.
#[derive(Debug)]
pub(super) struct Buffer<T> {
    memory: CudaSlice<T>,
    pub(super) length: usize,
}

impl<T: DeviceRepr + ValidAsZeroBits> Buffer<T> {
    pub(super) fn zeros(stream: &Arc<CudaStream>, length: usize) -> Result<Self> {
        Ok(Buffer {
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

    pub(super) fn view(&self) -> CudaView<'_, T> {
        self.memory.slice(..self.length)
    }

    pub(super) fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.memory.slice_mut(..self.length)
    }
}
