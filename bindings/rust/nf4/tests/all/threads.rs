//! What may go from thread to thread, and that calls on many threads do not disturb
//! each other.

use nf4::device::{
    DeviceInt4Parts, DeviceInt4PartsMut, DeviceSlice, DeviceSliceMut, DeviceTensor,
    DeviceTensorMut, Launch, Stream,
};
use nf4::{dequantize, quantize, Error, QuantizedMut, QuantizedRef, QuantizedTensor, Spec};

fn sendable<T: Send + Sync>() {}

#[test]
fn types_are_send_and_sync() {
    sendable::<QuantizedTensor>();
    sendable::<QuantizedRef<'static>>();
    sendable::<QuantizedMut<'static>>();
    sendable::<nf4::Workspace>();
    sendable::<nf4::Int4Tensor>();
    sendable::<nf4::Int4Ref<'static>>();
    sendable::<nf4::Int4Mut<'static>>();
    sendable::<Error>();
    sendable::<Stream>();
    // Slices are addresses: they are Send and Sync whatever their elements are.
    sendable::<DeviceSlice<*const u8>>();
    sendable::<DeviceSliceMut<'static, *const u8>>();
    sendable::<Launch<'static>>();
    sendable::<DeviceTensor>();
    sendable::<DeviceTensorMut<'static>>();
    sendable::<DeviceInt4Parts>();
    sendable::<DeviceInt4PartsMut<'static>>();
    sendable::<nf4::Matrix<'static, f32>>();
    sendable::<nf4::MatrixMut<'static, f32>>();
}

#[test]
fn many_threads_at_once() {
    let values: Vec<f32> = (0..5000).map(|i| (i as f32).cos()).collect();
    let weight = quantize(&values, Spec::new(50, 100), 1).expect("a spec in range");
    let back: Vec<f32> = dequantize(&weight, 1).expect("a weight that fits");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert!(quantize(&values, Spec::new(50, 100), 2).as_ref() == Ok(&weight));
                    assert!(dequantize(&weight, 2).as_ref() == Ok(&back));
                }
            });
        }
    });
}

/// The detail of an error is that of the same thread.
#[test]
fn errors_of_threads_do_not_mix() {
    std::thread::scope(|scope| {
        for thread in 1u32..9 {
            scope.spawn(move || {
                for _ in 0..500 {
                    let error = Spec::new(1, 1).blocksize(thread).sizes().unwrap_err();
                    assert!(error
                        .detail()
                        .starts_with(&format!("blocksize is {thread};")));
                }
            });
        }
    });
}
