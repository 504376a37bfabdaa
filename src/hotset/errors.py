"""Every error that a user can cause, with a one-sentence message: the problem, its place and a remedy.

The command line prints only the sentence. The Python API raises the type, so that a program can distinguish a
damaged file from a full context. All derive from HotsetError.
"""

from collections.abc import Mapping


class HotsetError(Exception):
    """Base of all errors that hotset raises intentionally."""


class FormatError(HotsetError):
    """A file that is damaged, hostile, or of an unknown kind."""


class ReadError(HotsetError):
    """A model file that could not be read during use: the disk failed, or the file was changed."""


class UnsupportedModelError(HotsetError):
    """A well-formed model that this version cannot run (architecture, tensor type, missing tensor)."""


class TokenizerError(HotsetError):
    """A tokenizer or chat template of a file that cannot be used."""


class ContextLengthError(HotsetError):
    """A prompt or an answer that does not fit in the context; nothing is truncated silently.

    n_tokens: tokens of the text, or a lower bound; None if they were not counted. n_ctx: tokens of the
    context.
    """

    def __init__(self, message: str, *, n_tokens: int | None = None, n_ctx: int | None = None) -> None:
        super().__init__(message)
        self.n_tokens, self.n_ctx = n_tokens, n_ctx


class ModelNotFoundError(HotsetError):
    """A model name that is not in the store or the catalogue, and not a path."""


class DownloadError(HotsetError):
    """A model that could not be fetched, or does not match its checksum."""


class OutOfMemoryError(HotsetError):
    """A model, cache or batch that does not fit in the available memory."""


class DeviceError(HotsetError):
    """A device that does not exist, whose software is not installed, or that failed during a run."""


class InvalidRequestError(HotsetError, ValueError):
    """A parameter outside its range (temperature, top_p, number of threads, ...).

    param: the name of the parameter, if programs may need it.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(HotsetError):
    """A full queue. seconds: about how long to wait before the next attempt."""

    def __init__(self, n_waiting: int, seconds: float) -> None:
        super().__init__(
            f"{n_waiting} requests are already waiting, which is the limit; "
            f"try again in {max(round(seconds), 1)} s"
        )
        self.seconds = seconds


class StepCancelledError(HotsetError):
    """A step that `cancel` ended before it was complete."""

    def __init__(self) -> None:
        super().__init__("the step was cancelled; its results can be computed again")


class CacheLostError(HotsetError):
    """The loss of a backend's KV cache. The backend works again, but must compute everything again."""


def did_you_mean(name: str, known: Mapping[str, str], least: float = 0.5) -> str:
    """Return a clause with the most similar known names, such as "did you mean pull or rm?", or "".

    name: in lower case. known: spelling in lower case → name to suggest. least: the smallest difflib ratio;
    short names need more.
    """
    import difflib  # slow to import, and rarely needed

    near = difflib.get_close_matches(name, known, cutoff=least)
    return f"did you mean {' or '.join(dict.fromkeys(known[one] for one in near))}?" if near else ""


def install_command(extra: str) -> str:
    """Return how to install an extra of pyproject.toml, or several separated by commas.

    It installs from the sources: hotset is not on PyPI, where its name may belong to another project.
    """
    return f"pip install '.[{extra}]' in the folder of hotset's sources"
