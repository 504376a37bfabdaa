"""The decoder on a GPU through Vulkan: any vendor's driver, and nothing to install beside it
(docs/guides/vulkan.md)."""
