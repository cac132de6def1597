"""nf4 compare, the logits."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("in_process")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import experts_cases  # noqa: E402
import int4_models  # noqa: E402
from nf4.checkpoint import FormatError, dequantize_checkpoint  # noqa: E402
from nf4.cli import main  # noqa: E402
from nf4.torch.comparing import Encoded, Judge, compare_logits, windows  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

TEXT = "The ferry left the island at six in the morning, before the bakery had opened.\n" * 3


def write_tokenizer(folder: Path, begin: bool = False, extra: int = 0) -> None:
    """Bytes are tokens, from `extra` + 1 on. Token 0 is special, and begins a text if `begin`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0} | {letter: at + 1 + extra for at, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>"])
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))


def llama(folder: Path, begin: bool = False, **sizes: int):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
           "max_position_embeddings": 128, "initializer_range": 0.2, **sizes}
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, begin)
    return model


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def compare(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert main(["compare", *map(str, arguments), "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> str:
    assert main(["compare", *map(str, arguments), "--quiet"]) == code
    return capsys.readouterr().err


def quantized(dense: Path, folder: Path, *options: str) -> Path:
    assert main(["quantize", str(dense), str(folder), "--quiet", *options]) == 0
    return folder


def direct_loss(model, tokens: list[int], prefix: list[int], window: int, stride: int) -> float:
    """The mean loss by transformers, token by token: each has the context of the first window that
    it is in."""
    losses = []
    for at in range(0 if prefix else 1, len(tokens)):
        inside = window - len(prefix)
        begin = stride * max(0, math.ceil((at + 1 - inside) / stride))
        ids = torch.tensor([[*prefix, *tokens[begin : at + 1]]])
        with torch.no_grad():
            logits = model(ids).logits[0, -2].double()
        losses.append(-logits.log_softmax(-1)[tokens[at]].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 30, 100])
@pytest.mark.parametrize(
    ("prefix", "window", "stride"), [(0, 8, 4), (0, 8, 7), (1, 8, 7), (2, 9, 1)]
)
def test_each_token_is_scored_once(count, prefix, window, stride):
    scored = []
    for each in windows(count, prefix, window, stride):
        assert each.end - each.begin + prefix <= window
        assert each.scored - each.begin + prefix >= 1
        scored += range(each.scored, each.end)
    assert scored == list(range(0 if prefix else 1, count))


def test_known_divergence():
    before, after = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    found = compare_logits(before, after, torch.tensor([1]))
    assert found.divergence == pytest.approx(0.5 * math.log(4 / 3), rel=1e-6)
    assert found.reference_loss == pytest.approx(math.log(2))
    assert found.other_loss == pytest.approx(math.log(4), rel=1e-6)
    assert compare_logits(after, after, torch.tensor([0])).divergence == 0


def test_identical_checkpoints_do_not_diverge(tmp_path, text, capsys):
    llama(tmp_path / "dense")
    four_bit = quantized(tmp_path / "dense", tmp_path / "nf4")
    for folder in (tmp_path / "dense", four_bit):
        found = compare(capsys, folder, folder, "--text", text, "--window", 64)["logits"]["all"]
        assert found["kl_divergence"] == found["loss_change"] == 0
        assert found["loss_change_standard_error"] == 0 and found["same_top_token"] == 1
        assert found["perplexity"] == found["reference_perplexity"]


@pytest.mark.parametrize("begin", [False, True])
def test_perplexity_is_that_of_transformers(begin, tmp_path, text, capsys):
    model = llama(tmp_path / "dense", begin)
    tokenizer = Tokenizer.from_file(str(tmp_path / "dense" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(tokens) == len(TEXT)
    four_bit = quantized(tmp_path / "dense", tmp_path / "nf4", "--compute-dtype", "fp16")
    dequantize_checkpoint(str(four_bit), str(tmp_path / "back"), dtype="fp32")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back")
    arguments = (tmp_path / "dense", four_bit, "--text", text, "--window", 48, "--stride", 20)
    document = compare(capsys, *arguments)
    (found,) = document["logits"]["texts"]
    prefix = [0] if begin else []
    expected = [direct_loss(each, tokens, prefix, 48, 20) for each in (model, back)]
    assert found["tokens"] == len(tokens) - (not begin)
    assert math.log(found["reference_perplexity"]) == pytest.approx(expected[0], rel=1e-5)
    assert math.log(found["perplexity"]) == pytest.approx(expected[1], rel=1e-4)
    assert found["loss_change"] == pytest.approx(expected[1] - expected[0], abs=1e-3)
    assert found["kl_divergence"] > 0 and document["tensors"]
    assert compare(capsys, *arguments) == document


@pytest.mark.parametrize("case", int4_models.CASES)
def test_integers(case, tmp_path, text, capsys):
    int4_models.checkpoint(tmp_path / "int4", case)
    dequantize_checkpoint(str(tmp_path / "int4"), str(tmp_path / "dense"), dtype="fp32")
    text.write_text("a text")
    # These models have 100 tokens.
    alphabet = {letter: at for at, letter in enumerate("<?> atex")}
    Tokenizer(models.BPE(alphabet, [])).save(str(tmp_path / "int4" / "tokenizer.json"))
    document = compare(capsys, tmp_path / "dense", tmp_path / "int4", "--text", text)
    assert document["relative_square_error"] == 0
    assert 0 <= document["logits"]["all"]["kl_divergence"] < 1e-8


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_experts(name, tmp_path, text, capsys):
    """transformers saves those of Qwen3 as a matrix each, and those of gpt-oss as a stack."""
    torch.manual_seed(0)
    experts_cases.MODELS[name]().save_pretrained(tmp_path / "dense")
    text.write_text("a text" * 20)
    alphabet = {letter: at for at, letter in enumerate("<?> atex")}
    Tokenizer(models.BPE(alphabet, [])).save(str(tmp_path / "dense" / "tokenizer.json"))
    four_bit = quantized(tmp_path / "dense", tmp_path / "nf4", "--experts")
    arguments = (tmp_path / "dense", four_bit, "--text", text, "--window", 64)
    document = compare(capsys, *arguments)
    stacks = [each for each in document["tensors"] if len(each["shape"]) == 3]
    assert len(stacks) == 4 and all(each["formats"] == ["dense", "nf4"] for each in stacks)
    assert document["only_in_reference"] == document["only_in_other"] == []
    assert all(0.001 < each["relative_square_error"] < 0.02 for each in document["tensors"])
    assert 0 < document["logits"]["all"]["kl_divergence"] < 0.1
    dequantize_checkpoint(str(four_bit), str(tmp_path / "back"), dtype="fp32")
    document = compare(capsys, tmp_path / "back", four_bit, "--text", text, "--window", 64)
    assert document["relative_square_error"] == 0
    assert document["logits"]["all"]["kl_divergence"] < 1e-8


def test_gpt2(tmp_path, text, capsys):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=257, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "dense")
    write_tokenizer(tmp_path / "dense")
    four_bit = quantized(tmp_path / "dense", tmp_path / "nf4")
    document = compare(capsys, tmp_path / "dense", four_bit, "--text", text, "--window", 64)
    assert 0.001 < document["relative_square_error"] < 0.02
    assert 0 < document["logits"]["all"]["kl_divergence"] < 0.1


def test_planted_error(tmp_path, text, capsys):
    model = llama(tmp_path / "dense")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] += 0.5
    model.save_pretrained(tmp_path / "planted")
    plot = tmp_path / "plot.svg"
    pytest.importorskip("matplotlib")
    arguments = ("--text", text, "--window", 64, "--plot", plot)
    document = compare(capsys, tmp_path / "dense", tmp_path / "planted", *arguments)
    assert document["worst_layer"] == "model.layers.1"
    assert [each["name"] for each in document["tensors"]] == ["model.layers.1.mlp.up_proj.weight"]
    assert document["logits"]["all"]["kl_divergence"] > 0
    assert b"</svg>" in plot.read_bytes()


def test_bad_texts_and_windows_are_named(tmp_path, text, capsys):
    folder = tmp_path / "dense"
    llama(folder)
    same = (folder, folder, "--text", text)
    assert "the stride is 64; expected 1 to 63" in refused(
        capsys, *same, "--window", 64, "--stride", 64, code=2
    )
    assert "a window of 512 tokens is more than the 128 of" in refused(capsys, *same, code=2)
    same += ("--window", 64)
    assert "device 'abacus': " in refused(capsys, *same, "--device", "abacus", code=2)
    text.write_text("a")
    assert "text.txt has 1 token; at least 2 are needed" in refused(capsys, *same, code=2)
    text.write_text("")
    assert "text.txt has 0 tokens" in refused(capsys, *same, code=2)


def test_other_tokenizers_are_named(tmp_path, text, capsys):
    llama(tmp_path / "dense")
    llama(tmp_path / "other", begin=True)
    arguments = (tmp_path / "dense", tmp_path / "other", "--text", text, "--window", 64)
    assert "tokenizer.json: it makes other tokens of" in refused(capsys, *arguments, code=3)
    write_tokenizer(tmp_path / "dense", extra=100)
    (tmp_path / "other" / "tokenizer.json").unlink()
    assert "it has 257 tokens, and the tokenizer makes" in refused(capsys, *arguments, code=3)
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: it is not read" in refused(capsys, *arguments, code=3)
    (tmp_path / "dense" / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "dense" / "tokenizer.json")
    assert "tokenizer.json: a FIFO" in refused(capsys, *arguments, code=3)
    (tmp_path / "dense" / "tokenizer.json").unlink()
    assert "it has no tokenizer.json" in refused(capsys, *arguments, code=3)


def test_models_without_logits_are_named(tmp_path, text, capsys):
    model = llama(tmp_path / "dense")
    with torch.no_grad():
        model.model.norm.weight[0] = np.inf
    model.save_pretrained(tmp_path / "inf")
    arguments = (tmp_path / "dense", tmp_path / "inf", "--text", text, "--window", 64)
    assert "its logits have NaN or Inf for tokens 0 to 64 of" in refused(capsys, *arguments, code=3)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=257, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    write_tokenizer(tmp_path / "bert")
    arguments = (tmp_path / "bert", tmp_path / "bert", "--text", text, "--window", 64)
    assert "BertModel is not a causal language model" in refused(capsys, *arguments, code=2)


def test_models_of_two_vocabularies_are_named(tmp_path):
    llama(tmp_path / "dense")
    llama(tmp_path / "other", vocab_size=300)
    judge = Judge(str(tmp_path / "dense"), str(tmp_path / "other"), window=8, stride=4)
    with pytest.raises(FormatError, match=r"other: its logits are of 300 tokens, those of .* 257"):
        judge.judge(Encoded("text", [], [1, 2, 3]), lambda name, count: None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory_is_said(error, tmp_path, text, capsys, monkeypatch):
    def fails(*_):
        raise error

    llama(tmp_path / "dense")
    monkeypatch.setattr("nf4.torch.comparing.load_alone", fails)
    arguments = (tmp_path / "dense", tmp_path / "dense", "--text", text, "--window", 64)
    assert refused(capsys, *arguments, code=4).endswith("nf4: out of memory\n")
