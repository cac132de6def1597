//! Launches on raw device memory, as far as a machine without a GPU can see.

use half::{bf16, f16};
use nf4::device::{
    DeviceInt4Parts, DeviceInt4PartsMut, DeviceScales, DeviceScalesMut, DeviceSlice,
    DeviceSliceMut, DeviceTensor, DeviceTensorMut, Launch, Stream,
};
use nf4::{
    dequantize_into, device_info, lora_grad_into, matmul_batch_into, matmul_batch_workspace_bytes,
    matmul_grad_into, matmul_grad_lora_into, matmul_grouped_grad_into, matmul_grouped_into,
    matmul_into, matmul_joined_into, matmul_lora_into, quantize_int4_into, quantize_into,
    reorder_int4_into, ColumnsOf, Element, GroupedOf, Int4Layout, Int4Of, Int4Scheme, Int4Spec,
    Int4StackOf, LoraGradOf, LoraOf, MatrixOf, ProductOf, Read as _, Result, Spec,
};

use super::arguments::detail;

/// Never followed: either a check fails, or there is no GPU.
fn slice<T>(n: usize, length: usize) -> DeviceSlice<T> {
    // SAFETY: as above.
    unsafe { DeviceSlice::from_raw_parts((n << 20) as *const T, length) }
}

fn slice_mut<T>(n: usize, length: usize) -> DeviceSliceMut<'static, T> {
    // SAFETY: as in slice.
    unsafe { DeviceSliceMut::from_raw_parts((n << 20) as *mut T, length) }
}

const ROWS: usize = 8;
const COLS: usize = 256;
const M: usize = 3;
const RANK: usize = 16;
const ON: Stream = Stream::LEGACY_DEFAULT;

/// With a workspace of so many bytes.
fn with_workspace(bytes: usize) -> Launch<'static> {
    Launch::new(ON).workspace(slice_mut(20, bytes))
}

fn enough() -> Launch<'static> {
    with_workspace(1 << 20)
}

fn matrix<T>(n: usize, rows: usize, cols: usize) -> MatrixOf<DeviceSlice<T>> {
    MatrixOf::new(slice(n, rows * cols), rows, cols).expect("it fits")
}

fn matrix_mut<T>(n: usize, rows: usize, cols: usize) -> MatrixOf<DeviceSliceMut<'static, T>> {
    MatrixOf::new(slice_mut(n, rows * cols), rows, cols).expect("it fits")
}

fn weight(spec: Spec) -> DeviceTensor {
    let sizes = spec.sizes().expect("a spec in range");
    let scales = DeviceScales::Nested {
        codes: slice(2, sizes.blocks),
        absmax: slice(3, sizes.nested_blocks),
        code: slice(4, 256),
        offset: slice(5, 1),
    };
    DeviceTensor::new(
        spec,
        slice(1, sizes.packed_bytes),
        scales,
        Some(slice(6, 16)),
    )
    .expect("it fits")
}

fn weight_mut() -> DeviceTensorMut<'static> {
    let spec = Spec::new(ROWS, COLS);
    let sizes = spec.sizes().expect("a spec in range");
    let scales = DeviceScalesMut::Nested {
        codes: slice_mut(2, sizes.blocks),
        absmax: slice_mut(3, sizes.nested_blocks),
        code: slice(4, 256),
        offset: slice_mut(5, 1),
    };
    DeviceTensorMut::new(spec, slice_mut(1, sizes.packed_bytes), scales, None).expect("it fits")
}

fn int4_parts(spec: Int4Spec) -> DeviceInt4Parts {
    let sizes = spec.sizes().expect("a spec in range");
    DeviceInt4Parts {
        packed: slice(1, sizes.packed),
        scales: slice(2, sizes.scales),
        zeros: Some(slice(3, sizes.zeros)),
        columns: ColumnsOf::InOrder,
    }
}

fn int4_spec(rows: usize) -> Int4Spec {
    Int4Spec::new(Int4Layout::Gptq, rows, COLS)
}

