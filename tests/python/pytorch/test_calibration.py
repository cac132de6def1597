"""Calibrated models: quantize_model(calibration=...) and `nf4 quantize --calibrate` write the same
bytes, whose error is smaller and which others load; what cannot calibrate is named."""

from __future__ import annotations

import json

import nf4
import pytest
import torch_cases
from conftest import ROOT

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers", "tokenizers")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from nf4.checkpoint.errors import OptionError  # noqa: E402
from nf4.cli import main  # noqa: E402
from nf4.torch import NF4Linear, quantize_model  # noqa: E402
from nf4.torch.calibration import checkpoints  # noqa: E402
from nf4.torch.calibration.layers import decoder_layers, round_layers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402
from torch import nn  # noqa: E402

WORDS = 64


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WORDS, max_position_embeddings=512, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=WORDS)
    return transformers.GPT2LMHeadModel(config).eval()


def mixture():
    config = transformers.Qwen2MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=1,
        shared_expert_intermediate_size=64, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=WORDS, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config).eval()


def tokens():
    """Windows in which some words are frequent, so that x is not the same in all directions."""
    words = torch.distributions.Categorical(1 / torch.arange(1.0, WORDS + 1))
    return words.sample((8, 512))


def logits(model, ids):
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits.double(), -1)


def divergence(dense, model, ids):
    other = logits(model, ids)
    return nn.functional.kl_div(other, dense, reduction="sum", log_target=True).item()


