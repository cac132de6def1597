//! Quantizes a weight on the CPU to NF4, FP4 and 4-bit integers, dequantizes it, and prints the size and
//! the error of each.
//!
//!     cargo run -p nf4-examples --bin host

use nf4::{dequantize, quantize, quantize_int4, Format, Int4Layout, Int4Scheme, Int4Spec, Spec};
use nf4_examples::{example_weight, relative_error};

fn main() -> Result<(), nf4::Error> {
    let (rows, cols) = (1024, 1024);
    let values = example_weight(rows * cols);
    println!(
        "libnf4 {}, CPU kernels: {}",
        nf4::version_string(),
        nf4::cpu_variant()
    );
    println!(
        "{rows} x {cols} in fp32: {} bytes",
        size_of_val(&values[..])
    );

    let nested = Spec::new(rows, cols);
    let fp4 = Spec::new(rows, cols).format(Format::Fp4);
    for (name, spec) in [
        ("NF4, nested", nested),
        ("NF4, flat", nested.flat()),
        ("FP4", fp4),
    ] {
        let weight = quantize(&values, spec, 0)?;
        let back: Vec<f32> = dequantize(&weight, 0)?;
        println!(
            "{name}: {} bytes, {:.3} bits per weight, relative error {:.4}",
            weight.bytes(),
            weight.bits_per_weight(),
            relative_error(&values, &back),
        );
    }

    for (name, layout) in [
        ("GPTQ", Int4Layout::Gptq),
        ("AWQ", Int4Layout::Awq),
        ("compressed-tensors", Int4Layout::CompressedTensors),
    ] {
        let spec = Int4Spec::new(layout, rows, cols);
        let weight = quantize_int4(&values, spec, Int4Scheme::Asymmetric, 0)?;
        let back: Vec<f32> = dequantize(&weight, 0)?;
        println!(
            "{name}, groups of 128: {} bytes, {:.3} bits per weight, relative error {:.4}",
            weight.bytes(),
            weight.bits_per_weight(),
            relative_error(&values, &back),
        );
    }
    Ok(())
}
