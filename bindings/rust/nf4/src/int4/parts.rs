//! The parts of a weight of integers, in any storage.

use std::convert::Infallible;

use nf4_sys as sys;

use super::Int4Spec;
use crate::Error;

/// The parts of a weight of integers. The parameters are their storage: [`Int4Parts`] owns them
/// on the host, [`Int4PartsRef`] and [`Int4PartsMut`] borrow them, others are in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4PartsOf<Words, Scales, Index> {
    /// Words of 32 bits, of eight codes each.
    pub packed: Words,
    /// The bits of the scales, in [`Int4Spec::scales_dtype`]; `half::slice` has what casts slices
    /// of `f16` and `bf16` to them and back.
    pub scales: Scales,
    /// Words of eight zero points each; `None`: all zero points are 8.
    pub zeros: Option<Words>,
    /// The order of the columns.
    pub columns: ColumnsOf<Index>,
}

/// The order of the columns in the codes, and how they form groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ColumnsOf<Index> {
    /// Column k is in group `k / group_size`.
    #[default]
    InOrder,
    /// `g_idx`: the group of each column, as of GPTQ with act order.
    GroupIndex(Index),
    /// Sorted by group, as [`reorder_int4_into`](crate::reorder_int4_into) does: stored column j
    /// is this column of the weight.
    Permuted(Index),
}

/// The order of columns, owned on the host.
pub type Columns = ColumnsOf<Vec<i32>>;

/// Parts that own their memory on the host.
pub type Int4Parts = Int4PartsOf<Vec<u32>, Vec<u16>, Vec<i32>>;
/// Parts borrowed from the host.
pub type Int4PartsRef<'a> = Int4PartsOf<&'a [u32], &'a [u16], &'a [i32]>;
/// Parts borrowed from the host to be written. The index is read.
pub type Int4PartsMut<'a> = Int4PartsOf<&'a mut [u32], &'a mut [u16], &'a [i32]>;

/// Number of elements of each part.
pub(crate) type Int4Lengths = Int4PartsOf<usize, usize, usize>;
/// Addresses for the C interface, which writes through the mutable ones in quantize alone.
pub(crate) type RawInt4Parts = Int4PartsOf<*mut u32, *mut u16, *const i32>;

impl<I> ColumnsOf<I> {
    /// Converts the index; the function also gets the name that the C interface has for it.
    pub(crate) fn try_map<I2, E>(
        self,
        index: impl FnOnce(&'static str, I) -> Result<I2, E>,
    ) -> Result<ColumnsOf<I2>, E> {
        Ok(match self {
            ColumnsOf::InOrder => ColumnsOf::InOrder,
            ColumnsOf::GroupIndex(groups) => ColumnsOf::GroupIndex(index("g_idx", groups)?),
            ColumnsOf::Permuted(columns) => ColumnsOf::Permuted(index("permutation", columns)?),
        })
    }

    pub(crate) fn as_ref(&self) -> ColumnsOf<&I> {
        match self {
            ColumnsOf::InOrder => ColumnsOf::InOrder,
            ColumnsOf::GroupIndex(groups) => ColumnsOf::GroupIndex(groups),
            ColumnsOf::Permuted(columns) => ColumnsOf::Permuted(columns),
        }
    }
}

impl<W, S, I> Int4PartsOf<W, S, I> {
    /// Converts each part; the functions also get the name that the C interface has for it.
    pub(crate) fn try_map<W2, S2, I2, E>(
        self,
        mut words: impl FnMut(&'static str, W) -> Result<W2, E>,
        scales: impl FnOnce(&'static str, S) -> Result<S2, E>,
        index: impl FnOnce(&'static str, I) -> Result<I2, E>,
    ) -> Result<Int4PartsOf<W2, S2, I2>, E> {
        Ok(Int4PartsOf {
            packed: words("packed", self.packed)?,
            scales: scales("scales", self.scales)?,
            zeros: self.zeros.map(|zeros| words("zeros", zeros)).transpose()?,
            columns: self.columns.try_map(index)?,
        })
    }

    pub(crate) fn map<W2, S2, I2>(
        self,
        mut words: impl FnMut(W) -> W2,
        scales: impl FnOnce(S) -> S2,
        index: impl FnOnce(I) -> I2,
    ) -> Int4PartsOf<W2, S2, I2> {
        let Ok(mapped) = self.try_map::<_, _, _, Infallible>(
            |_, part| Ok(words(part)),
            |_, part| Ok(scales(part)),
            |_, part| Ok(index(part)),
        );
        mapped
    }

    pub(crate) fn as_ref(&self) -> Int4PartsOf<&W, &S, &I> {
        Int4PartsOf {
            packed: &self.packed,
            scales: &self.scales,
            zeros: self.zeros.as_ref(),
            columns: self.columns.as_ref(),
        }
    }

    /// All but the index, which nothing writes, to be written.
    pub(crate) fn as_mut(&mut self) -> Int4PartsOf<&mut W, &mut S, &I> {
        Int4PartsOf {
            packed: &mut self.packed,
            scales: &mut self.scales,
            zeros: self.zeros.as_mut(),
            columns: self.columns.as_ref(),
        }
    }
}

impl Int4Parts {
    pub(crate) fn view(&self) -> Int4PartsRef<'_> {
        self.as_ref().map(|w| &w[..], |s| &s[..], |i| &i[..])
    }

    pub(crate) fn view_mut(&mut self) -> Int4PartsMut<'_> {
        self.as_mut()
            .map(|w| &mut w[..], |s| &mut s[..], |i| &i[..])
    }
}

impl Int4PartsRef<'_> {
    pub(crate) fn lengths(self) -> Int4Lengths {
        self.map(<[u32]>::len, <[u16]>::len, <[i32]>::len)
    }

