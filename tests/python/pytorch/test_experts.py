"""NF4Experts, and transformers' models with experts in 4 bits: logits and gradients are those of
the same model with the dequantized weights."""

from __future__ import annotations

import copy
import io

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers")

import nf4.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from experts_cases import MODELS, SIZES, TOKENS, dense_twin, qwen3  # noqa: E402
from nf4.torch import NF4Experts, _fast, quantize_model  # noqa: E402
from nf4.torch._replacing_layers import is_in_4_bits  # noqa: E402
from nf4.torch.distributed._prepare import prepare_layers  # noqa: E402
from nf4.torch.experts import _routing  # noqa: E402


def stacks_of(model):
    return [name for name, each in model.named_modules() if isinstance(each, NF4Experts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_dequantized_weights(name, dtype):
    model = MODELS[name]().to(dtype)
    replaced = quantize_model(model, experts=True)
    stacks = stacks_of(model)
    assert len(stacks) == 2 * 2 and set(stacks) <= set(replaced)
    assert not any(each.dim() == 3 for each in model.parameters())
    twin = dense_twin(model)
    allowed = 1e-5 if dtype == torch.float32 else 4e-2
    embedded = model.get_input_embeddings()(TOKENS).detach()
    results = []
    for each in (model, twin):
        x = embedded.clone().requires_grad_()
        logits = each(inputs_embeds=x).logits.float()
        (grad,) = torch.autograd.grad(logits.square().sum(), x)
        results.append((logits.detach(), grad.float()))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= allowed * expected.norm()


def test_generation_and_compilation():
    model = qwen3()
    quantize_model(model, experts=True)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        for tokens in (TOKENS, TOKENS.repeat(2, 1)):  # 44 rows, and more than experts.FEW
            expected = model(tokens).logits
            torch.testing.assert_close(compiled(tokens).logits, expected)
        made = model.generate(TOKENS[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
        twin = dense_twin(model)
        theirs = twin.generate(TOKENS[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(made, theirs)


DTYPES = torch.int64, torch.int32, torch.uint8
EXPERTS = 6


def routed(tokens, experts, dtype=torch.int64, top_k=2):
    x = torch.randn(tokens, 64, requires_grad=True)
    chosen = torch.rand(tokens, experts).topk(top_k).indices.to(dtype)
    return x, chosen, torch.rand(tokens, top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_compiled_rows_are_routed_as_eager_ones(dtype):
    compiled = torch.compile(_routing, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (1, 5, 32):
        # Parallel ranks number the experts of others behind their own: rows of no expert.
        _, chosen, _ = routed(tokens, EXPERTS + 1, dtype)
        for found, expected in zip(
            compiled(chosen, EXPERTS)[:2], _routing(chosen, EXPERTS)[:2], strict=True
        ):
            assert torch.equal(found, expected) and found.dtype == torch.int32


def test_few_compiled_rows_are_multiplied_as_eager_ones():
    model = qwen3()
    quantize_model(model, experts=True)
    experts = model.model.layers[0].mlp.experts
    layer = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens, dtype in zip((1, 5, 32), DTYPES, strict=True):
        x, chosen, weights = routed(tokens, experts.num_experts, dtype)
        y, expected = layer(x, chosen, weights), experts(x, chosen, weights)
        torch.testing.assert_close(y, expected)
        dy = torch.randn_like(y)
        grads = [torch.autograd.grad(each, x, dy)[0] for each in (y, expected)]
        torch.testing.assert_close(*grads)


def test_few_experts_rows_are_exported_for_a_range_of_tokens():
    model = qwen3()
    quantize_model(model, experts=True)
    experts = model.model.layers[0].mlp.experts
    tokens = torch.export.Dim("tokens", min=2, max=16)
    with torch.no_grad():
        exported = torch.export.export(
            experts, routed(5, 6), dynamic_shapes=({0: tokens},) * 3, strict=False
        ).module()
        for count in (3, 16):
            given = routed(count, 6)
            torch.testing.assert_close(exported(*given), experts(*given))


def test_a_state_dict_loads_into_a_model_quantized_alike():
    model, other = qwen3(), qwen3()
    for each in (model, other):
        quantize_model(each, experts=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    name = f"{stacks_of(model)[0]}.weight"
    assert {f"{name}.absmax", f"{name}.quant_state.bitsandbytes__nf4"} <= saved.keys()
    with torch.no_grad():
        assert not torch.equal(model(TOKENS).logits, other(TOKENS).logits)
        other.load_state_dict(saved)
        assert torch.equal(model(TOKENS).logits, other(TOKENS).logits)
        assert torch.equal(model(TOKENS).logits, copy.deepcopy(model)(TOKENS).logits)


def test_experts_stay_dense_unless_asked_and_by_patterns():
    model = qwen3()
    quantize_model(model)
    assert stacks_of(model) == []
    model = qwen3()
    quantize_model(model, experts=True, skip=["layers.0.mlp.experts"])
    assert stacks_of(model) == [
        f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    ]
    # One implementation serves both kinds of layers.
    twin = dense_twin(model)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, twin(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_experts_of_other_ranks_add_nothing():
    """Expert parallelism numbers them as num_experts, with a weight of 0."""
    model = qwen3()
    quantize_model(model, experts=True)
    ours = model.model.layers[0].mlp.experts
    theirs = dense_twin(model).model.layers[0].mlp.experts
    x, weights = torch.randn(5, 64), torch.rand(5, 2)
    chosen = torch.tensor([[0, 6], [6, 6], [5, 1], [6, 2], [3, 6]])
    weights = weights.masked_fill(chosen == 6, 0)
    results = []
    for each, implementation in ((ours, "nf4"), (theirs, "grouped_mm")):
        each._is_expert_parallel = True
        each.config._experts_implementation = implementation
        given = x.clone().requires_grad_()
        y = each(given, chosen, weights)
        results.append((y.detach(), torch.autograd.grad(y.square().sum(), given)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    assert not results[0][0][1].any() and results[0][0].isfinite().all()


def gate_up(model):
    return model.model.layers[1].mlp.experts.gate_up_proj.data


@pytest.mark.parametrize(
    ("break_it", "options", "message"),
    [
        (None, {"format": "int4", "group_size": 32}, "experts is True; expected False"),
        (None, {"blocksize": 4096 * 2}, "blocksize"),
        (None, {"skip": ["*down_proj"]}, "down_proj dense beside a stack of .*both or neither"),
        (lambda model: gate_up(model).fill_(float("nan")), {}, "gate_up_proj: the weight has NaN"),
        (lambda model: model.model.layers[1].mlp.experts.double(), {}, "proj: dtype torch.float64"),
    ],
)
def test_what_is_refused_changes_nothing(break_it, options, message):
    model = qwen3()
    if break_it is not None:
        break_it(model)
    with pytest.raises(nf4.InvalidArgument, match=message):
        quantize_model(model, experts=True, **options)
    assert not any(map(is_in_4_bits, model.modules()))
    assert stacks_of(model) == []


def test_experts_that_begin_within_a_block_are_named():
    config = transformers.Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 1},
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=32,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    with pytest.raises(nf4.InvalidArgument, match="down_proj: an expert has 512 elements"):
        quantize_model(model, experts=True, blocksize=1024)


def test_a_model_without_experts_is_refused():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(nf4.InvalidArgument, match="experts is True, but the model has no experts"):
        quantize_model(model, experts=True)


class TestTheModule:
    def test_it_is_the_weight_it_was_made_of(self):
        weight = torch.randn(3, 8, 64, dtype=torch.bfloat16)
        layer = NF4Experts.from_dense(weight)
        assert layer.dequantize().dtype == torch.bfloat16
        assert torch.equal(layer.dequantize(), nf4.torch.dequantize(nf4.torch.quantize(weight)))
        turned = NF4Experts.from_dense(weight.transpose(1, 2), transposed=True)
        assert torch.equal(turned.dequantize(), layer.dequantize())
        assert "experts=3, out_features=8, in_features=64, format=nf4, blocksize=" in repr(layer)

    @pytest.mark.parametrize(
        "move", [lambda each: each.half(), lambda each: prepare_layers([each])]
    )
    def test_what_it_keeps_goes_when_its_parts_do(self, move, monkeypatch):
        monkeypatch.setattr(_fast, "linear_grouped", lambda *given: None)
        layer = NF4Experts.from_dense(torch.randn(3, 8, 64))
        layer(torch.randn(2, 64), torch.tensor([0, 1, 2], dtype=torch.int32))
        assert layer._kept is not None
        move(layer)
        assert layer._kept is None

    def test_casts_reach_no_scale(self):
        layer = NF4Experts.from_dense(torch.randn(3, 8, 64), nested_blocksize=0).half()
        assert layer.absmax.dtype == torch.float32

    def test_one_of_zeros_takes_a_state_dict(self):
        layer = NF4Experts.from_dense(torch.randn(3, 8, 64))
        other = NF4Experts(3, 8, 64)
        assert not other.dequantize().any()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other.dequantize(), layer.dequantize())
        assigned = NF4Experts(3, 8, 64, device="meta")
        assigned.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(assigned.dequantize(), layer.dequantize())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda state: state.pop("weight"), "Missing key.*weight"),
            (lambda state: state.pop("weight.absmax"), "weight.absmax is missing"),
            (lambda state: state.update({"weight.more": torch.ones(1)}), "Unexpected.*weight.more"),
        ],
    )
    def test_a_state_dict_that_does_not_fit(self, change, message):
        layer = NF4Experts.from_dense(torch.randn(3, 8, 64))
        state = dict(layer.state_dict())
        change(state)
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)

    def test_what_is_refused(self):
        with pytest.raises(nf4.InvalidArgument, match="expected 3 dimensions"):
            NF4Experts.from_dense(torch.randn(8, 64))
        with pytest.raises(nf4.InvalidArgument, match="an expert has 165 elements"):
            NF4Experts.from_dense(torch.randn(3, 5, 33))
        with pytest.raises(RuntimeError, match="weight is of shape .3, 8, 128.; expected"):
            NF4Experts(3, 8, 64).load_state_dict(
                NF4Experts.from_dense(torch.randn(3, 8, 128)).state_dict()
            )

    def test_memory_that_moves_is_followed(self):
        layer = NF4Experts.from_dense(torch.randn(3, 8, 64))
        x, ends = torch.randn(2, 64), torch.tensor([1, 1, 2], dtype=torch.int32)
        expected = layer(x, ends)
        assert torch.equal(layer(x, ends), expected)
        layer.weight.data = layer.weight.data.clone()
        assert torch.equal(layer(x, ends), expected)
        layer.absmax = layer.absmax.clone()
        layer.absmax.fill_(200)
        assert not torch.equal(layer(x, ends), expected)
        other = NF4Experts.from_dense(torch.randn(3, 8, 64))
        layer.load_state_dict(other.state_dict())
        assert torch.equal(layer(x, ends), other(x, ends))
        assert torch.equal(copy.deepcopy(layer)(x, ends), other(x, ends))
