//! What the library says of itself and of the machine.

use nf4::{
    build_info, codebook, cpu_variant, device_info, scale_code, E8m0Rule, Error, Format,
    GlobalScale,
};

#[test]
fn versions_agree() {
    let version = nf4::version();
    let text = format!("{}.{}.{}", version.major, version.minor, version.patch);
    assert_eq!(nf4::version_string(), text);
    assert_eq!(env!("CARGO_PKG_VERSION"), text);
}

#[test]
fn build_info_has_its_keys() {
    for wanted in ["compiler", "cuda"] {
        assert!(
            build_info().any(|(key, value)| key == wanted && !value.is_empty()),
            "{wanted}"
        );
    }
    let variants = ["avx512bf16", "avx512", "avx2", "neonbf16", "neon", "scalar"];
    assert!(variants.contains(&cpu_variant()));
}

#[test]
fn tables_are_those_of_the_formats() {
    let fp4 = codebook(Format::Fp4);
    assert_eq!(fp4[..4], [0.0, 0.0625 / 12.0, 8.0 / 12.0, 1.0]);
    let nf4 = codebook(Format::Nf4);
    assert_eq!((nf4[0], nf4[1], nf4[15]), (-1.0, -0.696_192_8, 1.0));
    for format in [
        Format::Mxfp4(E8m0Rule::Even),
        Format::Nvfp4(GlobalScale::Factor),
    ] {
        let positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        assert_eq!(codebook(format)[..8], positive);
        assert_eq!(
            codebook(format)[9..],
            positive.map(|entry: f32| -entry)[1..]
        );
    }
    assert!(scale_code().windows(2).all(|pair| pair[0] < pair[1]));
    assert_eq!(scale_code()[255], 1.0);
}

#[test]
fn a_device_is_usable_or_says_why() {
    let gpu = device_info(0);
    match &gpu.status {
        Ok(()) => {
            assert!(gpu.usable() && gpu.device_count > 0 && gpu.memory_bytes > 0);
            assert!(!gpu.name.is_empty() && !gpu.dequant_variant.is_empty());
            assert!(gpu.shared_memory_bytes >= 48 << 10);
            assert_eq!(gpu.timed, gpu.compute_capability == 90);
        }
        Err(reason) => {
            assert!(!gpu.usable() && !reason.detail().is_empty());
            assert!(gpu.device_count > 0 || !gpu.timed && gpu.shared_memory_bytes == 0);
        }
    }
}

#[test]
fn no_device_has_a_negative_number() {
    let status = device_info(-1).status;
    let refused = matches!(
        status,
        Err(Error::InvalidArgument(_) | Error::NoCuda(_) | Error::NoDevice(_))
    );
    assert!(refused, "{status:?}");
}
