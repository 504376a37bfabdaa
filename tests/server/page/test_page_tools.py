"""Tools: chosen for a conversation, called by the model, and allowed or denied call by call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_page import act, answers, done, saved, say, stored, until, violations
from fake_chat_server import FakeServer, Hold, Refusal, mcp_server, tool_call
from paths import ROOT
from tiny_server import Serving, write_model

from hotset.server.mcp.file import McpServer

READ = tool_call("files__read", '{"path": "a.txt"}')
FUNCTION = {
    "name": "get_weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}


def result(content: str, is_error: bool = False) -> dict[str, Any]:
    return {"content": content, "is_error": is_error}


@pytest.fixture
def page(server: FakeServer, opened: Any) -> Any:
    """Return the page of a server with an MCP server, of which one of two tools is on."""
    server.mcp_servers = [mcp_server("files", "read", "write")]
    page = opened(server.url)
    turn_on(page, "read")
    return page


def turn_on(page: Any, tool: str) -> None:
    page.click("#show-tools")
    page.get_by_text("0 of 2 tools on").click()
    page.locator("#tools li", has_text=tool).get_by_role("checkbox").check()
    page.get_by_text("1 of 2 tools on").wait_for()
    page.keyboard.press("Escape")


def button(page: Any, name: str, tool: str = "files__read") -> Any:
    return page.get_by_role("button", name=f"{name}: {tool}")


def states(page: Any) -> list[str]:
    found: list[str] = page.locator(".call .state").all_inner_texts()
    return found


def results(page: Any) -> list[str]:
    found: list[str] = page.locator(".call .result pre").all_text_contents()
    return found


def test_a_call_is_made_when_it_is_allowed(server: FakeServer, page: Any) -> None:
    server.replies += [["Let me look.", READ], ["It says ", "hello."]]
    server.tool_results += [result("hello <b>you</b>")]
    say(page, "What is in a.txt?")
    assert server.tool_calls == []
    assert (states(page), page.locator(".call > pre").inner_text()) == (
        ["waiting for you"],
        '{\n  "path": "a.txt"\n}',
    )
    (tool,) = server.requests[0]["tools"]
    assert tool["function"]["name"] == "files__read"
    assert tool["function"]["parameters"] == mcp_server("files", "read")["tools"][0]["parameters"]
    assert violations(page) == []
    button(page, "Allow once").click()
    page.get_by_text("It says hello.", exact=True).wait_for()
    done(page)
    assert server.tool_calls == [("files__read", {"path": "a.txt"})]
    assert (answers(page), states(page), results(page)) == (
        ["Let me look.", "It says hello."],
        ["allowed once"],
        ["hello <b>you</b>"],
    )
    assert page.locator(".call b b").count() == 0
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "What is in a.txt?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {
                    "id": "c0",
                    "type": "function",
                    "function": {"name": "files__read", "arguments": '{"path": "a.txt"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c0", "content": "hello <b>you</b>"},
    ]
    assert page.evaluate("document.activeElement.id") == "ask"
    assert violations(page) == []


def test_a_tools_description_is_shown(server: FakeServer, page: Any) -> None:
    """Check calls, the list and a reload; another tool of the same name does not get the description."""
    tool = server.mcp_servers[0]["tools"][0]
    tool["description"] = "To read.\u202e And <b>more</b>."
    weather = tool_call("get_weather", "{}", 1)
    server.replies += [[READ, weather]]
    page.click("#show-tools")
    page.get_by_role("textbox", name="A function as JSON").fill(json.dumps(FUNCTION))
    page.get_by_role("button", name="Add", exact=True).click()
    for name, shown in (("read", tool), ("get_weather", FUNCTION)):
        entry = page.locator("#tools li", has_text=name)
        entry.get_by_text("Arguments").click()
        assert json.loads(entry.locator("pre").inner_text()) == shown["parameters"]
    assert violations(page) == []
    page.keyboard.press("Escape")
    say(page, "Go")
    for reloaded in (False, True):
        if reloaded:
            page.reload()
            page.click("#show-history")
            page.get_by_role("button", name="Go", exact=True).click()
        about = page.locator(".call .about")
        until(page, "document.querySelectorAll('.call .about').length === 2")
        assert about.locator("pre").first.is_hidden()
        for i, (said, shown) in enumerate(
            (("To read.\\u{202e} And <b>more</b>.", tool), ("The weather of a place", FUNCTION))
        ):
            about.nth(i).get_by_text("About this tool").click()
            assert about.nth(i).locator("p").inner_text() == said
            assert json.loads(about.nth(i).locator("pre").inner_text()) == shown["parameters"]
        assert violations(page) == []
    server.mcp_servers[0]["tools"][0] |= {"digest": "other"}
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="Go", exact=True).click()
    page.locator(".call .problem", has_text="This tool has changed").wait_for()
    assert page.locator(".call .about").count() == 1


def test_a_tool_that_is_always_allowed(server: FakeServer, page: Any) -> None:
    """The permission is for one conversation and one tool, and the user can withdraw it."""
    server.replies += [[READ], [READ, tool_call("files__read", "{}", 1)], ["Done."], [READ]]
    server.tool_results += [result("one"), result("two", True), result("three")]
    say(page, "Go")
    button(page, "Always in this conversation").click()
    page.get_by_text("Done.", exact=True).wait_for()
    done(page)
    assert states(page) == [
        "allowed in this conversation",
        "allowed in this conversation, failed",
        "allowed in this conversation",
    ]
    assert [one["content"] for one in server.requests[2]["messages"] if one["role"] == "tool"] == [
        "one",
        "two",
        "three",
    ]
    page.click("#show-tools")
    button(page, "Ask again").click()
    page.keyboard.press("Escape")
    say(page, "Again")
    assert states(page)[-1] == "waiting for you"
    assert len(server.tool_calls) == 3


def test_a_changed_tool_needs_permission_again(server: FakeServer, page: Any) -> None:
    """The permission is not for another description, or another program of the same name."""
    server.replies += [[READ], ["Done."], [READ], ["Done again."], [READ]]
    server.tool_results += [result("one"), result("two")]
    say(page, "Go")
    button(page, "Always in this conversation").click()
    page.get_by_text("Done.", exact=True).wait_for()
    done(page)
    server.mcp_servers[0]["tools"][0] |= {"description": "To read, and to send.", "digest": "other"}
    say(page, "Again")
    assert states(page)[-1] == "waiting for you"
    button(page, "Always in this conversation").click()
    page.get_by_text("Done again.", exact=True).wait_for()
    done(page)
    assert stored(page)["tools"]["allowed"] == [{"name": "files__read", "digest": "other"}]
    server.mcp_servers[0]["tools"][0] |= {"digest": "files/read"}
    say(page, "And again")
    assert states(page)[-1] == "waiting for you"
    assert len(server.tool_calls) == 2


def test_an_imported_file_cannot_give_permissions(server: FakeServer, page: Any, opened: Any) -> None:
    """A file can come from anyone. Its call has a tool that is off, and the page shows only its own text."""
    call = {
        "id": "c0", "name": "files__read", "arguments": "{}", "state": "asked", "server": "weather",
        "problem": "Checked: it reads the weather alone.", "digest": "weather",
    }  # fmt: skip
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Look.", "calls": [call]}]
    one = {
        "id": "7a",
        "titled": True,
        "title": "Theirs",
        "messages": messages,
        "tools": {"on": ["files__read"]},
    }
    file = json.dumps({"from": "hotset", "version": 2, "conversations": [one]}).encode()
    given = {"name": "a.json", "mimeType": "application/json", "buffer": file}
    page.set_input_files("#import-file", given)
    page.click("#show-history")
    page.get_by_role("button", name="Theirs", exact=True).click()
    page.locator(".call").wait_for()
    assert "weather" not in page.locator(".call").inner_text()
    server.replies += [["As you like."]]
    button(page, "Allow once").click()
    page.get_by_text("As you like.", exact=True).wait_for()
    assert server.tool_calls == []
    assert "files__read is off in this conversation" in results(page)[0]


def test_a_call_is_denied(server: FakeServer, page: Any) -> None:
    server.replies += [[READ, tool_call("files__read", '{"path": "b"}', 1)], ["As you like."]]
    server.tool_results += [result("of b")]
    say(page, "Go")
    button(page, "Deny").first.click()
    assert states(page) == ["denied", "waiting for you"]
    assert page.evaluate(
        "document.activeElement.matches('.call.asked')"
    )  # the next call, but none of its buttons
    page.keyboard.press("Enter")
    assert len(server.requests) == 1  # the second call is undecided
    button(page, "Allow once").click()
    page.get_by_text("As you like.", exact=True).wait_for()
    assert [one["content"] for one in server.requests[1]["messages"] if one["role"] == "tool"] == [
        "The user did not allow this call.",
        "of b",
    ]
    assert server.tool_calls == [("files__read", {"path": "b"})]


def test_calls_without_a_tool_are_answered_with_an_error(server: FakeServer, page: Any) -> None:
    """The user is not asked: the tool is off or unknown, or the arguments are wrong."""
    server.replies += [
        [
            tool_call("files__write", "{}"),
            tool_call("nothing", "{}", 1),
            tool_call("files__read", '{"path": ', 2),
        ],
        ["I see."],
    ]
    say(page, "Go")
    page.get_by_text("I see.", exact=True).wait_for()
    assert server.tool_calls == []
    assert results(page) == [
        "There is no tool named files__write.",
        "There is no tool named nothing.",
        "The arguments are not a JSON object.",
    ]
    sent = server.requests[1]["messages"][1]["tool_calls"][2]["function"]["arguments"]
    assert json.loads(sent) == {"text": '{"path": '}


def test_calls_survive_a_reload_and_are_part_of_branches(server: FakeServer, page: Any) -> None:
    server.replies += [["Look.", READ], ["First."], ["Second."], [READ]]
    server.tool_results += [result("hello")]
    say(page, "Go")
    page.reload()
    until(page, "document.querySelector('#model').textContent !== ''")
    page.click("#show-history")
    page.get_by_role("button", name="Go", exact=True).click()
    assert (states(page), server.tool_calls) == (["waiting for you"], [])
    button(page, "Allow once").click()
    page.get_by_text("First.", exact=True).wait_for()
    done(page)
    page.get_by_role("button", name="Regenerate").last.click()
    page.get_by_text("Second.", exact=True).wait_for()
    done(page)
    assert len(server.tool_calls) == 1  # the result was kept
    assert server.requests[1]["messages"] == server.requests[2]["messages"]
    page.reload()
    page.click("#show-history")
    page.get_by_role("button", name="Go", exact=True).click()
    assert (answers(page), states(page), results(page)) == (
        ["Look.", "Second."],
        ["allowed once"],
        ["hello"],
    )
    page.get_by_role("button", name="Regenerate").first.click()
    until(page, "document.querySelector('.call .state')?.textContent === 'waiting for you'")
    page.get_by_role("button", name="Previous version").click()
    assert states(page) == ["allowed once"]


def test_an_exported_conversation_contains_its_calls(server: FakeServer, page: Any, opened: Any) -> None:
    """After an import, permissions for the future have no effect, because a file can come from anyone."""
    server.replies += [["Look.", READ], ["Done."], [READ]]
    server.tool_results += [result("hello")]
    say(page, "Go")
    button(page, "Always in this conversation").click()
    page.get_by_text("Done.", exact=True).wait_for()
    done(page)
    page.click("#show-history")
    exported = saved(page.locator("#export-all"))[1]
    (one,) = json.loads(exported)["conversations"]
    assert one["messages"][1]["calls"] == [
        {
            "id": "c0", "name": "files__read", "arguments": '{"path": "a.txt"}', "state": "done",
            "server": "files", "digest": "files/read", "consent": "always", "result": "hello",
        }
    ]  # fmt: skip
    assert one["tools"]["allowed"] == [{"name": "files__read", "digest": "files/read"}]
    text = saved(act(page, "Save as text", "Go"))[1]
    assert '*Calls files__read*\n\n```\n{"path": "a.txt"}\n```\n\n*Result*\n\n```\nhello\n```' in text
    other = opened(server.url)
    other.set_input_files(
        "#import-file", {"name": "a.json", "mimeType": "application/json", "buffer": exported.encode()}
    )
    other.click("#show-history")
    other.get_by_role("button", name="Go", exact=True).click()
    assert (states(other), results(other)) == (["allowed in this conversation"], ["hello"])
    turn_on(other, "read")
    say(other, "More")
    assert states(other)[-1] == "waiting for you"
    assert len(server.tool_calls) == 1


def test_the_user_types_a_functions_result(server: FakeServer, opened: Any) -> None:
    server.replies += [[tool_call("get_weather", '{"place": "Rome"}')], ["Sunny in Rome."]]
    page = opened(server.url)
    page.click("#show-tools")
    area = page.get_by_role("textbox", name="A function as JSON")
    add = page.get_by_role("button", name="Add", exact=True)
    for wrong, why in (
        ("{", "This is not JSON."),
        ('{"name": "a b"}', "needs a name"),
        ('{"name": "a", "parameters": 7}', "a: parameters must be a JSON schema"),
    ):
        area.fill(wrong)
        add.click()
        page.locator("#function-problem", has_text=why).wait_for()
    area.fill(json.dumps([{"type": "function", "function": FUNCTION}]))
    add.click()
    page.locator("#tools li", has_text="get_weather").wait_for()
    assert page.locator("#function-problem").inner_text() == ""
    assert violations(page) == []
    page.keyboard.press("Escape")
    assert page.locator("#n-tools").inner_text() == "1"
    say(page, "Weather?")
    assert server.requests[0]["tools"] == [{"type": "function", "function": FUNCTION}]
    page.get_by_role("textbox", name="Result of get_weather").fill("25 °C")
    page.get_by_role("button", name="Send this result").click()
    page.get_by_text("Sunny in Rome.", exact=True).wait_for()
    assert server.requests[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "c0",
        "content": "25 °C",
    }
    assert states(page) == ["result typed by you"]
    page.click("#new-chat")
    assert page.locator("#n-tools").inner_text() == ""  # functions belong to the conversation


def test_calls_that_are_stopped_or_fail(server: FakeServer, page: Any) -> None:
    hold = Hold()
    server.replies += [[READ], ["Well."]]
    server.tool_results += [
        hold,
        Refusal(429, "too many calls"),
        Refusal(502, "the MCP server 'files' ended"),
    ]
    say(page, "Go")
    button(page, "Allow once").click()
    until(page, "document.querySelector('.call .state').textContent === 'running'")
    assert hold.reached.wait(60)
    page.click("#stop")
    page.locator(".call .problem", has_text="Stopped: its result is not known.").wait_for()
    assert states(page) == ["waiting for you"]
    button(page, "Allow once").click()
    page.locator(".call .problem", has_text="too many calls").wait_for()
    button(page, "Allow once").click()
    page.get_by_text("Well.", exact=True).wait_for()  # the model may try something else
    assert results(page) == ["the MCP server 'files' ended"]
    until(page, "document.querySelector('#stop').hidden")
    assert server.n_left == 1


def test_the_user_continues_without_a_call(server: FakeServer, page: Any) -> None:
    server.replies += [["Look.", READ], ["Never mind."]]
    say(page, "Go")
    say(page, "Leave it")
    assert states(page) == ["not called"]
    assert button(page, "Allow once").count() == 0
    assert server.requests[1]["messages"][2:] == [
        {"role": "tool", "tool_call_id": "c0", "content": "The user went on without this call."},
        {"role": "user", "content": "Leave it"},
    ]
    assert stored(page)["messages"][1]["calls"][0]["state"] == "asked"


@pytest.mark.slow
def test_an_endless_sequence_of_calls_is_interrupted(server: FakeServer, page: Any) -> None:
    server.replies += [[READ]] * 20
    server.tool_results += [result("x")] * 20
    say(page, "Go")
    button(page, "Always in this conversation").click()
    page.get_by_text("16 rounds of calls: Continue lets the model go on").wait_for()
    done(page)
    assert len(server.requests) == 16
    server.replies.clear()
    server.replies.append(["Enough."])
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("Enough.", exact=True).wait_for()


def test_hidden_characters_are_shown(server: FakeServer, page: Any) -> None:
    """The user sees all that is allowed: bidirectional and invisible characters are shown as escapes."""
    hidden, kept = (
        "\u3164\ufe01\u200d\U000e0041",
        "\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f4bb \u2764\ufe0f",
    )
    path = "a\u202etxt.exe\u200b\u0007" + hidden + kept + "x" * 5000
    server.replies += [[tool_call("files__read", json.dumps({"path": path}))], ["Done."]]
    server.tool_results += [result("<img src=x onerror=alert(1)>\u202e")]
    say(page, "Go")
    shown = page.locator(".call > pre").text_content()
    assert (
        "a\\u{202e}txt.exe\\u{200b}\\u0007\\u{3164}\\u{fe01}\\u{200d}\\u{e0041}" + kept + "x" * 5000 in shown
    )
    button(page, "Allow once").click()
    page.get_by_text("Done.", exact=True).wait_for()
    assert server.tool_calls == [("files__read", {"path": path})]
    assert results(page) == ["<img src=x onerror=alert(1)>\\u{202e}"]
    assert page.locator(".call img").count() == 0


def test_a_tool_of_an_mcp_server(tmp_path: Path, opened: Any) -> None:
    """Use the page, the server and a process with MCP; only the model's text is given."""
    script = str(ROOT / "tests" / "support" / "mcp_stdio.py")
    server = McpServer(name="small", command=sys.executable, args=("-I", "-S", script))
    said: list[dict[str, Any]] = [dict([tool_call("small__echo", '{"text": "heard"}')]), {"content": "Good."}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]} for delta in said]
    # Not with playwright's routes, which in Firefox lack the request's body.
    answer = """(chunks) => {
        const plain = window.fetch.bind(window);
        window.asked = [];
        window.fetch = async (url, how) => {
            if (!String(url).endsWith("v1/chat/completions")) return plain(url, how);
            window.asked.push(JSON.parse(how.body));
            const text = `data: ${JSON.stringify(chunks.shift())}\\n\\ndata: [DONE]\\n\\n`;
            return new Response(text, { headers: { "content-type": "text/event-stream" } });
        };
    }"""
    with Serving(write_model(tmp_path / "tiny.gguf"), mcp_servers=(server,)) as serving:
        page = opened(serving.url)
        page.evaluate(answer, chunks)
        page.click("#show-tools")
        page.get_by_text("0 of 11 tools on").wait_for()
        page.locator("#tools .mcp").get_by_role("checkbox").first.check()
        page.keyboard.press("Escape")
        say(page, "Go")
        button(page, "Allow once", "small__echo").click()
        page.get_by_text("Good.", exact=True).wait_for()
        asked = page.evaluate("window.asked")
        assert (len(asked[0]["tools"]), results(page)) == (11, ["heard"])
        assert asked[1]["messages"][-1] == {"role": "tool", "tool_call_id": "c0", "content": "heard"}


