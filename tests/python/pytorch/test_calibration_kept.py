"""An interrupted `nf4 quantize --calibrate` continues after the decoder layers that it has done,
to the same bytes."""

from __future__ import annotations

import pytest
import torch_cases

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("seeded", "in_process")]
torch_cases.require("torch", "transformers", "tokenizers")

import torch  # noqa: E402
from nf4.checkpoint.errors import OutputRefused  # noqa: E402
from nf4.torch.calibration import checkpoints  # noqa: E402
from nf4.torch.calibration.kept import Kept  # noqa: E402
from test_calibration import command, folder_of, huge, llama, text_of, tokens  # noqa: E402

OPTIONS = {
    "nf4": (torch.float16, ()),
    "flat fp4, one layer": (torch.float32, ("--format=fp4", "--flat", "--only=*.layers.1.mlp.*")),
    "gptq": (torch.bfloat16, ("--format=int4", "--layout=gptq", "--group-size=32")),
}


def interrupted(folder, text, monkeypatch, *words):
    """Runs the command, which is interrupted after the first decoder layer."""
    save = Kept.save

    def last(self, layer, weights):
        save(self, layer, weights)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "save", last)
        assert command(folder, text, *words) == 130
    assert not (folder / "made").exists()
    assert [path.name for path in folder_of_kept(folder).iterdir()] == ["0.safetensors"]


def folder_of_kept(folder):
    return folder / ".made.nf4-calibration"


def counted(monkeypatch):
    """The decoder layers that are rounded from now on."""
    found, rounds = [], checkpoints.models.round_layers

    def counting(model, names, batches, rounds_one, advance, restore):
        def asked(name):
            restored = restore(name)
            found.extend([] if restored else [name])
            return restored

        rounds(model, names, batches, rounds_one, advance, asked)

    monkeypatch.setattr(checkpoints.models, "round_layers", counting)
    return found


def written(folder):
    made = folder / "made"
    found = {path.name: path.read_bytes() for path in made.iterdir()}
    for path in made.iterdir():
        path.unlink()
    made.rmdir()
    return found


@pytest.mark.parametrize("case", OPTIONS)
def test_an_interrupted_run_continues_to_the_same_bytes(tmp_path, monkeypatch, capsys, case):
    dtype, words = OPTIONS[case]
    folder_of(llama().to(dtype), tmp_path / "dense")
    text = text_of(tmp_path / "text", tokens())
    assert command(tmp_path, text, *words) == 0
    whole, at_rest = written(tmp_path), set(tmp_path.iterdir())
    capsys.readouterr()
    interrupted(tmp_path, text, monkeypatch, *words)
    assert "keeps what is done: the same command continues from it" in capsys.readouterr().err
    rounded = counted(monkeypatch)
    assert command(tmp_path, text, *words) == 0
    assert "continuing after 1 decoder layers" in capsys.readouterr().err
    assert rounded == ["model.layers.1"]
    assert written(tmp_path) == whole and set(tmp_path.iterdir()) == at_rest


@pytest.mark.parametrize("other", ["text", "options", "weights", "threads"])
def test_other_inputs_begin_anew(tmp_path, monkeypatch, capsys, other):
    folder_of(llama(), tmp_path / "dense")
    text, words = text_of(tmp_path / "text", tokens()), []
    interrupted(tmp_path, text, monkeypatch)
    if other == "text":
        text_of(text, tokens())
    elif other == "options":
        words = ["--flat"]
    elif other == "threads":
        monkeypatch.setattr(checkpoints.torch, "get_num_threads", lambda: 99)
    else:
        folder_of(llama(), tmp_path / "dense")
    capsys.readouterr()
    rounded = counted(monkeypatch)
    assert command(tmp_path, text, *words) == 0
    assert "kept by a calibration with other inputs; it begins anew" in capsys.readouterr().err
    assert rounded == ["model.layers.0", "model.layers.1"]
    resumed = written(tmp_path)
    assert not folder_of_kept(tmp_path).exists()
    assert command(tmp_path, text, *words) == 0
    assert written(tmp_path) == resumed


def test_a_failure_that_would_come_again_keeps_nothing(tmp_path, capsys):
    model = llama()
    huge(model)
    folder_of(model, tmp_path / "dense")
    before = set(tmp_path.iterdir())
    (tmp_path / "text").write_text("w3 " * 4000)
    assert command(tmp_path, tmp_path / "text") == 2
    assert set(tmp_path.iterdir()) == {*before, tmp_path / "text"}


def test_an_output_that_cannot_be_written_keeps_all_layers(tmp_path, monkeypatch):
    folder_of(llama(), tmp_path / "dense")
    text = text_of(tmp_path / "text", tokens())

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nf4.checkpoint.convert.write_checkpoint", fail)
        assert command(tmp_path, text) == 4
    rounded = counted(monkeypatch)
    assert command(tmp_path, text) == 0
    assert not rounded


def test_one_process_at_a_time(tmp_path):
    path, device = str(tmp_path / "kept"), torch.device("cpu")
    first = Kept(path, "a", device)
    with pytest.raises(OutputRefused, match="another calibration for this output is running"):
        Kept(path, "a", device)
    first.save(0, {})
    first.close()
    second = Kept(path, "a", device)
    assert (second.count, second.load(0), second.load(1)) == (1, {}, None)
    second.remove()
    assert not (tmp_path / "kept").exists()


def test_files_that_do_not_count_are_removed(tmp_path):
    """Of other inputs, damaged or left by an interrupted write, and all after them."""
    path, device = tmp_path / "kept", torch.device("cpu")

    def opened(inputs="a"):
        found = Kept(str(path), inputs, device)
        found.close()
        return found.count, found.is_of_other_inputs, sorted(each.name for each in path.glob("*"))

    first = Kept(str(path), "a", device)
    for layer in range(4):
        first.save(layer, {})
    first.close()
    (path / "2.safetensors").write_bytes(b"damaged")
    (path / "4.safetensors.part").write_bytes(b"")
    names = ["0.safetensors", "1.safetensors"]
    assert opened() == (2, False, names)
    other = Kept(str(path), "b", device)
    other.close()
    assert other.is_of_other_inputs and not path.exists()


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    kept = Kept(str(tmp_path / "kept"), "a", torch.device("cpu"))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.save(0, {})
    kept.close()
    assert not list(tmp_path.iterdir())
