"""examples/cpp/llama on the CPU against transformers on the dequantized weights, in fp32."""

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import nf4
import numpy as np
import pytest
import torch_cases
from conftest import ROOT
from llama_program import program
from nf4.checkpoint import QuantizeOptions, quantize_checkpoint

torch_cases.require("torch", "transformers")

import int4_models  # noqa: E402
import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

pytestmark = pytest.mark.interop
TOKENS = 64
# Lengths of the prompts of a batch; the last is computed in two chunks.
LENGTHS = (5, 1, 520)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
# A row has what a config has beside the usual, what `nf4 quantize` is told, and a bound of the
# error in bf16, relative to the largest logit. Weights make much of roundings: errors are 4 %,
# 1.5 % and 3 %.
MODELS = {
    "nf4": ({}, {}, 6e-2),
    "fp4, flat, tied, biases, llama3": (
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
         "rope_parameters": LLAMA3, "num_key_value_heads": 1, "head_dim": 32},
        {"format": "fp4", "nested": False, "blocksize": 128, "skip": ("k_proj",)},
        3e-2,
    ),
    "shards, a head of 4 bits": ({}, {"only": ("*_proj", "lm_head")}, 6e-2),
}  # fmt: skip


def make(folder, more, options, shards=False):
    """Writes a checkpoint; transformers' model of the same weights."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        **{"vocab_size": 100, "num_key_value_heads": 2, "tie_word_embeddings": False,
           "max_position_embeddings": 1024, **more},
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    for weight in model.parameters():
        weight.data.normal_(1 if weight.ndim == 1 else 0, 0.2)
    dense = folder / "dense"
    model.save_pretrained(dense, max_shard_size="60KB" if shards else "1GB")
    assert (dense / "model.safetensors").exists() != shards
    quantize_checkpoint(str(dense), str(folder / "4-bit"), QuantizeOptions(**options))
    state = {}
    for file in (folder / "4-bit").glob("*.safetensors"):
        for name, value in nf4.load(file).items():
            if isinstance(value, nf4.QuantizedTensor):
                value = nf4.dequantize(value, "fp32")
            state[name] = torch.from_numpy(np.array(value, np.float32))
    model = LlamaForCausalLM(config).float().eval()
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return folder / "4-bit", model


def run(folder, *arguments, llama=None):
    command = [llama or program(), folder, "--cpu", "--threads", "1", *arguments]
    return subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, errors="surrogateescape"
    )


def are_bf16(logits):
    return not (logits.view(np.uint32) & 0xFFFF).any()


def check(folder, model, file, lengths=LENGTHS, count=TOKENS, options=(), bound=1e-4):
    """Greedy tokens of a batch, and all logits on the way, whose errors are at most `bound` of the
    largest."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(vocabulary, (size,), generator=generator) for size in lengths]
    words = [",".join(map(str, prompt.tolist())) for prompt in prompts]
    result = run(folder, *options, "--tokens", count, "--logits", file, *words)
    assert result.returncode == 0, result.stderr
    chosen = [[int(token) for token in line.split(",")] for line in result.stdout.split()]
    logits = np.fromfile(file, np.float32).reshape(count, len(prompts), vocabulary)
    is_bf16 = "--bf16" in options
    assert are_bf16(logits) == is_bf16
    for i, prompt in enumerate(prompts):
        assert len(chosen[i]) == count
        tokens = torch.cat([prompt, torch.tensor(chosen[i])])
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
        error = (torch.from_numpy(logits[:, i]) - expected).abs().max().item()
        largest = expected.abs().max().item()
        allowed = bound * largest
        assert error < allowed
        # Rounding the logits of an fp32 run would add less.
        assert not is_bf16 or error > 2**-8 * largest
        # The largest logit, or one that is equal to it but for rounding.
        taken = expected.gather(1, torch.tensor(chosen[i])[:, None])[:, 0]
        assert (expected.amax(1) - taken).max() <= 2 * allowed


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", MODELS)
def test_as_transformers(tmp_path, case):
    more, options, _ = MODELS[case]
    folder, model = make(tmp_path, more, options, shards="shards" in case)
    check(folder, model, tmp_path / "logits")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", MODELS)