def test_the_list_of_servers(server: FakeServer, opened: Any) -> None:
    server.mcp_servers = Refusal(403, "tools are called with an API key")
    page = opened(server.url)
    page.click("#show-tools")
    page.get_by_text("tools are called with an API key").wait_for()
    page.keyboard.press("Escape")
    server.mcp_servers = []
    page.click("#show-tools")
    page.get_by_text("hotset serve --mcp FILE").wait_for()
    page.keyboard.press("Escape")
    server.mcp_servers = [
        mcp_server("slow", state="starting"),
        mcp_server("gone", "a", state="failed", problem="ended (exit code 1)"),
    ]
    page.click("#show-tools")
    page.get_by_text("It ended (exit code 1).").wait_for()
    assert violations(page) == []
    button(page, "Start again", "gone").click()
    until(page, "!document.querySelector('#tools').textContent.includes('exit code')")
    server.mcp_servers[0] = mcp_server("slow", "b", "c")
    page.get_by_text("0 of 2 tools on").wait_for()  # the page polls
    page.locator("#tools .mcp", has_text="slow").get_by_role("checkbox").first.check()
    page.get_by_text("2 of 2 tools on").wait_for()
    server.mcp_servers = []
    page.keyboard.press("Escape")
    server.replies.append(["Hello."])
    say(page, "Hi")  # it is answered, and a notice names the missing server
    page.get_by_text("Tools that are on but not available: slow__b, slow__c").wait_for()
    assert "tools" not in server.requests[0]
    page.click("#show-tools")
    button(page, "Turn off", "tools that are not available").click()
    assert page.locator("#n-tools").inner_text() == ""
    assert stored(page)["tools"] == {"on": [], "functions": [], "allowed": []}
