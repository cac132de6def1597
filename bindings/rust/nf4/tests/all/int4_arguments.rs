//! What is wrong with a weight of integers is an error that names it.

use super::arguments::detail;
use half::bf16;
use nf4::{
    dequantize, dequantize_into, matmul, matmul_batch, quantize_int4, quantize_int4_into,
    reorder_int4_into, Columns, ColumnsOf, DType, Int4Layout, Int4Mut, Int4Parts, Int4PartsMut,
    Int4PartsRef, Int4Ref, Int4Scheme, Int4Spec, Int4Tensor, Matrix, Product, Result,
};

#[test]
fn wrong_specs() {
    let spec = Int4Spec::new(Int4Layout::GptqV2, 8, 128);
    let of = |layout, rows, cols| Int4Spec::new(layout, rows, cols).group_size(None);
    let cases = [
        (spec.group_size(Some(0)), "group_size is 0; expected"),
        (spec.group_size(Some(12)), "group_size is 12; expected"),
        (
            spec.group_size(Some(48)),
            "group_size is 48; expected a divisor of cols",
        ),
        (
            spec.group_size(Some(u32::MAX)),
            "group_size is 4294967295; expected",
        ),
        (spec.scales_dtype(DType::F32), "scales_dtype is 1"),
        (
            of(Int4Layout::Gptq, 8, 12),
            "cols is 12; expected a multiple of 8",
        ),
        (
            of(Int4Layout::Awq, 12, 8),
            "rows is 12; expected a multiple of 8",
        ),
        (
            of(Int4Layout::Awq, usize::MAX, 8),
            "rows is 18446744073709551615; expected",
        ),
        (of(Int4Layout::Awq, 1 << 40, 1 << 40), "rows * cols is"),
    ];
    for (spec, start) in cases {
        let parts = Int4PartsRef {
            packed: &[0; 128],
            scales: &[0; 8],
            zeros: None,
            columns: ColumnsOf::InOrder,
        };
        for result in [
            detail(spec.sizes()),
            detail(quantize_int4(
                &[0.0f32; 1024],
                spec,
                Int4Scheme::Symmetric,
                0,
            )),
            detail(Int4Tensor::zeros(spec, true)),
            detail(Int4Ref::new(spec, parts)),
        ] {
            assert!(
                result.starts_with(start),
                "{result:?} does not start with {start:?}"
            );
        }
    }
}

/// Three rows of two groups.
const SPEC: Int4Spec = Int4Spec::new(Int4Layout::CompressedTensors, 3, 16).group_size(Some(8));

fn parts(packed: usize, scales: usize, zeros: usize, columns: Columns) -> Int4Parts {
    Int4Parts {
        packed: vec![0; packed],
        scales: vec![0; scales],
        zeros: Some(vec![0; zeros]),
        columns,
    }
}

