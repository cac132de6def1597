//! Experts of integers on the host.

use nf4_sys as sys;

use super::parts::ColumnsOf;
use super::{Int4PartsRef, Int4Spec};
use crate::Result;

/// A stack of experts of integers, all of one [`Int4Spec`], for
/// [`matmul_grouped_int4`](crate::matmul_grouped_int4). It borrows the parts, each with one expert's
/// after another's, an index of columns for each expert among them.
#[derive(Debug, Clone, Copy)]
pub struct Int4Stack<'a> {
    spec: Int4Spec,
    experts: usize,
    parts: Int4PartsRef<'a>,
}

impl<'a> Int4Stack<'a> {
    /// A stack of these parts. `spec` is that of one expert.
    ///
    /// # Errors
    /// As [`Int4Ref::new`](crate::Int4Ref::new).
    pub fn new(spec: Int4Spec, experts: usize, parts: Int4PartsRef<'a>) -> Result<Self> {
        let groups = spec.check_lengths_of(experts, parts.lengths())?.groups;
        let columns = spec.cols.max(1);
        match parts.columns {
            ColumnsOf::InOrder => {}
            ColumnsOf::GroupIndex(index) => ColumnsOf::GroupIndex(index).check(groups)?,
            ColumnsOf::Permuted(index) => {
                let mut each = index.chunks(columns);
                each.try_for_each(|one| ColumnsOf::Permuted(one).check(groups))?;
            }
        }
        Ok(Int4Stack {
            spec,
            experts,
            parts,
        })
    }

    /// Layout and shape of one expert.
    pub fn spec(&self) -> Int4Spec {
        self.spec
    }

    /// How many there are.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Rows and columns of one.
    pub(crate) fn expert_shape(&self) -> (usize, usize) {
        (self.spec.rows, self.spec.cols)
    }

    pub(crate) fn raw(&self) -> Result<sys::nf4_int4_tensor> {
        self.parts.pointers().descriptor(&self.spec)
    }
}
