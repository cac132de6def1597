//! MXFP4 and NVFP4: the bytes that compressed-tensors writes, and scales that disagree.

use nf4::{
    dequantize, quantize, quantize_into, E8m0Rule, Error, Format, GlobalScale, QuantizedMut,
    QuantizedRef, Scales, ScalesMut, ScalesRef, Spec,
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
