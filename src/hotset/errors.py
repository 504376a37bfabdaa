"""Every error that a user can cause, as one sentence: what is wrong, where, what to do.

The command line prints the sentence and nothing else; the Python API raises the type, so that
a program can distinguish a broken file from a full context. All derive from HotsetError.
"""

from collections.abc import Mapping


class HotsetError(Exception):
    """Base of every error that hotset raises on purpose."""


class FormatError(HotsetError):
    """A file is damaged, hostile, or of a kind that is not understood."""


class ReadError(HotsetError):
    """A model file could not be read while it was in use: the disk failed, or the file was changed."""


class UnsupportedModelError(HotsetError):
    """A well-formed model that this version cannot run (architecture, tensor type, missing tensor)."""


class TokenizerError(HotsetError):
    """The tokenizer or the chat template of a file cannot be used."""


class ContextLengthError(HotsetError):
    """A prompt or an answer does not fit in the context, which truncates nothing in silence.

    n_tokens: of the text, or a lower bound; None if it was not counted. n_ctx: tokens of the context.
    """

    def __init__(self, message: str, *, n_tokens: int | None = None, n_ctx: int | None = None) -> None:
        super().__init__(message)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class ModelNotFoundError(HotsetError):
    """A model name that no store, catalogue or path resolves."""


class DownloadError(HotsetError):
    """A model could not be fetched, or what came does not match its checksum."""


class OutOfMemoryError(HotsetError):
    """A model, cache or batch does not fit in the memory that is there."""


class DeviceError(HotsetError):
    """A device that was named is not there, what drives it is not installed, or it failed while it ran."""


class InvalidRequestError(HotsetError, ValueError):
    """A parameter out of its range (temperature, top_p, number of threads, ...).

    param: the name of the parameter, if one is to blame and a program may want to know which.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(HotsetError):
    """As many requests wait as may; seconds: after which it is worth while to ask again, about."""

    def __init__(self, n_waiting: int, seconds: float) -> None:
        super().__init__(
            f"{n_waiting} requests are waiting already, which is as many as may; "
            f"ask again in {max(round(seconds), 1)} s"
        )
        self.seconds = seconds


class StepCancelledError(HotsetError):
    """A step was ended by `cancel` before it was done."""

    def __init__(self) -> None:
        super().__init__("the step was cancelled; what it had to compute can be computed again")


class CacheLostError(HotsetError):
    """What a backend kept of keys and values is gone, and it works again: all is to be computed anew."""


def did_you_mean(name: str, known: Mapping[str, str], least: float = 0.5) -> str:
    """A part of a sentence with the nearest of the known names, such as "did you mean pull or rm?", or "".

    name: in lower case. known: a spelling in lower case -> the name that it stands for. least: how near, as
    difflib's ratio; short names need more.
    """
    import difflib  # slow to import, and most runs have no error

    near = difflib.get_close_matches(name, known, cutoff=least)
    return f"did you mean {' or '.join(dict.fromkeys(known[one] for one in near))}?" if near else ""


def install_command(extra: str) -> str:
    """How to install an extra of pyproject.toml, or several with commas between.

    From the sources: hotset is not on PyPI, where its name may be anything.
    """
    return f"pip install '.[{extra}]' in the folder of hotset's sources"
