//! Goes the dense way: candle's product with weights that were dequantized.

use candle_core::backend::BackendStorage;
use candle_core::{Layout, Result};

use crate::product::{Extent, Product};

/// `dense` holds the weights of the product, one behind another.
pub(crate) fn multiply<S: BackendStorage>(
    product: &Product,
    x: &S,
    extent: &Extent,
    dense: &S,
) -> Result<S> {
    let ((inputs, outputs), m) = (product.sizes(), extent.m);
    let weight = if product.is_gradient() {
        Layout::contiguous((inputs, outputs))
    } else {
        Layout::contiguous((outputs, inputs)).transpose(0, 1)?
    };
    let x_layout = Layout::contiguous_with_offset((m, inputs), extent.from);
    x.matmul(dense, (1, m, outputs, inputs), &x_layout, &weight)
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, CustomOp1, Device, DeviceLocation, Tensor};
    use nf4::{QuantizedTensor, Spec};

    use super::*;
    use crate::product::{Weight, Weights};

    const COLS: usize = 64;

    fn weight(rows: usize) -> QuantizedTensor {
        let values: Vec<f32> = (0..rows * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
        nf4::quantize(&values, Spec::new(rows, COLS), 1).expect("it fits")
    }

    fn error(ours: CpuStorage, theirs: CpuStorage) -> Result<f32> {
        let [ours, theirs] = [ours, theirs].map(|storage| match storage {
            CpuStorage::F32(values) => values,
            other => panic!("{other:?}"),
        });
        assert_eq!(ours.len(), theirs.len());
        let [ours, theirs] =
            [ours, theirs].map(|all| Tensor::from_vec(all.clone(), all.len(), &Device::Cpu));
        (ours? - theirs?)?.abs()?.max(0)?.to_scalar()
    }

    /// Both ways give the same products and gradients, of one weight and of two, of x that begins
    /// inside its storage.
    #[test]
    fn it_is_the_fused_way() -> Result<()> {
        let weights = [weight(48), weight(16)];
        for (count, gradient_of) in [(1, None), (2, None), (2, Some(0)), (2, Some(1))] {
            let all = weights[..count].iter().cloned().map(Weight::Host).collect();
            let all = Weights::new(all, DeviceLocation::Cpu);
            let product = Product::new(all.into()).with_gradient_of(gradient_of);
            let (inputs, m) = (product.sizes().0, 3);
            let x = (0..(m + 1) * inputs).map(|i| (i as f32 * 0.11).cos());
            let x = CpuStorage::F32(x.collect());
            let layout = Layout::contiguous_with_offset((m, inputs), inputs);
            let dense = product.weights().iter().flat_map(|weight| match weight {
                Weight::Host(weight) => nf4::dequantize::<f32>(weight, 1).expect("it fits"),
                #[cfg(feature = "cuda")]
                Weight::Cuda(_) => unreachable!("they are on the host"),
            });
            let dense = CpuStorage::F32(dense.collect());
            let ours = multiply(&product, &x, &product.extent(&layout)?, &dense)?;
            let error = error(ours, product.cpu_fwd(&x, &layout)?.0)?;
            assert!(error < 1e-4, "{count} {gradient_of:?}: {error}");
        }
        Ok(())
    }
}