fn int4(rows: usize) -> Int4Of<DeviceInt4Parts> {
    Int4Of::new(int4_spec(rows), int4_parts(int4_spec(rows))).expect("it fits")
}

fn with_g_idx(rows: usize) -> Int4Of<DeviceInt4Parts> {
    // SAFETY: as in slice.
    unsafe { int4(rows).with_columns(ColumnsOf::GroupIndex(slice(4, COLS))) }.expect("it fits")
}

fn int4_mut() -> Int4Of<DeviceInt4PartsMut<'static>> {
    let sizes = int4_spec(ROWS).sizes().expect("a spec in range");
    let parts = DeviceInt4PartsMut {
        packed: slice_mut(1, sizes.packed),
        scales: slice_mut(2, sizes.scales),
        zeros: Some(slice_mut(3, sizes.zeros)),
        columns: ColumnsOf::InOrder,
    };
    Int4Of::new(int4_spec(ROWS), parts).expect("it fits")
}

type Grouped<T> = GroupedOf<DeviceSlice<T>, DeviceSlice<i32>, DeviceSlice<f32>>;

/// Two experts of `columns` columns of x, with M rows of y.
fn grouped<T>(columns: usize) -> Grouped<T> {
    Grouped {
        x_index: Some(slice(13, M)),
        row_scale: Some(slice(14, M)),
        ..Grouped::new(matrix(7, 2, columns), slice(12, 2))
    }
}

/// Every operation on ROWS x COLS and M rows, by name, with results in T.
fn launches<T: Element>() -> Vec<(&'static str, Result<()>)> {
    let (nf4, int4) = (&weight(Spec::new(ROWS, COLS)), &int4(ROWS));
    let x = || matrix::<T>(7, M, COLS);
    let grad_y = || matrix::<T>(8, M, ROWS);
    let y = &mut matrix_mut::<T>(9, M, ROWS);
    let grad_x = &mut matrix_mut::<T>(9, M, COLS);
    let product = &mut slice_mut::<T>(10, M * RANK);
    let (joined, mut batch) = (&mut matrix_mut(11, M, 2 * ROWS), [matrix_mut(9, M, ROWS)]);
    let lora = &LoraOf {
        a: matrix::<f32>(15, RANK, COLS),
        b: matrix(16, ROWS, RANK),
        scale: 0.5,
    };
    let gradients = &LoraGradOf {
        rank: RANK,
        scale: 0.5,
        x: x(),
        grad_y: grad_y(),
        p: slice(15, M * RANK),
        q: slice(16, M * RANK),
    };
    let (grad_a, grad_b) = (
        &mut matrix_mut::<f32>(17, RANK, COLS),
        &mut matrix_mut(18, ROWS, RANK),
    );
    let bias = Some(slice(19, ROWS));
    let values = slice::<T>(7, ROWS * COLS);
    let (packed, permutation) = (
        slice_mut(17, int4.parts().packed.length()),
        slice_mut(18, COLS),
    );
    let experts = Spec::new(2 * ROWS, COLS);
    let stack = Int4StackOf::new(int4_spec(ROWS), 1, int4_parts(int4_spec(ROWS)));
    let stack = stack.expect("it fits");
    let one = Grouped {
        ends: slice(12, 1),
        ..grouped::<T>(COLS)
    };
    vec![
        (
            "dequantize",
            dequantize_into(nf4, slice_mut::<T>(9, ROWS * COLS), ON),
        ),
        (
            "int4 dequantize",
            dequantize_into(int4, slice_mut::<T>(9, ROWS * COLS), ON),
        ),
        (
            "quantize",
            quantize_into(values, &mut weight_mut(), enough()),
        ),
        (
            "int4 quantize",
            quantize_int4_into(values, &mut int4_mut(), Int4Scheme::Asymmetric, ON),
        ),
        (
            "int4 reorder",
            reorder_int4_into(&with_g_idx(ROWS), packed, permutation, ON),
        ),
        ("matmul", matmul_into(x(), nf4, bias, y, enough())),
        ("int4 matmul", matmul_into(x(), int4, bias, y, enough())),
        (
            "lora",
            matmul_lora_into(x(), nf4, bias, lora, y, Some(product), enough()),
        ),
        ("grad", matmul_grad_into(grad_y(), nf4, grad_x, enough())),
        (
            "grad lora",
            matmul_grad_lora_into(grad_y(), nf4, lora, grad_x, None, enough()),
        ),
        (
            "batch",
            matmul_batch_into(&[ProductOf::new(x(), nf4)], &mut batch, enough()),
        ),
        (
            "int4 batch",
            matmul_batch_into(&[ProductOf::new(x(), int4)], &mut batch, enough()),
        ),
        (
            "joined",
            matmul_joined_into(x(), &[nf4, nf4], joined, enough()),
        ),
        (
            "lora grad",
            lora_grad_into(gradients, Some(grad_a), Some(grad_b), ON),
        ),
        (
            "grouped",
            matmul_grouped_into(&grouped(COLS), weight(experts), y, enough()),
        ),
        (
            "grouped grad",
            matmul_grouped_grad_into(&grouped(ROWS), weight(experts), grad_x, enough()),
        ),
        (
            "int4 grouped",
            matmul_grouped_into(&one, stack, y, enough()),
        ),
    ]
}

