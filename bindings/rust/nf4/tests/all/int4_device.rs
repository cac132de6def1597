//! Launches of weights of integers on raw pointers, as far as a machine without a GPU can see.

use super::arguments::detail;
use half::f16;
use nf4::device::{
    dequant_launch, matmul_batch_launch, matmul_batch_workspace_bytes, matmul_launch,
    quantize_int4_launch, reorder_int4_launch, DeviceInt4Parts, DeviceInt4Tensor, DeviceMatmul,
    DevicePtr, Stream,
};
use nf4::{device_info, ColumnsOf, Int4Layout, Int4Scheme, Int4Spec, Result};

/// Never followed: either a check fails, or there is no GPU.
fn address<T>(n: u64) -> DevicePtr<T> {
    DevicePtr::from_address(n << 20)
}

fn weight() -> DeviceInt4Tensor {
    DeviceInt4Tensor {
        spec: Int4Spec::new(Int4Layout::Gptq, 8, 256),
        parts: DeviceInt4Parts {
            packed: address(1),
            scales: address(2),
            zeros: Some(address(3)),
            columns: ColumnsOf::InOrder,
        },
    }
}

fn with_g_idx() -> DeviceInt4Tensor {
    let mut weight = weight();
    weight.parts.columns = ColumnsOf::GroupIndex(address(4));
    weight
}

fn dequant(weight: &DeviceInt4Tensor, out: DevicePtr<f32>) -> Result<()> {
    // SAFETY: as address() says.
    unsafe { dequant_launch(weight, out, Stream::LEGACY_DEFAULT) }
}

fn quantize(weight: &DeviceInt4Tensor, scheme: Int4Scheme) -> Result<()> {
    // SAFETY: as address() says.
    unsafe { quantize_int4_launch::<f16>(address(7), weight, scheme, Stream::LEGACY_DEFAULT) }
}

fn reorder(weight: &DeviceInt4Tensor, packed: DevicePtr<u32>) -> Result<()> {
    // SAFETY: as address() says.
    unsafe { reorder_int4_launch(weight, packed, address(6), Stream::LEGACY_DEFAULT) }
}

fn operands() -> DeviceMatmul<f16> {
    DeviceMatmul {
        m: 3,
        x: address(7),
        x_stride: 256,
        bias: Some(address(8)),
        y: address(9),
        y_stride: 8,
    }
}

fn matmul(weight: &DeviceInt4Tensor, operands: DeviceMatmul<f16>) -> Result<()> {
    let bytes = weight.matmul_workspace_bytes::<f16>(operands.m)?;
    // SAFETY: as address() says.
    unsafe {
        matmul_launch(
            weight,
            &operands,
            address(10),
            bytes,
            Stream::LEGACY_DEFAULT,
        )
    }
}

fn matmul_batch(products: &[(DeviceInt4Tensor, DeviceMatmul<f16>)]) -> Result<()> {
    let bytes = matmul_batch_workspace_bytes(products)?;
    // SAFETY: as address() says.
    unsafe { matmul_batch_launch(products, address(20), bytes, Stream::LEGACY_DEFAULT) }
}

#[test]
fn wrong_arguments_are_named() {
    let good = weight();
    let mut no_scales = good;
    no_scales.parts.scales = DevicePtr::NULL;
    let mut no_zeros = good;
    no_zeros.parts.zeros = None;
    let mut null_zeros = good;
    null_zeros.parts.zeros = Some(DevicePtr::NULL);
    let narrow = DeviceMatmul {
        x_stride: 255,
        ..operands()
    };
    let cases = [
        (dequant(&good, DevicePtr::NULL), "out is NULL"),
        (dequant(&good, address(3)), "zeros overlaps out"),
        (dequant(&no_scales, address(5)), "scales is NULL"),
        (
            dequant(&null_zeros, address(5)),
            "zero_offset is 1, but zeros is NULL",
        ),
        (
            quantize(&no_zeros, Int4Scheme::Asymmetric),
            "zeros is NULL, but symmetric is 0",
        ),
        (
            quantize(&with_g_idx(), Int4Scheme::Symmetric),
            "g_idx is not NULL",
        ),
        (reorder(&good, address(5)), "expected `from` with g_idx"),
        (
            reorder(&with_g_idx(), address(1)),
            "packed overlaps packed of `to`",
        ),
        (
            matmul(&good, narrow),
            "x_stride is 255; expected at least 256",
        ),
        (
            matmul_batch(&[(good, operands()), (good, operands())]),
            "y of product 0 overlaps y of product 1",
        ),
    ];
    for (result, start) in cases {
        let detail = detail(result);
        assert!(
            detail.starts_with(start),
            "{detail:?} does not start with {start:?}"
        );
    }
}

#[test]
fn without_a_gpu_the_reason_is_that_of_device_info() {
    let Err(reason) = device_info(0).status else {
        return; // What works is tested with the feature cudarc.
    };
    let weight = weight();
    for result in [
        dequant(&weight, address(5)),
        quantize(&weight, Int4Scheme::Asymmetric),
        reorder(&with_g_idx(), address(5)),
        matmul(&weight, operands()),
        matmul_batch(&[(weight, operands())]),
    ] {
        let error = result.unwrap_err();
        let kinds = (
            std::mem::discriminant(&error),
            std::mem::discriminant(&reason),
        );
        assert_eq!(kinds.0, kinds.1, "{error}");
    }
}

#[test]
fn nothing_is_launched_for_no_elements() {
    let mut weight = with_g_idx();
    weight.spec.rows = 0;
    assert_eq!(dequant(&weight, DevicePtr::NULL), Ok(()));
    assert_eq!(reorder(&weight, DevicePtr::NULL), Ok(()));
    assert_eq!(matmul(&weight, operands()), Ok(()));
}
