//! Keeps which way each product of a layer goes: the last answers of libnf4, which takes about a
//! microsecond for one.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::DType;

/// An answer of one layer depends on these.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    pub(crate) dtype: DType,
    /// Rows of the input.
    pub(crate) m: usize,
    /// The weight whose output a gradient is asked for.
    pub(crate) gradient_of: Option<usize>,
}

impl Question {
    /// All of it, and never 0, in the bits above the lowest: up to 64 weights and 2^50 rows.
    fn bits(self) -> Option<u64> {
        let dtype = match self.dtype {
            DType::F32 => 1,
            DType::F16 => 2,
            DType::BF16 => 3,
            _ => return None,
        };
        let part = self.gradient_of.map_or(0, |i| i as u64 + 1);
        let m = u64::try_from(self.m).ok().filter(|m| m >> 50 == 0)?;
        Some(((m << 7 | part) << 2 | dtype) << 1)
    }
}

/// Keeps answers by a hash of their questions. Of two with the same hash it keeps the last one.
#[derive(Debug, Default)]
pub(crate) struct Paths([AtomicU64; 16]);

impl Paths {
    /// Is the dense way faster? `ask` is called where the answer is not kept.
    pub(crate) fn is_dense<E>(
        &self,
        question: Question,
        ask: impl FnOnce() -> Result<bool, E>,
    ) -> Result<bool, E> {
        let Some(bits) = question.bits() else {
            return ask();
        };
        // The highest bits of a product with an odd number depend on all bits.
        let slot = &self.0[(bits.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize];
        // Each is whole in itself, and orders nothing else.
        let kept = slot.load(Ordering::Relaxed);
        if kept & !1 == bits {
            return Ok(kept & 1 != 0);
        }
        let dense = ask()?;
        slot.store(bits | u64::from(dense), Ordering::Relaxed);
        Ok(dense)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Every answer is that of its own question, and one that is repeated is not asked for again.
    #[test]
    fn answers_are_kept_by_their_questions() {
        let (paths, asked) = (Paths::default(), Cell::new(0));
        let dense_from = |dtype, gradient_of: Option<usize>| match dtype {
            DType::F32 => 17,
            _ => gradient_of.map_or(200, |i| 10 * i),
        };
        let answer = |dtype, m, gradient_of| {
            let question = Question {
                dtype,
                m,
                gradient_of,
            };
            let ask = || {
                asked.set(asked.get() + 1);
                Ok::<_, ()>(m >= dense_from(dtype, gradient_of))
            };
            assert_eq!(
                paths.is_dense(question, ask),
                Ok(m >= dense_from(dtype, gradient_of)),
                "{question:?}"
            );
        };
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for m in [0, 1, 16, 17, 199, 200, 201, 1 << 40, 1 << 50] {
                for gradient_of in [None, Some(0), Some(1), Some(63)] {
                    answer(dtype, m, gradient_of);
                    let before = asked.get();
                    answer(dtype, m, gradient_of);
                    assert_eq!(asked.get() > before, m >> 50 != 0);
                }
            }
        }
    }

    #[test]
    fn an_error_is_not_kept() {
        let (paths, question) = (
            Paths::default(),
            Question {
                dtype: DType::F16,
                m: 3,
                gradient_of: None,
            },
        );
        assert_eq!(paths.is_dense(question, || Err("no GPU")), Err("no GPU"));
        assert_eq!(paths.is_dense(question, || Ok::<_, &str>(true)), Ok(true));
        assert_eq!(paths.is_dense(question, || Err("asked again")), Ok(true));
    }
}
