//! Experts of integers.

use nf4_sys as sys;

use super::parts::{Int4PartsRef, ReadInt4Parts};
use super::spec::Int4Spec;
use crate::error::check_length;
use crate::kind::{Described, Experts};
use crate::memory::sealed::Sealed;
use crate::memory::Access;
use crate::Result;

/// A stack of experts of integers, all of one [`Int4Spec`], for
/// [`matmul_grouped`](crate::matmul_grouped). `Parts` are [`Int4PartsOf`](crate::Int4PartsOf) any
/// buffers. Each buffer, also that of `columns`, has the part of the first expert, then that of the
/// second, and so on. On the host the name is [`Int4Stack`].
#[derive(Debug, Clone, Copy)]
pub struct Int4StackOf<Parts> {
    spec: Int4Spec,
    experts: usize,
    parts: Parts,
}

/// A stack of experts of integers that borrows its parts on the host.
pub type Int4Stack<'a> = Int4StackOf<Int4PartsRef<'a>>;

impl<P: ReadInt4Parts> Int4StackOf<P> {
    /// Makes a stack of these parts. `spec` is that of one expert. On a GPU the columns have to be in
    /// order.
    ///
    /// # Errors
    /// It fails as [`Int4Of::new`](crate::Int4Of::new) does.
    pub fn new(spec: Int4Spec, experts: usize, parts: P) -> Result<Self> {
        let groups = spec.check_lengths_of(experts, parts.lengths())?.groups;
        parts.check_columns(experts, groups)?;
        Ok(Int4StackOf {
            spec,
            experts,
            parts,
        })
    }
}

impl<P> Int4StackOf<P> {
    /// Returns the layout and shape of one expert.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }
}

impl<P> Sealed for Int4StackOf<P> {}

impl<P: ReadInt4Parts> Described for Int4StackOf<P> {
    type Memory = P::Memory;
    type Raw = sys::nf4_int4_tensor;

    /// The first expert, which the others follow.
    fn raw<'a>(&'a self, access: &Access<'a, P::Memory>) -> Result<Self::Raw> {
        self.spec.with_parts(self.parts.raw(access)?)
    }

    fn nowhere(&self) -> Result<Self::Raw> {
        self.spec.descriptor()
    }
}

impl<P: ReadInt4Parts> Experts for Int4StackOf<P> {
    fn expert_shape(&self, experts: usize) -> Result<(usize, usize)> {
        check_length("ends", experts, self.experts)?;
        Ok((self.spec.rows, self.spec.cols))
    }
}
