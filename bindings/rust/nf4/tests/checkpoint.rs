//! Weights of bitsandbytes' files: one that `nf4 quantize` wrote, and files that are made here, wrong
//! ones among them.

use std::collections::HashMap;
use std::path::PathBuf;

use nf4::checkpoint::safetensors::tensor::{serialize, Dtype, TensorView};
use nf4::checkpoint::{Checkpoint, Error};
use nf4::{codebook, DType, Format, Spec};

const WEIGHT: &str = "model.layers.1.self_attn.k_proj.weight";

fn llama() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../tests/golden/llama")
}

fn floats<B: AsRef<[u8]>>(checkpoint: &Checkpoint<B>, name: &str) -> Vec<f32> {
    let bytes = checkpoint.tensor(name).expect("it is there");
    let chunks = bytes.data().chunks_exact(4);
    chunks
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

#[test]
fn a_weight_of_nf4_quantize_is_what_its_tensors_say() {
    // SAFETY: nothing writes to the file.
    let checkpoint = unsafe { Checkpoint::open(llama()) }.expect("it is read");
    let names: Vec<&str> = checkpoint.names().collect();
    let quantized = names
        .iter()
        .filter(|name| checkpoint.is_quantized(name))
        .count();
    assert_eq!((names.len(), quantized), (2 * 9 + 3, 2 * 7), "{names:?}");

    let stored = checkpoint.weight(WEIGHT).expect("it is whole");
    assert_eq!(
        (stored.shape(), stored.dtype()),
        (&[32, 64][..], DType::Bf16)
    );
    assert_eq!(stored.spec(), Spec::new(32, 64));
    let values: Vec<f32> = nf4::dequantize(stored.view().unwrap(), 1).unwrap();
    assert_eq!(
        values,
        nf4::dequantize::<f32>(&stored.to_tensor().unwrap(), 1).unwrap()
    );

    let part = |part: &str| floats(&checkpoint, &format!("{WEIGHT}.{part}"));
    let (map, code, absmax) = (
        part("quant_map"),
        part("nested_quant_map"),
        part("nested_absmax"),
    );
    let state = checkpoint
        .tensor(&format!("{WEIGHT}.quant_state.bitsandbytes__nf4"))
        .unwrap();
    let state: serde_json::Value = serde_json::from_slice(state.data()).unwrap();
    let offset = state["nested_offset"].as_f64().unwrap() as f32;
    let scales = checkpoint.tensor(&format!("{WEIGHT}.absmax")).unwrap();
    let packed = checkpoint.tensor(WEIGHT).unwrap();
    for (i, value) in values.iter().enumerate() {
        let byte = packed.data()[i / 2];
        let nibble = if i % 2 == 0 { byte >> 4 } else { byte & 15 };
        let scale = code[usize::from(scales.data()[i / 64])] * absmax[i / 64 / 256] + offset;
        assert_eq!(*value, map[usize::from(nibble)] * scale, "element {i}");
    }
}

/// The tensors of a flat FP4 weight [2, 32], of which a test may spoil one.
fn tensors() -> HashMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let bytes = |values: &[f32]| {
        values
            .iter()
            .flat_map(|v| v.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let mut map = *codebook(Format::Fp4);
    map[1] = 0.5;
    let state = br#"{"quant_type": "fp4", "blocksize": 32, "dtype": "float16", "shape": [2, 32]}"#;
    [
        ("w", Dtype::U8, vec![32, 1], vec![0x13; 32]),
        ("w.absmax", Dtype::F32, vec![2], bytes(&[2.0, 3.0])),
        ("w.quant_map", Dtype::F32, vec![16], bytes(&map)),
        (
            "w.quant_state.bitsandbytes__fp4",
            Dtype::U8,
            vec![state.len()],
            state.to_vec(),
        ),
        ("norm", Dtype::U8, vec![1], vec![7]),
    ]
    .map(|(name, dtype, shape, data)| (name.to_owned(), (dtype, shape, data)))
    .into()
}

fn file(tensors: &HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>) -> Vec<u8> {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (
            name,
            TensorView::new(*dtype, shape.clone(), data).expect("shape and data agree"),
        )
    });
    serialize(views, None).expect("a file")
}

