//! The layout and shape of a weight of integers.

use std::ptr;

use nf4_sys as sys;

use super::parts::{ColumnsOf, Int4Lengths, RawInt4Parts};
use crate::error::{check, check_length, convert, product};
use crate::info::check_version;
use crate::{DType, Result};

/// Says how a checkpoint stores the codes, zero points and scales of a weight of integers. The table
/// is in `nf4.h`, at `nf4_int4_layout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int4Layout {
    /// `qweight`, `qzeros` and `scales` of GPTQ (`checkpoint_format` gptq): each word of zero points is
    /// stored minus 0x11111111. The number of columns is a multiple of 8.
    Gptq,
    /// The same tensors (`checkpoint_format` gptq_v2), with zero points stored as they are.
    GptqV2,
    /// `qweight`, `qzeros` and `scales` of AWQ (`version` gemm). The number of rows is a multiple of 8.
    Awq,
    /// `weight_packed`, `weight_zero_point` and `weight_scale` of compressed-tensors
    /// (`format` pack-quantized).
    CompressedTensors,
}

impl Int4Layout {
    /// The `nf4_int4_layout` of the C interface.
    pub const fn as_raw(self) -> sys::nf4_int4_layout {
        match self {
            Int4Layout::Gptq | Int4Layout::GptqV2 => sys::NF4_INT4_GPTQ,
            Int4Layout::Awq => sys::NF4_INT4_AWQ,
            Int4Layout::CompressedTensors => sys::NF4_INT4_COMPRESSED_TENSORS,
        }
    }

    /// The `zero_offset` of the C interface for a weight that stores zero points.
    pub const fn zero_offset(self) -> i32 {
        matches!(self, Int4Layout::Gptq) as i32
    }
}

/// The way in which quantize chooses the zero points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Int4Scheme {
    /// All zero points are 8.
    Symmetric,
    /// Each zero point follows from the smallest and the largest value of its group.
    Asymmetric,
}

/// The layout and shape of a weight of integers.
///
/// ```
/// use nf4::{DType, Int4Layout, Int4Spec};
/// let spec = Int4Spec::new(Int4Layout::Gptq, 14336, 4096); // groups of 128, scales in fp16
/// assert_eq!(spec.sizes()?.groups, 32);
/// let whole_rows = Int4Spec::new(Int4Layout::CompressedTensors, 3, 50).group_size(None);
/// let spec = whole_rows.scales_dtype(DType::Bf16);
/// assert_eq!(spec.sizes()?.packed, 3 * 7); // a row ends in a word of two codes
/// # Ok::<(), nf4::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Int4Spec {
    /// The order of codes, zero points and scales.
    pub layout: Int4Layout,
    /// Columns of a group, which share a scale and a zero point in each row: a multiple of 8 that
    /// divides `cols`. `None`: all columns.
    pub group_size: Option<u32>,
    /// Rows of the weight.
    pub rows: usize,
    /// Columns of the weight; `rows * cols` is at most 2^60.
    pub cols: usize,
    /// [`DType::F16`] or [`DType::Bf16`].
    pub scales_dtype: DType,
}

/// The number of elements of each part of a weight of integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4Sizes {
    /// `rows * cols`.
    pub elements: usize,
    /// Groups in a row.
    pub groups: usize,
    /// Words of codes, of 32 bits each.
    pub packed: usize,
    /// Scales.
    pub scales: usize,
    /// Words of zero points, of 32 bits each.
    pub zeros: usize,
}

impl Int4Spec {
    /// A weight in groups of 128 columns with scales in fp16.
    pub const fn new(layout: Int4Layout, rows: usize, cols: usize) -> Self {
        Int4Spec {
            layout,
            group_size: Some(128),
            rows,
            cols,
            scales_dtype: DType::F16,
        }
    }

    /// The same in groups of another size; `None`: one group of all columns.
    pub const fn group_size(self, group_size: Option<u32>) -> Self {
        Int4Spec { group_size, ..self }
    }

    /// The same with scales of another type.
    pub const fn scales_dtype(self, scales_dtype: DType) -> Self {
        Int4Spec {
            scales_dtype,
            ..self
        }
    }

