"""Runs llama.cpp's converter: `llama_cpp_convert.py LLAMA_CPP` reads a line for each file.

A line is [FOLDER, OUT.gguf, OPTION...]. The script answers each with a line: the error, or an empty text.
Each file has a process of its own, because the converter's classes remember earlier files. Files are F32.
The converter identifies a vocabulary by a hash of its tokens for one text. It does not know the test
vocabularies, so the files get none.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path


def main(llama_cpp: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the converter prints freely, to stderr
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    converter = importlib.import_module("convert_hf_to_gguf")
    class_of = converter.get_model_class

    def without_vocabulary(*args: object, **kwargs: object) -> type:
        found = class_of(*args, **kwargs)
        return type(
            found.__name__, (found,), {"set_vocab": lambda self: None, "model_arch": found.model_arch}
        )

    converter.get_model_class = without_vocabulary
    for line in sys.stdin:
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        folder, out, *more = json.loads(line)
        sys.argv = ["convert_hf_to_gguf.py", folder, "--outfile", out, "--outtype", "f32", *more]
        error = ""
        with contextlib.suppress(FileNotFoundError):
            Path(out).unlink()
        try:
            converter.main()
        except (Exception, SystemExit) as why:
            error = f"{type(why).__name__}: {why}"
        print(json.dumps(error), file=answers, flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
