"""PEFT's target_parameters over experts in 4 bits: results and gradients are PEFT's over the same
experts, dense."""

from __future__ import annotations

import nf4
import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers", "peft")

import nf4.torch  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
from experts_cases import MODELS, TOKENS, dense_twin, qwen3  # noqa: E402
from nf4.torch import NF4Experts, quantize_model  # noqa: E402
from nf4.torch.experts import quantize_stack  # noqa: E402

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(model, **options):
    config = {"r": 4, "lora_alpha": 12, "target_modules": [], "target_parameters": TARGETS}
    made = peft.get_peft_model(model, peft.LoraConfig(**config | options))
    torch.manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    return made


def pair(name, dtype=torch.float32, **options):
    """With experts in 4 bits, and dense."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    quantize_model(model, experts=True)
    twin = dense_twin(model)
    return adapted(model, **options), adapted(twin, **options)


def step(model, autocast=None):
    model.zero_grad()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        logits = model(TOKENS).logits.float()
    logits.square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def require_near(found, expected, allowed):
    assert (found - expected).norm() <= allowed * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_over_dense_experts(name):
    model, twin = pair(name)
    assert sum(isinstance(each, NF4Experts) for each in model.modules()) == 4
    (logits, grads), (expected, theirs) = step(model), step(twin)
    require_near(logits, expected, 1e-5)
    # 2 layers of 2 stacks with an A and a B.
    assert grads.keys() == theirs.keys() and len(grads) == 8
    for key, grad in grads.items():
        assert theirs[key].any()
        require_near(grad, theirs[key], 1e-4)
    with model.disable_adapter(), twin.disable_adapter():
        require_near(model(TOKENS).logits, twin(TOKENS).logits, 1e-5)
        assert not torch.equal(model(TOKENS).logits, logits)


def test_16_bits_autocast_and_checkpointing():
    model, twin = pair("qwen3", torch.bfloat16)
    for (logits, grads), (expected, theirs) in (
        (step(model), step(twin)),
        (step(model, torch.bfloat16), step(twin, torch.bfloat16)),
    ):
        require_near(logits, expected, 4e-2)
        for key, grad in grads.items():
            assert grad.dtype == torch.float32
            require_near(grad, theirs[key], 8e-2)
    model.enable_input_require_grads()
    _, before = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    _, after = step(model)
    for key, grad in before.items():
        torch.testing.assert_close(after[key], grad)


def test_two_adapters_and_saved_ones():
    model, twin = pair("qwen3")
    for each in (model, twin):
        torch.manual_seed(9)
        config = {"target_modules": [], "target_parameters": TARGETS, "r": 8}
        each.add_adapter("more", peft.LoraConfig(**config, init_lora_weights=False))
        each.base_model.set_adapter(["default", "more"])
    require_near(model(TOKENS).logits, twin(TOKENS).logits, 1e-5)
    saved = peft.get_peft_model_state_dict(twin, adapter_name="more")
    assert saved.keys() == peft.get_peft_model_state_dict(model, adapter_name="more").keys()
    for each in (model, twin):
        each.base_model.set_adapter("default")
    halved = {name: 0.5 * each for name, each in saved.items()}
    peft.set_peft_model_state_dict(model, halved, adapter_name="more")
    peft.set_peft_model_state_dict(twin, halved, adapter_name="more")
    for each in (model, twin):
        each.base_model.set_adapter("more")
    require_near(model(TOKENS).logits, twin(TOKENS).logits, 1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_merging_quantizes_the_sum(name):
    """Each weight is as near to the merged dense one as NF4 brings it; and back again."""
    model, twin = pair(name)
    dense = twin.merge_and_unload()
    before = {n: m.dequantize() for n, m in model.named_modules() if isinstance(m, NF4Experts)}
    model.merge_adapter()
    merged = {n: m.dequantize() for n, m in model.named_modules() if isinstance(m, NF4Experts)}
    assert len(merged) == 4
    for key, each in merged.items():
        wanted = dense.get_parameter(
            key.removeprefix("base_model.model.").replace(".base_layer", "")
        )
        wanted = wanted.transpose(1, 2) if name == "gpt-oss" else wanted
        require_near(each, wanted, 0.12)
        assert (before[key] - wanted).norm() > 0.5 * wanted.norm()
    model.unmerge_adapter()
    for key, each in before.items():
        found = model.get_submodule(key).dequantize()
        assert (found - each).norm() <= 0.2 * merged[key].norm()
    unloaded = model.merge_and_unload(safe_merge=True)
    assert sum(isinstance(each, NF4Experts) for each in unloaded.modules()) == 4
    assert not any("lora_" in key for key in unloaded.state_dict())


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_merging_into_other_formats(format):
    torch.manual_seed(0)
    model = MODELS["qwen3"]()
    for name in [name for name, _ in model.named_parameters() if name.endswith(tuple(TARGETS))]:
        quantize_stack(model, name, None, format=format)
    twin = adapted(dense_twin(model))
    model = adapted(model)
    require_near(step(model)[0], step(twin)[0], 1e-5)
    merged, dense = model.merge_and_unload(safe_merge=True), twin.merge_and_unload()
    stacks = {n: m for n, m in merged.named_modules() if isinstance(m, NF4Experts)}
    assert len(stacks) == 4
    for name, stack in stacks.items():
        assert stack.format == format
        require_near(stack.dequantize(), dense.get_parameter(name), 0.13)


def test_packed_bytes_are_no_target():
    model = qwen3()
    quantize_model(model, experts=True)
    for target, instead in (
        ("experts.gate_up_proj.weight", "'experts.gate_up_proj' in target_parameters"),
        ("q_proj.weight", "'q_proj' in target_modules"),
    ):
        config = peft.LoraConfig(target_modules=[], target_parameters=[target])
        with pytest.raises(nf4.InvalidArgument, match=f"packed bytes of .*{instead}"):
            peft.get_peft_model(model, config)


def test_a_peft_that_is_not_known(monkeypatch):
    """All of its functions are left alone, and one line names the experts and the first."""
    from nf4.torch import peft as nf4_peft

    nf4_peft.unregister()
    wrapper, forward = (
        peft.tuners.lora.layer.ParamWrapper,
        peft.tuners.lora.layer.ParamWrapper.forward,
    )
    try:
        with monkeypatch.context() as patch:
            patch.setattr(wrapper, "forward", lambda *a, **k: forward(*a, **k))
            found = nf4_peft.register()
            assert found.left_alone == ["peft.tuners.lora.layer.ParamWrapper.forward"]
            model = qwen3()
            quantize_model(model, experts=True)
            known = (
                r"experts.gate_up_proj gets no adapter: libnf4 does not know .*ParamWrapper.forward"
            )
            with pytest.warns(match=known):
                made = adapted(model, target_modules=["q_proj"])
            assert not any("experts" in n for n, p in made.named_parameters() if p.requires_grad)
            nf4_peft.unregister()
    finally:
        nf4_peft.register()


def test_experts_of_rows_that_grouped_mm_does_not_take_back():
    """20 of 16 bits are no whole number of 16 bytes, which the gradient of its result needs."""
    from nf4.torch._expert_adapters import ExpertAdapter

    a, b, x = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
               for shape in ((3, 8, 64), (3, 20, 8), (6, 64)))  # fmt: skip
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    y = torch.zeros(6, 20, dtype=torch.bfloat16)
    made = ExpertAdapter(a, b, 2.0).added(y, x, ends, None)
    experts = torch.tensor([0, 0, 1, 2, 2, 2])
    products = torch.einsum("mrk,mk->mr", a.float()[experts], x.float())
    expected = 2 * torch.einsum("mor,mr->mo", b.float()[experts], products)
    grads = [torch.autograd.grad(each.square().sum(), (x, a, b)) for each in (made, expected)]
    for found, exact in zip(*grads, strict=True):
        require_near(found, exact, 2e-2)


def test_routings_that_are_wrong_add_nothing_elsewhere():
    """Ends beyond the rows, rows without an expert, and a row of x that is not there."""
    layer = NF4Experts.from_dense(torch.randn(3, 8, 64))
    from nf4.torch._expert_adapters import ExpertAdapter

    a = torch.randn(3, 4, 64, requires_grad=True)
    b = torch.randn(3, 8, 4, requires_grad=True)
    x = torch.randn(4, 64, requires_grad=True)
    index = torch.tensor([0, 9, 3, -1, 2], dtype=torch.int32)
    for ends in ([2, 1, 4], [0, 9, 9], [0, 0, 0]):
        ends = torch.tensor(ends, dtype=torch.int32)
        y = torch.zeros(5, 8)
        made = ExpertAdapter(a, b, 2.0).added(y, x, ends, index)
        grads = torch.autograd.grad(made.square().sum(), (x, a, b))
        expected, bounds = [], ends.cummax(0).values.clamp(max=5).tolist()
        for row, at in enumerate(index.tolist()):
            expert = next((e for e, end in enumerate(bounds) if row < end), None)
            known = expert is not None and 0 <= at < 4
            expected.append(2 * b[expert] @ (a[expert] @ x[at]) if known else torch.zeros(8))
        expected = torch.stack(expected)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
        if expected.requires_grad:
            theirs = torch.autograd.grad(expected.square().sum(), (x, a, b))
            for grad, each in zip(grads, theirs, strict=True):
                require_near(grad, each, 1e-5)
    layer.adapters = (ExpertAdapter(a, b, 2.0),)
    ends = torch.zeros(3, dtype=torch.int32)
    assert layer(x[:0], ends).shape == (0, 8)
    assert torch.equal(layer(x, ends, index[:0]), torch.zeros(0, 8))
