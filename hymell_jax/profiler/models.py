"""Level 3: whole decoder models from a configuration, random weights, nothing downloaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from hymell_jax.profiler import catalogue
from hymell_jax.profiler.bench import Bench
from hymell_jax.profiler.blocks import Rewind, cache_argument
from hymell_jax.profiler.cases import Case
from hymell_jax.profiler.clocks import Call

PROMPTS = 4  # different prompts in turn


class Models:
    """Builds one model at a time and keeps it for the cases that follow."""

    def __init__(self, bench: Bench):
        self._bench = bench
        self._name: tuple[str, str] | None = None
        self._model: Any = None
        self._broken: dict[tuple[str, str], str] = {}

    def prepare(self, case: Case) -> Call:
        """One forward pass of a case.

        Raises:
            RuntimeError: the model cannot be built, with the reason; or memory is out.
        """
        model = self._get(case.sizes["model"], case.sizes["attention"])
        run = _prefill if case.sizes["phase"] == "prefill" else _decode
        return run(self._bench, model, case.sizes)

    def holds(self, name: str) -> bool:
        """Whether the model is built, so that its memory is taken already."""
        return self._name is not None and self._name[0] == name

    def drop(self) -> None:
        """Forget the model and free its memory."""
        self._name = self._model = None
        self._bench.release()

    def _get(self, name: str, attention: str) -> Any:
        wanted = (name, attention)
        if wanted in self._broken:
            raise RuntimeError(self._broken[wanted])
        if self._name != wanted:
            self.drop()
            try:
                self._model = _build(self._bench, name, attention)
            except Exception as error:
                self._broken[wanted] = f"{name} cannot be built: {type(error).__name__}: {error}"
                raise RuntimeError(self._broken[wanted]) from error
            self._name = wanted
        return self._model


def config_json(bench: Bench, name: str) -> str:
    """The configuration of a model as the library writes it.

    Raises:
        ValueError, KeyError: this version of the library does not know the family.
    """
    return json.dumps(_config(bench, name).to_dict(), indent=1, default=str)


def _shape(name: str) -> dict[str, Any]:
    tied = catalogue.tied_embeddings(name)
    return dict(catalogue.MODELS[name]) | {"tie_word_embeddings": tied}


def _config(bench: Bench, name: str) -> Any:
    settings = _shape(name)
    kind = settings.pop("model_type")
    return bench.transformers.AutoConfig.for_model(kind, **settings)


def _build(bench: Bench, name: str, attention: str) -> Any:
    make = bench.transformers.AutoModelForCausalLM.from_config
    with _without_initialisation(), bench.device:
        model = make(_config(bench, name), attn_implementation=attention, dtype=bench.dtype)
    model.tie_weights()
    _randomise(bench, model)
    return model.eval()


@contextlib.contextmanager
def _without_initialisation() -> Iterator[None]:
    """Random weights come afterwards, faster than the library draws them."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before transformers 5
        from transformers.modeling_utils import no_init_weights
    with no_init_weights():
        yield


def _randomise(bench: Bench, model: Any) -> None:
    """Weights around 0, vectors (norms, biases) around 1 and 0."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        flat = parameter.data.view(-1)
        for part in flat.split(1 << 22):
            part.copy_(bench.weights.view((part.numel(),)))
        if parameter.dim() == 1 and not name.endswith("bias"):
            flat.add_(1.0)


def _prefill(bench: Bench, model: Any, s: Any) -> Call:
    prompts = _tokens(bench, s, s["prompt_len"])

    def call(index: int) -> Any:
        return model(input_ids=prompts[index % PROMPTS], use_cache=True, logits_to_keep=1)

    return call


def _decode(bench: Bench, model: Any, s: Any) -> Call:
    step, name = _tokens(bench, s, 1), cache_argument(model.forward)
    rewind = Rewind(_filled_cache(bench, model, s["batch"], s["context_len"] - 1))

    def call(index: int) -> Any:
        return model(input_ids=step[index % PROMPTS], use_cache=True, **{name: rewind()})

    return call


def _tokens(bench: Bench, s: Any, length: int) -> list[Any]:
    shape = (s["batch"], length)
    draw = bench.torch.randint
    return [draw(s["vocab_size"], shape, device=bench.device) for _ in range(PROMPTS)]


def _filled_cache(bench: Bench, model: Any, batch: int, length: int) -> Any:
    """A cache as a prompt of `length` tokens leaves it, with random keys and values."""
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for layer in range(config.num_hidden_layers):
        keys, values = (bench.activations.view((batch, kv_heads, length, dim)) for _ in range(2))
        cache.update(keys, values, layer)
    return cache
