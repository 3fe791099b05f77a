# SPDX-License-Identifier: Apache-2.0
"""Options of `ppd data`, declared once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class DataOptions(BaseModel):
    """Let the target answer prompts, or write user turns and answer them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        description="target: a causal LM folder or Hub name that vLLM can load"
    )
    out: str = Field(
        description=(
            ".jsonl file to write; a stopped run continues with the missing chats"
        )
    )
    prompts: tuple[str, ...] = Field(
        (),
        description="files of prompts to answer; without them, the model writes the "
        "user turns itself, from the beginning of its chat template (Magpie, arXiv "
        "2406.08464), or whole texts if it has no template",
    )
    number: int | None = Field(
        None, ge=1, description="chats to write (default 1000, or one per prompt)"
    )
    system: str | None = Field(
        None,
        description="system prompt of chats without one (default: the chat template's)",
    )
    temperature: float = Field(
        0.8, ge=0, description="temperature of the responses; 0 is greedy"
    )
    top_p: float = Field(0.95, gt=0, le=1, description="top-p of the responses")
    max_tokens: int = Field(512, ge=1, description="most tokens of a response")
    prompt_tokens: int = Field(
        64, ge=1, description="tokens at a text's beginning that form the prompt"
    )
    max_length: int = Field(
        2048,
        ge=2,
        description="most tokens of prompt and response; longer prompts are skipped",
    )
    batch: int = Field(
        256,
        ge=1,
        description="chats generated together; a killed run loses one batch at most",
    )
    precision: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="dtype; auto: the model's, or float32 on CPUs without bfloat16 "
        "instructions",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of KV cache, for machines whose memory is shared (default: "
        "all free memory)",
    )
    seed: int = Field(0, description="seed; each chat derives its own from it")
    trust_remote_code: bool = Field(
        False, description="run code that comes with the model"
    )

    def essence(self) -> dict[str, Any]:
        """The options that must be the same for a stopped run to continue."""
        free = {
            "out",
            "number",
            "batch",
            "precision",
            "kv_cache_gib",
            "trust_remote_code",
        }
        return self.model_dump(mode="json", exclude=free)
