//! The gradients of an adapter's matrices on the GPU, against binary64.

use std::sync::Arc;

use half::{bf16, f16};
use nf4::cuda::{lora_grad_into, CudaLoraGrad};
use nf4::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use nf4::{Error, Result};

use super::common::Number;
use super::cuda::stream;
use super::lora_grad::{check_close, Operands, COLS, M, RANK, ROWS, SCALE};

/// Operands without gaps, in buffers on the GPU.
struct OnGpu<T> {
    x: CudaSlice<T>,
    grad_y: CudaSlice<T>,
    p: CudaSlice<T>,
    q: CudaSlice<T>,
}

impl<T: Number + DeviceRepr> OnGpu<T> {
    fn upload(stream: &Arc<CudaStream>, operands: &Operands<T>) -> Result<Self> {
        Ok(OnGpu {
            x: stream.clone_htod(&operands.x)?,
            grad_y: stream.clone_htod(&operands.grad_y)?,
            p: stream.clone_htod(&operands.p)?,
            q: stream.clone_htod(&operands.q)?,
        })
    }

    fn view(&self) -> CudaLoraGrad<'_, T> {
        CudaLoraGrad {
            rank: RANK,
            scale: SCALE,
            m: M,
            rows: ROWS,
            cols: COLS,
            x: self.x.as_view(),
            grad_y: self.grad_y.as_view(),
            p: self.p.as_view(),
            q: self.q.as_view(),
        }
    }
}

fn is_close<T, G>(stream: &Arc<CudaStream>, epsilon: f64) -> Result<()>
where
    T: Number + DeviceRepr,
    G: Number + DeviceRepr + ValidAsZeroBits,
{
    let operands = Operands::<T>::new(0);
    let on_gpu = OnGpu::upload(stream, &operands)?;
    let mut grad_a = stream.alloc_zeros::<G>(RANK * COLS)?;
    let mut grad_b = stream.alloc_zeros::<G>(ROWS * RANK)?;
    let (to_a, to_b) = (&mut grad_a.as_view_mut(), &mut grad_b.as_view_mut());
    lora_grad_into(&on_gpu.view(), Some(to_a), Some(to_b), stream)?;
    let (grad_a, grad_b) = (stream.clone_dtoh(&grad_a)?, stream.clone_dtoh(&grad_b)?);
    stream.synchronize()?;
    check_close(&grad_a, COLS, epsilon, |i, j| operands.of_a(i, j));
    check_close(&grad_b, RANK, epsilon, |i, j| operands.of_b(i, j));
    Ok(())
}

#[test]
fn gradients_are_those_of_binary64() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    is_close::<f32, f32>(&stream, f64::powi(2.0, -24))?;
    is_close::<f16, f32>(&stream, f64::powi(2.0, -24))?;
    is_close::<bf16, f32>(&stream, f64::powi(2.0, -24))?;
    is_close::<f16, f16>(&stream, f64::powi(2.0, -11))?;
    is_close::<bf16, bf16>(&stream, f64::powi(2.0, -8))
}

#[test]
fn one_gradient_needs_its_own_operands_alone() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let operands = Operands::<bf16>::new(0);
    let on_gpu = OnGpu::upload(&stream, &operands)?;
    let none = || on_gpu.p.slice(..0);
    let of_b = CudaLoraGrad {
        x: none(),
        q: none(),
        ..on_gpu.view()
    };
    let mut grad_b = stream.alloc_zeros::<f32>(ROWS * RANK)?;
    lora_grad_into(&of_b, None, Some(&mut grad_b.as_view_mut()), &stream)?;
    let grad_b = stream.clone_dtoh(&grad_b)?;
    stream.synchronize()?;
    let epsilon = f64::powi(2.0, -24);
    check_close(&grad_b, RANK, epsilon, |i, j| operands.of_b(i, j));
    Ok(())
}

#[test]
fn wrong_lengths_are_named() -> Result<()> {
    let Some(stream) = stream() else {
        return Ok(());
    };
    let on_gpu = OnGpu::upload(&stream, &Operands::<f16>::new(0))?;
    let mut grad = stream.alloc_zeros::<f32>(RANK * COLS)?;
    let mut refused = |operands: CudaLoraGrad<'_, f16>, length: usize| {
        let to = &mut grad.slice_mut(..length);
        match lora_grad_into(&operands, Some(to), None, &stream) {
            Err(Error::InvalidArgument(detail)) => detail,
            other => panic!("expected InvalidArgument, not {other:?}"),
        }
    };
    let (good, length) = (|| on_gpu.view(), RANK * COLS);
    let x = on_gpu.x.slice(1..);
    assert_eq!(
        refused(CudaLoraGrad { x, ..good() }, length),
        "x has 3588 elements; expected 3589"
    );
    let q = on_gpu.q.slice(1..);
    assert_eq!(
        refused(CudaLoraGrad { q, ..good() }, length),
        "q has 184 elements; expected 185"
    );
    assert_eq!(
        refused(good(), length - 1),
        "grad_a has 484 elements; expected 485"
    );
    Ok(())
}
