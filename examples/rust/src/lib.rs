//! The two examples share this: a weight to quantize, and the error of the result.

/// Returns values that are distributed like a trained weight: almost normal, with mean 0.
pub fn example_weight(elements: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    // A sum of uniform numbers is close to normal.
    let mut bell = move || (0..4).map(|_| uniform()).sum::<f32>() - 2.0;
    (0..elements).map(|_| bell() * 0.05).collect()
}

/// Returns the root mean square of the differences, relative to that of `values`.
pub fn relative_error(values: &[f32], back: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let moved: f64 = values.iter().zip(back).map(|(x, y)| square(x - y)).sum();
    let size: f64 = values.iter().map(|x| square(*x)).sum();
    (moved / size).sqrt()
}
