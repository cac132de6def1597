//! The global scales that quantize gives a weight of NVFP4.

use crate::{Element, Format, GlobalScale, Spec};

/// The largest product of an E2M1 number and an E4M3 scale.
const LARGEST: f32 = 6.0 * 448.0;

/// Writes the scale of each part of the rows of `values`: the block with the part's largest finite
/// magnitude gets the largest scale. 1 where no finite number does that.
pub(crate) fn choose<T: Element>(values: &[T], spec: &Spec, scales: &mut [f32]) {
    let rows = match spec.nested_blocksize {
        0 => spec.rows,
        rows => spec.rows.min(rows as usize),
    };
    let parts = values.chunks((rows * spec.cols).max(1));
    for (scale, part) in scales.iter_mut().zip(parts) {
        let amax = T::largest(part);
        let chosen = match spec.format {
            // compressed-tensors divides in these two steps.
            Format::Nvfp4(GlobalScale::Divisor) => 1.0 / amax * LARGEST,
            _ => amax / LARGEST,
        };
        let usable = chosen.is_finite() && chosen != 0.0;
        *scale = if usable { chosen } else { 1.0 };
    }
}
