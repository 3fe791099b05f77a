# SPDX-License-Identifier: Apache-2.0
"""The training run, from data, target and recipe to a heads folder; it can be stopped at any time and continued."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_ppd.heads.errors import TrainingError
from vllm_ppd.heads.kinds import recipe_of
from vllm_ppd.heads.progress import Bar, say
from vllm_ppd.heads.quote import place
from vllm_ppd.heads.training import checkpoint
from vllm_ppd.heads.training.checkpoint import BEST, STATE, WORK, RunFacts, unfinished_run
from vllm_ppd.heads.training.curve import POINTS, add_point, begin_curve
from vllm_ppd.heads.training.evaluation import Evaluation, Progress, evaluate, evaluated_windows
from vllm_ppd.heads.training.optimizer import Muon
from vllm_ppd.heads.training.options import TrainingOptions
from vllm_ppd.heads.training.parallel import Processes
from vllm_ppd.heads.training.provenance import data_files, provenance
from vllm_ppd.heads.training.recipe import Recipe
from vllm_ppd.heads.training.signals import Stopped, stop_signals
from vllm_ppd.heads.training.states import StatesCache, read_target
from vllm_ppd.heads.training.target import Target
from vllm_ppd.heads.training.tokens import Order, TokenStore

DIVERGED = 3.0  # multiple of the best smoothed loss
TIMED = 2  # steps to time; the first is slower
MakeRecipe = Callable[[Any, Target], Recipe]


def train(options: TrainingOptions, make: MakeRecipe | None = None) -> dict[str, Any]:
    """Train heads, or the modules of another recipe, and write a folder.

    Args:
        options: of the recipe.
        make: makes the recipe from options and a target (None: the recipe of the options' kind of heads).

    Returns:
        The provenance that was written beside the heads, evaluation included.

    Raises:
        InUse: if another run writes the folder.
        TrainingError: on bad input or a diverging loss; the last checkpoint stays on disk.
        Stopped: after Ctrl-C or a termination signal; the last checkpoint is kept.
    """
    files = [file.model_dump() for file in data_files(options.data)]  # the files may be gone at the end
    processes = Processes(options.device)
    with unfinished_run(options, processes) as work:
        recipe, store = _prepared(options, make or recipe_of(options.kind), processes, work)
        facts = _Run(options, processes, recipe, store, work).train()
        if processes.is_main_process:
            recipe.prepare_output(store, work.parent)
            facts = provenance(kind=options.kind, options=options.model_dump(mode="json"), data_files=files, **facts)
            recipe.write(work.parent, json.dumps(facts, indent=2) + "\n")
            shutil.rmtree(work.rename(work.with_name(f"{WORK}.old")))  # at once, so that no part of it is left
        processes.wait_for_everyone()
    return facts


class Speed(NamedTuple):
    """The measured speed of a training."""

    step: float  # seconds of an optimiser step, with the target's states from the cache, if any
    target: float  # seconds to compute a step's states that the cache lacks; 0 without a cache
    steps: float  # in a pass over the data


def speed_of(options: TrainingOptions) -> Speed:
    """Time the first step of a training a few times. No checkpoint is written; tokens and cached states remain.

    Raises:
        InUse, TrainingError: as train.
    """
    processes = Processes(options.device)
    with unfinished_run(options, processes) as work:
        recipe, store = _prepared(options, recipe_of(options.kind), processes, work)
        run, seconds = _Run(options, processes, recipe, store, work), list[float]()
        with Bar(desc="timing training steps", total=TIMED * run.tokens_a_step, unit=" tokens") as bar:
            for _ in range(TIMED):
                run.facts.step = 0
                started = time.monotonic()
                loss, _ = run._loss_and_gradient(bar, [])
                run._update(loss)
                seconds.append(time.monotonic() - started)
        started = time.monotonic()
        if recipe.cache is not None:
            for batch in run.order.batches(0, 1):
                read_target(recipe.target, batch.to(processes.device), recipe.reads)
        if processes.device.type == "cuda":
            torch.cuda.synchronize(processes.device)
        target = time.monotonic() - started
    return Speed(seconds[-1], target, store.num_windows() / options.batch_size)


def _prepared(
    options: TrainingOptions, make: MakeRecipe, processes: Processes, work: Path
) -> tuple[Recipe, TokenStore]:
    """The recipe with its loaded target, and the data's tokens."""
    if options.batch_size % (processes.num_processes * options.accumulation):
        raise TrainingError(
            f"--batch-size {options.batch_size} is not divisible by {processes.num_processes} processes "
            f"x {options.accumulation} accumulated parts"
        )
    if options.patience is not None and options.evaluate_every is None:
        raise TrainingError(
            f"--patience {options.patience} needs --evaluate-every; give the number of steps between evaluations"
        )
    full = getattr(options, "recipe", None) == "full"
    if full and options.states_cache is not None:
        raise TrainingError("--states-cache needs a frozen target, but --recipe full trains it; omit one of them")
    if processes.is_main_process:
        say(f"vllm-ppd: loading {options.model}")
    # The full recipe's updates of the base model are too small for bfloat16.
    dtype = torch.float32 if full else getattr(torch, options.precision)
    target = Target(options.model, processes.device, dtype, options.trust_remote_code, trainable=full)
    if target.max_length is not None and options.sequence_length > target.max_length:
        raise TrainingError(
            f"--sequence-length {options.sequence_length} is more than the model's {target.max_length} positions"
        )
    torch.manual_seed(options.seed)
    recipe = make(options, target)
    recipe.check()
    work.mkdir(parents=True, exist_ok=True)

    def make_store() -> TokenStore:
        return TokenStore(
            work, options.data, target.tokenizer, target.vocab_size, options.held_out, options.sequence_length,
            options.train_on_prompts,
        )  # fmt: skip

    if processes.is_main_process:
        make_store()
    processes.wait_for_everyone()
    store = make_store()
    if options.states_cache is not None:
        most_bytes = int(options.states_cache_gb * 1e9)
        recipe.cache = StatesCache(Path(options.states_cache), target, store, recipe.reads, most_bytes)
    _check_reach(recipe, store, options, processes)
    return recipe, store


def _check_reach(recipe: Recipe, store: TokenStore, options: TrainingOptions, processes: Processes) -> None:
    """Say what can be neither learnt nor evaluated.

    Raises:
        TrainingError: if nothing can be learnt.
    """
    reach = recipe.reach
    lengths = set(reach.values())
    learnt = {length for length in lengths if store.has_rows("train", length)}
    instead = "give longer responses"
    if recipe.reach_option is not None:
        instead += f", or a smaller {recipe.reach_option}"
    if not learnt:
        part, length = min(reach.items(), key=lambda item: item[1])
        raise TrainingError(
            f"no window has a response of {length} tokens in a row, which {part} needs to learn; {instead}"
        )
    if not processes.is_main_process:
        return
    windows = evaluated_windows(store, options)
    evaluated = {length for length in learnt if store.has_rows("held_out", length, windows)}
    for part, length in reach.items():
        if length not in learnt:
            say(f"vllm-ppd: {part} is not trained: no response has {length} tokens in a row; {instead}")
        elif length not in evaluated:
            say(
                f"vllm-ppd: {part} is not evaluated: no held-out response has {length} tokens in a row within "
                "--evaluation-tokens; give more of them, or a larger --held-out"
            )


class _Run:
    """One training run over its steps."""

    def __init__(
        self, options: TrainingOptions, processes: Processes, recipe: Recipe, store: TokenStore, work: Path
    ) -> None:
        self.options, self.processes, self.recipe, self.store, self.work = options, processes, recipe, store, work
        self.out = work.parent
        self.steps = options.steps or max(1, math.ceil(options.epochs * store.num_windows() / options.batch_size))
        self.tokens_a_step = options.batch_size * options.sequence_length
        self.order = Order(store, options.seed, options.batch_size, same_grid=recipe.cache is not None)
        self.facts = RunFacts(
            options=checkpoint.essence(options, processes), step=0, seconds=0.0, before={}, smoothed=math.inf,
            best=math.inf, tokens=store.manifest.digest, held_out=Progress(),
        )  # fmt: skip
        saved = checkpoint.read_facts(work / STATE)
        recipe.begin(store, fresh=saved is None)
        optimizer = Muon if options.optimizer == "muon" else torch.optim.AdamW
        groups = recipe.groups(options.learning_rate)
        self.module, self.optimizer = processes.prepare(
            recipe, optimizer(groups, betas=options.betas, weight_decay=options.weight_decay)
        )
        if saved is not None:
            self._continue(saved)
        self.saved = self.facts.step
        if processes.is_main_process:
            begin_curve(self.out, self.facts.step)
        self.losses: list[float] = []  # since the curve's last line

    def _continue(self, saved: RunFacts) -> None:
        """Restore a checkpoint."""
        if saved.tokens != self.facts.tokens:
            raise TrainingError(
                f"{place(self.work / STATE)} was trained on other tokens: the data or the tokenizer changed; give "
                f"the same again, or delete the folder {WORK} there to start again"
            )
        checkpoint.load(self.work / STATE, saved.step, self.processes)
        # Learning rates may have been changed.
        groups = self.recipe.groups(self.options.learning_rate)
        for group, fresh in zip(self.optimizer.param_groups, groups, strict=True):
            group["peak"] = fresh["peak"]
        self.facts = saved.model_copy(update={"options": self.facts.options})
        held_out, kept = self.facts.held_out, checkpoint.read_facts(self.work / BEST)
        if held_out.best is not None and (kept is None or kept.step != held_out.best.step):
            if held_out.best.step == saved.step:  # a kill came before these weights were kept as the best
                checkpoint.save(self.work / BEST, self.facts, self.processes)
            else:
                held_out.best = None
        if self.processes.is_main_process:
            where = f"step {saved.step} of {self.steps}, after {saved.step * self.tokens_a_step:,} tokens"
            say(f"vllm-ppd: {place(self.out)} continues at {where}")

    def train(self) -> dict[str, Any]:
        """Run all remaining steps, and the evaluations before the first and after the last; the best weights remain."""
        options, facts = self.options, self.facts
        if not facts.step:
            facts.before = self._evaluate("before").figures
        progress = Bar(
            initial=facts.step * self.tokens_a_step, total=self.steps * self.tokens_a_step, unit=" tokens",
            unit_scale=True, mininterval=1, desc=f"training {options.kind} heads",
            disable=not self.processes.is_main_process,
        )  # fmt: skip
        started = time.monotonic() - facts.seconds
        with progress, stop_signals() as stop:
            while facts.step < self.steps and not self._is_flat():
                loss, stops = self._loss_and_gradient(progress, stop)
                self._watch(loss)
                facts.seconds = time.monotonic() - started
                # Save before the update, while the loss shows that these weights are good.
                if stops or (facts.step % options.save_every == 0 and facts.step > self.saved):
                    self._save()
                if stops:
                    raise Stopped(facts.step, self.steps)
                self._update(loss)
                shown = {} if loss is None else {"loss": f"{loss:.4f}"}
                progress.set_postfix(step=f"{facts.step}/{self.steps}", **shown, **self._held_out())
                if options.evaluate_every and facts.step % options.evaluate_every == 0 and facts.step < self.steps:
                    self._evaluate(f"step {facts.step}")
            if facts.step > self.saved:
                self._save_last(stop)
        facts.seconds = time.monotonic() - started
        after = self._finish()
        return {
            "steps": facts.step,
            "tokens": facts.step * self.tokens_a_step,
            "tokens_in_data": len(self.store.tokens["train"]),
            "documents_in_data": self.store.manifest.documents,
            "skipped_records": self.store.manifest.skipped,
            "seconds": round(facts.seconds, 1),
            "stopped_flat": facts.step < self.steps,
            "held_out_before": facts.before,
            "held_out_after": after.figures,
            "held_out_after_step": after.step,
        }

    def _held_out(self) -> dict[str, str]:
        """Drafts accepted per step in the last evaluation, for the progress line."""
        last = self.facts.held_out.last
        return {} if last is None or last.accepted is None else {"accepted": f"{last.accepted:.3f}"}

    def _loss_and_gradient(self, progress: Bar, stop: list[int]) -> tuple[float | None, bool]:
        """Accumulate the gradient over the step's windows.

        Returns:
            (The mean loss of the parts in which a token counts, None without any; whether any process is to stop).

        A single process that is to stop returns after the current part of the step, which is done again later.
        """
        options, processes, step = self.options, self.processes, self.facts.step
        world, rank = processes.num_processes, processes.process_index
        self.module.train()
        # A recipe's random draws depend on the step only, so that a continued run repeats them.
        torch.manual_seed((options.seed * 1_000_003 + step) * world + rank)
        total, parts = torch.zeros((), device=processes.device), 0
        for batch in self.order.batches(step, options.accumulation * world, rank, world):
            with processes.arithmetic(options.precision):
                loss, counts = self.module(batch.to(processes.device))
            processes.backward(loss / options.accumulation)
            total = total + loss.detach().float()
            parts += bool(counts)
            progress.update(batch.num_tokens * world)
            if stop and world == 1:
                break
        others = total.new_tensor([float(parts), float(bool(stop))])
        sums = processes.reduce(torch.cat([total[None], others]), "sum").tolist()
        return sums[0] / sums[1] if sums[1] else None, bool(sums[2])

    def _update(self, loss: float | None) -> None:
        """One optimiser step with the schedule's learning rate."""
        facts = self.facts
        warmup = max(1, round(self.steps * self.options.warmup))
        scale = min((facts.step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * facts.step / self.steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * scale
            # Separately: the heads' large first gradients would shrink those of a base model that is also trained.
            torch.nn.utils.clip_grad_norm_(group["params"], self.options.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        facts.step += 1
        if loss is not None:
            self.losses.append(loss)
        if self.losses and (facts.step % math.ceil(self.steps / POINTS) == 0 or facts.step == self.steps):
            self._note(loss=round(sum(self.losses) / len(self.losses), 5), rate=round(scale, 5))
            self.losses = []

    def _evaluate(self, when: str) -> Evaluation:
        """Evaluate the current weights on held-out windows, and keep them if they are the best so far."""
        facts = self.facts
        evaluation = evaluate(self.recipe, self.store, self.options, self.processes, facts.step, when)
        if evaluation.loss is not None:
            self._note(held_out_loss=evaluation.loss, held_out=evaluation.figures)
        if facts.held_out.take(evaluation):
            if facts.step:
                self._save()  # first: a run that continues from here keeps these weights as its best
            checkpoint.save(self.work / BEST, facts, self.processes)
        return evaluation

    def _is_flat(self) -> bool:
        return self.options.patience is not None and self.facts.held_out.stale >= self.options.patience

    def _save_last(self, stop: list[int]) -> None:
        """Save the weights after the last step, once the loss of a further one shows that they are good.

        An evaluation may take long, and must not be what a stopped run loses its last steps to.
        """
        loss, stops = self._loss_and_gradient(Bar(disable=True), stop)
        self.optimizer.zero_grad(set_to_none=True)
        self._watch(loss)
        self._save()
        if stops:
            raise Stopped(self.facts.step, self.steps)

    def _finish(self) -> Evaluation:
        """The last evaluation; restore the best weights and return their evaluation."""
        facts = self.facts
        last = facts.held_out.last
        if last is None or last.step != facts.step:
            last = self._evaluate("after")
        if last.loss is not None and not math.isfinite(last.loss):
            self._watch(math.nan)
        best = facts.held_out.best
        if best is not None and best.step < facts.step:
            checkpoint.load(self.work / BEST, best.step, self.processes)
            self.processes.wait_for_everyone()
            return best
        return last

    def _note(self, **figures: Any) -> None:
        if self.processes.is_main_process:
            finite = {name: x for name, x in figures.items() if not isinstance(x, float) or math.isfinite(x)}
            step = self.facts.step
            add_point(self.out, step, step * self.tokens_a_step, **finite)

    def _watch(self, loss: float | None) -> None:
        """Raise if the loss is not finite or climbs; the last checkpoint is from before that."""
        facts = self.facts
        if loss is None:
            return
        is_finite = math.isfinite(loss)
        if is_finite:
            facts.smoothed = loss if math.isinf(facts.smoothed) else 0.9 * facts.smoothed + 0.1 * loss
            facts.best = min(facts.best, facts.smoothed)
        if not is_finite or facts.smoothed > DIVERGED * max(facts.best, 1e-3):
            left = f"the checkpoint of step {self.saved} is kept" if self.saved else "no checkpoint was saved yet"
            raise TrainingError(
                f"training diverged at step {facts.step}: loss {loss:g} (best {facts.best:g}); {left}: "
                "run the same command with a lower --learning-rate"
            )

    def _save(self) -> None:
        checkpoint.save(self.work / STATE, self.facts, self.processes)
        self.saved = self.facts.step
