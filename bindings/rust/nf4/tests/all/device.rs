//! Launches on raw pointers, as far as a machine without a GPU can see.

use half::{bf16, f16};
use nf4::device::{
    dequant_launch, lora_grad_launch, matmul_batch_launch, matmul_batch_workspace_bytes,
    matmul_launch, quantize_launch, DeviceLoraGrad, DeviceMatmul, DevicePtr, DeviceScales,
    DeviceTensor, Stream,
};
use nf4::{device_info, Element, Error, Result, Spec};

/// Never followed: either a check fails, or there is no GPU.
fn address<T>(n: u64) -> DevicePtr<T> {
    DevicePtr::from_address(n << 20)
}

fn nested_weight() -> DeviceTensor {
    DeviceTensor {
        spec: Spec::new(8, 64),
        packed: address(1),
        scales: DeviceScales::Nested {
            codes: address(2),
            absmax: address(3),
            code: address(4),
            offset: address(5),
        },
        codebook: Some(address(6)),
    }
}

fn dequant(weight: &DeviceTensor, out: DevicePtr<f32>) -> Result<()> {
    // SAFETY: as address() says.
    unsafe { dequant_launch(weight, out, Stream::LEGACY_DEFAULT) }
}

fn quantize(weight: &DeviceTensor, workspace_bytes: usize) -> Result<()> {
    // SAFETY: as address() says.
    unsafe {
        quantize_launch::<bf16>(
            address(7),
            weight,
            address(8),
            workspace_bytes,
            Stream::LEGACY_DEFAULT,
        )
    }
}

/// Three rows of x for nested_weight().
fn operands<T>() -> DeviceMatmul<T> {
    DeviceMatmul {
        m: 3,
        x: address(7),
        x_stride: 64,
        bias: Some(address(8)),
        y: address(9),
        y_stride: 8,
    }
}

