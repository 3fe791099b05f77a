# SPDX-License-Identifier: Apache-2.0
"""The training run: data, target and recipe in; a heads folder out; stopped at any moment, it continues."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import recipe_of
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training.curve import POINTS, Curve, Point
from vllm_ppd.heads.training.data_files import data_files
from vllm_ppd.heads.training.evaluation import BEST, Evaluation, Progress, evaluate
from vllm_ppd.heads.training.folder import unfinished_run
from vllm_ppd.heads.training.optimizer import Muon
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.order import Order
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.heads.training.provenance import provenance
from vllm_ppd.heads.training.recipe import Recipe
from vllm_ppd.heads.training.signals import Stopped, stop_signals
from vllm_ppd.heads.training.state import NAME, RunFacts, load_state, load_weights, peek_facts, save_state, save_weights
from vllm_ppd.heads.training.states import StatesCache
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.token_files import check_same_tokens
from vllm_ppd.heads.training.tokens import TokenStore

DIVERGED = 3.0  # times the best smoothed loss


def train(options: TrainingOptions, make: Callable[[Any, Target], Recipe] | None = None) -> dict[str, Any]:
    """Train heads, or what another recipe trains, and write a folder.

    Args:
        options: of the recipe.
        make: the recipe of options and a target (None: of the options' kind of heads).

    Returns:
        The provenance that was written beside the heads, evaluation included.

    Raises:
        InUse: if another run writes the folder.
        TrainingError: on bad input or a diverging loss; what was trained so far stays on disk.
        Stopped: after Ctrl-C or a termination signal, with the checkpoint written.
    """
    check_data(options.data)
    files = [file.model_dump() for file in data_files(options.data)]  # they may be gone at the end
    processes = Processes(options.device)
    with unfinished_run(options, processes.is_main) as work:
        return _train(options, make or recipe_of(options.kind), processes, work, files)


def _train(
    options: TrainingOptions, make: Callable[[Any, Target], Recipe], processes: Processes, work: Path,
    files: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    out = work.parent
    if processes.is_main:
        print(f"vllm-ppd: loading {options.model}", file=sys.stderr, flush=True)
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
    recipe = make(options, target)
    work.mkdir(parents=True, exist_ok=True)
    if processes.is_main:
        _store(options, target, work)
    processes.wait()
    store = _store(options, target, work)
    if options.states_cache is not None:
        most = int(options.states_cache_gb * 1e9)
        folder = Path(options.states_cache)
        recipe.cache = StatesCache(folder, target, store, recipe.reads, options.states_layers, most)
    run = _Run(options, processes, recipe, store, work)
    facts = run.train()
    if processes.is_main:
        recipe.prepare_output(run.store, out)
        facts = provenance(kind=options.kind, options=options.model_dump(mode="json"), data_files=files, **facts)
        recipe.write(out, json.dumps(facts, indent=2) + "\n")
        shutil.rmtree(work)
    processes.wait()
    return facts


def _store(options: TrainingOptions, target: Target, work: Path) -> TokenStore:
    return TokenStore(
        work, options.data, target.tokenizer, target.vocab_size, options.held_out, options.sequence_length,
        options.train_on_prompts,
    )  # fmt: skip


class _Run:
    """One training run over its steps."""

    def __init__(
        self, options: TrainingOptions, processes: Processes, recipe: Recipe, store: TokenStore, work: Path
    ) -> None:
        self.options, self.processes, self.recipe, self.store, self.work = options, processes, recipe, store, work
        if options.batch_size % (processes.world * options.accumulation):
            raise TrainingError(
                f"--batch-size {options.batch_size} does not divide into {processes.world} processes "
                f"x {options.accumulation} accumulated parts"
            )
        if options.patience is not None and options.evaluate_every is None:
            raise TrainingError(
                f"--patience {options.patience} needs --evaluate-every: give the steps between two evaluations"
            )
        self.steps = options.steps or max(1, math.ceil(options.epochs * store.num_windows() / options.batch_size))
        self.order = Order(store, options.seed, options.batch_size, one_grid=recipe.cache is not None)
        recipe.begin(store, fresh=peek_facts(work) is None)
        optimizer = Muon if options.optimizer == "muon" else torch.optim.AdamW
        groups = recipe.groups(options.learning_rate)
        self.optimizer = optimizer(groups, betas=options.betas, weight_decay=options.weight_decay)
        self.step, self.saved, self.seconds = 0, 0, 0.0
        self.smoothed = self.best = math.inf
        self.before: dict[str, Any] = {}
        self.held_out = Progress()
        facts = load_state(work, recipe, self.optimizer)
        if facts is not None:
            check_same_tokens(work / NAME, facts.tokens, store.manifest.digest)
            self.step, self.seconds, self.before = facts.step, facts.seconds, facts.before
            self.smoothed, self.best, self.held_out = facts.smoothed, facts.best, facts.held_out
            self._say_where()
        self.saved = self.step
        self.curve = Curve(work.parent, self.step, processes.is_main)
        self.losses: list[float] = []  # since the curve's last line

    def _say_where(self) -> None:
        """Where a run continues."""
        if self.processes.is_main:
            tokens = self.step * self.options.batch_size * self.options.sequence_length
            where = f"step {self.step} of {self.steps}, after {tokens:,} tokens"
            print(f"vllm-ppd: {place(self.work.parent)} continues at {where}", file=sys.stderr, flush=True)

    def train(self) -> dict[str, Any]:
        """All remaining steps, and the evaluation before the first and after the last."""
        options, processes = self.options, self.processes
        module, optimizer = processes.prepare(self.recipe, self.optimizer)
        if not self.step:
            self.before = self._evaluate("before").figures
        tokens = options.batch_size * options.sequence_length
        progress = tqdm(
            initial=self.step * tokens, total=self.steps * tokens, unit=" tokens", unit_scale=True, mininterval=1,
            desc=f"training {options.kind} heads", disable=not processes.is_main,
        )  # fmt: skip
        started = time.monotonic()
        try:
            with stop_signals() as stop:
                while self.step < self.steps and not self._is_flat():
                    loss = self._loss_and_gradient(module, progress, stop)
                    self._watch(loss)
                    # Saved before the update, with a loss that says that these weights are good.
                    if stop or (self.step % options.save_every == 0 and self.step > self.saved):
                        self._save(self.seconds + time.monotonic() - started)
                    if stop:
                        raise Stopped(self.step, self.steps)
                    self._update(optimizer, loss)
                    progress.set_postfix(step=f"{self.step}/{self.steps}", loss=f"{loss:.4f}")
                    if options.evaluate_every and self.step % options.evaluate_every == 0:
                        self._evaluate(f"step {self.step}")
        finally:
            progress.close()
        self.seconds += time.monotonic() - started
        after = self._finish()
        return {
            "steps": self.step,
            "tokens": self.step * tokens,
            "tokens_in_data": len(self.store.tokens["train"]),
            "documents_in_data": self.store.manifest.documents,
            "skipped_records": self.store.manifest.skipped,
            "seconds": round(self.seconds, 1),
            "stopped_flat": self.step < self.steps,
            "held_out_before": self.before,
            "held_out_after": after.figures,
            "held_out_after_step": after.step,
        }

    def _loss_and_gradient(self, module: Any, progress: Any, stop: list[int]) -> float:
        """The gradient of the step's windows; returns the loss, the mean over all processes.

        Alone it ends after the current part where it is to stop, with the loss so far: the step is done again later.
        """
        options, processes = self.options, self.processes
        module.train()
        # What a recipe draws is a function of the step, so that a run that continues draws the same.
        torch.manual_seed((self.options.seed * 1_000_003 + self.step) * processes.world + processes.rank)
        total = torch.zeros((), device=processes.device)
        parts = options.accumulation * processes.world
        batches = self.order.batches(self.step, parts, processes.rank, processes.world)
        for done, batch in enumerate(batches, start=1):
            with self._autocast():
                loss, _ = module(batch.to(processes.device))
            processes.backward(loss / options.accumulation)
            total += loss.detach() / options.accumulation
            progress.update(batch.num_tokens * processes.world)
            if stop and processes.world == 1:
                return float(total) * options.accumulation / done
        return float(processes.sum(total)) / processes.world

    def _update(self, optimizer: Any, loss: float) -> None:
        """One optimiser step at the rate of this point of the schedule."""
        warmup = max(1, round(self.steps * self.options.warmup))
        scale = min((self.step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * self.step / self.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * scale
            # Each by itself: the heads' first gradients would shrink those of a base model that learns beside them.
            torch.nn.utils.clip_grad_norm_(group["params"], self.options.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.losses.append(loss)
        if self.step % math.ceil(self.steps / POINTS) == 0 or self.step == self.steps:
            self._note(loss=round(sum(self.losses) / len(self.losses), 5), rate=round(scale, 5))
            self.losses = []

    def _evaluate(self, when: str) -> Evaluation:
        """Held-out figures of the present weights; the best weights are kept where the run may stop early."""
        found = evaluate(self.recipe, self.store, self.options, self.processes, self.step, when)
        self._note(held_out_loss=found.loss, held_out=found.figures)
        if self.held_out.take(found) and self.options.patience is not None and self.processes.is_main:
            save_weights(self.work / BEST, self.recipe, found.step)
        return found

    def _is_flat(self) -> bool:
        return self.options.patience is not None and self.held_out.stale >= self.options.patience

    def _finish(self) -> Evaluation:
        """The last evaluation; of a run that may stop early, the best weights and theirs."""
        last = self.held_out.last
        if last is None or last.step != self.step:
            last = self._evaluate("after")
        if not math.isfinite(last.loss):
            self._watch(math.nan)
        self._save(self.seconds)
        best = self.held_out.best
        if self.options.patience is not None and best is not None and best.step < self.step:
            self.processes.wait()
            load_weights(self.work / BEST, self.recipe, best.step)
            return best
        return last

    def _note(self, **facts: Any) -> None:
        tokens = self.step * self.options.batch_size * self.options.sequence_length
        finite = {name: value for name, value in facts.items() if not isinstance(value, float) or math.isfinite(value)}
        self.curve.add(Point(step=self.step, tokens=tokens, **finite))

    def _autocast(self) -> Any:
        return self.processes.autocast(self.options.precision)

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
            smoothed=self.smoothed, best=self.best, tokens=self.store.manifest.digest, held_out=self.held_out,
        )  # fmt: skip
        save_state(self.work, self.recipe, self.optimizer, facts)
