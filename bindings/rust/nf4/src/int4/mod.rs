//! 4-bit integer weights, as GPTQ, AWQ and compressed-tensors store them.

mod ops;
mod parts;
mod spec;
mod stack;
mod tensor;

#[cfg(feature = "cudarc-core")]
pub(crate) use ops::identity;
pub use ops::{quantize_int4, quantize_int4_into, reorder_int4_into};
pub use parts::{
    Columns, ColumnsOf, Int4Parts, Int4PartsMut, Int4PartsOf, Int4PartsRef, ReadInt4Parts,
    WriteInt4Parts,
};
pub use spec::{Int4Layout, Int4Scheme, Int4Sizes, Int4Spec};
pub use stack::{Int4Stack, Int4StackOf};
pub use tensor::{Int4Mut, Int4Of, Int4Ref, Int4Tensor};
