//! Loads the weights of a model from a `Source`, such as a checkpoint.

use candle_core::safetensors::Load;
use candle_core::{bail, DType, Device, Error, Module, Result, Tensor, D};
use nf4::checkpoint::Checkpoint;
use nf4::QuantizedTensor;
use nf4_candle::QuantizedLinear;

/// A linear layer, or several side by side.
pub enum Linear {
    Quantized(QuantizedLinear),
    Dense(Tensor),
    /// Several layers side by side, some in 4 bits and some dense.
    Mixed(Vec<Linear>),
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Linear::Quantized(linear) => linear.forward(x),
            Linear::Dense(weight) => x.matmul(weight),
            Linear::Mixed(parts) => {
                let outputs = parts.iter().map(|part| part.forward(x));
                Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, D::Minus1)
            }
        }
    }
}

impl Linear {
    /// Returns the product plus `sum`. For one row and a 4-bit weight it is one launch.
    pub fn forward_add(&self, x: &Tensor, sum: &Tensor) -> Result<Tensor> {
        match self {
            Linear::Quantized(linear) => linear.forward_add(x, sum),
            _ => self.forward(x)? + sum,
        }
    }
}

/// A source of weights for a device.
pub trait Source {
    /// Returns the device of the model, and the type of dense tensors.
    fn place(&self) -> (&Device, DType);

    /// Returns a dense tensor. A size of `None` in the shape matches any size.
    fn dense(&self, name: &str, shape: &[Option<usize>]) -> Result<Tensor>;

    /// Returns a 4-bit weight, or `None` if this weight is dense.
    fn quantized(&self, name: &str, rows: usize, cols: usize) -> Result<Option<QuantizedTensor>>;

    /// Returns the layers of these names and rows, side by side, so that one launch computes all.
    fn linear(&self, layers: &[(&str, usize)], cols: usize) -> Result<Linear> {
        let (mut quantized, mut dense) = (Vec::new(), Vec::new());
        for (name, rows) in layers {
            let name = format!("{name}.weight");
            match self.quantized(&name, *rows, cols)? {
                Some(weight) => quantized.push(weight),
                None => dense.push(self.dense(&name, &[Some(*rows), Some(cols)])?),
            }
        }
        if dense.is_empty() {
            let joined = QuantizedLinear::joined(quantized, None, self.place().0)?;
            return Ok(Linear::Quantized(joined));
        }
        if quantized.is_empty() {
            return Ok(Linear::Dense(Tensor::cat(&dense, 0)?.t()?));
        }
        let parts = layers.iter().map(|one| self.linear(&[*one], cols));
        Ok(Linear::Mixed(parts.collect::<Result<_>>()?))
    }
}

/// Reads tensors of a checkpoint.
pub struct Loader<'a> {
    pub checkpoint: &'a Checkpoint,
    pub device: &'a Device,
    pub dtype: DType,
}

impl Source for Loader<'_> {
    fn place(&self) -> (&Device, DType) {
        (self.device, self.dtype)
    }

    fn dense(&self, name: &str, shape: &[Option<usize>]) -> Result<Tensor> {
        let view = self.checkpoint.tensor(name).map_err(Error::wrap)?;
        let found = view.shape();
        let fits = |(found, wanted): (&usize, &Option<usize>)| wanted.is_none_or(|n| n == *found);
        if found.len() != shape.len() || !found.iter().zip(shape).all(fits) {
            let wanted = shape
                .iter()
                .map(|n| n.map_or("any".into(), |n| n.to_string()));
            let wanted = wanted.collect::<Vec<String>>().join(", ");
            bail!("{name} has the shape {found:?}; expected [{wanted}]");
        }
        view.load(self.device)?.to_dtype(self.dtype)
    }

    fn quantized(&self, name: &str, rows: usize, cols: usize) -> Result<Option<QuantizedTensor>> {
        if !self.checkpoint.is_quantized(name) {
            return Ok(None);
        }
        let stored = self.checkpoint.weight(name).map_err(Error::wrap)?;
        if stored.shape() != [rows, cols] {
            let (found, wanted) = (stored.shape(), [rows, cols]);
            bail!("{name} has the shape {found:?}; expected {wanted:?}");
        }
        stored.to_tensor().map(Some).map_err(Error::wrap)
    }
}
