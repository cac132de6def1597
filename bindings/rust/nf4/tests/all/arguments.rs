//! What is wrong is an error that names it, and never reaches memory that is not there.

use half::bf16;
use nf4::{
    dequantize, dequantize_into, lora_grad_into, matmul_grad_into, matmul_into, quantize,
    quantize_into, scale_code, Error, Format, LoraGrad, Matrix, MatrixMut, QuantizedMut,
    QuantizedRef, QuantizedTensor, Result, Scales, ScalesMut, ScalesRef, Spec,
};

pub fn detail<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::InvalidArgument(detail)) => detail,
        other => panic!("expected InvalidArgument, not {other:?}"),
    }
}

#[test]
fn wrong_specs() {
    let spec = Spec::new(4, 64);
    let cases = [
        (spec.blocksize(0), "blocksize is 0; expected"),
        (spec.blocksize(48), "blocksize is 48; expected"),
        (spec.blocksize(16), "blocksize is 16; expected"),
        (spec.blocksize(8192), "blocksize is 8192; expected"),
        (
            spec.blocksize(u32::MAX),
            "blocksize is 4294967295; expected",
        ),
        (spec.nested(3), "nested_blocksize is 3; expected"),
        (
            spec.nested(1 << 31),
            "nested_blocksize is 2147483648; expected",
        ),
        (
            Spec::new(usize::MAX, 1),
            "rows is 18446744073709551615; expected",
        ),
        (
            Spec::new(1, usize::MAX),
            "cols is 18446744073709551615; expected",
        ),
        (Spec::new(1 << 40, 1 << 40), "rows * cols is"),
    ];
    for (spec, start) in cases {
        for result in [
            detail(spec.sizes()),
            detail(spec.workspace_bytes()),
            detail(quantize(&[0.0f32; 256], spec, 0)),
            detail(QuantizedTensor::zeros(spec)),
            detail(QuantizedRef::new(
                spec,
                &[0; 128],
                ScalesRef::Flat(&[0.0; 4]),
                None,
            )),
        ] {
            assert!(
                result.starts_with(start),
                "{result:?} does not start with {start:?}"
            );
        }
    }
}

#[test]
fn wrong_lengths_of_a_flat_weight() {
    let spec = Spec::new(3, 33).blocksize(32).flat();
    let try_lengths = |packed: usize, absmax: usize| {
        let (mut packed, mut absmax) = (vec![0; packed], vec![0.0; absmax]);
        let read = QuantizedRef::new(spec, &packed, ScalesRef::Flat(&absmax), None).map(|_| ());
        let scales = Scales::Flat(absmax.clone());
        let owned = QuantizedTensor::new(spec, packed.clone(), scales, None).map(|_| ());
        let scales = ScalesMut::Flat(&mut absmax);
        let written = QuantizedMut::new(spec, &mut packed, scales, None).map(|_| ());
        assert_eq!(read, written);
        assert_eq!(read, owned);
        read
    };
    assert_eq!(try_lengths(50, 4), Ok(()));
    for packed in [0, 49, 51] {
        let wanted = format!("packed has {packed} elements; expected 50");
        assert_eq!(detail(try_lengths(packed, 4)), wanted);
    }
    for absmax in [0, 3, 5] {
        let wanted = format!("absmax has {absmax} elements; expected 4");
        assert_eq!(detail(try_lengths(50, absmax)), wanted);
    }
}

#[test]
fn wrong_lengths_of_a_nested_weight() {
    let spec = Spec::new(3, 33).blocksize(32).nested(2);
    let try_lengths = |codes: usize, absmax: usize| {
        let (mut codes, mut absmax) = (vec![0; codes], vec![0.0; absmax]);
        let (code, mut offset) = (scale_code(), 0.0);
        let scales = ScalesRef::Nested {
            codes: &codes,
            absmax: &absmax,
            code,
            offset: &offset,
        };
        let read = QuantizedRef::new(spec, &[0; 50], scales, None).map(|_| ());
        let scales = ScalesMut::Nested {
            codes: &mut codes,
            absmax: &mut absmax,
            code,
            offset: &mut offset,
        };
        let mut packed = [0; 50];
        let written = QuantizedMut::new(spec, &mut packed, scales, None).map(|_| ());
        assert_eq!(read, written);
        read
    };
    assert_eq!(try_lengths(4, 2), Ok(()));
    assert_eq!(
        detail(try_lengths(3, 2)),
        "absmax has 3 elements; expected 4"
    );
    assert_eq!(
        detail(try_lengths(4, 1)),
        "nested_absmax has 1 elements; expected 2"
    );
    assert_eq!(
        detail(try_lengths(4, 3)),
        "nested_absmax has 3 elements; expected 2"
    );
}

