# SPDX-License-Identifier: Apache-2.0
"""The training run: data, target and recipe in; a heads folder out; stopped at any moment, it continues."""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_ppd.heads.data.files import expand
from vllm_ppd.heads.io import CONFIG_NAME, save_heads, write_text
from vllm_ppd.heads.target_path import stored_name
from vllm_ppd.heads.training import TrainingError
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.heads.training.recipe import Recipe, make_recipe
from vllm_ppd.heads.training.state import NAME, RunFacts, load_state, peek_facts, save_state
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.token_files import check_same_tokens
from vllm_ppd.heads.training.tokens import Batch, TokenStore

WORK = ".training"  # inside the heads folder while a run is unfinished
DIVERGED = 3.0  # times the best smoothed loss
# A run may continue with these changed.
FREE_TO_CHANGE = {"learning_rate", "base_learning_rate", "stem_learning_rate"}


class Stopped(KeyboardInterrupt):
    """The user stopped the run; its checkpoint is on disk."""


def train(options: TrainingOptions) -> dict[str, Any]:
    """Train heads and write their folder.

    Returns:
        The provenance that was written beside the heads, evaluation included.

    Raises:
        TrainingError: on bad input or a diverging loss; what was trained so far stays on disk.
        Stopped: after Ctrl-C or a termination signal, with the checkpoint written.
    """
    out = Path(options.out)
    work = out / WORK
    _check_folder(options, out, work)
    expand(options.data)  # a missing file is told before the target loads
    processes = Processes(options.device)
    dtype = getattr(torch, options.precision)
    full = getattr(options, "recipe", None) == "full"
    # The full recipe moves the base model by less than bfloat16 can hold.
    target = Target(
        options.model, processes.device, torch.float32 if full else dtype, options.trust_remote_code, trainable=full
    )
    if target.max_length is not None and options.sequence_length > target.max_length:
        raise TrainingError(
            f"--sequence-length {options.sequence_length} is over the model's {target.max_length} positions"
        )
    torch.manual_seed(options.seed)
    recipe = make_recipe(options, target)
    work.mkdir(parents=True, exist_ok=True)
    if processes.is_main:
        _store(options, target, work)
    processes.wait()
    run = _Run(options, processes, recipe, _store(options, target, work), work)
    facts = run.train()
    if processes.is_main:
        recipe.prepare_output(run.store, out)
        config = recipe.config()
        config = config.model_copy(update={"verifier": stored_name(config.verifier, out)})
        save_heads(out, config, recipe.tensors())
        facts = provenance(kind=options.kind, options=options.model_dump(mode="json"), **facts)
        write_text(out / "provenance.json", json.dumps(facts, indent=2) + "\n")
        shutil.rmtree(work)
    processes.wait()
    return facts


def _store(options: TrainingOptions, target: Target, work: Path) -> TokenStore:
    return TokenStore(
        work, options.data, target.tokenizer, target.vocab_size, options.held_out, options.sequence_length
    )


def _check_folder(options: TrainingOptions, out: Path, work: Path) -> None:
    """Refuse a folder that holds finished heads or a run with other options."""
    facts = peek_facts(work)
    if facts is None:
        if (out / CONFIG_NAME).exists():
            raise TrainingError(f"--out {str(out)!r} already holds heads or a model; delete it or give another folder")
        return
    ours, theirs = options.essence(), facts.options
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name) and name not in FREE_TO_CHANGE:
            raise TrainingError(
                f"--out {str(out)!r} holds an unfinished run with {name}={theirs.get(name)!r}, and this one has "
                f"{ours.get(name)!r}: give the same options to continue it, or another folder"
            )


