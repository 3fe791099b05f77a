# SPDX-License-Identifier: Apache-2.0
"""A small Llama with the demo model's tokenizer, as vLLM's method `draft_model` reads it.

    python benchmarks/peers/draft_model.py                  # build/peers/draft_model

Two layers and two thirds of the target's width, trained from nothing on the target's distribution over the corpus.
"""

from __future__ import annotations

import torch
from common import Target, arguments, fit, optimizers_of, save, tell
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = arguments(__doc__, "draft_model", steps=240, learning_rate=3e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    target = Target(args)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 32, num_key_value_heads=args.hidden // 64,
        head_dim=32, max_position_embeddings=target.config.max_position_embeddings, tie_word_embeddings=True,
        bos_token_id=target.config.bos_token_id, eos_token_id=target.config.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    unembedding = target.model.get_output_embeddings().weight

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = functional.linear(target.hidden(ids), unembedding).float().softmax(-1)
        logits = model(input_ids=ids).logits.float()
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))

    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    seconds = fit(target, args, optimizers_of(model, matrices, args), loss_of)
    ids = target.held_out()
    with torch.no_grad():
        said, meant = model(input_ids=ids).logits.argmax(-1), target.model(input_ids=ids).logits.argmax(-1)
    tensors = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save(args.out, config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, tensors)
    target.tokenizer.save_pretrained(args.out)
    tell(args, seconds, {"the target's token": round((said == meant).float().mean().item(), 4)})


if __name__ == "__main__":
    main()
