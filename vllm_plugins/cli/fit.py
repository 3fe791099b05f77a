# SPDX-License-Identifier: Apache-2.0
"""`ppd fit`: data, training and calibration of CP heads in one run of limited time."""

import json
import os
import shutil
import time
import zlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from vllm_ppd.heads.calibration.run import calibrate, report
from vllm_ppd.heads.cp.config import CPOptions
from vllm_ppd.heads.data.records import records
from vllm_ppd.heads.errors import (
    HeadsError,
    TrainingError,
    loading,
    refuse_other_options,
)
from vllm_ppd.heads.files import write_json, write_text, writing_folder
from vllm_ppd.heads.folder import CONFIG_NAME, read_calibration
from vllm_ppd.heads.generation import within_context, write_chats
from vllm_ppd.heads.hub import SUBFOLDER
from vllm_ppd.heads.options import CalibrationOptions, DataOptions, FitOptions
from vllm_ppd.heads.provenance import PROVENANCE_NAME
from vllm_ppd.heads.training import loop
from vllm_ppd.heads.training.checkpoint import WORK
from vllm_ppd.heads.training.extracted import EXTRACTED
from vllm_ppd.heads.training.states import GIB
from vllm_ppd.model_patches.families import FAMILIES
from vllm_ppd.vllm_plugins.config.found import promise, register

# Shares of the time limit; calibration has what they leave
DATA = 0.5
TRAINING = 0.4
PROMPTS = str(resources.files("vllm_ppd.heads.data") / "prompts.jsonl")
# Most answers to a prompt at a temperature, each with its own seed, beside a greedy one
SAMPLED = 3
GREEDY = 0.25  # share of the answers' time for greedy ones
HELD_OUT = 8  # one of so many prompts is held out with all its answers
# Most tokens of a chat, and of a response
LENGTH = 2048
RESPONSE = 512
# The chat templates of models that reason have one of these words. Their answers are not
# cut, or no head would see one.
REASONS = ("<think>", "reasoning", "<|channel|>")
LONG = 16_384
HALF = (
    128  # most tokens of a held-out text that form its prompt; at most half of it
)
NEW_TOKENS = 128  # of a text for calibration
CALIBRATED = 64  # most held-out prompts of a calibration
MOST_PASSES = 16  # over the data
# Evaluations of a training, and how many may pass without improvement
EVALUATIONS = 12
PATIENCE = 6
CHECKPOINT_SECONDS = 30.0  # of training that a killed run may lose
# A step on a GPU: its tokens, the least steps of a pass over the data, and the parts in
# which it is computed, so that memory is that of a quarter of its tokens
STEP_TOKENS = 32_768
STEPS = 64
PARTS = 4
STATES_BYTES = 20e9  # most on disk, and at most half of the free space


