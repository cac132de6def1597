//! MXFP4 and NVFP4: the bytes that compressed-tensors writes, and scales that disagree.

use half::{bf16, f16};
use nf4::{
    dequantize, quantize, quantize_into, E8m0Rule, Element, Error, Format, GlobalScale,
    QuantizedMut, QuantizedRef, Scales, ScalesMut, ScalesRef, Spec,
};

fn values() -> Vec<f32> {
    let numbers = (0..64).map(|i| (i * 37 % 101 - 50) as f32 / 16.0);
    let rows = numbers.enumerate();
    rows.map(|(i, x)| if i < 32 { x } else { x / 128.0 })
        .collect()
}

const FIRST_BYTES: [u8; 6] = [0xbf, 0xe5, 0x69, 0x2e, 0xc7, 0xf4];

#[test]
fn mxfp4_has_the_bytes_of_compressed_tensors() -> nf4::Result<()> {
    let spec = Spec::new(2, 32).format(Format::Mxfp4(E8m0Rule::Even));
    let weight = quantize(&values(), spec.blocksize(32).flat(), 0)?;
    assert_eq!(weight.packed()[..FIRST_BYTES.len()], FIRST_BYTES);
    assert_eq!(weight.scales(), &Scales::Bytes(vec![0x7e, 0x77]));
    let back: Vec<f32> = dequantize(&weight, 0)?;
    assert_eq!(back[..4], [-3.0, -0.75, 1.5, -2.0]);
    Ok(())
}

#[test]
fn nvfp4_reads_its_global_scale() -> nf4::Result<()> {
    let spec = Spec::new(2, 32).format(Format::Nvfp4(GlobalScale::Divisor));
    let (mut packed, mut bytes, mut global) = ([0; 32], [0; 4], [f32::from_bits(0x4457_0a3d)]);
    let scales = ScalesMut::Global {
        bytes: &mut bytes,
        scales: &mut global,
    };
    let mut weight = QuantizedMut::new(spec.blocksize(16).flat(), &mut packed[..], scales, None)?;
    quantize_into(&values(), &mut weight, 0)?;
    assert_eq!(bytes, [0x7e, 0x7e, 0x45, 0x46]);
    assert_eq!(global, [f32::from_bits(0x4457_0a3d)]);
    Ok(())
}

fn nvfp4(rule: GlobalScale) -> Spec {
    let spec = Spec::new(2, 32).format(Format::Nvfp4(rule));
    spec.blocksize(16).flat()
}

fn global_scales<T: Element>(values: &[T], spec: Spec) -> Vec<f32> {
    match quantize(values, spec, 1).expect("a spec in range").scales() {
        Scales::Global { scales, .. } => scales.clone(),
        _ => panic!("NVFP4 has global scales"),
    }
}

#[test]
fn quantize_chooses_the_global_scale_of_nvfp4() -> nf4::Result<()> {
    let weight = quantize(&values(), nvfp4(GlobalScale::Divisor), 0)?;
    let expected = Scales::Global {
        bytes: vec![0x7e, 0x7e, 0x45, 0x46],
        scales: vec![f32::from_bits(0x4457_0a3d)],
    };
    assert_eq!(weight.scales(), &expected);
    // A global scale of 1 would round these to zeros.
    for small in [2f32.powi(-12), 2f32.powi(-20)] {
        let values: Vec<f32> = values().iter().map(|x| x * small).collect();
        for rule in [GlobalScale::Divisor, GlobalScale::Factor] {
            let back: Vec<f32> = dequantize(&quantize(&values, nvfp4(rule), 0)?, 0)?;
            let amax = 3.125 * small;
            let of_row = |i| if i < 32 { amax } else { amax / 128.0 };
            let near = |(i, (x, y)): (usize, (&f32, &f32))| (x - y).abs() <= of_row(i) / 5.0;
            assert!(values.iter().zip(&back).enumerate().all(near));
        }
    }
    Ok(())
}

#[test]
fn global_scales_of_parts_and_of_each_dtype() {
    let factor = nvfp4(GlobalScale::Factor);
    let (amax, rows) = (3.125, values());
    assert_eq!(global_scales(&rows, factor), [amax / 2688.0]);
    let second = rows[32..].iter().fold(0f32, |most, x| most.max(x.abs()));
    let both = [amax / 2688.0, second / 2688.0];
    for rows_of_part in [1, 2, 1 << 30] {
        let expected = if rows_of_part == 1 {
            &both[..]
        } else {
            &both[..1]
        };
        assert_eq!(global_scales(&rows, factor.nested(rows_of_part)), expected);
    }
    let mut halves: Vec<f16> = rows.iter().map(|x| f16::from_f32(*x)).collect();
    halves[3] = f16::NEG_INFINITY;
    halves[4] = f16::NAN;
    assert_eq!(global_scales(&halves, factor), [amax / 2688.0]);
    let brains: Vec<bf16> = rows.iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(global_scales(&brains, factor), [amax / 2688.0]);
    for rule in [GlobalScale::Divisor, GlobalScale::Factor] {
        assert_eq!(global_scales(&[0f32; 64], nvfp4(rule)), [1.0]);
        assert_eq!(global_scales(&[f32::NAN; 64], nvfp4(rule)), [1.0]);
        assert_eq!(global_scales(&[1e-45f32; 64], nvfp4(rule)), [1.0]);
    }
}

#[test]
fn scales_of_another_format_are_refused() {
    let spec = Spec::new(2, 32).blocksize(32).flat();
    let (packed, bytes) = ([0; 32], [0; 2]);
    for (format, scales) in [
        (Format::Nf4, ScalesRef::Bytes(&bytes)),
        (Format::Mxfp4(E8m0Rule::Floor), ScalesRef::Flat(&[1.0, 1.0])),
    ] {
        let weight = QuantizedRef::new(spec.format(format), &packed[..], scales, None);
        assert!(matches!(weight, Err(Error::InvalidArgument(_))));
    }
}
