"""The decoder on a GPU through Vulkan, with any vendor's driver (docs/guides/vulkan.md)."""