    /// Returns the number of elements of each part.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a field is out of range, the group
    /// size does not divide the columns, or the layout needs a multiple of 8 rows or columns.
    pub fn sizes(&self) -> Result<Int4Sizes> {
        let mut sizes = sys::nf4_int4_sizes {
            struct_size: size_of::<sys::nf4_int4_sizes>(),
            groups: 0,
            packed_bytes: 0,
            scales_bytes: 0,
            zeros_bytes: 0,
        };
        // SAFETY: both live through the call, and their struct_size is set.
        check(unsafe { sys::nf4_int4_tensor_sizes(&self.descriptor()?, &mut sizes) })?;
        let count = |name, bytes, each| convert(name, bytes).map(|bytes: usize| bytes / each);
        Ok(Int4Sizes {
            elements: self.rows * self.cols,
            groups: convert("groups", sizes.groups)?,
            packed: count("packed_bytes", sizes.packed_bytes, size_of::<u32>())?,
            scales: count("scales_bytes", sizes.scales_bytes, size_of::<u16>())?,
            zeros: count("zeros_bytes", sizes.zeros_bytes, size_of::<u32>())?,
        })
    }

    /// The C descriptor, with no pointers yet. Every call on a weight passes through here.
    pub(crate) fn descriptor(&self) -> Result<sys::nf4_int4_tensor> {
        check_version()?;
        let group_size = self.group_size.map(|size| convert("group_size", size));
        Ok(sys::nf4_int4_tensor {
            struct_size: size_of::<sys::nf4_int4_tensor>(),
            layout: self.layout.as_raw(),
            scales_dtype: self.scales_dtype.as_raw(),
            group_size: group_size.transpose()?.unwrap_or(-1),
            zero_offset: 0, // zero points are stored as they are
            rows: convert("rows", self.rows)?,
            cols: convert("cols", self.cols)?,
            packed: ptr::null_mut(),
            scales: ptr::null_mut(),
            zeros: ptr::null_mut(),
            g_idx: ptr::null(),
            permutation: ptr::null(),
        })
    }

    /// The C descriptor of these addresses.
    pub(crate) fn with_parts(&self, parts: RawInt4Parts) -> Result<sys::nf4_int4_tensor> {
        let mut raw = self.descriptor()?;
        raw.packed = parts.packed.cast();
        raw.scales = parts.scales.cast();
        if let Some(zeros) = parts.zeros {
            raw.zeros = zeros.cast();
            raw.zero_offset = self.layout.zero_offset();
        }
        match parts.columns {
            ColumnsOf::InOrder => {}
            ColumnsOf::GroupIndex(groups) => raw.g_idx = groups,
            ColumnsOf::Permuted(columns) => raw.permutation = columns,
        }
        Ok(raw)
    }

    /// The C descriptor for queries, which follow no address: it says which parts there are.
    pub(crate) fn nowhere(
        &self,
        columns: ColumnsOf<()>,
        zeros: bool,
    ) -> Result<sys::nf4_int4_tensor> {
        self.with_parts(RawInt4Parts {
            packed: ptr::null_mut(),
            scales: ptr::null_mut(),
            zeros: zeros.then(ptr::dangling_mut),
            columns: columns.map(|()| ptr::dangling()),
        })
    }

    /// Do buffers of these lengths make so many weights, one after another? This is what keeps the C
    /// side inside the slices that it is given. The sizes are those of one.
    pub(crate) fn check_lengths_of(
        &self,
        weights: usize,
        lengths: Int4Lengths,
    ) -> Result<Int4Sizes> {
        let sizes = self.sizes()?;
        let check = |name, length, of_one| {
            check_length(
                name,
                length,
                product("elements of a part", weights, of_one)?,
            )
        };
        check("packed", lengths.packed, sizes.packed)?;
        check("scales", lengths.scales, sizes.scales)?;
        if let Some(zeros) = lengths.zeros {
            check("zeros", zeros, sizes.zeros)?;
        }
        match lengths.columns {
            ColumnsOf::InOrder => {}
            ColumnsOf::GroupIndex(length) => check("g_idx", length, self.cols)?,
            ColumnsOf::Permuted(length) => check("permutation", length, self.cols)?,
        }
        Ok(sizes)
    }
}
