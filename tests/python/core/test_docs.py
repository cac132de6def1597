"""The Python in README.md and docs/ runs on the CPU, with stand-ins for what it does not make."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nf4
import numpy as np
import pytest
from checkpoint_helpers import write_model
from conftest import ROOT, compile_c
from nf4.cli import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    page.relative_to(ROOT).as_posix(): re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    for page in PAGES
    if "```python" in (text := page.read_text())
}


def run(page: str, which: slice, **names: Any) -> dict[str, Any]:
    """Runs some of a page's blocks, one after the other, with these names; all that they made."""
    assert BLOCKS[page][which]
    for block in BLOCKS[page][which]:
        exec(compile(block, page, "exec"), names)
    return names


def test_every_block_is_python():
    """Those that need a GPU's packages and a model at hand are not run."""
    counts = {
        "README.md": 2,
        "docs/cli.md": 1,
        "docs/engines.md": 1,
        "docs/experts.md": 6,
        "docs/python.md": 6,
        "docs/pytorch.md": 5,
        "docs/quality.md": 1,
        "docs/several-gpus.md": 5,
        "docs/training.md": 1,
    }
    assert {page: len(blocks) for page, blocks in BLOCKS.items()} == counts
    for page, blocks in BLOCKS.items():
        for block in blocks:
            compile(block, page, "exec")


def test_on_numpy_arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run("docs/python.md", slice(0, 1))
    assert made["y"].shape == (8, 4096) and nf4.load("model.safetensors").keys() == {"up.weight"}
    assert made["back"].shape == (4096, 4096) and made["back"].dtype.name == "bfloat16"
    assert round(made["q"].bits_per_weight, 3) == 4.127


def test_gradients_of_an_adapter():
    made = run("docs/python.md", slice(3, 4))
    dense = nf4.dequantize(made["w"]).astype(np.float64)
    whole = dense + made["scale"] * (made["b"].astype(np.float64) @ made["a"])
    grad = made["x"] @ whole.T - made["target"]
    expected = (
        grad @ whole,
        made["scale"] * (grad @ made["b"]).T @ made["x"],
        made["scale"] * grad.T @ (made["x"] @ made["a"].T),
    )
    for name, other in zip(("grad_x", "grad_a", "grad_b"), expected, strict=True):
        np.testing.assert_allclose(made[name], other, atol=1e-5 * np.abs(other).max())


def test_on_integer_weights():
    made = run("docs/python.md", slice(4, 5))
    assert made["back"].shape == (512, 1024) and made["back"].dtype == np.float16
    assert made["y"].shape == (2, 512)


def test_tensors_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = run("docs/python.md", slice(5, 6))
    assert np.array_equal(made["up"].packed, made["tensors"]["up.weight"].packed)


