//! The layer on a GPU beside the same on the CPU. Candle's own kernels are not called.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use nf4::{QuantizedTensor, Spec};
use nf4_candle::QuantizedLinear;

const ROWS: usize = 192;
const COLS: usize = 256;

fn weight() -> QuantizedTensor {
    let values: Vec<f32> = (0..ROWS * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
    nf4::quantize(&values, Spec::new(ROWS, COLS), 1).expect("it fits")
}

fn x(rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
    let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.11).cos()).collect();
    Tensor::from_vec(values, (rows, cols), &Device::Cpu)?.to_dtype(dtype)
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    let a = a.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    (a - b.to_dtype(DType::F32)?)?
        .abs()?
        .flatten_all()?
        .max(0)?
        .to_scalar()
}

#[test]
fn products_and_gradients_are_those_of_the_cpu() -> Result<()> {
    let Ok(gpu) = Device::new_cuda(0) else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    let host = QuantizedLinear::new(weight(), None, &Device::Cpu)?;
    let device = QuantizedLinear::new(weight(), None, &gpu)?;
    // Rows: the kernel of few, and ones that need a workspace on Hopper; then a part of a tensor.
    for (dtype, m) in [
        (DType::F32, 1),
        (DType::F16, 5),
        (DType::BF16, 1),
        (DType::BF16, 300),
    ] {
        let x = x(m, COLS, dtype)?;
        let y = device.forward(&x.to_device(&gpu)?)?;
        assert_eq!((y.dims(), y.dtype()), (&[m, ROWS][..], dtype));
        let error = difference(&y, &host.forward(&x)?)?;
        assert!(
            error < if dtype == DType::F32 { 1e-3 } else { 0.5 },
            "{dtype:?} {m}: {error}"
        );
    }
    let x = x(8, COLS, DType::BF16)?;
    let part = device.forward(&x.to_device(&gpu)?.narrow(0, 3, 2)?)?;
    let error = difference(&part, &host.forward(&x.narrow(0, 3, 2)?)?)?;
    assert!(error < 0.5, "{error}");
    assert!(host.forward(&x.to_device(&gpu)?).is_err() && device.forward(&x).is_err());
    Ok(())
}

#[test]
fn the_gradient_is_that_of_the_cpu() -> Result<()> {
    let Ok(gpu) = Device::new_cuda(0) else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    let mut gradients = Vec::new();
    for device in [Device::Cpu, gpu] {
        let linear = QuantizedLinear::new(weight(), None, &device)?;
        let x = Var::from_tensor(&x(4, COLS, DType::BF16)?.to_device(&device)?)?;
        let mut y = linear.forward(&x)?.backward()?;
        gradients.push(y.remove(&x).expect("it reaches x"));
    }
    let error = difference(&gradients[1], &gradients[0])?;
    assert!(error < 0.5, "{error}");
    Ok(())
}