def run(options: FitOptions) -> int:
    """Run the steps that are not done, and print what they came to."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if options.out is None:
        model = os.path.basename(os.path.abspath(options.model))
        options = options.model_copy(update={"out": f"{model}-{SUBFOLDER}"})
    out = Path(str(options.out))
    folder = Path(f"{out}.fit")
    if (out / CONFIG_NAME).exists() and not folder.exists():
        raise TrainingError(
            f"--out {out} already holds heads; delete it or use another folder"
        )
    with writing_folder(out):  # which training needs to write later
        pass
    with writing_folder(folder, "the work folder"):
        fit = Fit(options, folder)
        steps = [fit.data, fit.training, fit.calibration]
        if fit.is_divided:  # calibration needs the whole target on one device
            steps.pop()
        for number, step in enumerate(steps, start=1):
            print(f"step {number} of {len(steps)}: {step.__name__}", flush=True)
            step()
        shutil.rmtree(folder / "states", ignore_errors=True)
    if not fit.is_divided:
        print(report(read_calibration(out), str(out)))
    print(f"\nwrote {out}; {folder} keeps the data")
    try:
        register(out)
    except (HeadsError, OSError) as error:
        print(f"`--speculative-model ppd` will not find {out} ({error})")
        return 0
    verb = "will not use" if 0 < promise(out) <= 1 else "finds"
    print(f"`--speculative-model ppd` {verb} {out} on this machine")
    return 0


class Fit:
    """The steps of a fit. Each is skipped when it is done, and continues where it was
    killed.

    Args:
        options: of the command.
        folder: for everything except the heads.

    Raises:
        TrainingError: if the folder belongs to a fit with other options.
    """

    def __init__(self, options: FitOptions, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.out = Path(str(options.out))
        code = options.trust_remote_code
        with loading(options.model):
            config = AutoConfig.from_pretrained(
                options.model, trust_remote_code=code
            )
            self.tokenizer = AutoTokenizer.from_pretrained(
                options.model, trust_remote_code=code
            )
        self.is_divided = options.tensor_parallel_size > 1
        self.architecture = next(iter(config.architectures or []), "")
        self.config = config.get_text_config()
        template = str(getattr(self.tokenizer, "chat_template", None))
        self.reasons = any(word in template for word in REASONS)
        most = LONG if self.reasons else LENGTH
        self.length = within_context(most, self.config)
        self.shared = options.model_dump(
            include={"model", "seed", "trust_remote_code"}
        )
        kept = folder / "options.json"
        ours = options.essence()
        theirs = json.loads(kept.read_text()) if kept.exists() else ours
        refuse_other_options(
            f"{folder} is of a fit", theirs, ours, "another --out"
        )
        write_json(kept, ours)

    def data(self) -> None:
        """Write answers to prompts and, if the user gives none, chats that the model begins."""
        if (self.folder / "held-out.jsonl").exists():
            return
        given = self.options.prompts
        prompts = given
        if not given and getattr(self.tokenizer, "chat_template", None):
            prompts = (PROMPTS,)
        seconds = 60 * self.options.minutes * DATA
        began = time.monotonic()
        shared = DataOptions(
            **self.shared,
            out="",  # of each part
            max_model_len=self.length,
            max_tokens=self.length
            if self.reasons
            else min(RESPONSE, self.length // 2),
            batch_size=256
            if torch.cuda.is_available() and not self.reasons
            else 64,
            tensor_parallel_size=self.options.tensor_parallel_size,
        )
        engine = cache(lambda: vllm_engine(shared))
        # Files, their options, and the share of the time at which each ends
        parts: list[tuple[str, dict[str, Any], float]] = []
        if prompts:
            end = 1.0 if given else 0.5
            greedy = {"prompts": prompts, "temperature": 0.0}
            parts.append(("greedy", greedy, end * GREEDY))
            parts.append(("answers", {"prompts": prompts * SAMPLED}, end))
        if not given:
            parts.append(("others", {}, 1.0))
        files: list[Path] = []
        for name, changes, end in parts:
            out = self.folder / f"{name}.jsonl"
            some = shared.model_copy(update={**changes, "out": str(out)})
            try:
                write_chats(some, lambda _: engine(), began + end * seconds)
            except TrainingError as error:
                # Some models write few or no usable user turns
                if name != "others" or not files:
                    raise
                print(f"vllm-ppd: fitting to fewer chats: {error}", flush=True)
            if out.exists():
                files.append(out)
        if engine.cache_info().currsize:
            engine().close()
        self._split(files)

    def _split(self, files: list[Path]) -> None:
        """Write training.jsonl and held-out.jsonl, which share no prompt."""

        training: list[str] = []
        held_out: dict[str, str] = {}  # one answer per prompt
        for path in files:
            for _, chat in records(path):
                prompt = chat["prompt_token_ids"]
                response = chat["token_ids"]
                if len(prompt) == 1:  # a whole text
                    half = min(HALF, len(response) // 2)
                    prompt = prompt + response[:half]
                    response = response[half:]
                name = json.dumps(prompt)
                if zlib.crc32(name.encode()) % HELD_OUT:
                    training.append(json.dumps(chat) + "\n")
                elif len(prompt) <= self.length - NEW_TOKENS:
                    chat = {"prompt_token_ids": prompt, "token_ids": response}
                    held_out[name] = json.dumps(chat) + "\n"
        if not training or not held_out:
            raise TrainingError(
                f"the model wrote {len(training)} chats to train on and "
                f"{len(held_out)} to hold out in the time; raise --minutes, or add "
                "--prompts"
            )
        write_text(self.folder / "training.jsonl", "".join(training))
        write_text(self.folder / "held-out.jsonl", "".join(held_out.values()))

    def training(self) -> None:
        """Train CP heads with a recurrent state on as many tokens as the time allows."""
        if not (
            self.out / PROVENANCE_NAME
        ).exists():  # the file that is written last
            kept = self.folder / "training.json"
            if not kept.exists():
                write_json(kept, self._training_options())
            chosen = json.loads(kept.read_text())
            loop.train(CPOptions(**chosen, license=self.options.license))
        shutil.rmtree(self.out / WORK, ignore_errors=True)

    def _training_options(self) -> dict[str, Any]:
        """Options of a training that fits the time, by its measured speed."""
        data = self.folder / "training.jsonl"
        tokens = sum(
            len(chat["prompt_token_ids"] + chat["token_ids"])
            for _, chat in records(data)
        )
        on_gpu = torch.cuda.is_available()
        longest = min(2048 if on_gpu else 512, self.length - EXTRACTED)
        length = max(8, min(longest, tokens // 32))
        parts = PARTS if on_gpu else 1
        windows = windows_a_step(tokens, length) if on_gpu else 4
        chosen: dict[str, Any] = self.shared | {
            "data": (str(data),),
            "out": str(self.out),
            "sequence_length": length,
            "batch_size": windows,
            "accumulation": parts,
            "held_out_fraction": 0.08,
            "evaluation_tokens": 32 * length,
            "condition": "recurrent",
            # Higher ranks accept no more drafts on top of a recurrent state.
            "rank": 1,
            "dropout": 0.1,
        }
        layers = self.config.num_hidden_layers
        if layers >= 4 and self.architecture in FAMILIES:
            chosen["layers"] = tuple(
                round(share * layers / 4) for share in (1, 2, 3)
            )
        # Four layers' states and the likeliest tokens of each position.
        kept_bytes = tokens * (4 * 2 * self.config.hidden_size + 16 * 6)
        room = shutil.disk_usage(self.folder).free / 2
        states = {"states_cache": str(self.folder / "states")}
        if self.is_divided:
            chosen |= states | {
                "states_from": "vllm",
                "tensor_parallel_size": self.options.tensor_parallel_size,
                "states_cache_gib": room / GIB,
            }
        elif kept_bytes < min(STATES_BYTES, room):
            chosen |= states
        began = time.monotonic()
        speed = loop.speed_of(CPOptions(**chosen))
        seconds = 60 * self.options.minutes * TRAINING - (
            time.monotonic() - began
        )
        steps = steps_in(seconds, speed)
        chosen["steps"] = steps
        print(
            f"training on {steps * windows * length:,} tokens, of {tokens:,}",
            flush=True,
        )
        chosen["evaluate_every"] = -(-steps // EVALUATIONS)
        chosen["patience"] = PATIENCE
        save_every = round(CHECKPOINT_SECONDS / speed.step)
        chosen["save_every"] = max(1, min(save_every, steps))
        return chosen

    def calibration(self) -> None:
        """Measure acceptance on held-out prompts."""
        try:
            read_calibration(self.out)
        except HeadsError:
            data = self.folder / "held-out.jsonl"
            held_out = data.read_bytes().count(b"\n")
            calibrate(
                CalibrationOptions(
                    **self.shared,
                    heads=str(self.out),
                    data=(str(data),),
                    num_prompts=min(held_out, CALIBRATED),
                    output_len=NEW_TOKENS,
                    dtype="bfloat16" if torch.cuda.is_available() else "float32",
                )
            )


def windows_a_step(tokens: int, length: int) -> int:
    """Windows of so many tokens in a step on a GPU, a multiple of PARTS.

    Args:
        tokens: of the data.
        length: of a window.
    """
    most = min(STEP_TOKENS, tokens // STEPS) // length
    return max(1, most // PARTS) * PARTS


def steps_in(seconds: float, speed: loop.Speed) -> int:
    """Steps that fill the time, which may be less than a pass over the data. Those of
    the first pass also compute the target's states.
    """
    seconds = max(0.0, seconds)
    first = min(speed.steps, seconds / speed.first_step)
    further = (seconds - first * speed.first_step) / speed.step
    return max(1, round(min(first + further, MOST_PASSES * speed.steps)))


def vllm_engine(options: Any) -> Any:
    """vLLM's engine, which takes seconds to import."""
    from vllm_ppd.vllm_plugins.engine.generation import OfflineEngine

    return OfflineEngine(options)
