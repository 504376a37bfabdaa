"""Spellings of other programs: every command accepts them, and no help shows them.

`MEANT` has other names of one option, `WITHOUT_EFFECT` has options for things that hotset always does.
`-m` and `-hf` name a model as the argument MODEL does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import typer

from hotset.cli.console import say
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.sampling_parameters import PARAMETERS

# Option → its spellings in llama.cpp, Ollama and vLLM, for commands that have it.
MEANT: Mapping[str, tuple[str, ...]] = {
    one.flag: one.spellings
    for one in (*LOAD_PARAMETERS.values(), *PARAMETERS.values())
    if one.option and one.spellings
} | {
    "--format": ("--output", "-o"),
    "--n-depth": ("--depth", "-d"),
    "--n-gen": ("-n",),
    "--n-prompt": ("-p",),
    "--raw": ("-no-cnv", "--no-conversation"),
    "--repetitions": ("-r",),
    "--tokens": ("-n",),
}  # fmt: skip

# Option → flags that set it to one of its values.
FLAGS: Mapping[str, Mapping[str, str]] = {
    "--device": {"--no-gpu": "cpu", "--list-devices": "list"},
    "--split": {"--disable-gpu-index": "layers"},
}


class WithoutEffect(NamedTuple):
    """An option of llama.cpp without effect. values: accepted ones; (): any; None: no value. why: reason."""

    names: tuple[str, ...]
    values: tuple[str, ...] | None
    why: str


WITHOUT_EFFECT = (
    WithoutEffect(("-fa", "--flash-attn"), ("on", "auto", "1", "true"), "attention is always fused"),
    WithoutEffect(("--jinja",), None, "chat templates are always Jinja's"),
    WithoutEffect(("-cnv", "--conversation"), None, "a model with a chat template always chats"),
    WithoutEffect(("-b", "--batch-size", "-ub", "--ubatch-size"), (), "hotset chooses the size of a step"),
    WithoutEffect(("-tb", "--threads-batch"), (), "-t counts for prompts too"),
    WithoutEffect(("-cb", "--cont-batching"), None, "requests always share steps"),
    WithoutEffect(("--mlock",), None, "memory is never locked; --ram-budget limits it"),
    WithoutEffect(("--mmap", "--no-mmap"), None, "files are mapped, or read within --ram-budget"),
    WithoutEffect(("--no-display-prompt",), None, "a prompt is never printed"),
)
MODEL = ("-m", "--model")
REPOSITORY, FILE = ("-hf", "-hfr", "--hf-repo"), ("-hff", "--hf-file")


def with_spellings(parser: Any, context: Any, parameters: Sequence[Any]) -> Any:
    """Return the parser of a command with these spellings added. parameters: of the command."""
    options = [one for one in parameters if one.param_type_name == "option"]
    own = {name for one in options for name in (*one.opts, *one.secondary_opts)}
    for option in options:
        _add_names(parser, context, option, own)
    argument: Any = next((one for one in parameters if one.param_type_name == "argument"), None)
    takes_model = argument is not None and argument.metavar == "MODEL"
    loads = "--ctx-size" in own or (takes_model and "--threads" in own)
    unused = WITHOUT_EFFECT if loads else ()
    for one in unused:
        for name in set(one.names) - own:
            _add(parser, (name,), name, has_value=one.values is not None)
    if takes_model:
        for names in (MODEL, REPOSITORY, FILE):
            _add(parser, names, names[0], has_value=True)
    parse = parser.parse_args

    def parse_args(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
        found: tuple[dict[str, Any], list[str], list[Any]] = parse([*args])
        if context.resilient_parsing:
            return found
        if "--device" in own and found[0].get("device") == "list":
            from hotset.cli.devices import print_devices

            print_devices()
            context.exit()
        for one in unused:
            _say_unused(one, found[0])
        if not (models := _models(found[0])):
            return found
        found = parse([*models, *args])
        if argument.nargs == 1 and (len(models) > 1 or found[1]):
            raise typer.BadParameter("the model is given twice.", param_hint="-m")
        return found

    parser.parse_args = parse_args
    return parser


def _add_names(parser: Any, context: Any, option: Any, own: Collection[str]) -> None:
    """Let a parser accept other names of an option. own: the names of all options of the command."""
    shown = option.opts
    option.opts = [name for one in shown for name in MEANT.get(one, ()) if name not in own]
    if option.opts:
        option.add_to_parser(parser, context)
    option.opts = shown
    for flags in (FLAGS.get(one, {}) for one in shown):
        for name, value in flags.items():
            parser.add_option(option, (name,), dest=option.name, action="store_const", const=value)


def _add(parser: Any, names: Sequence[str], key: str, *, has_value: bool) -> None:
    """Let a parser collect the values of these names, under `key`."""
    parser.add_option(None, names, dest=key, action="append" if has_value else "append_const", const=key)


def _models(given: Mapping[str, Any]) -> list[str]:
    """Return the models named by -m and -hf."""
    files, repositories = given.get(FILE[0], [None]), given.get(REPOSITORY[0], [])
    if not repositories and files != [None]:
        raise typer.BadParameter("--hf-file requires --hf-repo.", param_hint="--hf-file")
    found = list(given.get(MODEL[0], []))
    for one in repositories:
        name, _, quant = one.removeprefix("hf:").partition(":")
        wanted = files[-1] or quant
        found.append(f"hf:{name}:{wanted}" if wanted else f"hf:{name}")
    return found


def _say_unused(option: WithoutEffect, given: Mapping[str, Any]) -> None:
    for name in option.names:
        for value in given.get(name, ()):
            if option.values and value not in option.values:
                raise typer.BadParameter(
                    f"{option.why}; '{value}' is not one of {', '.join(option.values)}.", param_hint=name
                )
            say(f"{name} has no effect: {option.why}", dim=True)
