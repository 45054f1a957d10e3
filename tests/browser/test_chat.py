"""The chat view in a real browser, against a live server with the scripted engine."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from engine.fake import Fault, FaultKind
from gateway.config import ApiKey, GatewayConfig
from tests.browser.tab import NARROW, open_tab
from tests.conformance.live import live_server, says

pytestmark = [pytest.mark.browser, pytest.mark.timeout(60)]

COUNTING = " ".join(str(number) for number in range(120))


async def test_an_answer_streams_and_stays_after_a_reload() -> None:
    async with (
        live_server(says(f"first {COUNTING} last", decode_s=0.04)) as live,
        open_tab(live.url) as tab,
    ):
        await tab.send("Count, please")
        await expect(tab.answer).to_contain_text("first 0 1 2")
        await expect(tab.button("Stop")).to_be_visible()
        await expect(tab.answer).not_to_contain_text("last")
        await expect(tab.answer).to_contain_text("119 last")
        await expect(tab.answer).to_contain_text("per second")
        await expect(tab.button("Send")).to_be_visible()
        await tab.page.reload()
        await expect(tab.answer).to_contain_text("119 last")
        await expect(tab.page.locator(".turn.user .plain")).to_have_text("Count, please")
        await expect(tab.page.locator(".conversation .open")).to_have_text("Count, please")
        await tab.send("Again")
        await expect(tab.page.locator(".turn")).to_have_count(4)
        contents = [message["content"] for message in tab.bodies[-1]["messages"]]
        assert contents == ["Count, please", f"first {COUNTING} last", "Again"]
        assert {url.split("/")[2] for url in tab.urls} == {live.url.split("/")[2]}


@pytest.mark.parametrize("by_key", [False, True])
async def test_stop_ends_the_answer_and_frees_the_slot(by_key: bool) -> None:
    async with (
        live_server(says(COUNTING * 20, decode_s=0.05)) as live,
        open_tab(live.url) as tab,
    ):
        await tab.send("Go on for ever")
        await expect(tab.answer).to_contain_text("0 1 2")
        if by_key:
            await tab.page.keyboard.press("Escape")
        else:
            await tab.button("Stop").click()
        await expect(tab.answer.locator(".hint")).to_have_text("stopped")
        await live.wait_idle()
        await expect(tab.button("Send")).to_be_visible()
        await tab.page.reload()
        await expect(tab.answer).to_contain_text("0 1 2")
        await expect(tab.answer.locator(".hint")).to_have_text("stopped")


async def test_a_reload_in_the_middle_keeps_what_was_written() -> None:
    async with (
        live_server(says(COUNTING * 20, decode_s=0.05)) as live,
        open_tab(live.url) as tab,
    ):
        await tab.send("Go on")
        await expect(tab.answer).to_contain_text("0 1 2 3")
        await tab.page.reload()
        await expect(tab.answer).to_contain_text("0 1 2 3")
        await expect(tab.answer.locator(".hint")).to_have_text("interrupted")
        await live.wait_idle()


async def test_thinking_is_folded_away() -> None:
    async with (
        live_server(says("Let me *see*.\n</think>\n\nIt is 42.", decode_s=0.05)) as live,
        open_tab(live.url) as tab,
    ):
        await tab.set(enable_thinking="true")
        await tab.send("What is it?")
        await expect(tab.answer.locator(".prose").last).to_have_text("It is 42.")
        thought = tab.answer.locator("details > div")
        await expect(thought).to_be_hidden()
        await tab.answer.get_by_text("Thought").click()
        await expect(thought).to_have_text("Let me see.")
        assert tab.bodies[0]["enable_thinking"] is True


async def test_settings_are_sent_and_kept() -> None:
    async with live_server(says("x")) as live, open_tab(live.url) as tab:
        await tab.set(
            temperature="0.5",
            min_p="0.1",
            repetition_penalty="1.1",
            thinking_budget="7",
            top_p="0.9",
            top_k="7",
            max_tokens="5",
            seed="11",
            spec="0",
            enable_thinking="false",
            system="Be brief.",
        )
        await tab.page.reload()
        await tab.send("Hello")
        await expect(tab.answer).to_contain_text("2 tokens")
        body = tab.bodies[0]
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ]
        sent = {name: value for name, value in body.items() if name != "messages"}
        assert sent.pop("prompt_cache_key")
        assert sent == {
            "model": "default",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "thinking_budget": 7,
            "top_p": 0.9,
            "top_k": 7,
            "max_tokens": 5,
            "seed": 11,
            "spec": 0,
            "enable_thinking": False,
        }


async def test_an_error_is_shown_and_can_be_tried_again() -> None:
    async with live_server(says("Fine.")) as live, open_tab(live.url) as tab:
        await tab.set(temperature="5")
        await tab.send("Hello")
        await expect(tab.answer.locator(".error")).to_contain_text("temperature")
        await tab.set(temperature="1")
        await tab.button("Try again").click()
        await expect(tab.answer).to_contain_text("Fine.")
        await expect(tab.page.locator(".turn")).to_have_count(2)


async def test_an_error_inside_the_stream_is_shown() -> None:
    script = says(COUNTING, decode_s=0.02, faults=(Fault(window=3, kind=FaultKind.KERNEL),))
    async with live_server(script) as live, open_tab(live.url) as tab:
        await tab.send("Hello")
        await expect(tab.answer.locator(".error")).to_contain_text("engine")
        await expect(tab.answer).to_contain_text("0 1")


async def test_no_server_is_said_so() -> None:
    async with live_server(says("x")) as live, open_tab(live.url) as tab:
        await tab.page.route("**/v1/chat/completions", lambda route: route.abort())
        await tab.send("Hello")
        await expect(tab.answer.locator(".error")).to_have_text("no connection to the server")
        tab.problems.clear()  # the browser itself notes the lost connection


async def test_a_key_is_asked_for_and_kept_for_the_session_only() -> None:
    config = GatewayConfig(port=0, api_keys=(ApiKey(name="ann", secret="secret-1"),))
    async with live_server(says("Fine."), config=config) as live, open_tab(live.url) as tab:
        await tab.send("Hello")
        await expect(tab.answer.locator(".error")).to_contain_text("API key")
        await expect(tab.page.locator("#settings [name=key]")).to_be_focused()
        await tab.page.keyboard.type("secret-1")
        await tab.button("Done").click()
        await tab.button("Try again").click()
        await expect(tab.answer).to_contain_text("Fine.")
        assert "secret-1" not in await tab.page.evaluate("JSON.stringify(localStorage)")
        await tab.page.goto(live.url + "/#monitor")
        await tab.page.reload()
        await expect(tab.page.locator("#busy")).to_have_text("0 of 4")


async def test_conversations_are_listed_renamed_and_deleted() -> None:
    async with live_server(says("Yes.")) as live, open_tab(live.url) as tab:
        for title in ("One", "Two"):
            await tab.button("New chat").click()
            await tab.send(title)
            await expect(tab.answer).to_contain_text("Yes.")
        entries = tab.page.locator(".conversation .open")
        await expect(entries).to_have_text(["Two", "One"])
        await entries.nth(1).click()
        await expect(tab.page.locator(".turn.user .plain")).to_have_text("One")
        await tab.button("Rename One").click()
        await tab.page.keyboard.type("Uno")
        await tab.page.keyboard.press("Enter")
        await expect(entries).to_have_text(["Two", "Uno"])
        await tab.page.reload()
        await expect(entries).to_have_text(["Two", "Uno"])
        tab.page.on("dialog", lambda dialog: dialog.accept())
        await tab.page.locator(".conversation").nth(0).hover()
        await tab.button("Delete Two").click()
        await expect(entries).to_have_text(["Uno"])
        await expect(tab.page.locator(".turn.user .plain")).to_have_text("One")
        await tab.page.reload()
        await expect(entries).to_have_text(["Uno"])


async def test_an_answer_goes_on_while_another_conversation_is_open() -> None:
    async with (
        live_server(says(f"{COUNTING} last", decode_s=0.03)) as live,
        open_tab(live.url) as tab,
    ):
        await tab.send("Slow one")
        await expect(tab.answer).to_contain_text("0 1 2")
        await tab.button("New chat").click()
        await expect(tab.page.locator(".turn")).to_have_count(0)
        await live.wait_idle()
        await tab.page.locator(".conversation .open").click()
        await expect(tab.answer).to_contain_text("119 last")


async def test_markup_of_the_model_stays_text() -> None:
    text = (
        '<img src=x onerror="window.hacked = 1"><script>window.hacked = 2</script>\n\n'
        "[a link](javascript:window.hacked=3) and [another](https://example.org/)\n\n"
        "```html\n<b>bold</b>\n```\n\n- **one**\n- `two`"
    )
    async with live_server(says(text)) as live, open_tab(live.url) as tab:
        await tab.send('<svg onload="window.hacked = 4">')
        await expect(tab.answer.locator("pre")).to_have_text("<b>bold</b>")
        await expect(tab.answer).to_contain_text("<script>window.hacked = 2</script>")
        await expect(tab.answer.locator("a")).to_have_attribute("href", "https://example.org/")
        await expect(tab.answer.locator("li strong")).to_have_text("one")
        await expect(tab.answer.locator("img, script, pre b")).to_have_count(0)
        await expect(tab.page.locator(".turn.user svg")).to_have_count(0)
        assert await tab.page.evaluate("window.hacked") is None


async def test_the_policy_stops_markup_that_a_script_would_write() -> None:
    async with live_server(says("x")) as live, open_tab(live.url) as tab:
        refused = await tab.page.evaluate(
            "() => { try { document.body.innerHTML = '<b>x</b>'; } catch { return true; } return false; }"
        )
        assert refused
        seen = await tab.page.evaluate("window.violations.splice(0)")
        assert seen == ["require-trusted-types-for"]
        tab.problems.clear()  # the browser notes what it refused


async def test_a_narrow_screen_needs_no_sideways_scrolling() -> None:
    text = (
        "word " * 20 + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n|a|b|\n|-|-|\n|" + "z" * 90
    )
    async with (
        live_server(says(text)) as live,
        open_tab(live.url, size=NARROW, dark=True) as tab,
    ):
        await tab.send("w" * 200)
        await expect(tab.answer).to_contain_text("per second")
        assert not await tab.is_too_wide()
        sidebar = tab.page.locator("#sidebar")
        await expect(sidebar).to_be_hidden()
        await tab.button("Chats").click()
        await expect(sidebar).to_be_visible()
        await expect(tab.page.locator("#new")).to_be_focused()
        await tab.page.keyboard.press("Escape")
        await expect(sidebar).to_be_hidden()
        for _ in range(2):  # the button at the end leaves them scrolled
            await tab.button("Settings").click()
            heading = tab.page.get_by_role("heading", name="Settings")
            await expect(heading).to_be_in_viewport(ratio=1)
            await tab.button("Done").click()
        await tab.page.get_by_role("link", name="Monitor").click()
        await expect(tab.page.locator("#busy")).to_have_text("0 of 4")
        assert not await tab.is_too_wide()


async def test_everything_can_be_reached_by_key() -> None:
    async with live_server(says("Yes.")) as live, open_tab(live.url) as tab:
        keyboard = tab.page.keyboard
        await keyboard.type("Hello")
        await keyboard.press("Enter")
        await expect(tab.answer).to_contain_text("per second")
        reached: set[str] = set()
        for _ in range(16):
            await keyboard.press("Shift+Tab")
            reached.add(
                await tab.page.evaluate(
                    "document.activeElement.ariaLabel || document.activeElement.textContent"
                )
            )
        names = {"Chat", "Monitor", "New chat", "Hello", "Rename Hello", "Delete Hello"}
        assert names | {"Settings", "Copy", "Try again"} <= reached