CASES = {
    "nf4": (llama, {}),
    "flat fp4": (llama, {"format": "fp4", "nested": False, "blocksize": 128}),
    "int4": (llama, {"format": "int4", "group_size": 32}),
    "gptq": (
        llama,
        {"format": "int4", "group_size": 64, "layout": "gptq"},
    ),
    "Conv1D": (gpt2, {}),
    "mixture": (mixture, {"format": "fp4"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_divergence_is_smaller(case):
    make, options = CASES[case]
    ids, found = tokens(), []
    model = make()
    state, dense = model.state_dict(), logits(model, ids)
    for calibration in (None, ids, ids):
        model = make()
        model.load_state_dict(state)
        names = quantize_model(model, calibration=calibration, **options)
        found.append(divergence(dense, model, ids))
    assert found[1] < 0.8 * found[0] and found[1] == found[2]
    assert names == quantize_model(make(), **options)
    assert not model.training and model.config.quantization_config is not None


def test_modules_stay_in_their_modes():
    model = llama().train()
    model.model.layers[0].eval()
    quantize_model(model, calibration=tokens())
    modes = [model.training, *(layer.mlp.up_proj.training for layer in model.model.layers)]
    assert modes == [True, False, True]


def test_each_layer_sees_what_those_before_it_make():
    """A layer that becomes 0 is nothing to the layers after it, and other layers see the same."""
    model, ids = llama(), [tokens()]
    names = [
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and name != "lm_head"
    ]
    order, dense, found = [], {}, {}
    round_layers(model, names, ids, lambda name, _, seen: dense.update({name: seen.hessian}))

    def rounds(name, layer, seen):
        order.append(name)
        found[name] = seen.hessian
        if name.endswith("layers.0.self_attn.v_proj"):
            layer.weight.zero_()

    round_layers(model, names, ids, rounds)
    assert order == names
    assert not found["model.layers.0.self_attn.o_proj"].any()
    assert torch.equal(found["model.layers.0.self_attn.q_proj"], dense[names[0]])
    assert not torch.equal(found[names[-1]], dense[names[-1]])


def test_the_statistics_are_those_of_the_whole_model():
    """Layer by layer they are the mean of x x^T in a forward pass of all of it."""
    model, ids = gpt2(), tokens()
    name, expected = "transformer.h.1.mlp.c_proj", {}
    hook = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: expected.update({name: args[0].flatten(0, 1)})
    )
    logits(model, ids)
    hook.remove()
    found = {}
    round_layers(model, [name], ids.split(3), lambda name, _, seen: found.update({name: seen}))
    x = expected[name]
    assert found[name].tokens == len(x) == ids.numel()
    torch.testing.assert_close(found[name].hessian, x.T @ x / len(x))


class Twice(nn.Module):
    """Calls a layer twice, and one beside it once."""

    def __init__(self):
        super().__init__()
        self.often, self.once = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.often(self.often(x)) + self.once(x)


def test_all_calls_of_a_layer_count():
    model, ids, xs = llama(), tokens(), []
    model.model.layers[0].mlp = mlp = Twice()
    names = [f"model.layers.0.mlp.{name}" for name in ("often", "once")]
    hook = mlp.often.register_forward_pre_hook(lambda _, args: xs.append(args[0].flatten(0, 1)))
    logits(model, ids)
    hook.remove()
    found = {}
    round_layers(model, names, ids.split(3), lambda name, _, seen: found.update({name: seen}))
    x, once = torch.cat(xs), xs[0]
    assert [seen.tokens for seen in found.values()] == [len(x), len(once)] and len(xs) == 2
    for name, seen in zip(names, (x, once), strict=True):
        torch.testing.assert_close(found[name].hessian, seen.T @ seen / len(seen))


def test_the_decoder_layers_are_those_of_the_decoder():
    """A vision tower may have more layers, and is not called for text."""
    of_vision = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    text = llama().config.to_dict()
    config = transformers.LlavaConfig(
        vision_config={"model_type": "siglip_vision_model", "num_hidden_layers": 4,
                       "image_size": 32, "patch_size": 16, **of_vision},
        text_config={**text, "model_type": "llama"}, image_token_index=WORDS - 1,
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).eval()
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    found = list(decoder_layers(model, names))
    assert found == ["model.language_model.layers.0", "model.language_model.layers.1"]
    ids, dense = tokens().clamp_max(WORDS - 2), {}
    round_layers(model, names, [ids], lambda name, _, seen: dense.update({name: seen}))
    assert len(dense) == 14 and all(name.startswith(tuple(found)) for name in dense)


def folder_of(model, path):
    """The model with a tokenizer of words: w0, w1, ..."""
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{at}": at for at in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def begins_with_w9():
    return processors.TemplateProcessing(single="w9 $A", special_tokens=[("w9", 9)])


def text_of(path, ids):
    path.write_text(" ".join(f"w{each}" for each in ids.flatten().tolist()))
    return path


def command(folder, text, *words):
    """The exit code of quantizing folder/dense to folder/made."""
    paths = map(str, (folder / "dense", folder / "made"))
    return main(["quantize", *paths, "--calibrate", str(text), *words])


@pytest.mark.parametrize(
    "dtype, options, words",
    [
        (torch.float32, {}, []),
        (torch.bfloat16, {"format": "fp4", "nested": False}, ["--format", "fp4", "--flat"]),
        (
            torch.float16,
            {"format": "int4", "layout": "awq", "group_size": 32},
            ["--format", "int4", "--layout", "awq", "--group-size", "32"],
        ),
    ],
)
def test_the_command_writes_the_bytes_of_quantize_model(tmp_path, dtype, options, words):
    model, ids = llama().to(dtype), tokens()
    folder_of(model, tmp_path / "dense")
    assert command(tmp_path, text_of(tmp_path / "text", ids), *words) == 0
    # The command computes in fp32, and stores scales of integers in the dtype of the weights.
    assert len(quantize_model(model.float(), calibration=ids, **options)) == 14
    model.save_pretrained(tmp_path / "expected")
    made, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("made", "expected")
    )
    assert made.keys() == expected.keys()
    own = [name for name in made if "proj" in name and "quant_state" not in name]
    assert len(own) >= 14 * 3
    for name in own:
        assert made[name].dtype == expected[name].dtype
        assert torch.equal(made[name], expected[name]), name


def test_integers_of_bf16_have_scales_of_bf16(tmp_path):
    folder_of(llama().bfloat16(), tmp_path / "dense")
    words = ["--format", "int4", "--group-size", "32"]
    assert command(tmp_path, text_of(tmp_path / "text", tokens()), *words) == 0
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    assert main(["verify", str(tmp_path / "made")]) == 0


def test_the_python_of_the_page(tmp_path):
    block = (ROOT / "docs" / "quality.md").read_text().split("```python\n")[1].split("```")[0]
    folder, model = folder_of(llama(), tmp_path), llama()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    tokenizer.backend_tokenizer.post_processor = begins_with_w9()
    names = {"nf4": nf4, "torch": torch, "model": model, "tokenizer": tokenizer}
    names["text"] = "w1 w2 " * 1500
    exec(block.replace('"cuda"', '"cpu"'), names)
    assert names["windows"].shape == (5, 512) and names["windows"][:, 0].tolist() == [9] * 5
    assert isinstance(model.model.layers[0].mlp.up_proj, NF4Linear)


def test_transformers_loads_it(tmp_path):
    torch_cases.require("bitsandbytes", "accelerate")
    model, ids = llama(), tokens()
    folder_of(model, tmp_path / "dense")
    assert command(tmp_path, text_of(tmp_path / "text", ids)) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    names = nf4.torch.convert(loaded)
    assert len(names) == 14 and type(loaded.get_submodule(names[0])) is NF4Linear
    quantize_model(model, calibration=ids)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_the_report_counts_what_was_calibrated(tmp_path, capsys):
    folder_of(llama(), tmp_path / "dense")
    words = ["--only", "lm_head", "--only", "*.layers.1.mlp.*", "--json"]
    assert command(tmp_path, text_of(tmp_path / "text", tokens()), *words) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["weights"], report["calibrated"]) == (4, 3)


