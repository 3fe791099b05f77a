# SPDX-License-Identifier: Apache-2.0
"""The target of a training and its device: a frozen causal LM of transformers, or the
text model of a multimodal one, whose states are read where heads attach.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_ppd.heads.errors import TrainingError, loading
from vllm_ppd.heads.target import fingerprint
from vllm_ppd.heads.training.packed_attention import PackedAttention
from vllm_ppd.heads.training.tokens import Batch
from vllm_ppd.kernels.sampling import at_least_float32
from vllm_ppd.kernels.unembedding_loss import (
    capped,
    token_log_probs,
    top_log_probs,
)

LAYER_NAMES = ("layers", "h", "blocks")
NORM_NAMES = ("norm", "final_layer_norm", "ln_f", "final_layernorm", "norm_f")
# Names in configurations of the cap of the logits
CAP_NAMES = ("final_logit_softcapping", "logits_soft_cap")
# The check of a target: its text, and errors that are beyond bfloat16's rounding,
# relative to the spread of the values
PROBE = "Heads learn what a model says: 1, 2, 3 and so on."
STATES_ERROR = 0.1  # of the same tokens in another batch
LOGITS_ERROR = 0.01
SAMPLED_VALUES = 1024  # per parameter, for the digest


def device_of(name: str) -> torch.device:
    """The device that a user names; `auto` is a GPU if there is one.

    Raises:
        TrainingError: if the name is not a device, or the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(
            f"--device {name}: {str(error).splitlines()[0]}"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count() or "no"
        raise TrainingError(
            f"--device {name}: {count} CUDA devices are available; use another, or "
            "--device cpu"
        )
    return device


def cpu_computes_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions; others emulate them, which is
    several times slower.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return (
        torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )


@dataclass
class TargetStates:
    """The results of one forward pass for the heads. A row is a token: [rows, hidden]."""

    final: Tensor  # after the final norm; the LM head's input
    # After each number of layers and the final norm
    exits: dict[int, Tensor] = field(default_factory=dict)
    # After each number of layers, before the norm
    layers: dict[int, Tensor] = field(default_factory=dict)
    # [rows, k] int64: the target's likeliest next tokens
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None  # [rows, k] float32
    # Arguments of the last decoder layer
    stem: tuple[tuple[Any, ...], dict[str, Any]] | None = None


class Target:
    """A causal LM folder or hub name, loaded by transformers. Of a multimodal model the
    text model is read.

    Args:
        name: folder or hub name.
        device, dtype: to run with.
        trust_remote_code: run code that comes with the model.
        trainable: keep gradients (the full recipes); otherwise the target is frozen.

    Raises:
        TrainingError: if transformers cannot load it, if its layers, norm or LM head
            are not found, or if it says something else than heads would learn.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        trust_remote_code: bool = False,
        trainable: bool = False,
    ) -> None:
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForMultimodalLM,
            AutoTokenizer,
        )
        from transformers.utils import logging

        logging.disable_progress_bar()

        with loading(name):
            self.tokenizer = AutoTokenizer.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
            config = AutoConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
            text = config.get_text_config()
            self.num_layers: int = text.num_hidden_layers
            self.adapt(config)
            loader = (
                AutoModelForCausalLM
                if text is config
                else AutoModelForMultimodalLM
            )
            self.model: Any = loader.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
        self.name = name
        self.device = device
        self.dtype = dtype
        model: torch.nn.Module = self.model
        model.to(device).eval().requires_grad_(trainable)
        self.trainable = trainable
        decoder = self.model.get_decoder()
        # Llama 4's is a causal LM.
        self.base: Any = getattr(decoder, "model", decoder)
        self.layers: nn.ModuleList = _module(self.base, LAYER_NAMES, name)
        self.norm: nn.Module = _module(self.base, NORM_NAMES, name)
        # gpt-oss: only eager attention reads its sinks. Transformers ignores positions
        # in its masks, so documents would see each other.
        self.passes_masks = any(
            hasattr(module, "sinks") for module in model.modules()
        )
        if self.passes_masks:
            self.model.set_attn_implementation("eager")
        config = self.model.config.get_text_config()
        self.config = config
        # M-RoPE has a position for each of text, time, height and width.
        rope = getattr(config, "rope_parameters", None) or {}
        self.position_axes = 4 if "mrope_section" in rope else 1
        # xformers' attention of packed windows, if a training uses it
        self.packed: PackedAttention | None = None
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.max_length = getattr(config, "max_position_embeddings", None)
        self.scale = 1.0  # of the logits
        caps = [getattr(config, cap, None) for cap in CAP_NAMES]
        self.cap: float | None = next(filter(None, caps), None)
        self._check()

    @torch.no_grad()
    def _check(self) -> None:
        """Measure the scale of the logits, and compare states of packed documents and
        logits with the model's own.

        Raises:
            TrainingError: saying what differs.
        """
        words = self.tokenizer(PROBE, return_tensors="pt").input_ids
        ids = words.to(self.device) % self.vocab_size
        outputs: dict[int, Any] = {}
        hook = self.base.register_forward_hook(_catch(outputs, 0))
        logits = self.model(input_ids=ids).logits[0, :, : self.vocab_size].float()
        hook.remove()
        final = outputs[0].last_hidden_state[0]
        places = torch.arange(len(final), device=self.device)[None]
        both = torch.cat([ids.flip(1), ids], dim=1)
        packed = Batch(both, places.repeat(1, 2))
        problem = f"model {self.name!r} cannot be learned from"
        if not self._error_of(packed, final) < STATES_ERROR:
            self.passes_masks = True
            if not self._error_of(packed, final) < STATES_ERROR:
                raise TrainingError(
                    f"{problem}: documents that are packed into a window see each "
                    "other, or its states depend on more than tokens and positions"
                )
        uncapped = logits
        if self.cap is not None:
            bounded = (logits / self.cap).clamp(-0.99, 0.99)
            uncapped = bounded.atanh() * self.cap
        plain = functional.linear(final, self.unembedding, self.bias).float()
        scale = float((uncapped * plain).sum() / plain.square().sum())
        if abs(scale - 1) > 0.01:
            self.scale = scale
        error = _error(self.logits(final), logits)
        if not error < LOGITS_ERROR:
            raise TrainingError(
                f"{problem}: its logits differ by {error:.0%} of their spread from its "
                f"LM head's product with the final states, times {scale:.4g}"
            )

    def _error_of(self, packed: Batch, final: Tensor) -> float:
        """The error of a window's last states, given them [rows, hidden]."""
        try:
            output = self.base(input_ids=packed.input_ids, **self._places(packed))
        except (
            ValueError,
            RuntimeError,
            IndexError,
        ):  # of a family without such masks
            return math.inf
        return _error(output.last_hidden_state[0, -len(final) :], final)

    def logits(self, states: Tensor) -> Tensor:
        """The LM head's logits of final states, scaled and capped, at least float32.

        [rows, hidden] -> [rows, vocabulary]
        """
        states = states.to(self.dtype)
        logits = functional.linear(states, self.unembedding, self.bias)
        return capped(at_least_float32(logits), self.cap)

    def adapt(self, config: Any) -> None:
        """Change the model's configuration before it loads (nothing by default)."""

    @property
    def unembedding(self) -> Tensor:
        """E*, times the scale of the logits: [vocabulary, hidden]."""
        weight = self.model.get_output_embeddings().weight
        return self._scaled(weight[: self.vocab_size])

    @property
    def bias(self) -> Tensor | None:
        """Of the LM head, times the scale of the logits: [vocabulary]."""
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        return None if bias is None else self._scaled(bias[: self.vocab_size])

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self.scale == 1 else self.scale * values

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings of tokens [...], as the model's first layer gets them: [..., hidden]."""
        return self.model.get_input_embeddings()(token_ids)

    def log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """log p of one token a row [rows] by the LM head, from final states [rows,
        hidden]; it learns if trainable.
        """
        if not self.trainable:
            return token_log_probs(
                hidden, tokens, self.unembedding, self.bias, self.cap
            )
        logits = self.logits(hidden)
        return -functional.cross_entropy(logits, tokens, reduction="none")

    def forget(self, seed: int) -> None:
        """Replace all weights by random ones, initialized by the model's class."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = type(self.model)(self.model.config)
        self.model.load_state_dict(fresh.state_dict())

    def save(self, folder: Path) -> None:
        """Write model and tokenizer to a folder, which becomes the target's name."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.name = str(folder.resolve())

    def run(
        self,
        batch: Batch,
        exits: Sequence[int] = (),
        stem: bool = False,
        top_k: int = 0,
    ) -> TargetStates:
        """One forward pass over packed windows, hidden states flattened to rows.

        Args:
            batch: the windows.
            exits: layer counts after which to return the state, normed and not.
            stem: return the arguments of the last decoder layer, for heads that run
                beside it.
            top_k: number of likeliest next tokens to return.
        """
        before_stem = {self.num_layers - 1} if stem else set()
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            final, layers = self.compute(batch, before_stem.union(exits))
            states = self.states_of(batch, final, layers, stem)
        if top_k:
            states.top_ids, states.top_log_probs = top_log_probs(
                states.final, top_k, self.unembedding, self.bias, self.cap
            )
        return states

    def compute(
        self, batch: Batch, exits: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The final states, and those after some layers before the norm: [rows, hidden]
        each.
        """
        caught: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer in exits:
                hook = _catch(caught, layer)
                handle = self.layers[layer - 1].register_forward_hook(hook)
                hooks.callback(handle.remove)
            output = self.base(input_ids=batch.input_ids, **self._places(batch))
        layers = {layer: hidden.flatten(0, 1) for layer, hidden in caught.items()}
        return output.last_hidden_state.flatten(0, 1), layers

    def states_of(
        self,
        batch: Batch,
        final: Tensor,
        layers: dict[int, Tensor],
        stem: bool,
    ) -> TargetStates:
        """All states that `run` returns, from the final ones and those after layers."""
        exits = {layer: self.norm(hidden) for layer, hidden in layers.items()}
        states = TargetStates(final, exits, layers)
        if not stem:
            return states
        # The arguments of the last decoder layer's call, from the states before it; no
        # layer runs. The model's forward pass makes masks and rotary embeddings. Its
        # layers pass on these states instead of their input, as some families scale
        # embeddings first (Granite).
        before = layers[self.num_layers - 1].to(self.dtype)
        embeddings = before.view(*batch.input_ids.shape, -1)

        def passed_on(*args: Any, **kwargs: Any) -> Tensor:
            states.stem = args, kwargs
            return embeddings

        with ExitStack() as undo:
            for layer in self.layers:
                layer.forward = passed_on
                undo.callback(layer.__dict__.pop, "forward")
            self.base(inputs_embeds=embeddings, **self._places(batch))
        return states

    def _places(self, batch: Batch) -> dict[str, Any]:
        """Arguments for the tokens' positions, for a forward pass without a KV cache."""
        positions = batch.position_ids
        if self.position_axes > 1:
            positions = positions.expand(self.position_axes, -1, -1)
        places: dict[str, Any] = {
            "position_ids": positions,
            "use_cache": False,
        }
        if self.packed is not None:
            self.packed.read(batch.position_ids)
        if self.passes_masks:
            masks = packed_masks(self.config, batch.position_ids, self.dtype)
            whole = masks["full_attention"]
            places["attention_mask"] = masks if len(masks) > 1 else whole
        return places

    def digest(self) -> str:
        """A hash of what states depend on: names, shapes, dtypes and sampled values of
        all parameters.
        """
        digest = hashlib.sha256(f"{self.config.model_type} {self.dtype}".encode())
        for name, parameter in self.model.named_parameters():
            values = parameter.detach().flatten()
            step = max(1, len(values) // SAMPLED_VALUES)
            sampled = values[::step].float().cpu()
            digest.update(
                f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode()
            )
            digest.update(sampled.numpy().tobytes())
        return digest.hexdigest()

    def description(self) -> dict[str, Any]:
        """The fields of a heads config that describe its target."""
        return {
            "verifier": self.name,
            "verifier_architectures": self.model.config.architectures or [],
            "target": {
                "model_type": self.config.model_type,
                "hidden_size": self.hidden_size,
                "vocab_size": self.vocab_size,
                "num_hidden_layers": self.num_layers,
            },
            "fingerprint": fingerprint(self.folder),
        }

    @property
    def folder(self) -> Path:
        """The folder of the weights on this disk."""
        if Path(self.name).is_dir():
            return Path(self.name)
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(self.name, local_files_only=True))


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The root mean square of a difference, relative to the spread of `theirs`."""
    error = (ours.float() - theirs.float()).square().mean().sqrt()
    return float(error / theirs.float().std())


def packed_masks(
    config: Any, position_ids: Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """Attention masks of packed documents [windows, length], by kind of layer if the
    family has two kinds.

    transformers recognizes documents by their position ids, which restart at zero.
    """
    from transformers.masking_utils import (
        create_causal_mask,
        create_sliding_window_causal_mask,
    )

    shaped = torch.empty(
        *position_ids.shape, 1, dtype=dtype, device=position_ids.device
    )
    settings: dict[str, Any] = {
        "config": config,
        "inputs_embeds": shaped,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    masks = {"full_attention": create_causal_mask(**settings)}
    if getattr(config, "sliding_window", None) is not None:
        sliding = create_sliding_window_causal_mask(**settings)
        masks["sliding_attention"] = sliding
    return masks


def _module(base: nn.Module, names: Sequence[str], model: str) -> Any:
    for name in names:
        if hasattr(base, name):
            return getattr(base, name)
    raise TrainingError(
        f"model {model!r} ({type(base).__name__}) has none of {', '.join(names)}; "
        "heads need it"
    )


def _catch(caught: dict[int, Tensor], layer: int) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        caught[layer] = output[0] if isinstance(output, tuple) else output

    return hook
