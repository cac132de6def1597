//! NF4 and FP4 weights in candle: [`QuantizedLinear`] computes y = x W^T + bias on the packed bytes
//! that bitsandbytes stores, on the CPU and, with the feature `cuda`, on GPUs. With that feature, use
//! nf4's feature `cudarc-core` and not `cudarc`: candle makes cudarc link CUDA, and nf4's `cudarc` makes
//! it load CUDA.
//!
//! ```
//! use candle_core::{Device, Module, Tensor};
//! use nf4_candle::QuantizedLinear;
//!
//! let values: Vec<f32> = (0..64 * 128).map(|i| (i as f32 * 0.1).sin()).collect();
//! let weight = nf4::quantize(&values, nf4::Spec::new(64, 128), 0).expect("it fits");
//! let linear = QuantizedLinear::new(weight, None, &Device::Cpu)?;
//! let y = linear.forward(&Tensor::ones((2, 3, 128), candle_core::DType::BF16, &Device::Cpu)?)?;
//! assert_eq!(y.dims(), [2, 3, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! The first layer on a GPU loads the costs that the user measured with `nf4 tune`, unless the program
//! has set costs before ([`nf4::load_costs_unless_set`]).
//!
//! The example `llama` generates from a checkpoint that transformers or `nf4 quantize` wrote.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(test, feature = "cuda"))]
mod dense;
mod operators;
mod paths;
mod product;

use std::sync::Arc;

use candle_core::{Device, Error, Module, Result, Tensor};
use nf4::QuantizedTensor;

use operators::Biased;
use product::{Product, Weight, Weights};

/// A linear layer with a 4-bit weight, or with several side by side.
#[derive(Debug, Clone)]
pub struct QuantizedLinear {
    weights: Arc<Weights>,
    bias: Option<Tensor>,
}

impl QuantizedLinear {
    /// Makes a layer of this weight `[out_features, in_features]` and bias `[out_features]`, on a device.
    ///
    /// # Errors
    /// It fails if the bias has another shape or is on another device, or if the device is neither the
    /// CPU nor, with the feature `cuda`, a GPU.
    pub fn new(weight: QuantizedTensor, bias: Option<Tensor>, device: &Device) -> Result<Self> {
        Self::joined(vec![weight], bias, device)
    }

    /// Makes one layer of several weights with the same number of columns, such as q, k and v. Their
    /// outputs are side by side, and the bias has an element for each row of all weights. On a GPU up to
    /// four share a launch if x has few rows.
    ///
    /// # Errors
    /// It fails as [`new`](Self::new) does, and if there is no weight, if there are more than 64, or if
    /// their numbers of columns differ.
    pub fn joined(
        weights: Vec<QuantizedTensor>,
        bias: Option<Tensor>,
        device: &Device,
    ) -> Result<Self> {
        let columns = weights.first().map_or(0, |first| first.spec().cols);
        if !(1..=64).contains(&weights.len()) {
            candle_core::bail!("weights are {}; expected 1 to 64", weights.len());
        }
        if let Some(other) = weights.iter().find(|one| one.spec().cols != columns) {
            let other = other.spec().cols;
            candle_core::bail!("a weight has {other} columns; expected {columns}, as the first");
        }
        let rows: usize = weights.iter().map(|weight| weight.spec().rows).sum();
        if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [rows]) {
            candle_core::bail!("bias has the shape {:?}; expected [{rows}]", bias.dims());
        }
        let place = device.location();
        if let Some(bias) = bias
            .as_ref()
            .filter(|bias| bias.device().location() != place)
        {
            candle_core::bail!(
                "bias is on {:?}; expected {place:?}",
                bias.device().location()
            );
        }
        let weights = weights.into_iter().map(|weight| match device {
            Device::Cpu => Ok(Weight::Host(weight)),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => cuda::upload(&weight, device),
            device => candle_core::bail!("no kernels of libnf4 for {device:?} in this build"),
        });
        let weights = Arc::new(Weights::new(weights.collect::<Result<_>>()?, place));
        Ok(QuantizedLinear { weights, bias })
    }

    /// Returns y + `sum`, as a residual connection adds them; `sum` has the shape and dtype of y. For a
    /// single row of x, as in decode, one weight and no bias, libnf4's own kernel adds it and rounds once.
    ///
    /// # Errors
    /// It fails as [`forward`](Self::forward) does, and if `sum` does not have the shape and dtype of y.
    pub fn forward_add(&self, x: &Tensor, sum: &Tensor) -> Result<Tensor> {
        let weights = self.weights.all();
        let weight = weights[0].spec();
        let in_launch = weights.len() == 1 && self.bias.is_none();
        if in_launch && x.elem_count() == weight.cols && sum.elem_count() == weight.rows {
            let y = self.biased(x, &sum.flatten_all()?)?;
            if y.shape() == sum.shape() {
                return Ok(y);
            }
        }
        self.forward(x)? + sum
    }

    /// With a bias of x's dtype.
    fn biased(&self, x: &Tensor, bias: &Tensor) -> Result<Tensor> {
        let (x, product) = (x.contiguous()?, Product::new(self.weights.clone()));
        let m = x.elem_count() / product.sizes().0.max(1);
        if product.weights().len() > 1 || product.is_dense(x.dtype(), m)? {
            return x.apply_op1(product)?.broadcast_add(bias);
        }
        x.apply_op2(&bias.contiguous()?, Biased(product))
    }
}

impl Module for QuantizedLinear {
    /// Returns y `[..., out_features]` for x `[..., in_features]`, in the dtype of x: fp32, fp16 or bf16.
    /// On a GPU libnf4 says which way is faster (`nf4::Path`): its own kernel, or a dense weight in that
    /// dtype, which lives for the call, and candle's product. The gradient chooses in the same way. fp32
    /// with more than 16 rows of x goes the dense way. x and the bias have gradients, the weight has none.
    /// The bias may have another dtype than x.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.bias {
            Some(bias) => self.biased(x, &bias.to_dtype(x.dtype())?),
            None => x
                .contiguous()?
                .apply_op1(Product::new(self.weights.clone())),
        }
    }
}

fn wrap(error: nf4::Error) -> Error {
    Error::wrap(error)
}
