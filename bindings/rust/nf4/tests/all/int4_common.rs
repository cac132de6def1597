//! Random weights of integers, and what nf4.h says of them, element by element.

use half::{bf16, f16};
use nf4::{Columns, ColumnsOf, DType, Int4Layout, Int4Parts, Int4Spec, Int4Tensor};
use proptest::collection::vec;
use proptest::prelude::*;

/// A code in an array of words: the word, and the position in it.
type Place = (usize, usize);

/// Position i of a word of AWQ has row 8 c + AWQ_ORDER[i].
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn awq_position(row: usize) -> usize {
    let position = AWQ_ORDER.iter().position(|each| *each == row % 8);
    position.expect("each of 0 to 7 is there")
}

/// Where the code of row `n`, stored column `k` is.
pub fn code_place(spec: &Int4Spec, n: usize, k: usize) -> Place {
    match spec.layout {
        Int4Layout::Gptq | Int4Layout::GptqV2 => (k / 8 * spec.rows + n, k % 8),
        Int4Layout::Awq => (k * spec.rows / 8 + n / 8, awq_position(n)),
        Int4Layout::CompressedTensors => (n * spec.cols.div_ceil(8) + k / 8, k % 8),
    }
}

/// Where the zero point of row `n`, group `g` is.
pub fn zero_place(spec: &Int4Spec, groups: usize, n: usize, g: usize) -> Place {
    match spec.layout {
        Int4Layout::Gptq | Int4Layout::GptqV2 => (g * spec.rows.div_ceil(8) + n / 8, n % 8),
        Int4Layout::Awq => (g * spec.rows / 8 + n / 8, awq_position(n)),
        Int4Layout::CompressedTensors => (n / 8 * groups + g, n % 8),
    }
}

/// Which of the scales is that of row `n`, group `g`.
pub fn scale_place(spec: &Int4Spec, groups: usize, n: usize, g: usize) -> usize {
    match spec.layout {
        Int4Layout::CompressedTensors => n * groups + g,
        _ => g * spec.rows + n,
    }
}

pub fn code(words: &[u32], (word, position): Place) -> u32 {
    words[word] >> (4 * position) & 15
}

/// In a word of zeros.
pub fn store(words: &mut [u32], (word, position): Place, code: u32) {
    words[word] |= code << (4 * position);
}

/// What words of zero points are stored less by.
pub fn v1_ones(spec: &Int4Spec) -> u32 {
    match spec.layout {
        Int4Layout::Gptq => 0x1111_1111,
        _ => 0,
    }
}

pub fn scale_value(bits: u16, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_bits(bits).to_f32(),
        _ => f16::from_bits(bits).to_f32(),
    }
}

/// The weight in binary32, where each product is exact, in row-major order.
pub fn decoded(weight: &Int4Tensor) -> Vec<f32> {
    let (spec, parts) = (weight.spec(), weight.parts());
    let sizes = spec.sizes().expect("a spec in range");
    let group_size = spec.group_size.map_or(spec.cols, |size| size as usize);
    let mut dense = vec![0.0; sizes.elements];
    for (n, j) in (0..spec.rows).flat_map(|n| (0..spec.cols).map(move |j| (n, j))) {
        let (k, g) = match &parts.columns {
            ColumnsOf::InOrder => (j, j / group_size),
            ColumnsOf::GroupIndex(g_idx) => (j, g_idx[j] as usize),
            ColumnsOf::Permuted(columns) => (columns[j] as usize, j / group_size),
        };
        let zero = parts.zeros.as_ref().map_or(8, |zeros| {
            let (word, position) = zero_place(&spec, sizes.groups, n, g);
            code(&[zeros[word].wrapping_add(v1_ones(&spec))], (0, position))
        });
        let q = code(&parts.packed, code_place(&spec, n, j));
        let scale = parts.scales[scale_place(&spec, sizes.groups, n, g)];
        dense[n * spec.cols + k] = (q as f32 - zero as f32) * scale_value(scale, spec.scales_dtype);
    }
    dense
}

/// Every layout, group size and type of scales, and shapes with tails where the layout has them.
pub fn any_int4_spec() -> impl Strategy<Value = Int4Spec> {
    let layout = prop_oneof![
        Just(Int4Layout::Gptq),
        Just(Int4Layout::GptqV2),
        Just(Int4Layout::Awq),
        Just(Int4Layout::CompressedTensors),
    ];
    let dtype = prop_oneof![Just(DType::F16), Just(DType::Bf16)];
    let group = proptest::option::of(prop_oneof![Just(32u32), Just(64), Just(128), Just(24)]);
    (layout, dtype, group, 0usize..4, 0usize..70, 0usize..40).prop_map(
        |(layout, dtype, group, groups, cols, rows)| {
            let words_along_cols = matches!(layout, Int4Layout::Gptq | Int4Layout::GptqV2);
            let cols = match group {
                Some(size) => size as usize * groups,
                None if words_along_cols => cols / 8 * 8,
                None => cols,
            };
            let rows = if layout == Int4Layout::Awq {
                rows / 8 * 8
            } else {
                rows
            };
            let spec = Int4Spec::new(layout, rows, cols).group_size(group);
            spec.scales_dtype(dtype)
        },
    )
}

/// In order, or an index of whole groups, or a permutation.
fn any_columns(cols: usize, groups: usize) -> impl Strategy<Value = Columns> {
    let shuffled = Just((0..cols as i32).collect::<Vec<_>>()).prop_shuffle();
    (0..3, shuffled).prop_map(move |(kind, shuffled)| match kind {
        0 => ColumnsOf::InOrder,
        1 => {
            let size = (cols / groups.max(1)).max(1) as i32;
            ColumnsOf::GroupIndex(shuffled.iter().map(|k| k / size).collect())
        }
        _ => ColumnsOf::Permuted(shuffled),
    })
}

/// Weights of arbitrary words, with scales of any bits, or between 0.01 and 1.
pub fn any_int4_weight(any_scale: bool) -> impl Strategy<Value = Int4Tensor> {
    any_int4_spec().prop_flat_map(move |spec| {
        let sizes = spec.sizes().expect("a spec in range");
        let tame = (0.01f32..1.0).prop_map(move |scale| match spec.scales_dtype {
            DType::Bf16 => bf16::from_f32(scale).to_bits(),
            _ => f16::from_f32(scale).to_bits(),
        });
        let scale = if any_scale {
            any::<u16>().boxed()
        } else {
            tame.boxed()
        };
        let parts = (
            vec(any::<u32>(), sizes.packed),
            vec(scale, sizes.scales),
            proptest::option::of(vec(any::<u32>(), sizes.zeros)),
            any_columns(spec.cols, sizes.groups),
        );
        parts.prop_map(move |(packed, scales, zeros, columns)| {
            let parts = Int4Parts {
                packed,
                scales,
                zeros,
                columns,
            };
            Int4Tensor::new(spec, parts).expect("parts that fit")
        })
    })
}
