"""Hugging Face checkpoints written as GGUF files: configurations, tensors, tokenizers."""
