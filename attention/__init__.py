"""Exact FlashAttention, forward and backward, in memory linear in the length: Triton on GPUs, plain torch elsewhere."""

from .functional import flash_attention, flash_attention_varlen, scaled_dot_product_attention
from .modules import SelfAttention

__all__ = ["SelfAttention", "flash_attention", "flash_attention_varlen", "scaled_dot_product_attention"]