#[test]
fn without_a_gpu_the_reason_is_that_of_device_info() {
    let Err(reason) = device_info(0).status else {
        return; // What works is tested with the feature cudarc.
    };
    for (name, result) in [launches::<f16>(), launches::<bf16>()].concat() {
        let error = result.expect_err(name);
        assert_eq!(
            std::mem::discriminant(&error),
            std::mem::discriminant(&reason),
            "{name}: {error}"
        );
        assert!(!error.detail().is_empty());
    }
}

#[test]
fn libnf4_checks_a_launch() {
    let (nf4, int4) = (&weight(Spec::new(ROWS, COLS)), &int4(ROWS));
    let x = |m| matrix::<f16>(7, m, COLS);
    let out = |n| slice_mut::<f32>(n, ROWS * COLS);
    // SAFETY: as in slice.
    let unaligned = unsafe { DeviceSliceMut::from_raw_parts(((9 << 20) + 2) as *mut f32, 2048) };
    let values = slice::<bf16>(7, ROWS * COLS);
    let twice = || [ProductOf::new(x(M), nf4), ProductOf::new(x(M), nf4)];
    let mut same = [matrix_mut(9, M, ROWS), matrix_mut(9, M, ROWS)];
    let many: Vec<_> = (0..65).map(|_| ProductOf::new(x(M), int4)).collect();
    let mut outputs: Vec<_> = (0..65).map(|i| matrix_mut(30 + i, M, ROWS)).collect();
    let experts = || weight(Spec::new(2 * ROWS, COLS));
    let y = &mut matrix_mut(12, M, ROWS);
    let permuted = ColumnsOf::Permuted(slice(4, COLS));
    let sorted = DeviceInt4Parts {
        columns: permuted,
        ..int4_parts(int4_spec(ROWS))
    };
    let words = int4.parts().packed.length();
    let cases = [
        (
            dequantize_into(nf4, unaligned, ON),
            "out is 0x900002; expected",
        ),
        (dequantize_into(nf4, out(1), ON), "packed overlaps out"),
        (dequantize_into(int4, out(3), ON), "zeros overlaps out"),
        (
            quantize_into(values, &mut weight_mut(), with_workspace(8)),
            "workspace_bytes is 8; expected at least",
        ),
        (
            matmul_into(x(M), nf4, None, &mut matrix_mut(7, M, ROWS), ON),
            "x overlaps y",
        ),
        (
            matmul_into(
                matrix::<f32>(7, 17, COLS),
                nf4,
                None,
                &mut matrix_mut(9, 17, ROWS),
                ON,
            ),
            "dtype is 1 (fp32) and m is 17; expected",
        ),
        (
            matmul_batch_into(&twice(), &mut same, enough()),
            "y of product 0 overlaps y of product 1",
        ),
        (
            matmul_batch_into(&many, &mut outputs, enough()),
            "count is 65; expected at most 64",
        ),
        (
            matmul_batch_workspace_bytes(&many).map(|_| ()),
            "count is 65; expected at most 64",
        ),
        (
            matmul_grouped_into(&grouped::<f16>(COLS), experts(), y, enough()),
            "ends overlaps y",
        ),
        (
            reorder_int4_into(int4, slice_mut(9, words), slice_mut(10, COLS), ON),
            "expected `from` with g_idx",
        ),
        (
            reorder_int4_into(
                &with_g_idx(ROWS),
                slice_mut(1, words),
                slice_mut(10, COLS),
                ON,
            ),
            "packed overlaps packed of `to`",
        ),
        (
            Int4StackOf::new(int4_spec(ROWS), 1, sorted).map(|_| ()),
            "permutation is on a GPU, where its values cannot be checked",
        ),
    ];
    for (result, start) in cases {
        let detail = detail(result);
        assert!(
            detail.starts_with(start),
            "{detail:?} does not start with {start:?}"
        );
    }
    let bytes = matmul_batch_workspace_bytes(&[ProductOf::new(x(100), nf4)]);
    assert_eq!(
        bytes,
        Spec::new(ROWS, COLS).matmul_workspace_bytes::<f16>(100)
    );
    let bytes = matmul_batch_workspace_bytes(&[ProductOf::new(x(100), int4)]);
    assert_eq!(bytes, int4.matmul_workspace_bytes::<f16>(100));
}

