"""OpenAI's API schema."""
