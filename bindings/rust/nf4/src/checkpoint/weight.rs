//! A weight in 4 bits, read from the tensors that bitsandbytes stores.

use std::borrow::Cow;

use safetensors::Dtype;

use super::error::{Error, Result};
use super::state::{self, State, FORMATS, STATE_MARK};
use super::tensors::Checkpoint;
use crate::format::{CODEBOOK_SIZE, SCALE_CODE_SIZE};
use crate::{codebook, DType, QuantizedRef, QuantizedTensor, Scales, ScalesOf, Spec};

type StoredScales<'a> = ScalesOf<Cow<'a, [f32]>, &'a [u8], Box<[f32; SCALE_CODE_SIZE]>, f32>;

/// A 4-bit weight of a checkpoint. Its codes and scale codes are the file's bytes. Floats are copied
/// only if their address in the file is not aligned.
#[derive(Debug, Clone)]
pub struct StoredWeight<'a> {
    spec: Spec,
    shape: Vec<usize>,
    dtype: DType,
    packed: &'a [u8],
    scales: StoredScales<'a>,
    codebook: Option<[f32; CODEBOOK_SIZE]>,
}

impl StoredWeight<'_> {
    /// Returns the shape and format. If the dense weight has more than two dimensions, the rows are all
    /// of them except the last.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// Returns the shape of the dense weight: `[out_features, in_features]` for a linear layer.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the dtype of the dense weight.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Borrows the weight, for [`dequantize`](crate::dequantize), [`matmul`](crate::matmul) and others.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if libnf4 does not take the blocksizes, or if a part does not
    /// have the length that they require.
    pub fn view(&self) -> crate::Result<QuantizedRef<'_>> {
        let scales = self
            .scales
            .as_ref()
            .map(|f| &f[..], |b| *b, |c| &**c, |o| o);
        QuantizedRef::new(self.spec, self.packed, scales, self.codebook.as_ref())
    }

    /// Copies the weight to memory of its own.
    ///
    /// # Errors
    /// It fails as [`view`](Self::view) does.
    pub fn to_tensor(&self) -> crate::Result<QuantizedTensor> {
        let scales: Scales =
            self.scales
                .as_ref()
                .map(|f| f.to_vec(), |b| b.to_vec(), Clone::clone, |o| *o);
        QuantizedTensor::new(self.spec, self.packed.to_vec(), scales, self.codebook)
    }
}

impl<B: AsRef<[u8]>> Checkpoint<B> {
    /// Returns a 4-bit weight, borrowed from the file.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is no such weight. [`Error::Weight`] if its tensors contradict its
    /// quant_state, the JSON in which bitsandbytes stores the format and the shape.
    pub fn weight(&self, name: &str) -> Result<StoredWeight<'_>> {
        read(self, name)
    }
}

fn read<'a, B: AsRef<[u8]>>(checkpoint: &'a Checkpoint<B>, name: &str) -> Result<StoredWeight<'a>> {
    crate::info::check_version()?;
    let wrong = |detail: String| Error::Weight {
        name: name.to_owned(),
        detail,
    };
    let key = |suffix: &str| format!("{name}{STATE_MARK}{suffix}");
    let found = FORMATS
        .iter()
        .find(|(suffix, _)| checkpoint.index.contains_key(&key(suffix)));
    let Some((suffix, format)) = found else {
        return match checkpoint.tensor(name) {
            Ok(_) => Err(wrong(
                "it has no quant_state of bitsandbytes, so it is dense".into(),
            )),
            Err(error) => Err(error),
        };
    };
    let json = checkpoint.tensor(&key(suffix))?;
    let State {
        spec,
        shape,
        dtype,
        nested_offset,
    } = state::parse(json.data(), suffix, *format)
        .map_err(|detail| wrong(format!("its quant_state: {detail}")))?;

    let part = |part: &str| format!("{name}.{part}");
    let bytes = |part: &str| {
        let view = checkpoint.tensor(part)?;
        if view.dtype() == Dtype::U8 {
            return Ok(view.data());
        }
        Err(Error::Weight {
            name: part.to_owned(),
            detail: format!("it is {:?}; expected U8", view.dtype()),
        })
    };
    let floats = |part: &str| floats(checkpoint, part);
    let scales = if spec.is_nested() {
        ScalesOf::Nested {
            codes: bytes(&part("absmax"))?,
            absmax: floats(&part("nested_absmax"))?,
            code: Box::new(table(
                &part("nested_quant_map"),
                &floats(&part("nested_quant_map"))?,
            )?),
            offset: nested_offset,
        }
    } else {
        ScalesOf::Flat(floats(&part("absmax"))?)
    };
    let map: [f32; CODEBOOK_SIZE] = table(&part("quant_map"), &floats(&part("quant_map"))?)?;
    let weight = StoredWeight {
        spec,
        shape,
        dtype,
        // The packed bytes may be viewed as a float type (bitsandbytes' quant_storage).
        packed: checkpoint.tensor(name)?.data(),
        scales,
        codebook: (map != *codebook(*format)).then_some(map),
    };
    weight
        .view()
        .map_err(|error| wrong(error.detail().to_owned()))?;
    Ok(weight)
}

fn table<const N: usize>(name: &str, values: &[f32]) -> Result<[f32; N]> {
    values.try_into().map_err(|_| Error::Weight {
        name: name.to_owned(),
        detail: format!("it has {} elements; expected {N}", values.len()),
    })
}

fn floats<'a, B: AsRef<[u8]>>(checkpoint: &'a Checkpoint<B>, name: &str) -> Result<Cow<'a, [f32]>> {
    let view = checkpoint.tensor(name)?;
    if view.dtype() != Dtype::F32 {
        return Err(Error::Weight {
            name: name.to_owned(),
            detail: format!("it is {:?}; expected F32", view.dtype()),
        });
    }
    // SAFETY: every pattern of bits is a float.
    let (before, aligned, after) = unsafe { view.data().align_to::<f32>() };
    if cfg!(target_endian = "little") && before.is_empty() && after.is_empty() {
        return Ok(Cow::Borrowed(aligned));
    }
    let chunks = view.data().chunks_exact(size_of::<f32>());
    Ok(chunks
        .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")))
        .collect::<Vec<f32>>()
        .into())
}