fn matmul<T: Element>(weight: &DeviceTensor, operands: DeviceMatmul<T>) -> Result<()> {
    let bytes = weight.spec.matmul_workspace_bytes::<T>(operands.m)?;
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

fn matmul_batch<T: Element>(products: &[(DeviceTensor, DeviceMatmul<T>)]) -> Result<()> {
    let bytes = matmul_batch_workspace_bytes(products)?;
    // SAFETY: as address() says.
    unsafe { matmul_batch_launch(products, address(20), bytes, Stream::LEGACY_DEFAULT) }
}

/// Three rows of 64 elements of x, and of 8 of grad_y.
fn adapter<T>() -> DeviceLoraGrad<T, f32> {
    DeviceLoraGrad {
        rank: 16,
        scale: 0.5,
        m: 3,
        rows: 8,
        cols: 64,
        x: address(1),
        x_stride: 64,
        grad_y: address(2),
        grad_y_stride: 8,
        p: address(3),
        q: address(4),
        grad_a: Some(address(5)),
        grad_a_stride: 64,
        grad_b: Some(address(6)),
        grad_b_stride: 16,
    }
}

fn lora_grad<T: Element>(operands: DeviceLoraGrad<T, f32>) -> Result<()> {
    // SAFETY: as address() says.
    unsafe { lora_grad_launch(&operands, Stream::LEGACY_DEFAULT) }
}

#[test]
fn wrong_operands_of_an_adapter_are_named() {
    let good = adapter::<f16>();
    let cases = [
        (
            DeviceLoraGrad { rank: 129, ..good },
            "rank is 129; expected 1 to 128",
        ),
        (
            DeviceLoraGrad {
                x: DevicePtr::NULL,
                ..good
            },
            "x is NULL",
        ),
        (
            DeviceLoraGrad {
                x_stride: 63,
                ..good
            },
            "x_stride is 63; expected at least 64",
        ),
        (
            DeviceLoraGrad {
                grad_b_stride: 15,
                ..good
            },
            "db_stride is 15; expected at least 16",
        ),
        (
            DeviceLoraGrad {
                m: usize::MAX,
                ..good
            },
            "m is 18446744073709551615",
        ),
    ];
    for (operands, start) in cases {
        let result = lora_grad(operands);
        let Err(Error::InvalidArgument(detail)) = result else {
            panic!("expected InvalidArgument: {start}, not {result:?}");
        };
        assert!(
            detail.starts_with(start),
            "{detail:?} does not start with {start:?}"
        );
    }
}

#[test]
fn wrong_products_are_named() {
    let (weight, good) = (nested_weight(), operands::<f16>());
    let other = DeviceMatmul {
        y: address(11),
        ..good
    };
    let cases = [
        (
            vec![(weight, good), (weight, good)],
            "y of product 0 overlaps y of product 1",
        ),
        (
            vec![
                (weight, good),
                (
                    weight,
                    DeviceMatmul {
                        x_stride: 63,
                        ..other
                    },
                ),
            ],
            "product 1: x_stride is 63; expected at least 64",
        ),
        (
            vec![
                (weight, good),
                (
                    weight,
                    DeviceMatmul {
                        m: usize::MAX,
                        ..other
                    },
                ),
            ],
            "product 1: m is 18446744073709551615",
        ),
        (vec![(weight, good); 65], "count is 65; expected at most 64"),
    ];
    for (products, start) in cases {
        let result = matmul_batch(&products);
        let Err(Error::InvalidArgument(detail)) = result else {
            panic!("expected InvalidArgument: {start}, not {result:?}");
        };
        assert!(
            detail.starts_with(start),
            "{detail:?} does not start with {start:?}"
        );
    }
    assert_eq!(matmul_batch::<f16>(&[]), Ok(()));
}

#[test]
fn wrong_operands_are_named() {
    let weight = nested_weight();
    let good = operands::<f16>();
    let cases = [
        (
            matmul(
                &weight,
                DeviceMatmul {
                    x: DevicePtr::NULL,
                    ..good
                },
            ),
            "x is NULL",
        ),
        (
            matmul(
                &weight,
                DeviceMatmul {
                    x_stride: 63,
                    ..good
                },
            ),
            "x_stride is 63; expected at least 64",
        ),
        (
            matmul(
                &weight,
                DeviceMatmul {
                    y_stride: 7,
                    ..good
                },
            ),
            "y_stride is 7; expected at least 8",
        ),
        (
            matmul(
                &weight,
                DeviceMatmul {
                    y: address(7),
                    ..good
                },
            ),
            "x overlaps y",
        ),
        (
            matmul(
                &weight,
                DeviceMatmul {
                    m: usize::MAX,
                    ..good
                },
            ),
            "m is 18446744073709551615",
        ),
        (
            matmul(
                &weight,
                DeviceMatmul {
                    m: 17,
                    ..operands::<f32>()
                },
            ),
            "dtype is 1 (fp32) and m is 17; expected",
        ),
    ];
    for (result, start) in cases {
        let Err(Error::InvalidArgument(detail)) = result else {
            panic!("expected InvalidArgument: {start}, not {result:?}");
        };
        assert!(
            detail.starts_with(start),
            "{detail:?} does not start with {start:?}"
        );
    }
}

#[test]
fn wrong_arguments_are_named() {
    let weight = nested_weight();
    let flat = DeviceTensor {
        scales: DeviceScales::Flat(address(2)),
        ..weight
    };
    let cases = [
        (dequant(&weight, DevicePtr::NULL), "out is NULL"),
        (
            dequant(&weight, DevicePtr::from_address((7 << 20) + 2)),
            "out is 0x700002; expected",
        ),
        (dequant(&weight, address(1)), "packed overlaps out"),
        (
            dequant(
                &DeviceTensor {
                    packed: DevicePtr::NULL,
                    ..weight
                },
                address(7),
            ),
            "packed is",
        ),
        (
            dequant(&flat, address(7)),
            "nested_absmax is NULL, but nested_blocksize is 256",
        ),
        (
            quantize(&weight, 8),
            "workspace_bytes is 8; expected at least",
        ),
    ];
    for (result, start) in cases {
        let Err(Error::InvalidArgument(detail)) = result else {
            panic!("expected InvalidArgument: {start}, not {result:?}");
        };
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
    let weight = nested_weight();
    let bytes = weight.spec.workspace_bytes().expect("a spec in range");
    for result in [
        dequant(&weight, address(7)),
        quantize(&weight, bytes),
        matmul(&weight, operands::<bf16>()),
        matmul_batch(&[(weight, operands::<bf16>())]),
        lora_grad(adapter::<bf16>()),
    ] {
        let error = result.unwrap_err();
        assert_eq!(
            std::mem::discriminant(&error),
            std::mem::discriminant(&reason),
            "{error}"
        );
        assert!(!error.detail().is_empty());
    }
}

#[test]
fn nothing_is_launched_for_no_elements() {
    let weight = DeviceTensor {
        spec: Spec::new(0, 64).flat(),
        packed: DevicePtr::NULL,
        scales: DeviceScales::Flat(DevicePtr::NULL),
        codebook: None,
    };
    assert_eq!(dequant(&weight, DevicePtr::NULL), Ok(()));
    assert_eq!(quantize(&weight, 0), Ok(()));
    assert_eq!(matmul(&weight, operands::<f16>()), Ok(()));
    let no_rows = DeviceMatmul {
        m: 0,
        ..operands::<f16>()
    };
    assert_eq!(matmul(&nested_weight(), no_rows), Ok(()));
    let unwanted = DeviceLoraGrad {
        x: DevicePtr::NULL,
        x_stride: 0,
        grad_a: None,
        grad_b: None,
        ..adapter::<f16>()
    };
    assert_eq!(lora_grad(unwanted), Ok(()));
}

#[test]
fn handles_keep_their_value() {
    let mut place = 0u8;
    let raw = std::ptr::from_mut(&mut place).cast();
    assert_eq!(Stream::from_raw(raw).as_raw(), raw);
    assert_eq!(
        DevicePtr::<u8>::from_address(raw as u64),
        DevicePtr::from_raw(raw.cast())
    );
}