def test_what_is_in_the_file_is_its_windows_in_equal_shares(tmp_path, monkeypatch):
    dense = folder_of(llama(), tmp_path)
    texts = [("one", "w1 " * 2000), ("two", "w2 " * 9000), ("three", "w3 " * 600)]
    monkeypatch.setattr(checkpoints, "TOKENS", 6 * 512)
    ids = checkpoints.windows_of(str(dense), texts)
    assert ids.shape == (5, 512)
    assert [int(row[0]) for row in ids] == [1, 1, 2, 2, 3]


def test_a_window_begins_as_a_text_does(tmp_path):
    dense = folder_of(llama(), tmp_path)
    tokenizer = Tokenizer.from_file(f"{dense}/tokenizer.json")
    tokenizer.post_processor = begins_with_w9()
    tokenizer.save(f"{dense}/tokenizer.json")
    ids = checkpoints.windows_of(str(dense), [("text", "w1 " * 511 + "w2 " * 3000)])
    assert ids.shape == (6, 512) and ids[:, 0].tolist() == [9] * 6
    assert ids[0, 1:].unique().tolist() == [1] and ids[1:, 1:].unique().tolist() == [2]


def test_more_texts_than_windows_are_refused(tmp_path):
    with pytest.raises(OptionError, match="has 65 texts; 64 are used at most"):
        checkpoints.windows_of(str(tmp_path), [("text", "w1 " * 600)] * 65)


def test_the_call_again_replaces_what_is_left(monkeypatch):
    model, ids, options = llama(), tokens(), {"only": ["lm_head", "*_proj"]}
    state = model.state_dict()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        # Layers that are not calibrated come last.
        patch.setattr("nf4.torch.quantizing.replace_one", fail)
        quantize_model(model, calibration=ids, **options)
    assert isinstance(model.model.layers[1].mlp.up_proj, NF4Linear)
    assert len(quantize_model(model, calibration=ids, **options)) == 15
    whole = llama()
    whole.load_state_dict(state)
    quantize_model(whole, calibration=ids, **options)
    assert torch.equal(logits(model, ids), logits(whole, ids))


def huge(model):
    model.model.embed_tokens.weight.data[3] = torch.inf


def of_nothing(model):
    model.model.layers = nn.Sequential(*model.model.layers)


