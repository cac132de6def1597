//! The layer on a GPU beside the same on the CPU.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use nf4::{QuantizedTensor, Spec};
use nf4_candle::QuantizedLinear;

const ROWS: usize = 192;
const COLS: usize = 256;

/// The largest 2-norm of a difference, as a share of that of the values.
fn allowed(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 5e-4,
        _ => 4e-3,
    }
}

/// Sines whose frequency grows: their products have sums of no pattern.
fn numbers(count: usize, frequency: f64) -> Vec<f32> {
    let numbers = (0..count).map(|i| ((i * i) as f64 * frequency).sin() as f32);
    numbers.collect()
}

fn weight() -> QuantizedTensor {
    weight_of(ROWS, 0.37)
}

fn weight_of(rows: usize, frequency: f64) -> QuantizedTensor {
    nf4::quantize(&numbers(rows * COLS, frequency), Spec::new(rows, COLS), 1).expect("it fits")
}

fn x(rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
    Tensor::from_vec(numbers(rows * cols, 0.11), (rows, cols), &Device::Cpu)?.to_dtype(dtype)
}

fn norm(x: &Tensor) -> Result<f32> {
    x.sqr()?.sum_all()?.sqrt()?.to_scalar()
}

fn error(on_gpu: &Tensor, on_host: &Tensor) -> Result<f32> {
    let wanted = on_host.to_dtype(DType::F32)?;
    let got = on_gpu.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    Ok(norm(&(got - &wanted)?)? / norm(&wanted)?)
}

#[test]
fn products_and_gradients_are_those_of_the_cpu() -> Result<()> {
    let Ok(gpu) = Device::new_cuda(0) else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    let host = QuantizedLinear::new(weight(), None, &Device::Cpu)?;
    let device = QuantizedLinear::new(weight(), None, &gpu)?;
    // Rows: the kernel of few, fp32 by a dense weight, and ones that need a workspace on Hopper; then a
    // part of a tensor, and of no rows.
    for (dtype, m) in [
        (DType::F32, 1),
        (DType::F32, 40),
        (DType::F16, 5),
        (DType::BF16, 1),
        (DType::BF16, 300),
    ] {
        let x = x(m, COLS, dtype)?;
        let y = device.forward(&x.to_device(&gpu)?)?;
        assert_eq!((y.dims(), y.dtype()), (&[m, ROWS][..], dtype));
        let error = error(&y, &host.forward(&x)?)?;
        assert!(error < allowed(dtype), "{dtype:?} {m}: {error}");
    }
    for (dtype, rows) in [(DType::BF16, 2), (DType::F32, 20)] {
        let x = x(rows + 6, COLS, dtype)?;
        let part = device.forward(&x.to_device(&gpu)?.narrow(0, 3, rows)?)?;
        let error = error(&part, &host.forward(&x.narrow(0, 3, rows)?)?)?;
        assert!(error < allowed(dtype), "{dtype:?}: {error}");
    }
    let x = x(8, COLS, DType::BF16)?;
    let none = device.forward(&x.to_device(&gpu)?.narrow(0, 0, 0)?)?;
    assert_eq!(none.dims(), [0, ROWS]);
    assert!(host.forward(&x.to_device(&gpu)?).is_err() && device.forward(&x).is_err());
    let bias = Some(Tensor::zeros(ROWS, DType::F32, &Device::Cpu)?);
    let refused = QuantizedLinear::new(weight(), bias, &gpu).unwrap_err();
    assert!(refused.to_string().contains("bias is on Cpu"), "{refused}");
    Ok(())
}

#[test]
fn joined_weights_are_those_of_the_cpu() -> Result<()> {
    let Ok(gpu) = Device::new_cuda(0) else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    let weights = || vec![weight(), weight_of(64, 0.53), weight_of(128, 0.71)];
    let host = QuantizedLinear::joined(weights(), None, &Device::Cpu)?;
    let device = QuantizedLinear::joined(weights(), None, &gpu)?;
    for (dtype, m) in [(DType::BF16, 1), (DType::BF16, 300), (DType::F32, 40)] {
        let x = x(m, COLS, dtype)?;
        let y = device.forward(&x.to_device(&gpu)?)?;
        assert_eq!(y.dims(), [m, ROWS + 64 + 128]);
        let error = error(&y, &host.forward(&x)?)?;
        assert!(error < allowed(dtype), "{dtype:?} {m}: {error}");
    }
    Ok(())
}

#[test]
fn sums_and_biases_are_those_of_the_cpu() -> Result<()> {
    let Ok(gpu) = Device::new_cuda(0) else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    // One row takes the sum as the launch's bias; after a dense product of fp32 the bias is added.
    for (dtype, m) in [(DType::BF16, 1), (DType::F16, 5), (DType::F32, 40)] {
        let (x, sum) = (x(m, COLS, dtype)?, x(m, ROWS, dtype)?);
        let bias = sum.get(0)?;
        let on = |device: &Device| -> Result<[Tensor; 2]> {
            let (x, sum) = (x.to_device(device)?, sum.to_device(device)?);
            let bias = Some(bias.to_device(device)?);
            let biased = QuantizedLinear::new(weight(), bias, device)?.forward(&x)?;
            let plain = QuantizedLinear::new(weight(), None, device)?;
            Ok([biased, plain.forward_add(&x, &sum)?])
        };
        for (host, device) in on(&Device::Cpu)?.iter().zip(&on(&gpu)?) {
            let error = error(device, host)?;
            assert!(error < allowed(dtype), "{dtype:?} {m}: {error}");
        }
    }
    Ok(())
}

#[test]
fn the_gradient_is_that_of_the_cpu() -> Result<()> {
    let Ok(gpu) = Device::new_cuda(0) else {
        eprintln!("skipped: no GPU");
        return Ok(());
    };
    // fp32 and many rows go the dense way on every GPU.
    for (dtype, m) in [(DType::BF16, 4), (DType::F32, 40), (DType::F16, 1100)] {
        let mut gradients = Vec::new();
        for device in [&Device::Cpu, &gpu] {
            let linear = QuantizedLinear::new(weight(), None, device)?;
            let x = Var::from_tensor(&x(m, COLS, dtype)?.to_device(device)?)?;
            // Not ones: with them the errors of rounding a block's scale would add up.
            let by = self::x(m, ROWS, dtype)?.to_device(device)?;
            let mut all = (linear.forward(&x)? * by)?.backward()?;
            gradients.push(all.remove(&x).expect("it reaches x"));
        }
        let error = error(&gradients[1], &gradients[0])?;
        assert!(error < allowed(dtype), "{dtype:?} {m}: {error}");
    }
    Ok(())
}