def test_bf16_as_transformers(tmp_path, case):
    more, options, bound = MODELS[case]
    folder, model = make(tmp_path, more, options, shards="shards" in case)
    check(folder, model, tmp_path / "logits", options=["--bf16"], bound=bound)


def test_attention_by_tiles(tmp_path):
    """Whose softmax goes on from one tile of 2048 keys to the next."""
    folder, model = make(tmp_path, {"max_position_embeddings": 8192}, {})
    check(folder, model, tmp_path / "logits", lengths=(4500, 2049), count=3)


@pytest.mark.parametrize("case", ["gptq symmetric, act order", "gptq_v2, act order", "awq",
                                  "compressed-tensors", "compressed-tensors, zeros"])  # fmt: skip
def test_integers_as_transformers(tmp_path, case):
    model = int4_models.checkpoint(tmp_path / "int4", case)
    check(tmp_path / "int4", model, tmp_path / "logits")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape":[2,64]', b'"shape":[64,2]'),  # the scales of AWQ's version gemv
        (b'"shape":[64,16]', b'"shape":[128,8]'),  # and its codes
        (b"awq", b"gptq"),
    ],
)
def test_integers_of_another_layout(tmp_path, old, new):
    """The bytes are as many."""
    folder = tmp_path / "int4"
    int4_models.checkpoint(folder, "awq")
    if old == b"awq":
        gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        edit_config(folder, quantization_config=gptq)
    else:
        edit_header(folder, old, new)
    result = run(folder, "--tokens", "2", "1,2")
    assert result.returncode == 1 and "has the shape" in result.stderr


@pytest.fixture
def golden(tmp_path):
    """A checkpoint that a test may damage."""
    return shutil.copytree(ROOT / "tests" / "golden" / "llama", tmp_path / "golden")


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def append(path, text):
    path.write_text(path.read_text() + text)


