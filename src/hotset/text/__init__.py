"""Text and token ids: tokenizers and chat templates, built from a GGUF file's metadata."""
