//! The products as operators of candle.

use candle_core::{bail, CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, D};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::product::{Extent, Product};

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
        cuda::forward(self, storage, layout, None)
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad_y: &Tensor) -> Result<Option<Tensor>> {
        if self.is_gradient() {
            bail!("{}: it has no gradient of its own", self.name());
        }
        let (mut sum, mut from): (Option<Tensor>, _) = (None, 0);
        for (i, weight) in self.all_weights().all().iter().enumerate() {
            let rows = weight.spec().rows;
            let part = grad_y.narrow(D::Minus1, from, rows)?.contiguous()?;
            let gradient = Product::new(self.all_weights().clone()).with_gradient_of(Some(i));
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
        cuda::forward(&self.0, storage, layout, Some((bias, all)))
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
