"""The decoder on a GPU through Vulkan, with any vendor's driver and no other installation
(docs/guides/vulkan.md)."""