def shared(model):
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3


def changed_between(model):
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))


def test_experts_are_refused():
    with pytest.raises(nf4.InvalidArgument, match="calibration is given with experts=True"):
        quantize_model(mixture(), calibration=tokens(), experts=True)


@pytest.mark.parametrize(
    "said, options, change",
    [
        ("has 2047 tokens; at least 2048", {"calibration": torch.ones(1, 2047).long()}, None),
        ("calibration is torch.float32 of 2", {"calibration": torch.ones(8, 512)}, None),
        ("calibration is torch.int64 of 1", {"calibration": torch.ones(4096).long()}, None),
        ("calibration is of type str", {"calibration": "text"}, None),
        ("the token 64; the model has 64", {"calibration": torch.full((8, 512), 64)}, None),
        ("the token -1; the model has 64", {"calibration": torch.full((8, 512), -1)}, None),
        ('given with format "mxfp4"', {"format": "mxfp4"}, None),
        ("with asymmetric integers", {"format": "int4", "symmetric": False}, None),
        ("no list of decoder layers", {}, of_nothing),
        ("windows of 1024 tokens; the model takes 512", {"calibration": torch.ones(4, 1024).long()},
         None),
        ("layers.2 is not called once, with what", {}, shared),
        ("layers.1 is not called once, with what", {}, changed_between),
        ("model.layers.0.self_attn.q_proj: x has NaN or Inf", {}, huge),
    ],
)  # fmt: skip
def test_what_is_refused_by_quantize_model(said, options, change):
    model = llama()
    if change is not None:
        change(model)
    with pytest.raises(nf4.InvalidArgument, match=said):
        quantize_model(model, **{"calibration": tokens(), **options})
    assert not any(isinstance(each, NF4Linear) for each in model.modules())
    assert getattr(model.config, "quantization_config", None) is None


def test_weights_that_are_not_finite_are_refused_even_if_allowed():
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(nf4.InvalidArgument, match="up_proj: the weight has NaN or Inf"):
        quantize_model(model, calibration=tokens(), allow_nonfinite=True)


def nan_in_file(model):
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan


def inf_in_file(model):
    model.model.embed_tokens.weight.data[3] = torch.inf


@pytest.mark.parametrize(
    "said, code, text, words, change",
    [
        ("has 0 tokens", 2, "", [], None),
        ("calibration has 1536 tokens in whole windows of 512; at least 2048", 2, "w1 " * 2000, [],
         None),
        ("text has 3 tokens; a window of the calibration has 512", 2, "w1 w2 w3", [], None),
        ("is not UTF-8", 3, b"\xff", [], None),
        ("device 'nowhere'", 2, "w1 " * 4000, ["--device", "nowhere"], None),
        ("mxfp4", 2, "w1 " * 4000, ["--format", "mxfp4"], None),
        ("asymmetric", 2, "w1 " * 4000, ["--format", "int4", "--asymmetric"], None),
        ("no --allow-nonfinite", 2, "w1 " * 4000, ["--allow-nonfinite"], None),
        ("up_proj.weight': it has NaN or Inf", 3, "w1 " * 4000, [], nan_in_file),
        ("q_proj: x has NaN or Inf", 2, "w3 " * 4000, [], inf_in_file),
    ],
)  # fmt: skip
def test_what_is_refused_by_the_command(tmp_path, capsys, said, code, text, words, change):
    model = llama()
    if change is not None:
        change(model)
    folder_of(model, tmp_path / "dense")
    (tmp_path / "text").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert command(tmp_path, tmp_path / "text", *words) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_device_without_calibration_is_refused(tmp_path, capsys):
    dense = folder_of(llama(), tmp_path / "dense")
    assert main(["quantize", str(dense), str(tmp_path / "made"), "--device", "cpu"]) == 2
    assert "--device is an option of --calibrate" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_named(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "dense")
    assert command(tmp_path, text_of(tmp_path / "text", tokens())) == 3
    assert "it has no tokenizer.json" in capsys.readouterr().err
