//! Slices of raw device memory: parts, reborrows and comparison. Nothing follows the addresses.

use nf4::device::{
    DeviceScales, DeviceSlice, DeviceSliceMut, DeviceTensor, DeviceTensorMut, Launch, Stream,
};
use nf4::{dequantize_into, quantize_into, Result, ScalesOf, Spec};

use super::arguments::detail;

const FIRST: usize = 1 << 20;

fn slice<T>(length: usize) -> DeviceSlice<T> {
    // SAFETY: a check refuses each launch that has it.
    unsafe { DeviceSlice::from_raw_parts(FIRST as *const T, length) }
}

fn slice_mut<T>(first: usize, length: usize) -> DeviceSliceMut<'static, T> {
    // SAFETY: as above.
    unsafe { DeviceSliceMut::from_raw_parts(first as *mut T, length) }
}

#[test]
fn a_part_begins_at_its_first_element() {
    let stack = slice::<f32>(12);
    let expert = stack.slice(4..8);
    assert_eq!((expert.as_ptr() as usize, expert.len()), (FIRST + 16, 4));
    assert_eq!(stack.slice(0..12), stack);
    assert!(stack.slice(12..12).is_empty() && !expert.is_empty());

    let mut stack = slice_mut::<u16>(FIRST, 12);
    let mut expert = stack.slice_mut(4..8);
    let last = expert.slice_mut(3..4);
    assert_eq!((last.as_ptr() as usize, last.len()), (FIRST + 14, 1));
    assert_eq!(expert.as_mut_ptr() as usize, FIRST + 8);
    assert_eq!(stack.reborrow(), slice_mut(FIRST, 12));
    assert_eq!(stack.len(), 12);
}

#[test]
#[should_panic(expected = "the range is 4..13; expected one within 0..12")]
fn a_part_behind_the_end_is_refused() {
    slice::<f32>(12).slice(4..13);
}

#[test]
#[should_panic(expected = "the range is 5..4; expected one within 0..12")]
fn a_part_that_ends_before_it_begins_is_refused() {
    slice_mut::<f32>(FIRST, 12).slice_mut(std::ops::Range { start: 5, end: 4 });
}

/// Both launches get the workspace, whose size libnf4 refuses.
#[test]
fn one_workspace_serves_several_launches() -> Result<()> {
    let spec = Spec::new(8, 256);
    let sizes = spec.sizes()?;
    let mut workspace = slice_mut::<u8>(FIRST, 8);
    for first in [2 << 20, 3 << 20] {
        let scales = ScalesOf::Nested {
            codes: slice_mut(4 << 20, sizes.blocks),
            absmax: slice_mut(5 << 20, sizes.nested_blocks),
            code: slice(256),
            offset: slice_mut(6 << 20, 1),
        };
        let packed = slice_mut(first, sizes.packed_bytes);
        let mut weight = DeviceTensorMut::new(spec, packed, scales, None)?;
        let on = Launch::new(Stream::LEGACY_DEFAULT).workspace(workspace.reborrow());
        let refused = detail(quantize_into(slice::<f32>(8 * 256), &mut weight, on));
        assert!(refused.starts_with("workspace_bytes is 8; expected at least"));
    }
    Ok(())
}

/// The whole of `out` is too long, and its second half begins where the weight does.
#[test]
fn a_launch_takes_a_part() -> Result<()> {
    let scales = DeviceScales::Flat(slice(4));
    let weight = DeviceTensor::new(Spec::new(1, 256).flat(), slice(128), scales, None)?;
    let mut out = slice_mut::<f32>(FIRST - 256 * size_of::<f32>(), 512);
    let mut refused = |part| dequantize_into(weight, out.slice_mut(part), Stream::LEGACY_DEFAULT);
    let wanted = "out has 512 elements; expected 256";
    assert_eq!(detail(refused(0..512)), wanted);
    assert_eq!(detail(refused(256..512)), "packed overlaps out");
    Ok(())
}

#[test]
fn weights_are_equal_with_the_same_parts() -> Result<()> {
    let spec = Spec::new(1, 256).flat();
    let make = |absmax| DeviceTensor::new(spec, slice(128), DeviceScales::Flat(absmax), None);
    assert_eq!(make(slice(4))?, make(slice(4))?);
    assert_ne!(make(slice(4))?, make(slice(5).slice(1..5))?);
    Ok(())
}
