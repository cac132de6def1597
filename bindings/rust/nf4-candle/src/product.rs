//! x W^T of one weight or several as candle's operator, and its gradient, the sum of dY W.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{
    bail, CpuStorage, CustomOp1, CustomOp2, DType, DeviceLocation, Layout, Result, Shape, Tensor, D,
};
use nf4::{Element, Matrix, Path, Place, QuantizedTensor, Spec};

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
    /// Of the output of which weight this is the gradient.
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
    fn extent_of_bias(&self, layout: &Layout) -> Result<Range<usize>> {
        let (name, (_, rows)) = (self.name(), self.sizes());
        match layout.contiguous_offsets() {
            Some((from, to)) if to - from == rows => Ok(from..to),
            _ => bail!("{name}: the bias is not {rows} contiguous elements"),
        }
    }

    /// A bias goes with one weight.
    fn on_host<T: Element>(&self, x: &[T], m: usize, bias: Option<&[T]>) -> Result<Vec<T>> {
        let x = Matrix::new(x, m, self.sizes().0).map_err(wrap)?;
        let mut products = Vec::with_capacity(self.weights().len());
        for weight in self.weights() {
            #[allow(irrefutable_let_patterns)]
            let Weight::Host(weight) = weight
            else {
                bail!("{}: the weight is on a GPU, the input is not", self.name());
            };
            if self.is_gradient() {
                return nf4::matmul_grad(x, weight, 0).map_err(wrap);
            }
            products.push(nf4::Product {
                bias,
                ..nf4::Product::new(x, weight)
            });
        }
        let mut parts = nf4::matmul_batch(&products, 0).map_err(wrap)?;
        if let [y] = &mut parts[..] {
            return Ok(std::mem::take(y));
        }
        let rows = (0..m).flat_map(|row| {
            parts.iter().flat_map(move |y| {
                let columns = y.len() / m;
                &y[row * columns..(row + 1) * columns]
            })
        });
        Ok(rows.copied().collect())
    }
}

impl CustomOp1 for Product {
    fn name(&self) -> &'static str {
        if self.is_gradient() {
            "nf4-matmul-grad"
        } else {
            "nf4-matmul"
        }
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Extent { from, to, m, shape } = self.extent(layout)?;
        let y = match storage {
            CpuStorage::F32(x) => CpuStorage::F32(self.on_host(&x[from..to], m, None)?),
            CpuStorage::F16(x) => CpuStorage::F16(self.on_host(&x[from..to], m, None)?),
            CpuStorage::BF16(x) => CpuStorage::BF16(self.on_host(&x[from..to], m, None)?),
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
        crate::cuda::forward(self, storage, layout, None)
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad_y: &Tensor) -> Result<Option<Tensor>> {
        if self.is_gradient() {
            bail!("{}: it has no gradient of its own", self.name());
        }
        let (mut sum, mut from): (Option<Tensor>, _) = (None, 0);
        for (i, weight) in self.weights.all.iter().enumerate() {
            let rows = weight.spec().rows;
            let part = grad_y.narrow(D::Minus1, from, rows)?.contiguous()?;
            let gradient = Product::new(self.weights.clone()).with_gradient_of(Some(i));
            let gradient = part.apply_op1(gradient)?;
            sum = Some(match sum {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            });
            from += rows;
        }
        Ok(sum)
    }
}

/// A product and what the launch adds to each of its rows, of one weight.
pub(crate) struct Biased(pub(crate) Product);

impl CustomOp2 for Biased {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn cpu_fwd(
        &self,
        storage: &CpuStorage,
        layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let Extent { from, to, m, shape } = self.0.extent(layout)?;
        let (x, all) = (from..to, self.0.extent_of_bias(bias_layout)?);
        let y = match (storage, bias) {
            (CpuStorage::F32(values), CpuStorage::F32(bias)) => {
                CpuStorage::F32(self.0.on_host(&values[x], m, Some(&bias[all]))?)
            }
            (CpuStorage::F16(values), CpuStorage::F16(bias)) => {
                CpuStorage::F16(self.0.on_host(&values[x], m, Some(&bias[all]))?)
            }
            (CpuStorage::BF16(values), CpuStorage::BF16(bias)) => {
                CpuStorage::BF16(self.0.on_host(&values[x], m, Some(&bias[all]))?)
            }
            _ => bail!(
                "{}: input and bias are not both F32, F16 or BF16",
                self.name()
            ),
        };
        Ok((y, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &candle_core::CudaStorage,
        layout: &Layout,
        bias: &candle_core::CudaStorage,
        bias_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        let all = self.0.extent_of_bias(bias_layout)?;
        crate::cuda::forward(&self.0, storage, layout, Some((bias, all)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        bias: &Tensor,
        y: &Tensor,
        grad_y: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let rows = grad_y.reshape(((), self.0.sizes().1))?;
        let of_bias = rows.sum(0)?.reshape(bias.shape())?;
        Ok((self.0.bwd(x, y, grad_y)?, Some(of_bias)))
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
