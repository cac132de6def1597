"""Compares the logits of two checkpoints of one language model on texts. Imports transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from nf4.checkpoint import FormatError
from nf4.checkpoint.errors import OptionError
from nf4.checkpoint.jsonio import read_bytes
from nf4.torch._annotations import PreTrainedModel
from nf4.torch.distributed.empty_models import empty_model
from nf4.torch.distributed.loading import load_alone
from nf4.typing import DTypeLike

_TOKENIZER = "tokenizer.json"
# Rows of logits that are in float64 at a time.
_ROWS = 64


@dataclasses.dataclass
class Judged:
    """Sums over the scored tokens of a text: the loss -log p of the reference and of the other
    model, the square of their difference, the KL divergence of the other's distribution from the
    reference's (all in nats), and how often both have the same most likely token."""

    tokens: int = 0
    windows: int = 0
    reference_loss: float = 0.0
    other_loss: float = 0.0
    squared_change: float = 0.0
    divergence: float = 0.0
    same_top: int = 0

    def __add__(self, more: Judged) -> Judged:
        return Judged(
            *map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True))
        )

    @property
    def perplexities(self) -> tuple[float, float]:
        """Those of the reference and of the other model; inf where a float cannot hold them."""
        losses = self.reference_loss / self.tokens, self.other_loss / self.tokens
        return tuple(math.exp(each) if each < 700 else math.inf for each in losses)

    @property
    def loss_change(self) -> tuple[float, float]:
        """The mean difference of the losses, and its standard error if tokens were independent."""
        mean = (self.other_loss - self.reference_loss) / self.tokens
        variance = max(0.0, self.squared_change / self.tokens - mean * mean)
        return mean, math.sqrt(variance / self.tokens)


class Encoded(NamedTuple):
    """A text as tokens. prefix: the special tokens that a text begins with, such as <s>."""

    name: str
    prefix: list[int]
    tokens: list[int]


class Window(NamedTuple):
    """The tokens from begin to end, after the prefix. Those from scored on are scored."""

    begin: int
    end: int
    scored: int


def windows(count: int, prefix: int, window: int, stride: int) -> Iterator[Window]:
    """Yields windows of `window` tokens, prefix included, that begin `stride` tokens after each
    other, until each of `count` tokens is scored once, in the first window that has it. Without a
    prefix the first token of a text is not scored, because nothing is before it."""
    begin, scored = 0, 0 if prefix else 1
    while scored < count:
        end = min(begin + window - prefix, count)
        yield Window(begin, end, scored)
        begin, scored = begin + stride, end


def encoded(
    folders: Sequence[str], texts: Sequence[tuple[str, str]], window: int, stride: int
) -> list[Encoded]:
    """Returns the tokens of texts (names and contents), by the tokenizer.json of the folders.

    Raises FormatError if no folder has one, or if two make different tokens of a text, and
    OptionError for a text that is too short, or windows that leave a token without context."""
    tokenizers = _tokenizers(folders)
    first, *others = tokenizers
    result = []
    for name, text in texts:
        found = {path: _tokens(tokenizer, text) for path, tokenizer in tokenizers.items()}
        for path in others:
            if found[path] != found[first]:
                raise FormatError(path, f"it makes other tokens of {name} than {first}")
        prefix, tokens = found[first]
        if len(prefix) + len(tokens) < 2:
            count = f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"
            raise OptionError(f"{name} has {count}; at least {2 - len(prefix)} are needed")
        context = len(prefix) or 1
        if not 1 <= stride <= window - context:
            raise OptionError(
                f"the stride is {stride}; expected 1 to {window - context} for windows of {window} "
                f"tokens"
            )
        result.append(Encoded(name, prefix, tokens))
    return result


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Turns torch's ways to say that memory ran out into MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from None
        raise