#[test]
fn wrong_parts() {
    let index = |groups: &[i32]| ColumnsOf::GroupIndex(groups.to_vec());
    let identity: Vec<i32> = (0..16).collect();
    let with = |k: usize, value| {
        let mut columns = identity.clone();
        columns[k] = value;
        ColumnsOf::Permuted(columns)
    };
    let cases = [
        (
            parts(5, 6, 2, ColumnsOf::InOrder),
            "packed has 5 elements; expected 6",
        ),
        (
            parts(6, 7, 2, ColumnsOf::InOrder),
            "scales has 7 elements; expected 6",
        ),
        (
            parts(6, 6, 0, ColumnsOf::InOrder),
            "zeros has 0 elements; expected 2",
        ),
        (
            parts(6, 6, 2, index(&[0; 15])),
            "g_idx has 15 elements; expected 16",
        ),
        (
            parts(
                6,
                6,
                2,
                index(&[0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            ),
            "g_idx[2] is 2; expected at least 0 and less than 2",
        ),
        (
            parts(6, 6, 2, index(&[-1; 16])),
            "g_idx[0] is -1; expected at least 0 and less than 2",
        ),
        (
            parts(6, 6, 2, ColumnsOf::Permuted(vec![0; 17])),
            "permutation has 17 elements; expected 16",
        ),
        (
            parts(6, 6, 2, with(3, 16)),
            "permutation[3] is 16; expected at least 0 and less than 16",
        ),
        (parts(6, 6, 2, with(3, 9)), "permutation has 9 twice"),
    ];
    for (mut parts, wanted) in cases {
        let written = Int4PartsMut {
            packed: &mut parts.packed.clone(),
            scales: &mut parts.scales.clone(),
            zeros: parts.zeros.as_deref_mut(),
            columns: match &parts.columns {
                ColumnsOf::InOrder => ColumnsOf::InOrder,
                ColumnsOf::GroupIndex(index) => ColumnsOf::GroupIndex(index),
                ColumnsOf::Permuted(index) => ColumnsOf::Permuted(index),
            },
        };
        assert_eq!(detail(Int4Mut::new(SPEC, written)), wanted);
        assert_eq!(detail(Int4Tensor::new(SPEC, parts)), wanted);
    }
}

#[test]
fn wrong_values() -> Result<()> {
    let mut weight = Int4Tensor::new(SPEC, parts(6, 6, 2, ColumnsOf::InOrder))?;
    let before = weight.clone();
    let mut out = [bf16::ONE; 49];
    for length in [0, 47, 49] {
        let values = vec![1.0f32; length];
        let wanted = format!("values has {length} elements; expected 48");
        assert_eq!(
            detail(quantize_int4(&values, SPEC, Int4Scheme::Symmetric, 0)),
            wanted
        );
        let result = quantize_int4_into(&values, &mut weight, Int4Scheme::Symmetric, 0);
        assert_eq!(detail(result), wanted);
        let result = dequantize_into(&weight, &mut out[..length], 0);
        assert_eq!(
            detail(result),
            format!("out has {length} elements; expected 48")
        );
    }
    let huge = Int4Spec::new(Int4Layout::Gptq, 1 << 30, 1 << 30);
    assert_eq!(
        detail(quantize_int4(&[0.0f32; 4], huge, Int4Scheme::Symmetric, 0)),
        "values has 4 elements; expected 1152921504606846976"
    );
    assert_eq!((weight, out), (before, [bf16::ONE; 49]));
    Ok(())
}

#[test]
fn what_quantize_cannot_write() -> Result<()> {
    let values = [1.0f32; 48];
    let mut no_zeros = Int4Tensor::zeros(SPEC, false)?;
    let mut quantize = |scheme| quantize_int4_into(&values, &mut no_zeros, scheme, 0);
    assert_eq!(
        detail(quantize(Int4Scheme::Asymmetric)),
        "zeros is NULL, but symmetric is 0"
    );
    quantize(Int4Scheme::Symmetric)?;
    for (columns, wanted) in [
        (
            ColumnsOf::GroupIndex(vec![1; 16]),
            "g_idx is not NULL; expected NULL in quantize",
        ),
        (
            ColumnsOf::Permuted((0..16).collect()),
            "permutation is not NULL; expected NULL in quantize",
        ),
    ] {
        let mut weight = Int4Tensor::new(SPEC, parts(6, 6, 2, columns))?;
        let refused = quantize_int4_into(&values, &mut weight, Int4Scheme::Symmetric, 0);
        assert_eq!(detail(refused), wanted);
    }
    Ok(())
}

#[test]
fn what_reorder_refuses() -> Result<()> {
    let groups: Vec<i32> = (0..16).map(|k| k % 2).collect();
    let sortable = Int4Tensor::new(SPEC, parts(6, 6, 2, ColumnsOf::GroupIndex(groups)))?;
    let reorder = |words: usize, columns: usize| {
        let (mut packed, mut permutation) = (vec![0; words], vec![0; columns]);
        reorder_int4_into(&sortable, &mut packed, &mut permutation, 0)
    };
    assert_eq!(detail(reorder(5, 16)), "packed has 5 elements; expected 6");
    assert_eq!(
        detail(reorder(6, 17)),
        "permutation has 17 elements; expected 16"
    );
    reorder(6, 16)?;

    let uneven = Int4Tensor::new(SPEC, parts(6, 6, 2, ColumnsOf::GroupIndex(vec![1; 16])))?;
    assert_eq!(
        detail(uneven.reordered(0)),
        "g_idx has 0 columns of group 0; expected 8"
    );
    let in_order = Int4Tensor::new(SPEC, parts(6, 6, 2, ColumnsOf::InOrder))?;
    let wanted = "expected `from` with g_idx and without permutation";
    assert_eq!(detail(in_order.reordered(0)), wanted);
    assert_eq!(detail(sortable.reordered(0)?.reordered(0)), wanted);
    Ok(())
}

#[test]
fn wrong_operands() -> Result<()> {
    let weight = Int4Tensor::zeros(SPEC, false)?;
    let x = [1.0f32; 15];
    let narrow = Matrix::new(&x, 1, 15)?;
    let wanted = "x is of 1 x 15 elements; expected 1 x 16";
    assert_eq!(detail(matmul(narrow, &weight, None, 0)), wanted);
    let batch = matmul_batch(&[Product::new(narrow, &weight)], 0);
    assert_eq!(detail(batch), format!("product 0: {wanted}"));
    Ok(())
}

#[test]
fn weights_of_no_elements() -> Result<()> {
    for (rows, cols) in [(0, 128), (8, 0), (0, 0)] {
        let spec = Int4Spec::new(Int4Layout::Gptq, rows, cols);
        let weight = quantize_int4::<bf16>(&[], spec, Int4Scheme::Asymmetric, 0)?;
        assert!(weight.bits_per_weight().is_nan());
        assert!(dequantize::<f32>(&weight, 0)?.is_empty());
        assert!(dequantize_into(&weight, &mut [0.0f32], 0).is_err());
        let (spec, parts) = weight.into_parts();
        let columns = ColumnsOf::GroupIndex(vec![0; cols]);
        let indexed = Int4Tensor::new(spec, Int4Parts { columns, ..parts })?;
        assert_eq!(indexed.reordered(0)?.elements(), 0);
    }
    Ok(())
}
