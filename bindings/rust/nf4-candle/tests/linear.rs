//! The layer beside candle's own product with the dequantized weight: values, gradients, and what is
//! refused.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use nf4::{QuantizedTensor, Spec};
use nf4_candle::QuantizedLinear;

const ROWS: usize = 48;
const COLS: usize = 128;

fn weight() -> QuantizedTensor {
    let values: Vec<f32> = (0..ROWS * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
    nf4::quantize(&values, Spec::new(ROWS, COLS), 1).expect("it fits")
}

fn dense() -> Result<Tensor> {
    let values: Vec<f32> = nf4::dequantize(&weight(), 1).expect("it fits");
    Tensor::from_vec(values, (ROWS, COLS), &Device::Cpu)
}

fn bias() -> Result<Tensor> {
    Tensor::arange(0f32, ROWS as f32, &Device::Cpu)
}

fn x() -> Result<Tensor> {
    let values: Vec<f32> = (0..6 * COLS).map(|i| (i as f32 * 0.11).cos()).collect();
    Tensor::from_vec(values, (2, 3, COLS), &Device::Cpu)
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    let b = b.to_dtype(DType::F32)?;
    (a.to_dtype(DType::F32)? - b)?
        .abs()?
        .flatten_all()?
        .max(0)?
        .to_scalar()
}

#[test]
fn values_are_those_of_the_dense_weight() -> Result<()> {
    let linear = QuantizedLinear::new(weight(), None, &Device::Cpu)?;
    for (dtype, most) in [(DType::F32, 1e-4), (DType::F16, 0.05), (DType::BF16, 0.4)] {
        let y = linear.forward(&x()?.to_dtype(dtype)?)?;
        assert_eq!((y.dims(), y.dtype()), (&[2, 3, ROWS][..], dtype));
        let wanted = x()?.broadcast_matmul(&dense()?.t()?)?;
        let error = difference(&y, &wanted)?;
        assert!(error < most, "{dtype:?}: {error}");
    }
    // A part of a tensor, which begins inside its storage; and columns that are not contiguous.
    let part = x()?.narrow(0, 1, 1)?;
    let wanted = part.broadcast_matmul(&dense()?.t()?)?;
    assert!(difference(&linear.forward(&part)?, &wanted)? < 1e-4);
    let turned = x()?.transpose(0, 1)?;
    let wanted = turned.contiguous()?.broadcast_matmul(&dense()?.t()?)?;
    assert!(difference(&linear.forward(&turned)?, &wanted)? < 1e-4);
    assert_eq!(linear.forward(&x()?.narrow(0, 0, 0)?)?.dims(), [0, 3, ROWS]);
    Ok(())
}

#[test]
fn the_gradient_reaches_x_and_the_bias() -> Result<()> {
    let (x, bias) = (Var::from_tensor(&x()?)?, Var::from_tensor(&bias()?)?);
    let linear = QuantizedLinear::new(weight(), Some(bias.as_tensor().clone()), &Device::Cpu)?;
    let ours = linear.forward(&x)?.sqr()?.sum_all()?.backward()?;
    let dense = x.broadcast_matmul(&dense()?.t()?)?.broadcast_add(&bias)?;
    let theirs = dense.sqr()?.sum_all()?.backward()?;
    for var in [&x, &bias] {
        let (ours, theirs) = (ours.get(var).unwrap(), theirs.get(var).unwrap());
        let scale: f32 = theirs.abs()?.flatten_all()?.max(0)?.to_scalar()?;
        assert!(difference(ours, theirs)? < 1e-5 * scale);
    }
    Ok(())
}

/// Two weights side by side are one whose rows they are: values and gradient.
#[test]
fn joined_weights_are_one() -> Result<()> {
    let values: Vec<f32> = nf4::dequantize(&weight(), 1).expect("it fits");
    let spec = |rows| Spec::new(rows, COLS);
    let parts = [
        (&values[..COLS * 16], 16),
        (&values[COLS * 16..], ROWS - 16),
    ];
    let parts = parts.map(|(values, rows)| nf4::quantize(values, spec(rows), 1).expect("it fits"));
    let dense = parts
        .each_ref()
        .map(|part| nf4::dequantize::<f32>(part, 1).expect("it fits"));
    let dense = Tensor::from_vec(dense.concat(), (ROWS, COLS), &Device::Cpu)?;
    let joined = QuantizedLinear::joined(parts.to_vec(), Some(bias()?), &Device::Cpu)?;
    let x = Var::from_tensor(&x()?)?;
    let (ours, theirs) = (joined.forward(&x)?, x.broadcast_matmul(&dense.t()?)?);
    assert!(difference(&ours, &theirs.broadcast_add(&bias()?)?)? < 1e-4);
    let gradient = |y: Tensor| y.sqr()?.sum_all()?.backward();
    let (ours, theirs) = (gradient(joined.forward(&x)?)?, {
        gradient(x.broadcast_matmul(&dense.t()?)?.broadcast_add(&bias()?)?)?
    });
    let (ours, theirs) = (ours.get(&x).unwrap(), theirs.get(&x).unwrap());
    let scale: f32 = theirs.abs()?.flatten_all()?.max(0)?.to_scalar()?;
    assert!(difference(ours, theirs)? < 1e-5 * scale);
    Ok(())
}

/// The launch adds it for one row, a later kernel for more, with a bias or without; the gradient reaches the sum.
#[test]
fn a_sum_is_added() -> Result<()> {
    for (rows, bias) in [(1, None), (3, None), (1, Some(bias()?))] {
        let linear = QuantizedLinear::new(weight(), bias, &Device::Cpu)?;
        let x = Var::from_tensor(&x()?.narrow(0, 0, 1)?.narrow(1, 3 - rows, rows)?)?;
        let sum = Tensor::arange(0f32, (rows * ROWS) as f32, &Device::Cpu)?;
        let sum = Var::from_tensor(&sum.reshape((1, rows, ROWS))?)?;
        let (ours, theirs) = (
            linear.forward_add(&x, &sum)?,
            (linear.forward(&x)? + sum.as_tensor())?,
        );
        assert_eq!(ours.dims(), [1, rows, ROWS]);
        assert!(difference(&ours, &theirs)? < 1e-4);
        let gradient = |y: Tensor| y.sqr()?.sum_all()?.backward();
        let (ours, theirs) = (gradient(ours)?, gradient(theirs)?);
        for var in [&x, &sum] {
            let (ours, theirs) = (ours.get(var).unwrap(), theirs.get(var).unwrap());
            let scale: f32 = theirs.abs()?.flatten_all()?.max(0)?.to_scalar()?;
            assert!(difference(ours, theirs)? < 1e-5 * scale);
        }
        let flat = linear.forward_add(&x, &sum.flatten_all()?).unwrap_err();
        assert!(flat.to_string().contains("shape mismatch"), "{flat}");
    }
    Ok(())
}

#[test]
fn a_bias_may_have_another_dtype() -> Result<()> {
    let linear = QuantizedLinear::new(weight(), Some(bias()?), &Device::Cpu)?;
    let y = linear.forward(&x()?.to_dtype(DType::BF16)?)?;
    assert_eq!(y.dtype(), DType::BF16);
    assert!(difference(&y, &linear.forward(&x()?)?)? < 0.4);
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let linear = QuantizedLinear::new(weight(), None, &Device::Cpu)?;
    let error = |x: Tensor| linear.forward(&x).unwrap_err().to_string();
    let text = error(Tensor::zeros((2, 64), DType::F32, &Device::Cpu)?);
    assert!(
        text.contains("[2, 64]; expected 128 as its last size"),
        "{text}"
    );
    let text = error(Tensor::zeros((2, COLS), DType::F64, &Device::Cpu)?);
    assert!(text.contains("neither F32, F16 nor BF16"), "{text}");
    let text = error(Tensor::zeros((), DType::F32, &Device::Cpu)?);
    assert!(text.contains("expected 128"), "{text}");
    let refused = |weights| {
        let refused = QuantizedLinear::joined(weights, None, &Device::Cpu);
        refused.unwrap_err().to_string()
    };
    let text = refused(Vec::new());
    assert!(text.contains("weights are 0; expected 1 to 64"), "{text}");
    let other = nf4::quantize(&[1f32; 64], Spec::new(1, 64), 1).expect("it fits");
    let text = refused(vec![weight(), other]);
    assert!(text.contains("64 columns; expected 128"), "{text}");
    let bias = Some(Tensor::zeros(3, DType::F32, &Device::Cpu)?);
    let text = QuantizedLinear::new(weight(), bias, &Device::Cpu)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("bias has the shape [3]; expected [48]"),
        "{text}"
    );
    Ok(())
}