    pub(crate) fn pointers(self) -> RawInt4Parts {
        self.map(
            |words| words.as_ptr().cast_mut(),
            |scales| scales.as_ptr().cast_mut(),
            <[i32]>::as_ptr,
        )
    }
}

impl RawInt4Parts {
    pub(crate) fn descriptor(self, spec: &Int4Spec) -> crate::Result<sys::nf4_int4_tensor> {
        let mut raw = spec.descriptor()?;
        raw.packed = self.packed.cast();
        raw.scales = self.scales.cast();
        if let Some(zeros) = self.zeros {
            raw.zeros = zeros.cast();
            raw.zero_offset = spec.layout.zero_offset();
        }
        match self.columns {
            ColumnsOf::InOrder => {}
            ColumnsOf::GroupIndex(groups) => raw.g_idx = groups,
            ColumnsOf::Permuted(columns) => raw.permutation = columns,
        }
        Ok(raw)
    }
}

impl ColumnsOf<&[i32]> {
    /// Checks the values, which libnf4 does not: it would follow them.
    pub(crate) fn check(self, groups: usize) -> crate::Result<()> {
        match self {
            ColumnsOf::InOrder => Ok(()),
            ColumnsOf::GroupIndex(index) => check_range("g_idx", index, groups),
            ColumnsOf::Permuted(index) => {
                check_range("permutation", index, index.len())?;
                let mut seen = vec![false; index.len()];
                let twice = |column: &&i32| std::mem::replace(&mut seen[**column as usize], true);
                index.iter().find(twice).map_or(Ok(()), |column| {
                    Err(Error::InvalidArgument(format!(
                        "permutation has {column} twice"
                    )))
                })
            }
        }
    }
}

/// Has each group as many columns as the others? Sorted by group they are consecutive then.
pub(crate) fn check_whole_groups(index: &[i32], groups: usize) -> crate::Result<()> {
    let mut columns = vec![0; groups];
    index.iter().for_each(|g| columns[*g as usize] += 1);
    let expected = index.len() / groups.max(1);
    match columns.iter().position(|count| *count != expected) {
        None => Ok(()),
        Some(g) => Err(Error::InvalidArgument(format!(
            "g_idx has {} columns of group {g}; expected {expected}",
            columns[g]
        ))),
    }
}

fn check_range(name: &str, index: &[i32], count: usize) -> crate::Result<()> {
    let in_range = |value: &i32| usize::try_from(*value).is_ok_and(|value| value < count);
    match index.iter().position(|value| !in_range(value)) {
        None => Ok(()),
        Some(k) => Err(Error::InvalidArgument(format!(
            "{name}[{k}] is {}; expected at least 0 and less than {count}",
            index[k]
        ))),
    }
}