def test_a_checkpoint(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(model.parent)
    made = run("docs/cli.md", slice(None))
    assert made["findings"] == [] and made["dense"].shape == made["q"].shape


def test_the_command_line_of_readme(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).normal(0, 0.02, (64, 256)).astype(np.float32)
    write_model(tmp_path / "model", {"model.layers.0.up_proj.weight": weight})
    lines = re.findall(r"^nf4 (.*)", (ROOT / "README.md").read_text(), re.M)
    assert len(lines) == 8
    for line in lines:
        assert main(shlex.split(line, comments=True)) == 0, line


@pytest.mark.interop
def test_on_tensors():
    pytest.importorskip("torch")
    made = run("docs/python.md", slice(1, 3), nf4=nf4)
    rows, cols = made["linear"].weight.shape
    assert made["y"].shape == (2, 10, rows) and made["dense"].shape == (rows, cols)
    assert made["up"].shape == made["gate"].shape == made["y"].shape


def small_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.interop
def test_layers_of_readme(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    small_llama().save_pretrained("model")
    made = run("README.md", slice(0, 2), linear=torch.nn.Linear(64, 24))
    changed = made["model"].model.layers[0].mlp.up_proj
    assert all(type(each) is made["nf4"].torch.NF4Linear for each in (changed, made["layer"]))
    assert (tmp_path / "model-4bit" / "model.safetensors").exists()


@pytest.mark.interop
def test_layers():
    torch, bnb = (pytest.importorskip(name) for name in ("torch", "bitsandbytes"))
    model = torch.nn.Sequential(bnb.nn.Linear4bit(64, 24, quant_type="nf4").to("cpu"))
    names = {"model": model, "linear": torch.nn.Linear(64, 24), "dense_model": small_llama()}
    made = run("docs/pytorch.md", slice(0, 1), **names)
    assert all(type(each) is made["nf4"].torch.NF4Linear for each in (model[0], made["layer"]))


@pytest.mark.interop
def test_integers_of_checkpoints(monkeypatch):
    torch = pytest.importorskip("torch")
    import nf4.torch

    model, linear = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.Linear(128, 8)
    monkeypatch.setattr(nf4.torch, "load", lambda folder, device: model)
    made = run("docs/pytorch.md", slice(2, 3), nf4=nf4, linear=linear)
    assert made["model"] is model and made["names"] == []
    assert made["layer"].layout == "compressed-tensors"


# Lines for a shell begin with these words, after variables.
COMMANDS = {
    "./app", "./cpp_llama", "./dev", "./first", "apt", "cargo", "cmake", "eval", "export", "go",
    "meson", "nf4", "node", "npm", "pip", "prefix=$(python", "python", "python3", "qemu-aarch64",
    "vllm",
}  # fmt: skip


def test_each_line_for_a_shell_is_a_command():
    """Prose that continues a comment in the next line is not."""
    found = set()
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                found |= set([each for each in words if not re.match(r"\w+=[^$]", each)][:1])
    assert found == COMMANDS


def test_a_layer_of_experts():
    torch = pytest.importorskip("torch")
    import nf4.torch

    names = {"weight": torch.randn(4, 8, 64), "x": torch.randn(3, 64), "top_k": 2}
    top_k_index = torch.tensor([[0, 3], [3, 1], [1, 0]])
    page = {"nf4": nf4, "torch": torch, "top_k_index": top_k_index}
    made = run("docs/experts.md", slice(3, 4), **names | page)
    dense = made["experts"].dequantize()
    chosen, order = top_k_index.flatten().sort(stable=True)
    expected = torch.einsum("mk,mnk->mn", names["x"][order // 2], dense[chosen])
    torch.testing.assert_close(made["y"], expected)


# The names that the C of the pages takes from the program around it.
C_AROUND = """
#include <stdio.h>
#include <nf4/nf4.h>
enum { cudaSuccess };
int cudaMalloc(void **, size_t);
extern void *packed, *absmax, *nested_absmax, *nested_code, *nested_offset;
extern void *x, *y, *gate_y, *up_y, *out, *a, *b, *p, *q, *qweight, *scales, *qzeros;
extern void *dy, *da, *db, *ends, *token_of_row, *router_weights, *workspace;
extern nf4_tensor gate, up;
extern nf4_matmul_args args;
extern void *dense;
extern size_t bytes;
extern int64_t m, rows, tokens;
extern nf4_stream stream;
"""


# The names that the C++ takes from CUDA.
CUDA_AROUND = """
#include <cstddef>
enum cudaMemcpyKind { cudaMemcpyDefault };
int cudaMalloc(void **, size_t);
int cudaMemcpy(void *, const void *, size_t, cudaMemcpyKind);
"""
# And from an engine.
ENGINE_AROUND = """
extern const nf4::Products products;
extern int32_t device;
extern void *workspace, *dense;
extern size_t bytes;
extern nf4_stream stream;
void gemm(const nf4_matmul_args &, const void *, int64_t rows, int64_t cols);
"""


def test_the_c_of_the_pages_compiles(tmp_path):
    """As C99, with warnings as errors: names and types are those of nf4.h."""
    found = 0
    for page in PAGES:
        for block in re.findall(r"^```c\n(.*?)^```", page.read_text(), re.M | re.S):
            includes = "".join(re.findall(r"^#include.*\n", block, re.M))
            body = block.replace(includes, "")
            source = tmp_path / f"{page.stem}{found}.c"
            around = f"{includes}{C_AROUND}void block(void);\nvoid block(void) {{\n{body}}}\n"
            source.write_text(block if "int main(" in block else around)
            strict = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-Wno-unused-variable")
            compile_c(source, tmp_path / "block.o", "-c", *strict)
            found += 1
    assert found == 12


def test_the_cpp_of_the_headers_compiles(tmp_path):
    """As C++17, with warnings as errors."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    found = 0
    for page in PAGES:
        for block in re.findall(r"^```cpp\n(.*?)^```", page.read_text(), re.M | re.S):
            if "#include <nf4/" not in block:
                continue
            includes = "".join(re.findall(r"^#include.*\n", block, re.M))
            source = tmp_path / f"{page.stem}{found}.cpp"
            body = block.replace(includes, "")
            around = "#include <cuda_runtime.h>\n" if "cudaMalloc" in body else ""
            around += ENGINE_AROUND if "gemm" in body else ""
            source.write_text(f"{includes}{around}void block();\nvoid block() {{\n{body}}}\n")
            (tmp_path / "cuda_runtime.h").write_text(CUDA_AROUND)
            strict = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unused")
            folders = (f"-I{ROOT / 'include'}", f"-I{tmp_path}")
            subprocess.run([compiler, *strict, *folders, "-fsyntax-only", str(source)], check=True)
            found += 1
    assert found == 4


def test_the_rust_on_cudarc_is_that_of_doctests():
    page = (ROOT / "docs" / "rust.md").read_text()
    blocks = [b for b in re.findall(r"^```rust\n(.*?)^```", page, re.M | re.S) if "nf4::cuda:" in b]
    sources = (ROOT / "bindings" / "rust" / "nf4" / "src" / "cuda").glob("*.rs")
    documented = "".join(re.sub(r"^//[/!] ?", "", path.read_text(), flags=re.M) for path in sources)
    assert len(blocks) == 2 and all(block in documented for block in blocks)
