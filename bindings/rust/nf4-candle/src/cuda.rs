//! The product on a GPU: libnf4 reads and writes candle's buffers, on candle's stream.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::{bail, CustomOp1, DType, Layout, Result, Shape};
use nf4::cuda::{CudaTensor, Launch};
use nf4::{
    dequantize_into, matmul_grad_into, matmul_into, matmul_joined_into, Element, MatrixOf,
    QuantizedTensor,
};

use crate::dense::multiply;
use crate::product::{Extent, Product, Weight};
use crate::wrap;

pub(crate) fn upload(weight: &QuantizedTensor, device: &CudaDevice) -> Result<Weight> {
    // Before the first product, whose choice of a kernel is kept. Later calls load nothing.
    nf4::load_costs_unless_set();
    let weight = CudaTensor::upload(&device.cuda_stream(), weight).map_err(wrap)?;
    Ok(Weight::Cuda(Box::new(weight)))
}

/// Where it lies in its storage; of a product with one weight.
type Bias<'a> = Option<(&'a CudaStorage, Range<usize>)>;

pub(crate) fn forward(
    product: &Product,
    storage: &CudaStorage,
    layout: &Layout,
    bias: Bias,
) -> Result<(CudaStorage, Shape)> {
    let extent = product.extent(layout)?;
    let y = match storage.dtype() {
        DType::F32 => on_device::<f32>(product, storage, &extent, bias),
        DType::F16 => on_device::<half::f16>(product, storage, &extent, bias),
        DType::BF16 => on_device::<half::bf16>(product, storage, &extent, bias),
        _ => bail!("{}: the input is neither F32, F16 nor BF16", product.name()),
    }?;
    Ok((y, extent.shape))
}

fn on_device<T: Element + CudaDType + DeviceRepr>(
    product: &Product,
    storage: &CudaStorage,
    extent: &Extent,
    bias: Bias,
) -> Result<CudaStorage> {
    let mut weights = Vec::with_capacity(product.weights().len());
    for weight in product.weights() {
        let Weight::Cuda(weight) = weight else {
            bail!(
                "{}: the input is on a GPU, the weight is not",
                product.name()
            );
        };
        weights.push(&**weight);
    }
    if bias.is_none() && product.is_dense(storage.dtype(), extent.m)? {
        by_dense_weights::<T>(product, &weights, storage, extent)
    } else {
        fused::<T>(product, &weights, storage, extent, bias)
    }
}

/// The dense weights are candle's memory until its stream has used them.
fn by_dense_weights<T: Element + CudaDType + DeviceRepr>(
    product: &Product,
    weights: &[&CudaTensor],
    storage: &CudaStorage,
    extent: &Extent,
) -> Result<CudaStorage> {
    let ((inputs, outputs), device) = (product.sizes(), storage.device());
    // SAFETY: the launches below write every element before the product reads one.
    let mut dense = unsafe { device.alloc::<T>(inputs * outputs)? };
    let mut next = 0;
    for weight in weights {
        let from = next;
        next += weight.elements();
        let to = dense.slice_mut(from..next);
        dequantize_into(weight, to, &device.cuda_stream()).map_err(wrap)?;
    }
    let dense = CudaStorage::wrap_cuda_slice(dense, device.clone());
    multiply(product, storage, extent, &dense)
}

fn fused<T: Element + CudaDType + DeviceRepr>(
    product: &Product,
    weights: &[&CudaTensor],
    storage: &CudaStorage,
    extent: &Extent,
    bias: Bias,
) -> Result<CudaStorage> {
    let Extent { from, to, m, .. } = *extent;
    let ((inputs, outputs), device) = (product.sizes(), storage.device());
    let stream = device.cuda_stream();
    let x = storage.as_cuda_slice::<T>()?.slice(from..to);
    let x = MatrixOf::new(x, m, inputs).map_err(wrap)?;
    let bias = match bias {
        Some((bias, all)) => Some(bias.as_cuda_slice::<T>()?.slice(all)),
        None => None,
    };
    let mut bytes = 0;
    for weight in weights {
        let of_one = if product.is_gradient() {
            weight.spec().matmul_grad_workspace_bytes::<T>(m, 0)
        } else {
            weight.spec().matmul_workspace_bytes::<T>(m)
        };
        bytes = bytes.max(of_one.map_err(wrap)?);
    }
    // SAFETY: the launch below writes every element of y before anything reads one; what it reads of
    // its workspace it has written. CUDA has no allocation of 0 bytes.
    let (mut y, mut workspace) = unsafe {
        let y = device.alloc::<T>((m * outputs).max(1))?;
        (
            y,
            (bytes > 0).then(|| device.alloc::<u8>(bytes)).transpose()?,
        )
    };
    let mut on = Launch::new(&stream);
    if let Some(workspace) = &mut workspace {
        on = on.workspace(workspace.as_view_mut());
    }
    let to = y.slice_mut(..m * outputs);
    let to = &mut MatrixOf::new(to, m, outputs).map_err(wrap)?;
    if product.is_gradient() {
        matmul_grad_into(x, weights[0], to, on)
    } else if bias.is_some() {
        matmul_into(x, weights[0], bias, to, on)
    } else {
        matmul_joined_into(x, weights, to, on)
    }
    .map_err(wrap)?;
    Ok(CudaStorage::wrap_cuda_slice(y, device.clone()))
}