#[test]
fn nothing_is_launched_for_no_elements() {
    let flat = DeviceScales::Flat(DeviceSlice::EMPTY);
    let empty = Spec::new(0, COLS).flat();
    let empty = DeviceTensor::new(empty, DeviceSlice::EMPTY, flat, None).expect("it fits");
    let no_rows = Int4Of::new(int4_spec(0), int4_parts(int4_spec(0))).expect("it fits");
    let none = || matrix_mut::<f16>(9, 0, ROWS);
    assert_eq!(
        dequantize_into(empty, DeviceSliceMut::<f32>::EMPTY, ON),
        Ok(())
    );
    assert_eq!(
        dequantize_into(no_rows, DeviceSliceMut::<f32>::EMPTY, ON),
        Ok(())
    );
    let y = &mut matrix_mut(9, M, 0);
    assert_eq!(
        matmul_into(matrix::<f16>(7, M, COLS), empty, None, y, ON),
        Ok(())
    );
    let nf4 = weight(Spec::new(ROWS, COLS));
    assert_eq!(
        matmul_into(matrix(7, 0, COLS), nf4, None, &mut none(), ON),
        Ok(())
    );
    let products: [ProductOf<DeviceSlice<f16>, DeviceTensor>; 0] = [];
    let no_outputs: &mut [MatrixOf<DeviceSliceMut<f16>>] = &mut [];
    assert_eq!(matmul_batch_into(&products, no_outputs, ON), Ok(()));
    let experts = weight(Spec::new(2 * ROWS, COLS));
    let no_rows = Grouped {
        x_index: Some(DeviceSlice::EMPTY),
        row_scale: None,
        ..grouped(COLS)
    };
    assert_eq!(
        matmul_grouped_into(&no_rows, experts, &mut none(), ON),
        Ok(())
    );
    let unwanted = LoraGradOf {
        rank: RANK,
        scale: 0.5,
        x: matrix::<f16>(7, 0, 0),
        grad_y: matrix(8, M, ROWS),
        p: DeviceSlice::EMPTY,
        q: DeviceSlice::EMPTY,
    };
    let (no_a, no_b) = (None::<&mut MatrixOf<DeviceSliceMut<f32>>>, None);
    assert_eq!(lora_grad_into(&unwanted, no_a, no_b, ON), Ok(()));
}

#[test]
fn a_stream_keeps_its_value() {
    let mut place = 0u8;
    let raw = std::ptr::from_mut(&mut place).cast();
    // SAFETY: it is given to no launch.
    assert_eq!(unsafe { Stream::from_raw(raw) }.as_raw(), raw);
}
