//! x W^T as candle's operator, and its gradient dY W, which is the same with inputs and outputs
//! exchanged.

use std::sync::Arc;

use candle_core::{bail, CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use nf4::{Element, Matrix, QuantizedTensor, Spec};

use crate::wrap;

#[derive(Debug)]
pub(crate) enum Weight {
    Host(QuantizedTensor),
    #[cfg(feature = "cuda")]
    Cuda(Box<nf4::cuda::CudaTensor>),
}

impl Weight {
    fn spec(&self) -> Spec {
        match self {
            Weight::Host(weight) => weight.spec(),
            #[cfg(feature = "cuda")]
            Weight::Cuda(weight) => weight.spec(),
        }
    }
}

pub(crate) struct Product {
    pub(crate) weight: Arc<Weight>,
    pub(crate) gradient: bool,
}

/// Where the input lies in its storage, its rows, and the shape of the output.
pub(crate) struct Extent {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) m: usize,
    pub(crate) shape: Shape,
}

impl Product {
    pub(crate) fn new(weight: Arc<Weight>) -> Self {
        Product {
            weight,
            gradient: false,
        }
    }

    /// The columns of the input and of the output.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let Spec { rows, cols, .. } = self.weight.spec();
        if self.gradient {
            (rows, cols)
        } else {
            (cols, rows)
        }
    }

    pub(crate) fn extent(&self, layout: &Layout) -> Result<Extent> {
        let (inputs, outputs) = self.sizes();
        let Some((from, to)) = layout.contiguous_offsets() else {
            bail!("{}: the input is not contiguous", self.name());
        };
        let mut dims = layout.dims().to_vec();
        match dims.last_mut() {
            Some(last) if *last == inputs => *last = outputs,
            _ => bail!(
                "{}: the input has the shape {dims:?}; expected {inputs} as its last size",
                self.name()
            ),
        }
        Ok(Extent {
            from,
            to,
            m: dims[..dims.len() - 1].iter().product(),
            shape: dims.into(),
        })
    }

    fn on_host<T: Element>(&self, x: &[T], m: usize) -> Result<Vec<T>> {
        #[allow(irrefutable_let_patterns)]
        let Weight::Host(weight) = self.weight.as_ref() else {
            bail!("{}: the weight is on a GPU, the input is not", self.name());
        };
        let x = Matrix::new(x, m, self.sizes().0).map_err(wrap)?;
        let y = if self.gradient {
            nf4::matmul_grad(x, weight, 0)
        } else {
            nf4::matmul(x, weight, None, 0)
        };
        y.map_err(wrap)
    }
}

impl CustomOp1 for Product {
    fn name(&self) -> &'static str {
        if self.gradient {
            "nf4-matmul-grad"
        } else {
            "nf4-matmul"
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Extent { from, to, m, shape } = self.extent(layout)?;
        let y = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.on_host(&x[from..to], m)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.on_host(&x[from..to], m)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.on_host(&x[from..to], m)?),
            _ => bail!("{}: the input is neither F32, F16 nor BF16", self.name()),
        };
        Ok((y, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::forward(self, storage, layout)
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad_y: &Tensor) -> Result<Option<Tensor>> {
        if self.gradient {
            bail!("{}: it has no gradient of its own", self.name());
        }
        let gradient = Product {
            weight: self.weight.clone(),
            gradient: true,
        };
        Ok(Some(grad_y.contiguous()?.apply_op1(gradient)?))
    }
}