class _Run:
    """One training run over its steps."""

    def __init__(
        self, options: TrainingOptions, processes: Processes, recipe: Recipe, store: TokenStore, work: Path
    ) -> None:
        self.options, self.processes, self.recipe, self.store, self.work = options, processes, recipe, store, work
        windows = store.num_windows()
        if options.batch_size % (processes.world * options.accumulation):
            raise TrainingError(
                f"--batch-size {options.batch_size} does not divide into {processes.world} processes "
                f"x {options.accumulation} accumulated parts"
            )
        self.steps = options.steps or max(1, math.ceil(options.epochs * windows / options.batch_size))
        self.optimizer = torch.optim.AdamW(
            recipe.groups(options.learning_rate), betas=(0.9, 0.95), eps=1e-8, weight_decay=options.weight_decay
        )
        self.step, self.saved, self.seconds = 0, 0, 0.0
        self.smoothed = self.best = math.inf
        self.before: dict[str, Any] = {}
        self._order: tuple[int, torch.Tensor] | None = None
        facts = load_state(work, recipe, self.optimizer)
        if facts is not None:
            check_same_tokens(work / NAME, facts.tokens, store.manifest.digest)
            self.step, self.seconds, self.before = facts.step, facts.seconds, facts.before
            self.smoothed, self.best = facts.smoothed, facts.best

    def train(self) -> dict[str, Any]:
        """All remaining steps, and the evaluation before the first and after the last."""
        options, processes = self.options, self.processes
        module, optimizer = processes.prepare(self.recipe, self.optimizer)
        if not self.step:
            self.before = self.evaluate()
        tokens = options.batch_size * options.sequence_length
        progress = tqdm(
            initial=self.step * tokens, total=self.steps * tokens, unit=" tokens", unit_scale=True, mininterval=1,
            desc=f"training {options.kind} heads", disable=not processes.is_main,
        )  # fmt: skip
        started, self.saved = time.monotonic(), self.step
        try:
            with _stop_signals() as stop:
                while self.step < self.steps:
                    loss = self._loss_and_gradient(module)
                    self._watch(loss)
                    # Saved before the update, with a loss that says that these weights are good.
                    if stop or (self.step % options.save_every == 0 and self.step > self.saved):
                        self._save(self.seconds + time.monotonic() - started)
                    if stop:
                        raise Stopped(f"stopped at step {self.step} of {self.steps}; the same command continues it")
                    self._update(optimizer)
                    self.step += 1
                    progress.update(tokens)
                    progress.set_postfix(step=f"{self.step}/{self.steps}", loss=f"{loss:.4f}")
        finally:
            progress.close()
        self.seconds += time.monotonic() - started
        after = self.evaluate()
        if "nan" in json.dumps(after).lower():
            self._watch(math.nan)
        self._save(self.seconds)
        return {
            "steps": self.steps,
            "tokens": self.steps * tokens,
            "tokens_in_data": len(self.store.tokens["train"]),
            "documents_in_data": self.store.manifest.documents,
            "skipped_records": self.store.manifest.skipped,
            "seconds": round(self.seconds, 1),
            "held_out_before": self.before,
            "held_out_after": after,
        }

    def _loss_and_gradient(self, module: Any) -> float:
        """The gradient of the step's windows; returns the loss, the mean over all processes."""
        options, processes = self.options, self.processes
        module.train()
        total = torch.zeros((), device=processes.device)
        for batch in self._batches():
            with self._autocast():
                loss, _ = module(batch.input_ids, batch.position_ids)
            processes.backward(loss / options.accumulation)
            total += loss.detach() / options.accumulation
        return float(processes.sum(total)) / processes.world

    def _update(self, optimizer: Any) -> None:
        """One optimiser step at the rate of this point of the schedule."""
        warmup = max(1, round(self.steps * self.options.warmup))
        scale = min((self.step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * self.step / self.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, self.options.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Readable figures on held-out windows, the same ones every time."""
        self.recipe.eval()
        windows = max(1, min(self.store.num_windows("held_out"), self.options.evaluation_tokens // self.store.length))
        sums: dict[str, float] = {}
        size = max(1, self.options.batch_size // (self.options.accumulation * self.processes.world))
        for start in range(0, windows, size):
            batch = self.store.batch("held_out", range(start, min(start + size, windows))).to(self.processes.device)
            with self._autocast():
                _, counts = self.recipe.loss(batch)
            for name, value in counts.items():
                for index, item in enumerate(value.reshape(-1).tolist()):
                    key = name if value.dim() == 0 else f"{name}.{index}"
                    sums[key] = sums.get(key, 0.0) + item
        return self.recipe.summary(sums)

    def _autocast(self) -> Any:
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16")

    def _batches(self) -> Iterator[Batch]:
        """This process's parts of the step's windows; a function of the step alone, so a resumed run sees the same."""
        options, processes = self.options, self.processes
        parts = options.accumulation * processes.world
        size = options.batch_size // parts
        windows = [self._window(self.step * options.batch_size + i) for i in range(options.batch_size)]
        for part in range(processes.rank, parts, processes.world):
            chosen = windows[part * size : (part + 1) * size]
            batches = [self.store.batch("train", [number], shift) for number, shift in chosen]
            yield Batch(torch.cat([b.input_ids for b in batches]), torch.cat([b.position_ids for b in batches])).to(
                processes.device
            )

    def _window(self, index: int) -> tuple[int, int]:
        """(window number, shift in tokens): every epoch has an order and a grid of its own."""
        count = self.store.num_windows()
        epoch, place = divmod(index, count)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(count, generator=generator))
        return int(self._order[1][place]), epoch * 7919 % self.store.length if epoch else 0

    def _watch(self, loss: float) -> None:
        """Stop a run whose loss is not a number or climbs; its last checkpoint is from before that."""
        finite = math.isfinite(loss)
        if finite:
            self.smoothed = loss if math.isinf(self.smoothed) else 0.9 * self.smoothed + 0.1 * loss
            self.best = min(self.best, self.smoothed)
        if not finite or self.smoothed > DIVERGED * max(self.best, 1e-3):
            kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "nothing was saved yet"
            raise TrainingError(
                f"training diverged at step {self.step}: loss {loss:g} (best {self.best:g}); {kept}: "
                "run the same command with a lower --learning-rate"
            )

    def _save(self, seconds: float) -> None:
        self.saved = self.step
        if not self.processes.is_main:
            return
        facts = RunFacts(
            options=self.options.essence(), step=self.step, seconds=seconds, before=self.before,
            smoothed=self.smoothed, best=self.best, tokens=self.store.manifest.digest,
        )  # fmt: skip
        save_state(self.work, self.recipe, self.optimizer, facts)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or a termination signal; a second one interrupts at once."""
    caught: list[int] = []

    def note(number: int, _: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, as in Ray's workers
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