def edit_header(folder, old, new):
    """In place: both are as long."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    assert len(old) == len(new) and data.count(old) >= 1
    path.write_bytes(data.replace(old, new))


def split(folder):
    """Two files with the same tensors, and an index that names both."""
    shutil.copy(folder / "model.safetensors", folder / "a.safetensors")
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_threads_share_attention(golden, tmp_path, dtype):
    """Of a prompt that is long enough for it; the bits are those of one thread."""
    edit_config(golden, max_position_embeddings=1024)
    prompt, files = ",".join(["5", "9"] * 300), [tmp_path / "one", tmp_path / "three"]
    for threads, file in zip((1, 3), files, strict=True):
        options = [*dtype, "--tokens", 1, "--threads", threads, "--logits", file]
        assert run(golden, *options, prompt).returncode == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bf16_compiled_for_avx2(golden, tmp_path):
    """The program has products of its own for that; Meson compiles it for any CPU."""
    info = Path("/proc/cpuinfo")
    if not info.exists() or "avx2" not in info.read_text().split():
        pytest.skip("no AVX2")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    library, llama = nf4.get_library(), tmp_path / "llama"
    source = ROOT / "examples" / "cpp" / "llama" / "main.cpp"
    command = [compiler, "-std=c++17", "-mavx2", "-Wno-psabi", "-pthread", f"-I{ROOT / 'include'}"]
    command += [source, library, f"-Wl,-rpath,{Path(library).parent}", "-o", llama]
    subprocess.run(command, check=True)
    expected = json.loads((golden / "expected.json").read_text())
    options = ["--bf16", "--tokens", 1, "--logits", tmp_path / "logits"]
    result = run(golden, *options, ",".join(map(str, expected["prompt"])), llama=llama)
    assert result.returncode == 0, result.stderr
    logits = np.fromfile(tmp_path / "logits", np.float32)
    error = np.sqrt(np.square(logits - expected["logits"]).mean())
    assert are_bf16(logits) and error < 2 * expected["bf16_rms_error"][0]


def answer(folder):
    result = run(folder, "--tokens", "4", "1,2")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_default_of_hidden_act(golden):
    before = answer(golden)
    edit_config(golden, hidden_act=None)
    assert answer(golden) == before


def test_files_of_the_index(golden):
    """Alone; model.safetensors goes before it, as in transformers."""
    before, single, shard = answer(golden), "model.safetensors", "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 1}, "weight_map": {"model.norm.weight": shard}}
    (golden / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(golden / single, golden / "stale.safetensors")
    assert answer(golden) == before
    (golden / single).rename(golden / shard)
    assert answer(golden) == before
    (golden / shard).unlink()
    assert "cannot be read: No such file" in run(golden, "1").stderr


UP = b"model.layers.1.mlp.up_proj.weight"
FAULTS = {
    "model_type is mistral": lambda folder: edit_config(folder, model_type="mistral"),
    "rope_type is yarn": lambda folder: edit_config(folder, rope_parameters={"rope_type": "yarn"}),
    "hidden_act is gelu": lambda folder: edit_config(folder, hidden_act="gelu"),
    "num_attention_heads * head_dim is too large": (
        lambda folder: edit_config(folder, num_attention_heads=1 << 16, head_dim=(1 << 16) + 16)
    ),
    'num_hidden_layers is "two"': lambda folder: edit_config(folder, num_hidden_layers="two"),
    "vocab_size is missing": lambda folder: edit_config(folder, vocab_size=None),
    "config.json: not JSON": lambda folder: (folder / "config.json").write_text("{" * 100),
    "config.json: not JSON at 'more'": lambda folder: append(folder / "config.json", " more"),
    "config.json: cannot be read": lambda folder: (folder / "config.json").unlink(),
    "has no tensor model.layers.1.mlp.up_proj.weight": (
        lambda folder: edit_header(folder, b'"' + UP, b'"M' + UP[1:])
    ),
    "has no tensor model.layers.2.input_layernorm.weight": (
        lambda folder: edit_config(folder, num_hidden_layers=3)
    ),
    "model.embed_tokens.weight has the shape [128, 64]; expected [129, 64]": (
        lambda folder: edit_config(folder, vocab_size=129)
    ),
    "mlp.gate_proj.weight has the shape [192, 64]; expected [256, 64]": (
        lambda folder: edit_config(folder, intermediate_size=256)
    ),
    "lies outside the file": (lambda folder: os.truncate(folder / "model.safetensors", 100000)),
    "shorter than its header says": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 63))
    ),
    "neither model.safetensors nor its index, but 0 other safetensors files": (
        lambda folder: (folder / "model.safetensors").unlink()
    ),
    "model.safetensors: cannot be read: No such file or directory": (
        lambda folder: (
            (folder / "model.safetensors").replace(folder / "away")
            and (folder / "model.safetensors").symlink_to("none")
        )
    ),
    "is in two files": split,
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_named(golden, message):
    FAULTS[message](golden)
    result = run(golden, "--tokens", "2", "1,2")
    assert result.returncode == 1
    assert message in result.stderr and result.stderr.count("\n") == 1


# Positions of which the keys of 8 sequences in a layer, 32 floats each, take a third of the memory,
# and the values as much; there are two layers.
THIRD = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (3 * 8 * 32 * 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "2", "--context", str(10**9), "1"], "too little memory: the KV cache"),
        (
            ["--tokens", "2", "--context", str(THIRD), *"11111111"],
            "too little memory: the KV cache",
        ),
        # The positions of all sequences are 2^32.
        (
            ["--tokens", "2", "--context", str(1 << 30), *"1111"],
            "too little memory: the KV cache",
        ),
        (["--context", "3", "1"], "65 tokens are more than"),
        (["128"], "token 128 is outside the vocabulary of 128"),
        (["--tokens", "2", "--logits", "/none/logits", "1"], "/none/logits: cannot be written"),
        (["--tokens", "2", "--logits", "/dev/full", "1"], "/dev/full: writing failed"),
    ],
)
def test_requests_that_cannot_be_met(golden, arguments, message):
    result = run(golden, *arguments)
    assert result.returncode == 1 and message in result.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["--tokens", "0", "1"], ["1,,2"], ["1", ""], ["--what", "1"]]
)
def test_usage(golden, arguments):
    result = run(golden, *arguments)
    assert result.returncode == 2 and result.stderr.startswith("llama FOLDER")
