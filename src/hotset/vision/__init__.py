"""Images as the input of a model: decoding of files, preprocessing, and the encoder.

picture = decoded(Path("a.jpg").read_bytes())
with ImageEncoder.open(Path("mmproj.gguf"), n_embd=576) as encoder:
    layout = encoder.layout(picture)  # the picture's place in the prompt
    rows = encoder.encode(picture)  # float32 [layout.n_tokens, 576]
"""

from hotset.vision.encoder import ImageEncoder
from hotset.vision.layouts import Layout
from hotset.vision.pictures import ImageLimits, Picture, decoded

__all__ = ["ImageEncoder", "ImageLimits", "Layout", "Picture", "decoded"]
