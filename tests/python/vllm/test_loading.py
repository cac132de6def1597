"""The tensors of a layer arrive as vLLM's loaders hand them over, without vLLM."""

import pytest
from test_arrivals import dense, tensors

torch = pytest.importorskip("torch")
nf4_torch = pytest.importorskip("nf4.torch")
loading = pytest.importorskip("nf4.vllm.loading")

pytestmark = pytest.mark.interop


class Method(loading.Loading):
    """Keeps complete weights in the layer."""

    def __init__(self, quantize=None, expected=None):
        self.quantize = quantize
        self.expected = expected or {"": torch.uint8, "absmax": torch.uint8}

    def arrive(self, layer, part, tensor, shard=None):
        weight = self.completed(layer, shard, "layer", part, tensor)
        if weight is not None:
            layer.found[shard] = weight
        return shard != "of another rank"


def layer_of(method):
    layer = torch.nn.Module()
    layer.found = {}
    method.expect(layer, ["weight"], torch.bfloat16)
    return layer


def load(layer, parts, *shard, **named):
    for part, tensor in parts.items():
        param = layer.get_parameter(f"weight_{part}" if part else "weight")
        last = param.weight_loader(param, tensor, *shard, **named)
    return last


def test_shards_arrive_side_by_side():
    layer = layer_of(Method())
    weight, parts = tensors()
    assert load(layer, parts, "q") is None and load(layer, parts, shard="k") is None
    assert load(layer, parts, "of another rank", return_success=True) is False
    assert load(layer, parts, return_success=True) is True
    assert layer.found.keys() == {"q", "k", "of another rank", None}
    assert all(torch.equal(dense(each), dense(weight)) for each in layer.found.values())
    loading.drop(layer)
    assert not list(layer.parameters())


def test_a_dense_weight_is_quantized_where_that_is_asked_for():
    matrix = torch.randn(8, 64)
    for quantize in (None, nf4_torch.quantize):
        method = Method(quantize, {"": None})
        layer = layer_of(method)
        assert layer.weight.dtype == torch.bfloat16
        load(layer, {"": matrix})
        if quantize is None:
            assert layer.found[None] is matrix
        else:
            assert torch.equal(dense(layer.found[None]), dense(nf4_torch.quantize(matrix)))


def test_what_is_incomplete_is_named():
    layer = layer_of(Method())
    _, parts = tensors()
    del parts["absmax"]
    load(layer, parts)
    with pytest.raises(ValueError, match=r"layer: the checkpoint lacks \['absmax'\]"):
        loading.drop(layer)


def test_on_meta_nothing_arrives():
    """vLLM counts the tensors of a layer so, before it loads its weights again."""
    layer = layer_of(Method())
    _, parts = tensors()
    meta = torch.nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    assert layer.weight.weight_loader(meta, parts[""], return_success=True) is True
    assert not layer.nf4_arrivals


def test_a_cut_that_does_not_fit_names_the_layer():
    weight, _ = tensors()
    with pytest.raises(ValueError, match="qkv_proj: columns 0 to 20 of a weight of 96x64"):
        loading.local("qkv_proj", weight, 1, [(0, 20)], torch.device("cpu"))


@pytest.mark.parametrize("flat_on", [(), ("cpu",)])
def test_a_local_part_has_memory_of_its_own(flat_on, monkeypatch):
    monkeypatch.setattr(loading, "FLAT_ON", flat_on)
    weight, _ = tensors()
    made = loading.local("qkv_proj", weight, 0, [(0, 96)], torch.device("cpu"))
    assert torch.equal(dense(made), dense(weight)) and made.nested == (not flat_on)
    assert made.packed.data_ptr() != weight.packed.data_ptr()
