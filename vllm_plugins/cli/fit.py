# SPDX-License-Identifier: Apache-2.0
"""`ppd fit`: data, training, calibration and plan in one run of limited time."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ppd.heads.data.check import check_data
from vllm_ppd.heads.errors import TrainingError, loading
from vllm_ppd.heads.locking import writing_folder
from vllm_ppd.heads.progress import Stage
from vllm_ppd.heads.quote import place
from vllm_ppd.vllm_plugins.cli.data import vllm_engine, write_chats

if TYPE_CHECKING:
    from vllm_ppd.heads.fitting.options import FitOptions
    from vllm_ppd.heads.fitting.state import State

LENGTH, RESPONSE = 2048, 512  # most tokens of a chat, and of a response
STATES_GB = 20.0  # most on disk, and at most half of the free space
PRECISION = {True: "bfloat16", False: "float32"}


def run(options: FitOptions) -> int:
    """Run the stages that are not done, and print the page."""
    check_data(options.prompts)
    for name, value in {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}.items():
        os.environ.setdefault(name, value)  # other output would break the stages' lines

    from vllm_ppd.heads.fitting.page import NAME
    from vllm_ppd.heads.fitting.state import SHARES, State
    from vllm_ppd.heads.io import CONFIG_NAME
    from vllm_ppd.heads.training.provenance import data_files

    out, folder = Path(options.out), Path(f"{options.out}.fit")
    if (out / CONFIG_NAME).exists() and not folder.exists():
        raise TrainingError(f"--out {place(out)} already holds heads; delete it or give another folder")
    with writing_folder(out):  # which training needs to write later
        pass
    with writing_folder(folder, "the work folder"):
        files = [file.model_dump() for file in data_files(options.prompts)]
        state = State(folder, options.essence() | {"prompts": files})
        for name in SHARES:
            if name not in state.facts.done:
                with state.stage(name) as stage:
                    getattr(Fit(options, folder, state, stage), name)()
                    state.finish(name)
        shutil.rmtree(folder / "states", ignore_errors=True)
    print((out / NAME).read_text())
    print(f"wrote {out} and in it {NAME}; {folder} keeps the data")
    return 0


class Fit:
    """The stages of a fit; each continues where it was killed, and makes its choices once.

    Args:
        options: of the command.
        folder: for everything except heads and page.
        state: the choices so far.
        stage: the line of the current stage.
    """

    def __init__(self, options: FitOptions, folder: Path, state: State, stage: Stage) -> None:
        from transformers import AutoConfig

        self.options, self.folder, self.state, self.stage, self.out = options, folder, state, stage, Path(options.out)
        code = options.trust_remote_code
        with loading(options.model):
            config = AutoConfig.from_pretrained(options.model, trust_remote_code=code)
        self.architecture, self.config = next(iter(config.architectures or []), ""), config.get_text_config()
        self.length = min(LENGTH, getattr(self.config, "max_position_embeddings", None) or LENGTH)
        self.shared: dict[str, Any] = {"model": options.model, "seed": options.seed, "trust_remote_code": code}

    def data(self) -> None:
        """Write answers to prompts and, if the user gives none, chats that the model begins; hold out some of both."""
        import torch
        from transformers import AutoTokenizer

        from vllm_ppd.heads.fitting import choices, data
        from vllm_ppd.heads.generation.options import DataOptions

        options, folder, state, stage = self.options, self.folder, self.state, self.stage
        with loading(options.model):
            tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
        prompts, longest = folder / "prompts.jsonl", self.length // 2
        categories = data.write_prompts(options.prompts, tokenizer, longest, prompts)
        shared = DataOptions(**self.shared | {
            "out": "-", "max_length": self.length, "max_tokens": min(RESPONSE, self.length - longest),
            "batch": choices.batch_of(options.minutes, torch.cuda.is_available()),
        })  # fmt: skip
        engine_of = cache(lambda: vllm_engine(shared))
        # A base model's own texts are closer to its training data than chat prompts.
        answered = 1.0 if options.prompts else 0.5 if getattr(tokenizer, "chat_template", None) else 0.25
        parts = {"answers": (answered, (str(prompts),)), "others": (1.0, ())}
        for name, (share, files) in [*parts.items()][: 1 if options.prompts else 2]:
            chosen = state.facts.chosen.get(name, {})
            enough = choices.Enough(state, stage, name, share, shared.max_tokens)
            given = shared.model_copy(update={
                "out": str(folder / f"{name}.jsonl"), "prompts": files, "number": chosen.get("chats"),
            })  # fmt: skip
            try:
                enough.choose(write_chats(given, lambda _: engine_of(), enough).count)
            except TrainingError as error:  # some models write no usable user turns; the answers remain
                if files:
                    raise
                print(f"vllm-ppd: fitting to answers alone: {error}", file=sys.stderr)
        if engine_of.cache_info().currsize:
            engine_of().close()
        written = [folder / f"{name}.jsonl" for name in parts if name in state.facts.chosen]
        counts = state.choose("data", lambda: data.split(written, categories, self.length - choices.NEW_TOKENS, folder))
        stage.status = "{training:,} chats of {tokens:,} tokens, {held_out} held out".format(**counts)

    def training(self) -> None:
        """Train the largest heads for which the time allows a few passes over the data."""
        from vllm_ppd.heads.cp.config import CPOptions
        from vllm_ppd.heads.training import loop
        from vllm_ppd.heads.training.checkpoint import WORK
        from vllm_ppd.heads.training.provenance import NAME as PROVENANCE
        from vllm_ppd.heads.training.provenance import provenance_of

        if not (self.out / PROVENANCE).exists():  # the file that is written last
            chosen = self.state.choose("training", self._training)
            loop.train(CPOptions(**chosen | {"license": self.options.license}))
        shutil.rmtree(self.out / WORK, ignore_errors=True)
        facts = provenance_of(self.out)
        accepted = facts.held_out_after.get("accepted_a_step")
        shown = "" if accepted is None else f"; held out {accepted:.3f} greedy drafts accepted per step"
        self.stage.status = f"{facts.steps:,} steps{shown}"

    def _training(self) -> dict[str, Any]:
        """Options of the training that fits the time, by measured speeds."""
        import torch

        from vllm_ppd.heads.cp.config import CPOptions
        from vllm_ppd.heads.fitting import choices
        from vllm_ppd.heads.training.loop import speed_of
        from vllm_ppd.heads.training.parallel import cpu_computes_bfloat16
        from vllm_ppd.model_patches.families import FAMILIES

        tokens, config = self.state.facts.chosen["data"]["tokens"], self.config
        keeps = choices.state_bytes(tokens, config.hidden_size) < min(
            1e9 * STATES_GB, shutil.disk_usage(self.folder).free / 2
        )
        shared = self.shared | choices.windows(tokens, self.length) | {
            "data": (str(self.folder / "training.jsonl"),), "out": str(self.out),
            "precision": PRECISION[torch.cuda.is_available() or cpu_computes_bfloat16()],
            "states_cache": str(self.folder / "states") if keeps else None,
        }  # fmt: skip
        layers = config.num_hidden_layers if self.architecture in FAMILIES else 0
        for heads in choices.heads(layers, config.vocab_size):
            speed = speed_of(CPOptions(**shared | heads))
            seconds, planned = self.stage.seconds, self.stage.planned
            passes = choices.passes_in(planned - seconds, speed)
            if passes >= choices.LEAST_PASSES or seconds > choices.MEASURING * planned:
                break
        return shared | heads | choices.schedule(max(passes, 1.0), speed)

    def calibration(self) -> None:
        """Measure acceptance on held-out prompts, and times."""
        import torch

        from vllm_ppd.heads.calibration.options import CalibrationOptions
        from vllm_ppd.heads.calibration.run import calibrate
        from vllm_ppd.heads.fitting import choices

        facts, planned = self.state.facts, self.stage.planned
        rate = max(facts.chosen.get(name, {}).get("tokens_a_second", 0.0) for name in ("answers", "others"))
        held_out = facts.chosen["data"]["held_out"]
        prompts = self.state.choose("prompts", lambda: choices.prompts_in(planned, rate, held_out))
        calibrate(CalibrationOptions(**self.shared | {
            "heads": str(self.out), "data": (str(self.folder / "held-out.jsonl"),), "prompts": prompts,
            "new_tokens": choices.NEW_TOKENS, "precision": PRECISION[torch.cuda.is_available()],
        }))  # fmt: skip

    def plan(self) -> None:
        """Plan, and write the page."""
        from vllm_ppd.heads.cp.config import CPParts
        from vllm_ppd.heads.fitting.page import accepted_a_step, write_page
        from vllm_ppd.heads.io import load_calibration, load_config
        from vllm_ppd.heads.planning.options import PlanOptions
        from vllm_ppd.heads.planning.plan import make_plan
        from vllm_ppd.heads.training.provenance import machine, provenance_of

        chosen, trained, parts = self.state.facts.chosen, provenance_of(self.out), load_calibration(self.out)
        assert isinstance(parts, CPParts)
        plan = make_plan(PlanOptions(**dict[str, Any](heads=(str(self.out),), model=self.options.model)))
        minutes = sum(self.state.facts.seconds.values()) / 60
        write_page(self.out, plan, parts, {
            "heads": f"CP, {load_config(self.out).describe()}",
            "data": "{training:,} chats of {tokens:,} tokens, written by the model".format(**chosen["data"]),
            "training": f"{trained.steps:,} steps, {trained.tokens:,} tokens",
            "figures": f"on {chosen['prompts']} held-out prompts",
            "time": f"{minutes:.1f} of {self.options.minutes:g} minutes on {machine()}",
        })  # fmt: skip
        self.stage.status = f"{accepted_a_step(parts):.3f} drafts accepted per step, sampled texts"
