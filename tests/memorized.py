# SPDX-License-Identifier: Apache-2.0
"""A tiny model that has memorized a few answers, and heads that draft them: most drafts
are accepted.
"""

from pathlib import Path
from typing import Any

import overfitted
import tiny
import torch
import transformers as tf

USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOKENS = [
    USER,
    ASSISTANT,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# What the assistant answers, by what the user says.
ANSWERS = {
    "weather": "<think>look it up</think><tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
    "both": (
        '<think>two calls</think><tool_call>\n{"name": "weather", "arguments": '
        '{"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ),
    "number": '<think>count them all first</think>{"a": 127, "b": "none of them"}',
    "story": "<think>once upon a time</think>There was a café, and it was closed.",
}
STEPS = 400
LOSS = 0.002


def make(folder: Path) -> None:
    """Train the model and its heads, and write them to `model` and `heads` in a folder.

    Raises:
        RuntimeError: if the model has not memorized the answers after STEPS.
    """
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(TOKENS)
    tokenizer.chat_template = TEMPLATE
    chats = []
    for said, answer in ANSWERS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], tokenize=False
        )
        chats.append(prompt + ASSISTANT + answer + tiny.END)
    settings: dict[str, Any] = {
        **tiny._COMMON,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "initializer_range": 0.05,
    }
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(**settings | {"vocab_size": len(tokenizer)})
    )
    batch = tokenizer(chats, return_tensors="pt", padding=True)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[
        :, : 1 + max(map(len, ANSWERS))
    ] = -100  # which question comes cannot be known
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        loss = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=labels,
        ).loss
        if loss.item() < LOSS:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise RuntimeError(
            f"the answers are not memorized: loss {loss.item():.4f}"
        )
    model.eval().save_pretrained(folder / "model")
    model.generation_config.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sequences = [
        tokenizer.encode(chat, add_special_tokens=False) for chat in chats
    ]
    overfitted.fit(
        folder / "model",
        "early",
        sequences,
        folder / "heads",
        steps=120,
        head="classifier",
        exit_layers=(1,),
    )
