//! x W^T of one weight or several, and its gradient, the sum of dY W.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{bail, CustomOp1, DType, DeviceLocation, Layout, Result, Shape};
use nf4::{Element, Matrix, MatrixMut, Path, Place, QuantizedTensor, Spec};

use crate::paths::{Paths, Question};
use crate::wrap;

#[derive(Debug)]
pub(crate) enum Weight {
    Host(QuantizedTensor),
    #[cfg(feature = "cuda")]
    Cuda(Box<nf4::cuda::CudaTensor>),
}

impl Weight {
    pub(crate) fn spec(&self) -> Spec {
        match self {
            Weight::Host(weight) => weight.spec(),
            #[cfg(feature = "cuda")]
            Weight::Cuda(weight) => weight.spec(),
        }
    }
}

/// Holds the weights of a layer, which have the same columns: the outputs stand side by side.
#[derive(Debug)]
pub(crate) struct Weights {
    all: Vec<Weight>,
    /// The GPU that they are on.
    gpu: Option<usize>,
    paths: Paths,
}

impl Weights {
    pub(crate) fn new(all: Vec<Weight>, place: DeviceLocation) -> Self {
        let gpu = match place {
            DeviceLocation::Cuda { gpu_id } => Some(gpu_id),
            _ => None,
        };
        let paths = Paths::default();
        Weights { all, gpu, paths }
    }

    pub(crate) fn all(&self) -> &[Weight] {
        &self.all
    }
}

pub(crate) struct Product {
    weights: Arc<Weights>,
    /// The weight whose output this is the gradient of.
    gradient_of: Option<usize>,
}

/// Where the input lies in its storage, its rows, and the shape of the output.
pub(crate) struct Extent {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) m: usize,
    pub(crate) shape: Shape,
}

impl Product {
    pub(crate) fn new(weights: Arc<Weights>) -> Self {
        let gradient_of = None;
        Product {
            weights,
            gradient_of,
        }
    }

    /// The gradient of the output of a weight, or the product.
    pub(crate) fn with_gradient_of(self, gradient_of: Option<usize>) -> Self {
        Product {
            gradient_of,
            ..self
        }
    }

    pub(crate) fn is_gradient(&self) -> bool {
        self.gradient_of.is_some()
    }

    /// The weights of the layer.
    pub(crate) fn all_weights(&self) -> &Arc<Weights> {
        &self.weights
    }

    /// The weights that are multiplied with: of a gradient one.
    pub(crate) fn weights(&self) -> &[Weight] {
        match self.gradient_of {
            Some(i) => &self.weights.all[i..=i],
            None => &self.weights.all,
        }
    }

    /// Does it take less time on its GPU, with `m` rows of this dtype, to dequantize the weights and
    /// multiply by them? Of several weights all go the way of one for which it does.
    pub(crate) fn is_dense(&self, dtype: DType, m: usize) -> Result<bool> {
        let Some(gpu) = self.weights.gpu else {
            return Ok(false);
        };
        let (place, question) = (
            Place::Gpu(gpu),
            Question {
                dtype,
                m,
                gradient_of: self.gradient_of,
            },
        );
        let ask = || match dtype {
            DType::F32 => self.ask::<f32>(m, place),
            DType::F16 => self.ask::<half::f16>(m, place),
            DType::BF16 => self.ask::<half::bf16>(m, place),
            _ => bail!("{}: the input is neither F32, F16 nor BF16", self.name()),
        };
        self.weights.paths.is_dense(question, ask)
    }

    fn ask<T: Element>(&self, m: usize, place: Place) -> Result<bool> {
        for weight in self.weights() {
            let spec = weight.spec();
            let path = if self.is_gradient() {
                spec.matmul_grad_path::<T>(m, 0, place)
            } else {
                spec.matmul_path::<T>(m, place)
            };
            if path.map_err(wrap)? == Path::Dense {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The columns of the input and of the output.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        let weights = self.weights();
        let rows = weights.iter().map(|weight| weight.spec().rows).sum();
        let cols = weights[0].spec().cols;
        if self.is_gradient() {
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

    /// Where a bias lies in its storage.
    pub(crate) fn extent_of_bias(&self, layout: &Layout) -> Result<Range<usize>> {
        let (name, (_, rows)) = (self.name(), self.sizes());
        match layout.contiguous_offsets() {
            Some((from, to)) if to - from == rows => Ok(from..to),
            _ => bail!("{name}: the bias is not {rows} contiguous elements"),
        }
    }

    /// A bias goes with one weight.
    pub(crate) fn on_host<T: Element>(
        &self,
        x: &[T],
        m: usize,
        bias: Option<&[T]>,
    ) -> Result<Vec<T>> {
        let (inputs, outputs) = self.sizes();
        let x = Matrix::new(x, m, inputs).map_err(wrap)?;
        let mut weights = Vec::with_capacity(self.weights().len());
        for weight in self.weights() {
            #[allow(irrefutable_let_patterns)]
            let Weight::Host(weight) = weight
            else {
                bail!("{}: the weight is on a GPU, the input is not", self.name());
            };
            weights.push(weight);
        }
        if self.is_gradient() {
            return nf4::matmul_grad(x, weights[0], 0).map_err(wrap);
        }
        if bias.is_some() {
            return nf4::matmul(x, weights[0], bias, 0).map_err(wrap);
        }
        let mut y = vec![T::ZERO; m * outputs];
        let to = &mut MatrixMut::new(&mut y, m, outputs).map_err(wrap)?;
        nf4::matmul_joined_into(x, &weights, to, 0).map_err(wrap)?;
        Ok(y)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(gpu: Option<usize>, gradient_of: Option<usize>) -> Product {
        let weight = |rows| {
            let spec = Spec::new(rows, 64);
            Weight::Host(nf4::quantize(&vec![1f32; rows * 64], spec, 1).expect("it fits"))
        };
        let place = gpu.map_or(DeviceLocation::Cpu, |gpu_id| DeviceLocation::Cuda {
            gpu_id,
        });
        let weights = Weights::new(vec![weight(32), weight(16)], place);
        Product::new(Arc::new(weights)).with_gradient_of(gradient_of)
    }

    /// The CPU's answers, which a layer on the CPU does not ask for.
    #[test]
    fn the_way_is_that_of_the_library() -> Result<()> {
        for gradient_of in [None, Some(0), Some(1)] {
            let product = product(None, gradient_of);
            for m in [1, 257] {
                let dense = gradient_of.is_some() && m == 257;
                assert_eq!(product.ask::<half::bf16>(m, Place::Cpu)?, dense);
                assert!(!product.ask::<f32>(m, Place::Cpu)?);
                assert!(!product.is_dense(DType::BF16, m)?);
            }
        }
        Ok(())
    }

    #[test]
    fn a_gpu_is_asked_or_named() {
        let product = product(Some(0), None);
        match nf4::device_info(0).status {
            Ok(()) => assert!(product.is_dense(DType::F32, 17).expect("it is usable")),
            Err(reason) => {
                let error = product.is_dense(DType::F32, 17).unwrap_err().to_string();
                assert!(error.contains(reason.detail()), "{error}");
            }
        }
        let error = product.is_dense(DType::F64, 1).unwrap_err().to_string();
        assert!(error.contains("neither F32, F16 nor BF16"), "{error}");
    }
}