class Judge:
    """Two checkpoints of a causal language model, loaded in one dtype.

    reference, other   folders of any form that empty_model takes
    dtype              of everything that is not in 4 bits, and of the computation
    device             where both models are
    window, stride     as for `windows`

    Raises FormatError for a folder that is not read, and OptionError for a model that is no causal
    language model or takes only shorter windows, and for a device that torch does not have.
    """

    def __init__(
        self,
        reference: str,
        other: str,
        *,
        dtype: DTypeLike = "fp32",
        device: str = "cpu",
        window: int = 512,
        stride: int = 256,
    ):
        self._paths = reference, other
        self._window, self._stride = window, stride
        self._device = device_of(device)
        self._models = [causal_model(path, dtype, window) for path in self._paths]
        with memory_errors():
            for path, model in zip(self._paths, self._models, strict=True):
                load_alone(model, path, self._device)
                model.to(self._device)

    def judge(self, text: Encoded, advance: Callable[[str, int], None]) -> Judged:
        """Judges a text. advance: called with the text's name and the tokens of each window."""
        for path, model in zip(self._paths, self._models, strict=True):
            known, largest = model.get_input_embeddings().weight.shape[0], max(text.tokens)
            if largest >= known:
                reason = f"it has {known} tokens, and the tokenizer makes {largest} of {text.name}"
                raise FormatError(path, reason)
        total = Judged()
        places = windows(len(text.tokens), len(text.prefix), self._window, self._stride)
        for window in places:
            with memory_errors():
                total += self._of_window(text, window)
            advance(text.name, window.end - window.scored)
        return total

    @torch.inference_mode()
    def _of_window(self, text: Encoded, window: Window) -> Judged:
        tokens = [*text.prefix, *text.tokens[window.begin : window.end]]
        ids = torch.tensor([tokens], device=self._device)
        count = window.end - window.scored
        targets = ids[0, -count:]
        logits = []
        for path, model in zip(self._paths, self._models, strict=True):
            found = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1]
            if not found.isfinite().all():
                where = f"tokens {window.begin} to {window.end} of {text.name}"
                raise FormatError(path, f"its logits have NaN or Inf for {where}")
            logits.append(found)
        known = [each.shape[1] for each in logits]
        if known[0] != known[1]:
            reason = f"its logits are of {known[1]} tokens, those of {self._paths[0]} of {known[0]}"
            raise FormatError(self._paths[1], reason)
        result = Judged(tokens=count, windows=1)
        for at in range(0, count, _ROWS):
            rows = slice(at, at + _ROWS)
            result += compare_logits(logits[0][rows], logits[1][rows], targets[rows])
        return result


def compare_logits(reference: Tensor, other: Tensor, targets: Tensor) -> Judged:
    """Compares logits, [rows, vocabulary], in float64. targets: the next tokens, [rows]. Counts
    neither tokens nor windows."""
    before, after = (functional.log_softmax(each.double(), -1) for each in (reference, other))
    divergence = functional.kl_div(after, before, reduction="sum", log_target=True)
    losses = [-each.gather(1, targets[:, None]) for each in (before, after)]
    return Judged(
        reference_loss=losses[0].sum().item(),
        other_loss=losses[1].sum().item(),
        squared_change=(losses[1] - losses[0]).square().sum().item(),
        divergence=divergence.item(),
        same_top=int((before.argmax(1) == after.argmax(1)).sum()),
    )


def device_of(name: str) -> torch.device:
    """Raises OptionError for a device that torch does not have."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        raise OptionError(f"device {name!r}: {str(error).splitlines()[0]}") from None


def causal_model(path: str, dtype: DTypeLike | None, window: int) -> PreTrainedModel:
    """Returns the model of a folder as empty_model does. Raises OptionError for a model that is no
    causal language model or takes only shorter windows."""
    model = empty_model(path, dtype=dtype, compute_dtype=dtype)
    if not model.can_generate() or model.config.is_encoder_decoder:
        kind = type(model).__name__
        raise OptionError(f"{path}: {kind} is not a causal language model, which texts need")
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and window > most:
        raise OptionError(f"a window of {window} tokens is more than the {most} of {path}")
    return model


def _tokenizers(folders: Sequence[str]) -> dict[str, Tokenizer]:
    """Returns the tokenizers of the folders that have one, by their paths."""
    found = {}
    for folder in folders:
        path = os.path.join(folder, _TOKENIZER)
        if not os.path.lexists(path):
            continue
        try:
            found[path] = Tokenizer.from_buffer(read_bytes(path, "the tokenizer"))
        except (FormatError, OSError):
            raise
        except Exception as error:  # tokenizers raises no other type
            raise FormatError(path, f"it is not read: {error}") from None
        found[path].no_truncation()
        found[path].no_padding()
    if not found:
        raise FormatError(folders[0], f"it has no {_TOKENIZER}, which texts need")
    return found


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Returns the special tokens that any text begins with, and the tokens of this one."""
    mask = tokenizer.encode("a").special_tokens_mask
    specials = mask.index(0) if 0 in mask else 0
    prefix = tokenizer.encode("a").ids[:specials]
    return prefix, tokenizer.encode(text, add_special_tokens=False).ids