#[test]
fn scales_that_contradict_the_spec() {
    let flat = Scales::Flat(vec![0.0; 1]);
    let nested = Scales::Nested {
        codes: vec![0; 1],
        absmax: vec![0.0; 1],
        code: Box::new(*scale_code()),
        offset: 0.0,
    };
    let of = |spec, scales| detail(QuantizedTensor::new(spec, vec![0; 32], scales, None));
    let spec = Spec::new(1, 64);
    assert_eq!(
        of(spec, flat),
        "the scales are flat, but nested_blocksize is 256"
    );
    assert_eq!(
        of(spec.flat(), nested),
        "the scales are nested, but nested_blocksize is 0"
    );
}

#[test]
fn wrong_lengths_of_dense_data() -> Result<()> {
    let spec = Spec::new(2, 50);
    let mut weight = quantize(&[1.0f32; 100], spec, 0)?;
    let before = weight.clone();
    let mut out = [bf16::ONE; 101];
    for length in [0, 99, 101] {
        let values = vec![0.0f32; length];
        let wanted = format!("values has {length} elements; expected 100");
        assert_eq!(detail(quantize(&values, spec, 0)), wanted);
        assert_eq!(detail(quantize_into(&values, &mut weight, 0)), wanted);
        let result = dequantize_into(&before, &mut out[..length], 0);
        assert_eq!(
            detail(result),
            format!("out has {length} elements; expected 100")
        );
    }
    assert_eq!(weight, before);
    assert_eq!(out, [bf16::ONE; 101]);
    Ok(())
}

/// An absurd weight is refused before its buffers are allocated.
#[test]
fn values_are_checked_before_memory_is_taken() {
    let spec = Spec::new(1 << 30, 1 << 30);
    assert_eq!(
        detail(quantize(&[0.0f32; 4], spec, 0)),
        "values has 4 elements; expected 1152921504606846976"
    );
}

#[test]
fn weights_of_no_elements() -> Result<()> {
    for spec in [Spec::new(0, 64), Spec::new(64, 0), Spec::new(0, 0).flat()] {
        let weight = quantize::<bf16>(&[], spec.format(Format::Fp4), 0)?;
        assert_eq!((weight.packed().len(), weight.elements()), (0, 0));
        assert!(weight.bits_per_weight().is_nan());
        assert!(dequantize::<f32>(&weight, 0)?.is_empty());
        dequantize_into(&weight, &mut [0.0f32; 0], 3)?;
        assert!(dequantize_into(&weight, &mut [0.0f32], 0).is_err());
    }
    Ok(())
}

/// Functions that return a vector take all of it for written.
#[test]
fn sums_without_terms_are_written() -> Result<()> {
    let none: &[f32] = &[];
    let (no_cols, no_rows) = (Spec::new(3, 0), Spec::new(0, 64));
    let (no_cols, no_rows) = (quantize(none, no_cols, 0)?, quantize(none, no_rows, 0)?);
    for (bias, wanted) in [
        (None, [0.0; 3]),
        (Some(&[1.0, 2.0, 3.0][..]), [1.0, 2.0, 3.0]),
    ] {
        let mut y = [f32::NAN; 6];
        let to = &mut MatrixMut::new(&mut y, 2, 3)?;
        matmul_into(Matrix::new(none, 2, 0)?, &no_cols, bias, to, 0)?;
        assert_eq!([&y[..3], &y[3..]], [wanted; 2]);
    }
    let mut grad_x = [f32::NAN; 2 * 64];
    let to = &mut MatrixMut::new(&mut grad_x, 2, 64)?;
    matmul_grad_into(Matrix::new(none, 2, 0)?, &no_rows, to, 0)?;
    assert_eq!(grad_x, [0.0; 2 * 64]);

    let operands = LoraGrad {
        rank: 2,
        scale: 1.0,
        x: Matrix::new(none, 0, 64)?,
        grad_y: Matrix::new(none, 0, 3)?,
        p: none,
        q: none,
    };
    let (mut grad_a, mut grad_b) = ([f32::NAN; 2 * 64], [f32::NAN; 3 * 2]);
    let a = &mut MatrixMut::new(&mut grad_a[..], 2, 64)?;
    let b = &mut MatrixMut::new(&mut grad_b[..], 3, 2)?;
    lora_grad_into(&operands, Some(a), Some(b), 0)?;
    assert_eq!((grad_a, grad_b), ([0.0; 2 * 64], [0.0; 3 * 2]));
    Ok(())
}

#[test]
fn errors_say_what_and_why() {
    let error = Spec::new(1, 1).blocksize(33).sizes().unwrap_err();
    let detail = "blocksize is 33; expected a power of two from 32 to 4096";
    assert_eq!(error, Error::InvalidArgument(detail.to_owned()));
    assert_eq!(error.detail(), detail);
    assert_eq!(error.to_string(), format!("invalid argument: {detail}"));
}
