//! What the tests share: generators of weights, and comparisons.

use half::{bf16, f16};
use nf4::{Element, Format, QuantizedTensor, Scales, Spec, CODEBOOK_SIZE, SCALE_CODE_SIZE};
use proptest::collection::vec;
use proptest::prelude::*;

/// An element type, as seen by a test.
pub trait Number: Element + std::fmt::Debug {
    fn of(value: f32) -> Self;
    fn get(self) -> f32;
}

impl Number for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn get(self) -> f32 {
        self
    }
}

impl Number for f16 {
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn get(self) -> f32 {
        self.to_f32()
    }
}

impl Number for bf16 {
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn get(self) -> f32 {
        self.to_f32()
    }
}

/// The same bits, or two NaNs.
pub fn same<T: Number>(a: T, b: T) -> bool {
    let (a, b) = (a.get(), b.get());
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Sixteen evenly spaced entries from -1 to 1.
pub fn even_codebook() -> [f32; CODEBOOK_SIZE] {
    std::array::from_fn(|i| (2.0 * i as f32 - 15.0) / 15.0)
}

/// Every format, blocksize and nesting, and shapes with tails, odd counts and nothing.
pub fn any_spec() -> impl Strategy<Value = Spec> {
    let format = prop_oneof![Just(Format::Nf4), Just(Format::Fp4)];
    let nested = prop_oneof![Just(0u32), Just(256), (0u32..12).prop_map(|log| 1 << log)];
    (0usize..40, 0usize..200, format, 5u32..13, nested).prop_map(
        |(rows, cols, format, log, nested)| {
            Spec::new(rows, cols)
                .format(format)
                .blocksize(1 << log)
                .nested(nested)
        },
    )
}

/// Any 32 bits are a float: NaN, infinite and subnormal ones too.
fn any_float() -> impl Strategy<Value = f32> {
    prop_oneof![3 => -10.0f32..10.0, 1 => any::<u32>().prop_map(f32::from_bits)]
}

fn any_array<const N: usize>() -> impl Strategy<Value = [f32; N]> {
    vec(any_float(), N).prop_map(|values| std::array::from_fn(|i| values[i]))
}

/// Weights of arbitrary bytes, which nothing has quantized.
pub fn any_weight() -> impl Strategy<Value = QuantizedTensor> {
    any_spec().prop_flat_map(|spec| {
        let sizes = spec.sizes().expect("a spec in range");
        let scales = if spec.is_nested() {
            let parts = (
                vec(any::<u8>(), sizes.blocks),
                vec(any_float(), sizes.nested_blocks),
                any_array::<SCALE_CODE_SIZE>(),
                any_float(),
            );
            let nested = |(codes, absmax, code, offset)| {
                let code = Box::new(code);
                Scales::Nested {
                    codes,
                    absmax,
                    code,
                    offset,
                }
            };
            parts.prop_map(nested).boxed()
        } else {
            vec(any_float(), sizes.blocks)
                .prop_map(Scales::Flat)
                .boxed()
        };
        let packed = vec(any::<u8>(), sizes.packed_bytes);
        let codebook = proptest::option::of(any_array::<CODEBOOK_SIZE>());
        (packed, scales, codebook).prop_map(move |(packed, scales, codebook)| {
            QuantizedTensor::new(spec, packed, scales, codebook).expect("sizes that fit")
        })
    })
}

/// A spec and the values of a dense weight for it.
pub fn any_values() -> impl Strategy<Value = (Spec, Vec<f32>)> {
    any_spec().prop_flat_map(|spec| {
        vec(-1000.0f32..1000.0, spec.rows * spec.cols).prop_map(move |values| (spec, values))
    })
}
