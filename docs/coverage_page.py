"""Writes coverage.md: which products of Transformers' models ``convert`` gives to tmm.

    python docs/coverage_page.py          # writes docs/coverage.md
    python docs/coverage_page.py --check  # fails if the page is out of date

Each model is tiny, random and on a CPU. Its products are counted while it runs, before and after.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tmm_core.nn import Report, convert

PAGE = Path(__file__).with_name("coverage.md")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 8}
BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}  # fmt: skip

#: The suffix of each family's model class, its configuration, and the inputs of its forward.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("ForCausalLM", GROUPED, "text"),
    "Mistral": ("ForCausalLM", HEADS, "text"),
    "Ministral": ("ForCausalLM", HEADS, "text"),
    "Qwen2": ("ForCausalLM", GROUPED, "text"),
    "Qwen3": ("ForCausalLM", HEADS, "text"),
    "Gemma": ("ForCausalLM", HEADS, "text"),
    "Gemma2": ("ForCausalLM", HEADS, "text"),
    "Phi": ("ForCausalLM", SIZES, "text"),
    "Phi3": ("ForCausalLM", GROUPED, "text"),
    "Cohere": ("ForCausalLM", GROUPED, "text"),
    "Granite": ("ForCausalLM", GROUPED, "text"),
    "Olmo2": ("ForCausalLM", GROUPED, "text"),
    "SmolLM3": ("ForCausalLM", GROUPED, "text"),
    "StableLm": ("ForCausalLM", GROUPED, "text"),
    "GPT2": (
        "LMHeadModel",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "text",
    ),
    "GPTNeoX": ("ForCausalLM", SIZES, "text"),
    "OPT": ("ForCausalLM", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}, "text"),
    "Bloom": (
        "ForCausalLM",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "text",
    ),
    "Falcon": ("ForCausalLM", SIZES, "text"),
    "Mamba": ("ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "text"),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 4}, "text"),
    "Qwen2Moe": (
        "ForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40},
        "text",
    ),
    "Qwen3Moe": (
        "ForCausalLM",
        {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "text",
    ),
    "GptOss": ("ForCausalLM", {**HEADS, "num_local_experts": 4}, "text"),
    "DeepseekV3": ("ForCausalLM", LATENT, "text"),
    "Bert": ("ForMaskedLM", SIZES, "text"),
    "Roberta": ("ForMaskedLM", SIZES, "text"),
    "DistilBert": (
        "ForMaskedLM",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        "text",
    ),
    "Electra": ("ForMaskedLM", {**SIZES, "embedding_size": 32}, "text"),
    "ModernBert": ("ForMaskedLM", {**SIZES, "sep_token_id": 2, "cls_token_id": 1}, "text"),
    "T5": ("ForConditionalGeneration", T5, "both"),
    "Bart": ("ForConditionalGeneration", BART, "both"),
    "Whisper": (
        "ForConditionalGeneration",
        {**{k: v for k, v in BART.items() if k != "max_position_embeddings"}, "num_mel_bins": 8,
         "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0,
         "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0},
        "sound",
    ),
    "ViT": ("ForImageClassification", VISION, "image"),
    "Dinov2": ("ForImageClassification", {**VISION, "mlp_ratio": 2}, "image"),
    "Siglip": ("VisionModel", VISION, "image"),
    "CLIP": ("VisionModel", VISION, "image"),
}  # fmt: skip

#: Configuration classes that have another name than the family.
CONFIGS = {"Siglip": "SiglipVisionConfig", "CLIP": "CLIPVisionConfig"}

#: Torch's operators that multiply matrices.
_PRODUCTS = re.compile(r"aten\.(mm|addmm|bmm|baddbmm|_grouped_mm|_scaled_dot_product\w*)\.")
_OURS = re.compile(r"tmm\.(matmul|grouped_matmul|gated_linear)")


class _Counted(TorchDispatchMode):
    """Counts the products of a forward, by torch and by tmm."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = self.tmm = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.torch += bool(_PRODUCTS.match(str(function)))
        self.tmm += bool(_OURS.match(str(function)))
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Row:
    """A line of the page."""

    model: str
    products: int
    tmm: int
    fused: int
    torch: int
    why: str

    def __str__(self) -> str:
        cells = self.model, self.products, self.tmm, self.fused, self.torch, self.why
        return f"| {' | '.join(map(str, cells))} |"


def inputs(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(12).view(2, 6) % 7 + 3
    image = torch.ones(2, 3, 16, 16)
    return {
        "text": {"input_ids": ids},
        "both": {"input_ids": ids, "decoder_input_ids": ids},
        "image": {"pixel_values": image},
        "sound": {"input_features": torch.ones(2, 8, 32), "decoder_input_ids": ids},
    }[kind]


def row(family: str) -> Row:
    """Convert a model of a family, and count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        suffix, sizes, kind = FAMILIES[family]
        config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**sizes)
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}{suffix}")(config).eval()
        with torch.no_grad(), _Counted() as before:
            model(**inputs(kind))
        report = convert(model)
        with torch.no_grad(), _Counted() as after:
            model(**inputs(kind))
    fused = sum(change.kind in ("epilogue", "gated", "experts") for change in report.changes)
    name = f"{family}{suffix}"
    return Row(name, before.torch, after.tmm, fused, after.torch, _why(report))


def _why(report: Report) -> str:
    """The modules whose products or activations stay torch's, with what their code calls."""
    left: Counter[str] = Counter()
    for item in report.left:
        calls = re.fullmatch(r"its code multiplies tensors itself \((.*)\)", item.reason)
        left[f"`{item.module}`: {calls[1] if calls else item.reason}"] += 1
    apart = Counter(f"`{item.activation}` not fused: {item.reason}" for item in report.not_fused)
    return "; ".join(re.sub(r"\|", r"\\|", text) for text in (*left, *apart))


HEAD = """\
# Which models convert covers

`python docs/coverage_page.py` writes this page. It converts a tiny random model of each family of
Transformers {version} and counts its products while it runs, in evaluation mode on a CPU.

- **products**: calls of torch that multiply matrices, in the model as it is. One call of
  `scaled_dot_product_attention` counts as one. Convolutions do not count.
- **tmm**: products that tmm computes after `tmm_core.nn.convert(model)`. A gated MLP has one
  product less, because its gate and up projections become one; attention has two less where query,
  key and value become one.
- **fused**: activations, gated MLPs and mixtures of experts, computed inside these products.
- **torch**: products that torch still computes.
- **what stays torch's**: modules whose own code multiplies, with the functions that the code names,
  whether or not this configuration calls them; and activations that stay apart, with the reason.

`print(convert(model))` gives the same for any model, with the path of every module.

| model | products | tmm | fused | torch | what stays torch's |
|---|---|---|---|---|---|
"""


def page() -> str:
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    rows = "\n".join(str(row(family)) for family in FAMILIES)
    return HEAD.format(version=version) + rows + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    written = page()
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != written:
            raise SystemExit("docs/coverage.md is out of date: run python docs/coverage_page.py")
    else:
        PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
