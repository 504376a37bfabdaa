"""Chat templates render the same bytes as transformers, and a hostile file can do no harm."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import wine
from cases import quick_are

from hotset.errors import TokenizerError
from hotset.text import renderer
from hotset.text.chat import ChatTemplate, chat_template, chat_template_names
from hotset.text.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- set ns = namespace(index=0, system=none) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content %}
        {%- continue %}
    {%- endif %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{% for message in messages if message.role != 'system' %}
    {% if message.role == 'user' %}
[INST] {% if loop.last and ns.system %}{{ ns.system }}

{% endif %}{{ message.content }}[/INST]
    {% else %}
 {{ message.content|trim }}{{ eos_token }}
    {% endif %}
{% endfor %}
"""
QWEN = """{%- macro show(content) -%}
    {%- if content is string %}{{ content }}
    {%- else %}{%- for part in content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}
{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages[::-1] %}{% if loop.index > 99 %}{% break %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- generation %}{%- set inside = 1 %}
    {%- set content = show(message.content).split('</think>')[-1] %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endgeneration %}
{%- endfor %}
{{- inside is defined }}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN}

PLAIN = [{"role": "user", "content": " Hi <b>&'é'\n"}]
LONG = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Is 3 < 5?\n\n"},
    {"role": "assistant", "content": " <think>hm</think> Yes "},
    {"role": "user", "content": "你好 👋"},
]
TWICE = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
CALL = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "get", "arguments": {"city": "Zürich <ZRH>"}}}
        ],
    },
    {"role": "tool", "content": {"degrees": 21.5, "ok": True}},
]
TOOLS = [{"type": "function", "function": {"name": "get", "description": "a & b > c, è", "parameters": {}}}]


@pytest.mark.parametrize("messages", [PLAIN, LONG, TWICE, CALL], ids=["plain", "long", "twice", "call"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name, messages):
    oracle = pytest.importorskip(
        "transformers.utils.chat_template_utils", reason="the oracle is transformers"
    )
    source = TEMPLATES[name]
    template = ChatTemplate(source, "<s>", "</s>")
    for tools in (None, TOOLS):
        for prompt in (True, False):
            try:
                expected = oracle.render_jinja_template(
                    conversations=[messages],
                    tools=tools,
                    chat_template=source,
                    add_generation_prompt=prompt,
                    bos_token="<s>",
                    eos_token="</s>",
                    enable_thinking=False,
                )[0][0]
            except Exception:
                with pytest.raises(TokenizerError):
                    template.render(messages, prompt, tools)
            else:
                assert template.render(messages, prompt, tools, enable_thinking=False) == expected


def test_known_texts():
    # written out, so that the check does not depend only on transformers
    assert ChatTemplate(CHATML).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(LLAMA2, "<s>", "</s>").render(LONG[:2]) == (
        "<s>[INST] <<SYS>>\nBe brief. \n<</SYS>>\n\nIs 3 < 5? [/INST]"
    )


def test_a_refusal_gives_the_templates_own_words():
    with pytest.raises(TokenizerError, match=r"refuses these messages: Conversation roles must alternate"):
        ChatTemplate(LLAMA2, "<s>", "</s>").render(TWICE)


def test_strftime_now_and_documents():
    year = str(time.localtime().tm_year)
    template = ChatTemplate("{{ strftime_now('%Y') }}{% for d in documents %}|{{ d.title }}{% endfor %}")
    assert template.render(PLAIN, documents=[{"title": "T", "text": "x"}]) in (
        f"{year}|T",
        f"{int(year) + 1}|T",
    )


def _metadata(**more):
    letters = [chr(c) for c in range(0x21, 0x7F)] + ["Ġ", "<|im_start|>", "<|im_end|>"]
    n = len(letters)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [1] * (n - 2) + [3, 3], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": n - 2, "tokenizer.ggml.eos_token_id": n - 1,
        **{f"tokenizer.chat_template{key}": value for key, value in more.items()},
    }  # fmt: skip


def test_the_template_comes_from_the_file():
    metadata = _metadata(**{"": "{{ bos_token }}A{{ eos_token }}", ".tool_use": "T", ".rag": "R"})
    tokenizer = load_tokenizer(metadata)
    template = chat_template(metadata, tokenizer)
    assert template.render(PLAIN) == "<|im_start|>A<|im_end|>"
    assert not template.is_fallback
    assert chat_template_names(metadata) == ["rag", "tool_use"]
    assert chat_template(metadata, tokenizer, "tool_use").render(PLAIN) == "T"
    with pytest.raises(TokenizerError, match=r"no chat template named 'x' \(it has: rag, tool_use\)"):
        chat_template(metadata, tokenizer, "x")


@pytest.mark.parametrize(
    ("token", "begins", "line"),
    [
        (
            "<|im_start|>",
            "<|im_start|>user\n a\n<|im_end|>\n<|im_start|>assistant\nb",
            "chatml (by its vocabulary)",
        ),
        ("[INST]", "[INST]  a\n[/INST] b</s>", "mistral (by its vocabulary)"),
        ("<start_of_turn>", "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb", "gemma (by its"),
        ("<|other|>", "<|im_start|>user\n a\n<|im_end|>\n", "chatml (the vocabulary points to no format)"),
    ],
)
def test_without_a_template_the_vocabulary_points_to_one(token, begins, line, caplog):
    metadata = _metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [token if one == "<|im_start|>" else one for one in tokens]
    with caplog.at_level("INFO", "hotset.text"):
        template = chat_template(metadata, load_tokenizer(metadata))
    assert template.is_fallback
    assert f"has no chat template, and gets {line}" in caplog.text
    text = template.render([{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b"}])
    assert text.startswith(begins)


def test_marks_of_chatml_are_tokens():
    tokenizer = load_tokenizer(_metadata())
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special=False, parse_special=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)


@pytest.mark.parametrize("messages", [["hi"], [{"content": "no role"}], [None]])
def test_invalid_messages(messages):
    with pytest.raises(TokenizerError, match="Every message"):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' ", "{% for x in y %}", "{{ x | nosuchfilter }}", "(" * 10]
)
def test_a_source_that_is_not_jinja(source):
    if source.startswith("("):
        source = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    with pytest.raises(TokenizerError, match="chat template"):
        ChatTemplate(source)


def test_a_source_that_is_too_long():
    with pytest.raises(TokenizerError, match="at most"):
        ChatTemplate("x" * (1 << 20) + "x")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__.__base__.__subclasses__()[0] }}",
    "{{ raise_exception.__globals__['json'] }}", "{{ strftime_now.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context.environment.globals }}{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}", "{{ ('{0.__class__}' | attr('format'))(messages) }}",
    "{% set x = namespace(__class__=1) %}", "{{ messages.append({'role': 'user'}) }}",
    "{% do messages.clear() %}", "{{ messages[0].update({'role': 'x'}) }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}", "{{ lipsum(n=1000) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source):
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate(source).render(messages)
    except TokenizerError:
        text = ""
    assert messages == [{"role": "user", "content": "hi"}]
    assert text in ("", "None")  # (of a method that changes the child's copy)


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "{{ range(10 ** 9) | list | length }}", "{{ 'a' * 10 ** 12 }}", "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}", "{{ (9 ** 9 ** 9999) * 2 }}", "{{ '%999999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}", "{{ '{:>999999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 999999999999) }}", "{{ 'a'.ljust(999999999999) }}",
    "{{ 'a'.zfill(width=999999999999) }}", "{{ 'a' | center(999999999999) }}",
    "{{ 'a' | indent(999999999999, true) }}", "{{ {'a': 1} | tojson(indent=999999999999) }}",
    *(
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = " + growth + " %}{% endfor %}"
        for growth in (
            "ns.x ~ ns.x",
            "ns.x + ns.x",
            "ns.x.replace('a', ns.x)",
            "ns.x | replace('a', ns.x)",
            "ns.x.join(ns.x)",
            "([ns.x] * 9) | join(ns.x)",
        )
    ),
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "{% set x = 'a' * 9999999 %}{% macro m() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}"
    "{{ m() }}",
    "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
]  # fmt: skip


# Work inside one call of Python, which checks between two steps of the template cannot interrupt.
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
EQUALS = (
    "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
)
LONG_TEXT = "{% set x = 'a' * 999999 %}"
BOMBS += [
    EQUALS + "{{ a.x == b.x }}", EQUALS + "{{ a.x < b.x }}", EQUALS + "{{ a.x in [b.x] }}",
    EQUALS + "{{ [a.x, b.x, a.x] | sort }}",
    NESTED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[1]", "(1,)") + "{{ {ns.x: 1} }}",
    NESTED + "{{ '%s' % [ns.x] }}", NESTED + "{{ '{}'.format(ns.x) }}",
    NESTED + "{{ ns.x | string | length }}", LONG_TEXT + "{{ ([[x]] * 99999) | sum(start=[]) | length }}",
    LONG_TEXT + "{% set y = x.translate({97: x}) %}",
    "{{ (['a'] * 99999) | tojson(separators=('b' * 99999, ':')) }}",
    LONG_TEXT + "{{ ([x] * 99999) | map('upper') | join }}",
    LONG_TEXT + "{{ (x.encode() * 999999) | length }}", "{{ 'a'|center(99999) }}" * 10_000,
    "{% if " + "'a'|center(99999999) ~ " * 100 + "1 %}{% endif %}",
]  # fmt: skip


@pytest.mark.parametrize("source", quick_are(BOMBS[::4], BOMBS))
def test_bombs_fizzle(source, monkeypatch):
    monkeypatch.setattr(renderer, "LIMITS", replace(renderer.LIMITS, seconds=0.2))
    with pytest.raises(TokenizerError, match="chat template") as raised, ChatTemplate(source) as template:
        template.render(PLAIN)
    assert len(str(raised.value)) < 600


def test_long_chat_takes_bounded_time():
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "x" * 500} for i in range(2000)]
    text = ChatTemplate(QWEN).render(messages)
    assert len(text) > 1_000_000


# ---- the process that renders ----

HELLO = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = (
    "{% if messages[0].content == 'go' %}{{ ((messages | length + 8) ** 999999) ** 9999 }}{% endif %}" + HELLO
)


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def template() -> Iterator[ChatTemplate]:
    with ChatTemplate(ENDLESS) as template:
        yield template


def child(template: ChatTemplate) -> psutil.Process:
    return psutil.Process(template._renderer._child.process.pid)


def test_one_process_serves_many_renderings_and_is_gone_with_its_template():
    gc.collect()  # close files of other tests
    n_open = getattr(psutil.Process(), "num_fds", lambda: 0)  # Windows counts other handles too
    before, others = n_open(), psutil.Process().children()
    template = ChatTemplate(HELLO)
    process = child(template)
    assert [template.render(say(str(i))) for i in range(20)] == [str(i) for i in range(20)]
    assert child(template) == process
    template.close()
    template.close()
    assert not process.is_running()
    assert n_open() == before
    with ChatTemplate(HELLO) as left_alone:
        process = child(left_alone)
    assert not process.is_running()
    dropped = ChatTemplate(HELLO)
    process = child(dropped)
    del dropped
    assert not process.is_running()
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        ChatTemplate("{% if %}")
    assert n_open() == before
    assert set(psutil.Process().children()) <= set(others)  # children of other tests may end meanwhile


@wine.lacks("the computing time of other processes")
def test_after_a_bomb_the_next_conversation_is_rendered(monkeypatch):
    monkeypatch.setattr(renderer, "LIMITS", replace(renderer.LIMITS, seconds=0.2))
    with ChatTemplate(ENDLESS) as template:
        for _ in range(2):
            with pytest.raises(TokenizerError, match=r"runs for more than 0\.2 s and was ended"):
                template.render(say("go"))
        assert template.render(say("hello")) == "hello"


def test_output_of_a_template_is_bounded():
    many = "puts out more than 16777216 characters"
    with ChatTemplate("{{ 'a' * 17000000 }}") as template, pytest.raises(TokenizerError, match=many):
        template.render(PLAIN)
    refuses = "{{ raise_exception('no ' * 9999) }}"
    with (
        ChatTemplate(refuses) as template,
        pytest.raises(TokenizerError, match=r"refuses .*: no no") as raised,
    ):
        template.render(PLAIN)
    assert len(str(raised.value)) < 500


def test_texts_arrive_as_they_are(template):
    text = "é \ud800 你好 👋 \x00 \u2028 {{ x }} </s>" + "x" * 3_000_000
    assert template.render(say(text)) == text


@pytest.mark.parametrize("bad", [{(1, 2): 3}, {"x": 10**5000}], ids=["key", "number"])
def test_variables_outside_json_give_one_message(template, bad):
    with pytest.raises(TokenizerError, match="must be plain data"):
        template.render([{"role": "user", "content": "a", "more": bad}])
    nested: list = []
    nested.append(nested)
    with pytest.raises(TokenizerError, match="must be plain data"):
        template.render([{"role": "user", "content": "a", "more": nested}])
    assert template.render(say("b")) == "b"


def test_threads_share_a_template(template):
    rendered: dict[int, list[str]] = {}

    def ask(i: int) -> None:
        rendered[i] = [template.render(say(f"{i} {j}")) for j in range(20)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rendered == {i: [f"{i} {j}" for j in range(20)] for i in range(4)}


def test_the_process_ignores_ctrl_c_and_is_replaced_when_it_dies(template):
    process = child(template)
    if os.name == "posix":  # on Windows Ctrl-C is sent to all programs of a console
        process.send_signal(signal.SIGINT)
    assert template.render(say("a")) == "a"
    assert child(template) == process
    process.kill()
    process.wait()
    assert template.render(say("b")) == "b"
    assert child(template) != process


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_a_renderer_of_its_own(template):
    process = child(template)
    template._renderer._lock.acquire()  # as if another thread rendered at that moment
    pid = os.fork()
    if pid == 0:
        try:
            template._renderer.start()
            right = template.render(say("forked")) == "forked"
            template.close()
            os._exit(0 if right and not psutil.Process().children() else 1)
        except BaseException:
            os._exit(2)
    template._renderer._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert template.render(say("here")) == "here"
    assert child(template) == process


def test_jinja_is_not_loaded_here():
    code = (
        "import sys; from hotset.text import chat, renderer; "
        "print([m for m in ('jinja2', 'torch') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
