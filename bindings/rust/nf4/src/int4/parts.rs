//! The parts of a weight of integers, in any storage.

use crate::memory::sealed::Sealed;
use crate::memory::{Access, Memory, Read, Write};
use crate::{Error, Result};

/// The parts of a weight of integers. The parameters are their storage: [`Int4Parts`] owns them
/// on the host, [`Int4PartsRef`] and [`Int4PartsMut`] borrow them, and others are in device memory.
/// [`Int4Spec::sizes`](crate::Int4Spec::sizes) gives their lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4PartsOf<Words, Scales, Index> {
    /// Words of 32 bits with eight codes each.
    pub packed: Words,
    /// The bits of the scales, in [`Int4Spec::scales_dtype`](crate::Int4Spec::scales_dtype);
    /// `half::slice::HalfFloatSliceExt` casts slices of `f16` and `bf16` to their bits and back.
    pub scales: Scales,
    /// Words of 32 bits with eight zero points each; `None`: all zero points are 8.
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
    /// `g_idx`: the group of each column, as GPTQ with act order stores it.
    GroupIndex(Index),
    /// Columns sorted by group, as [`reorder_int4_into`](crate::reorder_int4_into) sorts them: element
    /// j is the column of the weight that stored column j is.
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
pub type Int4Lengths = Int4PartsOf<usize, usize, usize>;
/// Addresses for the C interface, which writes through the mutable ones in quantize alone.
pub type RawInt4Parts = Int4PartsOf<*mut u32, *mut u16, *const i32>;

impl<I> ColumnsOf<I> {
    /// Converts the index; the function also gets the name that the C interface has for it.
    pub(crate) fn try_map<I2>(
        self,
        index: impl FnOnce(&'static str, I) -> Result<I2>,
    ) -> Result<ColumnsOf<I2>> {
        Ok(match self {
            ColumnsOf::InOrder => ColumnsOf::InOrder,
            ColumnsOf::GroupIndex(groups) => ColumnsOf::GroupIndex(index("g_idx", groups)?),
            ColumnsOf::Permuted(columns) => ColumnsOf::Permuted(index("permutation", columns)?),
        })
    }

    pub(crate) fn map<I2>(self, index: impl FnOnce(I) -> I2) -> ColumnsOf<I2> {
        match self {
            ColumnsOf::InOrder => ColumnsOf::InOrder,
            ColumnsOf::GroupIndex(groups) => ColumnsOf::GroupIndex(index(groups)),
            ColumnsOf::Permuted(columns) => ColumnsOf::Permuted(index(columns)),
        }
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
    pub(crate) fn try_map<W2, S2, I2>(
        self,
        mut words: impl FnMut(&'static str, W) -> Result<W2>,
        scales: impl FnOnce(&'static str, S) -> Result<S2>,
        index: impl FnOnce(&'static str, I) -> Result<I2>,
    ) -> Result<Int4PartsOf<W2, S2, I2>> {
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
        Int4PartsOf {
            packed: words(self.packed),
            scales: scales(self.scales),
            zeros: self.zeros.map(words),
            columns: self.columns.map(index),
        }
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
}

/// Parts of a weight of integers to be read, in any buffers of one memory.
pub trait ReadInt4Parts: Sealed {
    /// The memory that the parts are in.
    type Memory: Memory;

    #[doc(hidden)]
    fn lengths(&self) -> Int4Lengths;

    /// The addresses for one call.
    #[doc(hidden)]
    fn raw<'a>(&'a self, access: &Access<'a, Self::Memory>) -> Result<RawInt4Parts>;

    /// Checks the values of the index of so many weights, which libnf4 does not: it would follow
    /// them.
    #[doc(hidden)]
    fn check_columns(&self, weights: usize, groups: usize) -> Result<()>;
}

/// Parts of a weight of integers to be written. The index is read.
pub trait WriteInt4Parts: ReadInt4Parts {
    /// The addresses for one call.
    #[doc(hidden)]
    fn raw_mut<'a>(&'a mut self, access: &Access<'a, Self::Memory>) -> Result<RawInt4Parts>;
}

impl<W, S, I> Sealed for Int4PartsOf<W, S, I> {}

impl<W, S, I> ReadInt4Parts for Int4PartsOf<W, S, I>
where
    W: Read<Element = u32>,
    S: Read<Element = u16, Memory = W::Memory>,
    I: Read<Element = i32, Memory = W::Memory>,
{
    type Memory = W::Memory;

    fn lengths(&self) -> Int4Lengths {
        self.as_ref().map(W::length, S::length, I::length)
    }

    fn raw<'a>(&'a self, access: &Access<'a, W::Memory>) -> Result<RawInt4Parts> {
        self.as_ref().try_map(
            |name, words| Ok(words.address(name, access)?.cast_mut()),
            |name, scales| Ok(scales.address(name, access)?.cast_mut()),
            |name, index| index.address(name, access),
        )
    }

    fn check_columns(&self, weights: usize, groups: usize) -> Result<()> {
        let seen = |name, index: &'_ I| check_seen(name, index.on_host().map(<[i32]>::len));
        self.columns.as_ref().try_map(seen)?;
        match self
            .columns
            .as_ref()
            .map(|index| index.on_host().unwrap_or_default())
        {
            ColumnsOf::InOrder => Ok(()),
            ColumnsOf::GroupIndex(index) => check_range("g_idx", index, groups),
            ColumnsOf::Permuted(index) => {
                let mut each = index.chunks((index.len() / weights.max(1)).max(1));
                each.try_for_each(check_permutation)
            }
        }
    }
}

impl<W, S, I> WriteInt4Parts for Int4PartsOf<W, S, I>
where
    W: Write<Element = u32>,
    S: Write<Element = u16, Memory = W::Memory>,
    I: Read<Element = i32, Memory = W::Memory>,
{
    fn raw_mut<'a>(&'a mut self, access: &Access<'a, W::Memory>) -> Result<RawInt4Parts> {
        self.as_mut().try_map(
            |name, words| words.address_mut(name, access),
            |name, scales| scales.address_mut(name, access),
            |name, index| index.address(name, access),
        )
    }
}

/// Can the host see the values?
fn check_seen(name: &str, length: Option<usize>) -> Result<()> {
    length.map(|_| ()).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "{name} is on a GPU, where its values cannot be checked; expected with_columns"
        ))
    })
}

fn check_permutation(index: &[i32]) -> Result<()> {
    check_range("permutation", index, index.len())?;
    let mut seen = vec![false; index.len()];
    let twice = |column: &&i32| std::mem::replace(&mut seen[**column as usize], true);
    index.iter().find(twice).map_or(Ok(()), |column| {
        Err(Error::InvalidArgument(format!(
            "permutation has {column} twice"
        )))
    })
}

/// Has each group as many columns as the others? Sorted by group they are consecutive then.
pub(crate) fn check_whole_groups(index: &[i32], groups: usize) -> Result<()> {
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

fn check_range(name: &str, index: &[i32], count: usize) -> Result<()> {
    let in_range = |value: &i32| usize::try_from(*value).is_ok_and(|value| value < count);
    match index.iter().position(|value| !in_range(value)) {
        None => Ok(()),
        Some(k) => Err(Error::InvalidArgument(format!(
            "{name}[{k}] is {}; expected at least 0 and less than {count}",
            index[k]
        ))),
    }
}
