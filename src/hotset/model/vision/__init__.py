"""Image encoders: the meaning of a `clip` GGUF file (llama.cpp's mmproj), and the graph of its step."""
