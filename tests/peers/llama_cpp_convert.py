"""llama.cpp's converter on a checkpoint: `llama_cpp_convert.py LLAMA_CPP FOLDER OUT.gguf`, in F32.

It knows vocabularies by a hash of what they make of a text, and those of the tests are none of them: the file
gets none.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(llama_cpp: Path, folder: str, out: str) -> None:
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    converter = importlib.import_module("convert_hf_to_gguf")
    class_of = converter.get_model_class

    def without_vocabulary(*args: object, **kwargs: object) -> type:
        found = class_of(*args, **kwargs)
        found.set_vocab = lambda self: None
        return found

    converter.get_model_class = without_vocabulary
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32"]
    converter.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
