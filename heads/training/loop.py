# SPDX-License-Identifier: Apache-2.0
"""The training run, from data, target and recipe to a heads folder; it can be stopped
at any time and continued.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from vllm_ppd.heads.errors import Stopped, TrainingError, stop_signals
from vllm_ppd.heads.kinds import recipe_of
from vllm_ppd.heads.options import TrainingOptions
from vllm_ppd.heads.provenance import (
    data_files,
    provenance,
)
from vllm_ppd.heads.text import in_words
from vllm_ppd.heads.training import checkpoint
from vllm_ppd.heads.training.checkpoint import (
    WORK,
    Evaluation,
    Processes,
    RunFacts,
    unfinished_run,
)
from vllm_ppd.heads.training.extracted import EXTRACTED, ExtractedTarget
from vllm_ppd.heads.training.optimizer import Muon
from vllm_ppd.heads.training.packed_attention import packed_attention
from vllm_ppd.heads.training.recipe import Recipe
from vllm_ppd.heads.training.states import GIB, StatesCache
from vllm_ppd.heads.training.target import Target, cpu_computes_bfloat16
from vllm_ppd.heads.training.tokens import Order, TokenStore

CURVE = (
    "curve.jsonl"  # training loss and held-out figures by step, beside the heads
)
MakeRecipe = Callable[[Any, Target], Recipe]


def train(
    options: TrainingOptions, make: MakeRecipe | None = None
) -> dict[str, Any]:
    """Train heads, or the modules of another recipe, and write a folder.

    Args:
        options: of the recipe.
        make: makes the recipe from options and a target (None: the recipe of the
            options' kind).

    Returns:
        The provenance that was written beside the heads, evaluation included.

    Raises:
        InUse: if another run writes the folder.
        TrainingError: on bad input or a loss that is not finite; the last checkpoint
            stays on disk.
        Stopped: after Ctrl-C or SIGTERM; the last checkpoint is kept.
    """
    # They may be gone at the end
    files = data_files(options.data)
    with _begun(options, make) as run:
        facts = run.train()
        if run.processes.is_main_process:
            facts = provenance(
                kind=options.kind,
                options=options.model_dump(mode="json"),
                data_files=files,
                **facts,
            )
            run.recipe.write(run.out, facts)
            shutil.rmtree(run.work)
        run.processes.wait_for_everyone()
    return facts


class Speed(NamedTuple):
    """The measured speed of a training."""

    first_step: float  # seconds in the first pass, which fills a cache of states
    step: float  # seconds in later passes
    steps: float  # in a pass over the data


def speed_of(options: TrainingOptions) -> Speed:
    """Time the first steps of a training. No checkpoint is written; tokens and cached
    states remain.

    Raises:
        InUse, TrainingError: as train.
    """
    with _begun(options) as run:
        return run.speed()


@contextmanager
def _begun(
    options: TrainingOptions, make: MakeRecipe | None = None
) -> Iterator[Run]:
    processes = Processes(options.device, Path(options.out) / WORK)
    if options.dtype == "auto":
        is_fast = processes.device.type != "cpu" or cpu_computes_bfloat16()
        dtype = "bfloat16" if is_fast else "float32"
        options = options.model_copy(update={"dtype": dtype})
    with unfinished_run(options, processes) as facts:
        yield Run(options, processes, facts, make or recipe_of(options.kind))


class Run:
    """One training run over its steps.

    Raises:
        TrainingError: if options, target and data do not fit together.
    """

    def __init__(
        self,
        options: TrainingOptions,
        processes: Processes,
        facts: RunFacts,
        make: MakeRecipe,
    ) -> None:
        self.options = options
        self.processes = processes
        self.facts = facts
        self.out = Path(options.out)
        self.work = self.out / WORK
        full = getattr(options, "recipe", None) == "full"
        self._check_options(full)
        processes.say(f"loading {options.model}")
        # The full recipe's updates of the base model are too small for bfloat16.
        dtype = torch.float32 if full else getattr(torch, options.dtype)
        kind = ExtractedTarget if options.states_from == "vllm" else Target
        target = kind(
            options.model,
            processes.device,
            dtype,
            options.trust_remote_code,
            full,
        )
        longest = target.max_length
        if longest and options.states_from == "vllm":
            longest -= EXTRACTED
        if longest and options.sequence_length > longest:
            raise TrainingError(
                f"--sequence-length {options.sequence_length} is more than the "
                f"{longest} positions of the model that a window can have"
            )
        target.packed = packed_attention(target)
        if target.packed is not None:
            processes.say("xformers computes the attention of packed windows")
        torch.manual_seed(options.seed)
        recipe = make(options, target)
        self.recipe = recipe
        with processes.main_process_first():
            store = TokenStore(
                self.work,
                options.data,
                target.tokenizer,
                target.vocab_size,
                options.held_out_fraction,
                options.sequence_length,
                options.train_on_prompts,
            )
        self.store = store
        manifest = store.manifest
        processes.say(
            f"data: {manifest.documents:,} records, {manifest.answers:,} "
            f"answers or texts, {manifest.counted:,} tokens of them; left out: "
            f"{in_words(manifest.skipped)}"
        )
        if options.states_cache is not None:
            most_bytes = int(options.states_cache_gib * GIB)
            folder = Path(options.states_cache)
            recipe.cache = StatesCache(
                folder, target, store, recipe.reads, most_bytes
            )
            if isinstance(target, ExtractedTarget):
                target.options = options
                with processes.main_process_first():
                    recipe.cache.fill()
                target.close()
        # An evaluation reads the same ones every time
        self.held_out_windows = max(
            1,
            min(
                store.num_windows("held_out"),
                options.evaluation_tokens // store.length,
            ),
        )
        if not store.has_rows(recipe.needed):
            raise TrainingError(
                f"no window has a response of {recipe.needed} tokens in a row, which "
                "these heads need to learn; add longer responses"
            )
        epochs = math.ceil(
            options.epochs * store.num_windows() / options.batch_size
        )
        self.steps = options.steps or max(1, epochs)
        self.tokens_a_step = options.batch_size * options.sequence_length
        self.order = Order(store, options.seed, options.batch_size)
        recipe.begin(store, fresh=not facts.step)
        groups = recipe.groups(options.learning_rate)
        make_optimizer = (
            Muon if options.optimizer == "muon" else torch.optim.AdamW
        )
        optimizer = make_optimizer(
            groups, betas=options.betas, weight_decay=options.weight_decay
        )
        self.module, self.optimizer = processes.prepare(recipe, optimizer)
        self.saved = facts.step
        if facts.step:
            self._continue()
        if processes.is_main_process:
            self._begin_curve()

    def _check_options(self, full: bool) -> None:
        options = self.options
        processes = self.processes.num_processes
        if options.batch_size % (processes * options.accumulation):
            raise TrainingError(
                f"--batch-size {options.batch_size} is not divisible by {processes} "
                f"processes x {options.accumulation} accumulated parts"
            )
        if options.patience is not None and options.evaluate_every is None:
            raise TrainingError(
                f"--patience {options.patience} needs --evaluate-every"
            )
        if options.states_from == "vllm" and options.states_cache is None:
            raise TrainingError(
                "--states-from vllm needs a folder for the states; add --states-cache"
            )
        if full and options.states_cache is not None:
            raise TrainingError(
                "--states-cache needs a frozen target, but --recipe full trains it; "
                "omit one of them"
            )

    def _continue(self) -> None:
        """Restore the newest checkpoint."""
        checkpoint.load(self.work, self.processes)
        # Learning rates may have been changed.
        groups = self.recipe.groups(self.options.learning_rate)
        for group, fresh in zip(self.optimizer.param_groups, groups, strict=True):
            group["peak"] = fresh["peak"]
        held_out = self.facts.held_out
        if held_out.best and held_out.best.step != checkpoint.best_step(
            self.work
        ):
            # Better weights were kept after this checkpoint; the run finds them again.
            held_out.best = None
        self.processes.say(
            f"{self.out} continues at step {self.saved} of {self.steps}, after "
            f"{self.saved * self.tokens_a_step:,} tokens"
        )

    def train(self) -> dict[str, Any]:
        """Run all remaining steps, and the evaluations before the first and after the
        last; the best weights remain.
        """
        options = self.options
        facts = self.facts
        if not facts.step:
            facts.before = self._judge("before").figures
        progress = self.processes.bar(
            f"training {options.kind} heads",
            self.steps * self.tokens_a_step,
            initial=facts.step * self.tokens_a_step,
        )
        started = time.monotonic() - facts.seconds
        patience = options.patience or math.inf
        with progress, stop_signals() as stop:
            while facts.step < self.steps and facts.held_out.stale < patience:
                loss, stops = self._loss_and_gradient(progress, stop)
                facts.seconds = time.monotonic() - started
                # Save before the update, while the loss shows that these weights are
                # good.
                if stops or facts.step % options.save_every == 0:
                    self._save()
                if stops:
                    raise Stopped(facts.step, self.steps)
                self._update(loss)
                progress.set_postfix(self._shown(loss))
                every = options.evaluate_every or self.steps
                if facts.step % every == 0 and facts.step < self.steps:
                    self._judge(f"step {facts.step}")
            self._save()
        facts.seconds = time.monotonic() - started
        after = self._finish()
        return {
            "steps": facts.step,
            "tokens": facts.step * self.tokens_a_step,
            **self.store.facts(),
            "seconds": round(facts.seconds, 1),
            "stopped_flat": facts.step < self.steps,
            "held_out_before": facts.before,
            "held_out_after": after.figures,
            "held_out_after_step": after.step,
        }

    def speed(self) -> Speed:
        """Time optimizer steps."""
        # The first one warms up and caches its states, which the next one reads.
        steps = (0, 0, 1)
        seconds = []
        tokens = len(steps) * self.tokens_a_step
        with self.processes.bar("timing training steps", tokens) as progress:
            for step in steps:
                self.facts.step = step
                started = time.monotonic()
                loss, _ = self._loss_and_gradient(progress, [])
                self._update(loss)
                seconds.append(time.monotonic() - started)
        _, later, first = seconds
        return Speed(
            first, later, self.store.num_windows() / self.options.batch_size
        )

    def _shown(self, loss: float | None) -> dict[str, str]:
        """The figures of the progress line."""
        shown = {"step": f"{self.facts.step}/{self.steps}"}
        if loss is not None:
            shown["loss"] = f"{loss:.4f}"
        last = self.facts.held_out.last
        if last and last.accepted is not None:
            shown["accepted"] = f"{last.accepted:.3f}"
        return shown

    def _loss_and_gradient(
        self, progress: tqdm, stop: list[int]
    ) -> tuple[float | None, bool]:
        """Accumulate the gradient over the step's windows.

        A single process that is to stop returns after the current part of the step,
        which is done again later.

        Returns:
            (The mean loss of the parts in which a token counts, None without any;
            whether any process is to stop).

        Raises:
            TrainingError: if the loss is not finite.
        """
        options = self.options
        processes = self.processes
        step = self.facts.step
        world = processes.num_processes
        rank = processes.process_index
        self.module.train()
        # A recipe's random draws depend on the step only, so that a continued run
        # repeats them.
        torch.manual_seed((options.seed * 1_000_003 + step) * world + rank)
        total = torch.zeros((), device=processes.device)
        parts = 0
        for batch in self.order.batches(
            step, options.accumulation * world, rank, world
        ):
            with processes.arithmetic(options.dtype):
                loss, counts = self.module(batch.to(processes.device))
            processes.backward(loss / options.accumulation)
            total = total + loss.detach().float()
            if counts:
                parts += 1
            progress.update(batch.num_tokens * world)
            if stop and world == 1:
                break
        ours = torch.stack([total, *total.new_tensor([parts, len(stop)])])
        loss_sum, counted, stops = processes.reduce(ours, "sum").tolist()
        mean = loss_sum / counted if counted else None
        if mean is not None and not math.isfinite(mean):
            raise self._diverged("loss")
        return mean, stops > 0

    def _update(self, loss: float | None) -> None:
        """One optimizer step with the schedule's learning rate.

        Raises:
            TrainingError: if the gradient is not finite.
        """
        facts = self.facts
        warmup = max(1, round(self.steps * self.options.warmup))
        cosine = 0.5 * (1 + math.cos(math.pi * facts.step / self.steps))
        scale = min((facts.step + 1) / warmup, cosine)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * scale
            # Separately: the heads' large first gradients would shrink those of a base
            # model that is also trained.
            norm = torch.nn.utils.clip_grad_norm_(
                group["params"], self.options.gradient_clip
            )
            if not norm.isfinite():
                raise self._diverged("gradient")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        facts.step += 1
        if loss is not None:
            self._note(loss=round(loss, 5), rate=round(scale, 5))

    def _diverged(self, what: str) -> TrainingError:
        kept = "there is no checkpoint"
        if self.saved:
            kept = f"the checkpoint of step {self.saved} is kept"
        return TrainingError(
            f"training diverged: the {what} of step {self.facts.step} is not finite; "
            f"{kept}: run the same command with a lower --learning-rate"
        )

    @torch.no_grad()
    def evaluate(self, when: str) -> Evaluation:
        """Loss and figures on held-out windows."""
        options = self.options
        processes = self.processes
        recipe = self.recipe.eval()
        windows = self.held_out_windows
        parts = options.accumulation * processes.num_processes
        size = options.batch_size // parts
        sums: defaultdict[str, float] = defaultdict(float)
        total = 0.0
        tokens = windows * self.store.length
        with processes.bar(
            f"evaluating ({when})", tokens, leave=False
        ) as progress:
            for start in range(0, windows, size):
                some = range(start, min(start + size, windows))
                batch = self.store.batch("held_out", some)
                with processes.arithmetic(options.dtype):
                    loss, counts = recipe.loss(batch.to(processes.device))
                total += float(loss) * len(some) / windows
                for name, value in counts.items():
                    for index, item in enumerate(value.flatten().tolist()):
                        key = f"{name}.{index}" if value.dim() else name
                        sums[key] += item
                progress.update(batch.num_tokens)
        step = self.facts.step
        if not sums:
            return Evaluation(step=step, loss=None, figures={})
        figures = recipe.summary(sums)
        accepted = [sums[name] for name in sums if name.startswith("accepted.")]
        shares = [count / sums["accepted_of"] for count in accepted]
        # The mean over all processes, which must agree on when to stop.
        totals = torch.tensor(
            [total, sum(shares)], dtype=torch.float64, device=processes.device
        )
        loss, a_step = processes.reduce(totals, "mean").tolist()
        if not shares:
            return Evaluation(step=step, loss=loss, figures=figures)
        figures["accepted_a_step"] = round(a_step, 4)
        figures["accepted_by_position"] = [round(share, 4) for share in shares]
        # A target that is trained, too, is another one in each evaluation: drafts of its
        # guesses at first are the easiest.
        decisive = None if recipe.target.trainable else a_step
        return Evaluation(
            step=step, loss=loss, figures=figures, accepted=decisive
        )

    def _judge(self, when: str) -> Evaluation:
        """Evaluate the current weights on held-out windows, and keep them if they are
        the best so far.
        """
        facts = self.facts
        evaluation = self.evaluate(when)
        if evaluation.loss is not None:
            self._note(held_out_loss=evaluation.loss, held_out=evaluation.figures)
        if facts.held_out.take(evaluation) and self.processes.is_main_process:
            checkpoint.save_best(self.work, self.recipe, facts.step)
        self.processes.wait_for_everyone()
        return evaluation

    def _finish(self) -> Evaluation:
        """The last evaluation; restore the best weights and return their evaluation."""
        facts = self.facts
        last = facts.held_out.last
        if last is None or last.step != facts.step:
            last = self._judge("after")
        best = facts.held_out.best
        if best is not None and best.step < facts.step:
            checkpoint.load_best(self.work, self.recipe)
            return best
        return last

    def _begin_curve(self) -> None:
        """Begin the file of the curve, or drop what was written after the checkpoint."""
        path = self.out / CURVE
        kept = ""
        if self.saved and path.exists():
            for line in path.read_text().splitlines(keepends=True):
                if json.loads(line)["step"] <= self.saved:
                    kept += line
        path.write_text(kept)

    def _note(self, **figures: Any) -> None:
        """Append a line to the curve: `loss` of a step, with `rate`, the factor on the
        peak learning rates; or `held_out_loss` and
        `held_out`, figures by name as in provenance.json."""
        if not self.processes.is_main_process:
            return
        step = self.facts.step
        line = {"step": step, "tokens": step * self.tokens_a_step, **figures}
        with (self.out / CURVE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self) -> None:
        if self.facts.step > self.saved:
            checkpoint.save(self.facts, self.processes)
            self.saved = self.facts.step