fn checkpoint(bytes: Vec<u8>) -> Result<Checkpoint<Vec<u8>>, Error> {
    Checkpoint::new([("a file".to_owned(), bytes)])
}

#[test]
fn a_flat_weight_with_a_table_of_its_own() {
    let checkpoint = checkpoint(file(&tensors())).unwrap();
    let stored = checkpoint.weight("w").unwrap();
    assert_eq!(stored.dtype(), DType::F16);
    let values: Vec<f32> = nf4::dequantize(stored.view().unwrap(), 1).unwrap();
    let third = codebook(Format::Fp4)[3];
    assert_eq!((values[0], values[1]), (1.0, 2.0 * third));
    assert_eq!((values[32], values[33]), (1.5, 3.0 * third));
    assert!(checkpoint.is_quantized("w") && !checkpoint.is_quantized("norm"));
    let mut names: Vec<&str> = checkpoint.names().collect();
    names.sort_unstable();
    assert_eq!(names, ["norm", "w"]);
}

#[test]
fn parts_are_no_names_and_what_sorts_beside_them_is() {
    let mut tensors = tensors();
    for name in ["w-b", "w", "w.", "w.x.y", "w0", "v.w", ".w", "wx.w"] {
        let one = (Dtype::U8, vec![1], vec![0]);
        tensors.entry(name.to_owned()).or_insert(one);
    }
    let checkpoint = checkpoint(file(&tensors)).unwrap();
    let mut names: Vec<&str> = checkpoint.names().collect();
    names.sort_unstable();
    assert_eq!(names, [".w", "norm", "v.w", "w", "w-b", "w0", "wx.w"]);
}

#[test]
fn messages_have_no_control_characters() {
    let good = checkpoint(file(&tensors())).unwrap();
    let error = good.weight("a\x1b[31m\n\u{9b}\u{202e}é\\").unwrap_err();
    assert_eq!(
        error.to_string(),
        r"the checkpoint has no tensor a\u{1b}[31m\n\u{9b}\u{202e}é\"
    );
}

