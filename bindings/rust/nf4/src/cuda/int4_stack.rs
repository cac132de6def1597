//! Experts of integers in buffers of cudarc.

use cudarc::driver::CudaView;

use super::access::{Access, Readable};
use super::int4::PartsRef;
use crate::device::DeviceInt4Tensor;
use crate::{ColumnsOf, Int4Spec, Result};

/// A stack of experts of integers, all of one [`Int4Spec`], that borrows buffers on the GPU, each with
/// one expert's part after another's: for [`matmul_grouped_int4_into`](super::matmul_grouped_int4_into).
/// Their columns are in order.
#[derive(Debug)]
pub struct CudaInt4Stack<'a> {
    spec: Int4Spec,
    experts: usize,
    parts: PartsRef<'a>,
}

impl<'a> CudaInt4Stack<'a> {
    /// A stack of these parts. `spec` is that of one expert.
    ///
    /// # Errors
    /// As [`Int4Stack::new`](crate::Int4Stack::new).
    pub fn new(
        spec: Int4Spec,
        experts: usize,
        packed: CudaView<'a, u32>,
        scales: CudaView<'a, u16>,
        zeros: Option<CudaView<'a, u32>>,
    ) -> Result<Self> {
        let parts = PartsRef {
            packed,
            scales,
            zeros,
            columns: ColumnsOf::InOrder,
        };
        let lengths = parts.as_ref().map(|w| w.len(), |s| s.len(), |i| i.len());
        spec.check_lengths_of(experts, lengths)?;
        Ok(CudaInt4Stack {
            spec,
            experts,
            parts,
        })
    }

    /// The layout and sizes of one expert.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// How many there are.
    pub fn experts(&self) -> usize {
        self.experts
    }
}

impl Readable for CudaInt4Stack<'_> {
    type Device = DeviceInt4Tensor;

    /// The first expert, which the others follow.
    fn read<'a>(&'a self, access: &Access<'a>) -> Result<DeviceInt4Tensor> {
        self.parts.read(self.spec, access)
    }

    /// Rows of all experts, and columns.
    fn shape(&self) -> (usize, usize) {
        (self.experts * self.spec.rows, self.spec.cols)
    }
}
