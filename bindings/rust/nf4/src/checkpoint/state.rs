//! The quant_state of a weight: JSON that bitsandbytes stores as bytes.

use serde_json::Value;

use crate::{DType, Format, Spec};

pub(super) const STATE_MARK: &str = ".quant_state.bitsandbytes__";
pub(super) const FORMATS: [(&str, Format); 2] = [("nf4", Format::Nf4), ("fp4", Format::Fp4)];

const DTYPES: [(&str, DType); 3] = [
    ("float32", DType::F32),
    ("float16", DType::F16),
    ("bfloat16", DType::Bf16),
];

/// The weight that a tensor of this name is the quant_state of.
pub(super) fn weight_of(name: &str) -> Option<&str> {
    let (weight, format) = name.rsplit_once(STATE_MARK)?;
    FORMATS
        .iter()
        .any(|(suffix, _)| *suffix == format)
        .then_some(weight)
}

pub(super) struct State {
    pub spec: Spec,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub nested_offset: f32,
}

/// Parses the JSON under a key for the format `suffix`, or names the field that is wrong.
pub(super) fn parse(json: &[u8], suffix: &str, format: Format) -> Result<State, String> {
    let fields = super::json::parse(json)?;
    let wrong = |field: &str| format!("{field} is {}", fields[field]);
    if fields["quant_type"] != suffix {
        return Err(format!("{} under a key for {suffix}", wrong("quant_type")));
    }
    let number = |field: &str| {
        let value = fields[field]
            .as_u64()
            .and_then(|value| u32::try_from(value).ok());
        value.ok_or_else(|| wrong(field))
    };
    let dtype = DTYPES.iter().find(|(name, _)| fields["dtype"] == *name);
    let (_, dtype) = dtype.ok_or_else(|| wrong("dtype"))?;
    let shape = shape(&fields["shape"]).ok_or_else(|| wrong("shape"))?;
    // matmul takes all dimensions but the last for rows.
    let cols = shape[shape.len() - 1];
    let rows = shape[..shape.len() - 1]
        .iter()
        .try_fold(1usize, |rows, size| rows.checked_mul(*size));
    let rows = rows.ok_or_else(|| wrong("shape"))?;
    let mut state = State {
        spec: Spec::new(rows, cols)
            .format(format)
            .blocksize(number("blocksize")?)
            .flat(),
        shape,
        dtype: *dtype,
        nested_offset: 0.0,
    };
    let keys = fields
        .as_object()
        .into_iter()
        .flat_map(|fields| fields.keys());
    if keys.into_iter().any(|key| key.starts_with("nested_")) {
        state.spec = state.spec.nested(number("nested_blocksize")?);
        if fields["nested_dtype"] != "float32" {
            return Err(wrong("nested_dtype"));
        }
        let offset = fields["nested_offset"].as_f64().map(|offset| offset as f32);
        let offset = offset.filter(|offset| offset.is_finite());
        state.nested_offset = offset.ok_or_else(|| wrong("nested_offset"))?;
        if !state.spec.is_nested() {
            return Err(wrong("nested_blocksize"));
        }
    }
    Ok(state)
}

fn shape(value: &Value) -> Option<Vec<usize>> {
    let sizes = value.as_array()?.iter();
    let shape: Option<Vec<usize>> = sizes
        .map(|size| usize::try_from(size.as_u64()?).ok())
        .collect();
    shape.filter(|shape| !shape.is_empty())
}