#[test]
fn what_is_wrong_is_named() {
    let state = |text: &str| {
        let mut tensors = tensors();
        let bytes = text.as_bytes().to_vec();
        let key = "w.quant_state.bitsandbytes__fp4".to_owned();
        tensors.insert(key, (Dtype::U8, vec![bytes.len()], bytes));
        tensors
    };
    let with = |name: &str, dtype: Dtype, shape: &[usize], bytes: usize| {
        let mut tensors = tensors();
        tensors.insert(name.to_owned(), (dtype, shape.to_vec(), vec![0; bytes]));
        tensors
    };
    let mut without = tensors();
    without.remove("w.absmax");
    let fp4 = r#""quant_type": "fp4", "dtype": "float16""#;
    let cases = [
        (without, "the checkpoint has no tensor w.absmax"),
        (
            with("w", Dtype::U8, &[31, 1], 31),
            "w: packed has 31 elements; expected 32",
        ),
        (
            with("w.absmax", Dtype::F32, &[3], 12),
            "w: absmax has 3 elements; expected 2",
        ),
        (
            with("w.absmax", Dtype::U8, &[2], 2),
            "w.absmax: it is U8; expected F32",
        ),
        (
            with("w.quant_map", Dtype::F32, &[15], 60),
            "w.quant_map: it has 15 elements; expected 16",
        ),
        (state("{"), "w: its quant_state: EOF"),
        (state("[]"), "w: its quant_state: quant_type is null"),
        (
            state(r#"{"quant_type": "nf4"}"#),
            r#"quant_type is "nf4" under a key for fp4"#,
        ),
        (state(&format!(r#"{{{fp4}, "shape": []}}"#)), "shape is []"),
        (
            state(&format!(r#"{{{fp4}, "shape": [9e9, 2]}}"#)),
            "shape is [9",
        ),
        (
            state(&format!(r#"{{{fp4}, "shape": [2, 32], "blocksize": -1}}"#)),
            "blocksize is -1",
        ),
        (
            state(&format!(r#"{{{fp4}, "shape": [2, 32], "blocksize": 33}}"#)),
            "blocksize is 33",
        ),
        (
            state(&format!(
                r#"{{{fp4}, "shape": [2, 32], "blocksize": 32, "nested_blocksize": 0}}"#
            )),
            "nested_dtype is null",
        ),
    ];
    for (tensors, wanted) in cases {
        let error = checkpoint(file(&tensors))
            .unwrap()
            .weight("w")
            .unwrap_err()
            .to_string();
        assert!(error.contains(wanted), "{error:?} has no {wanted:?}");
    }
    let good = checkpoint(file(&tensors())).unwrap();
    assert!(good
        .weight("norm")
        .unwrap_err()
        .to_string()
        .starts_with("norm: it has no quant_state"));
    assert!(matches!(good.weight("none"), Err(Error::Missing(name)) if name == "none"));
}

#[test]
fn files_that_are_none_are_named() {
    let mut cut = file(&tensors());
    cut.pop();
    assert!(matches!(checkpoint(cut), Err(Error::File { file, .. }) if file == "a file"));
    let two = [("one", file(&tensors())), ("two", file(&tensors()))];
    let error = Checkpoint::new(two.map(|(name, bytes)| (name.to_owned(), bytes)))
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .starts_with("two: another file has a tensor"),
        "{error}"
    );
    // SAFETY: there is no such file.
    let error = unsafe { Checkpoint::open(llama().join("none.safetensors")) }
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("none.safetensors: No such file"),
        "{error}"
    );
}

#[test]
fn an_index_names_the_files() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("sharded");
    std::fs::create_dir_all(&folder).unwrap();
    let (rest, norm): (HashMap<_, _>, HashMap<_, _>) =
        tensors().into_iter().partition(|(name, _)| name != "norm");
    std::fs::write(folder.join("a.safetensors"), file(&rest)).unwrap();
    std::fs::write(folder.join("b.safetensors"), file(&norm)).unwrap();
    let single = folder.join("model.safetensors");
    let _ = std::fs::remove_file(&single); // of an earlier run
    let index = folder.join("model.safetensors.index.json");
    let map = r#"{"weight_map": {"w": "a.safetensors", "w.absmax": "a.safetensors", "norm": "b.safetensors"}}"#;
    std::fs::write(&index, map).unwrap();
    // SAFETY: nothing writes to the files.
    let checkpoint = unsafe { Checkpoint::open(&folder) }.unwrap();
    assert!(checkpoint.weight("w").is_ok() && checkpoint.tensor("norm").is_ok());
    std::fs::write(&index, r#"{"weight_map": {"w": "../a.safetensors"}}"#).unwrap();
    // SAFETY: as above.
    let error = unsafe { Checkpoint::open(&folder) }.err().unwrap();
    assert!(
        error.to_string().contains("is no name of a file"),
        "{error}"
    );
    std::fs::write(&index, r#"{"weight_map": {"w": "b.safetensors"}}"#).unwrap();
    // SAFETY: as above.
    let error = unsafe { Checkpoint::open(&index) }.err().unwrap();
    assert!(
        error
            .to_string()
            .ends_with("json: w is not in b.safetensors"),
        "{error}"
    );
    // As for transformers, this file goes before an index, which is wrong here.
    std::fs::write(&single, file(&norm)).unwrap();
    // SAFETY: as above.
    let checkpoint = unsafe { Checkpoint::open(&folder) }.unwrap();
    assert!(checkpoint.tensor("norm").is_ok() && checkpoint.tensor("w").is_err());
    // Without both, the only file there is.
    std::fs::remove_file(&index).unwrap();
    std::fs::remove_file(&single).unwrap();
    // SAFETY: as above.
    let error = unsafe { Checkpoint::open(&folder) }.err().unwrap();
    assert!(
        error.to_string().contains("2 other safetensors files"),
        "{error}"
    );
    std::fs::remove_file(folder.join("b.safetensors")).unwrap();
    // SAFETY: as above.
    let checkpoint = unsafe { Checkpoint::open(&folder) }.unwrap();
    assert!(checkpoint.weight("w").is_ok());
}
