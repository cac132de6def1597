//! Tests which way products go.

use half::{bf16, f16};
use nf4::{ColumnsOf, Error, Format, Int4Layout, Int4Spec, Path, Place, Result, Spec};

/// Checks an answer for a GPU: `answer` on one that libnf4 can use, else why it cannot.
fn on_gpu(asked: Result<Path>, answer: Path) {
    match nf4::device_info(0).status {
        Ok(()) => assert_eq!(asked, Ok(answer)),
        Err(reason) => assert_eq!(
            std::mem::discriminant(&asked.unwrap_err()),
            std::mem::discriminant(&reason)
        ),
    }
}

#[test]
fn products_go_the_fused_way_on_the_cpu() {
    let spec = Spec::new(256, 128);
    for m in [0, 1, 16, 17, 4096] {
        assert_eq!(spec.matmul_path::<f32>(m, Place::Cpu), Ok(Path::Fused));
        assert_eq!(
            spec.matmul_lora_path::<f16>(m, 8, Place::Cpu),
            Ok(Path::Fused)
        );
        assert_eq!(
            spec.lora_grad_path::<bf16, f32>(m, 8, Place::Cpu),
            Ok(Path::Fused)
        );
        for columns in [
            ColumnsOf::InOrder,
            ColumnsOf::GroupIndex(()),
            ColumnsOf::Permuted(()),
        ] {
            let spec = Int4Spec::new(Int4Layout::Gptq, 256, 128);
            let path = spec.matmul_path::<bf16>(columns, m, Place::Cpu);
            assert_eq!(path, Ok(Path::Fused));
        }
    }
    let grouped = spec.format(Format::Fp4).flat();
    assert_eq!(
        grouped.matmul_grouped_path::<bf16>(4, 64, Place::Cpu),
        Ok(Path::Fused)
    );
    assert_eq!(
        grouped.matmul_grouped_grad_path::<bf16>(4, 64, Place::Cpu),
        Ok(Path::Fused)
    );
    let int4 = Int4Spec::new(Int4Layout::Awq, 256, 128);
    assert_eq!(
        int4.matmul_grouped_path::<bf16>(4, 64, Place::Cpu),
        Ok(Path::Fused)
    );
}

/// A gradient in bf16 decodes the weight for each row of y.
#[test]
fn the_gradient_of_many_rows_goes_the_dense_way() {
    let spec = Spec::new(256, 128);
    for rank in [0, 16] {
        let path = |m| spec.matmul_grad_path::<bf16>(m, rank, Place::Cpu);
        assert_eq!(
            (path(0), path(1), path(257)),
            (Ok(Path::Fused), Ok(Path::Fused), Ok(Path::Dense))
        );
        let path = spec.matmul_grad_path::<f32>(257, rank, Place::Cpu);
        assert_eq!(path, Ok(Path::Fused));
    }
}

#[test]
fn a_gpu_answers_or_says_why_not() {
    let gpu = Place::Gpu(0);
    let spec = Spec::new(256, 128);
    on_gpu(spec.matmul_path::<f32>(0, gpu), Path::Fused);
    on_gpu(spec.matmul_path::<f32>(17, gpu), Path::Dense);
    on_gpu(spec.lora_grad_path::<f32, f32>(0, 8, gpu), Path::Fused);
    on_gpu(spec.matmul_grad_path::<f32>(17, 0, gpu), Path::Dense);
    on_gpu(spec.matmul_grouped_path::<f32>(4, 64, gpu), Path::Dense);
    let int4 = Int4Spec::new(Int4Layout::Gptq, 256, 128);
    let path = int4.matmul_path::<f32>(ColumnsOf::InOrder, 1, gpu);
    on_gpu(path, Path::Dense);
    on_gpu(int4.matmul_grouped_path::<f32>(4, 64, gpu), Path::Dense);
}

#[test]
fn what_makes_no_sense_is_named() {
    let refused = |asked: Result<Path>, wanted: &str| match asked {
        Err(Error::InvalidArgument(detail)) => assert!(detail.contains(wanted), "{detail}"),
        other => panic!("{other:?}; expected {wanted}"),
    };
    let spec = Spec::new(256, 128);
    let path = spec.blocksize(48).matmul_path::<f32>(1, Place::Cpu);
    refused(path, "blocksize is 48");
    let path = spec.matmul_path::<f32>(1, Place::Gpu(1 << 31));
    refused(path, "the index of the GPU is 2147483648");
    let path = spec.matmul_path::<f32>(1 << 60, Place::Cpu);
    refused(path, "m * x_stride is 1152921504606846976 * 128");
    refused(spec.matmul_lora_path::<f32>(1, 0, Place::Cpu), "rank is 0");
    let path = spec.matmul_grad_path::<f32>(1, 129, Place::Cpu);
    refused(path, "rank is 129");
    let path = spec.lora_grad_path::<f32, f32>(1, 129, Place::Cpu);
    refused(path, "rank is 129");
    let path = spec.lora_grad_path::<f32, f16>(1, 8, Place::Cpu);
    refused(path, "grad_dtype is");
    let path = spec.matmul_grouped_path::<f32>(3, 1, Place::Cpu);
    refused(path, "experts is 3");
    let int4 = Int4Spec::new(Int4Layout::Gptq, 256, 130);
    let path = int4.matmul_path::<f32>(ColumnsOf::InOrder, 1, Place::Cpu);
    refused(path, "a divisor of cols, 130");
}
