// The chat view: the shown conversation, its turns, the composer, and the answers that are being written.
//
// The objects of conversations.js are the truth; a Turn shows one message and is drawn again when it changed. An
// answer goes on when another conversation is opened: it belongs to its conversation, not to what is shown.

import { ApiError, streamChat } from "./api.js";
import * as conversations from "./conversations.js";
import { button, byId, make } from "./dom.js";
import { copyText, renderMarkdown } from "./markdown.js";
import { openSettings, requestFields, systemPrompt } from "./settings.js";
import { closeSidebar, drawSidebar } from "./sidebar.js";

const SAVE_EVERY_MS = 1000;

const scroller = byId("scroller");
const text = byId("text");
const running = new Map(); // conversation id -> { conversation, controller }
const deleted = new Set(); // ids; an answer that ends after its conversation was deleted is not kept
let isLeaving = false;
let current = conversations.create();
let turns = []; // what is shown, one for each message of `current`

/** One message on the page. */
class Turn {
  constructor(message) {
    this.message = message;
    this.isDue = false;
    this.thought = make("div", { className: "prose" });
    this.thinking = make("summary", {}, "Thought");
    this.details = make("details", { className: "thought", hidden: true }, this.thinking, this.thought);
    this.body = make("div", { className: message.role === "user" ? "plain" : "prose" });
    this.note = make("p", { className: "hint" });
    this.error = make("p", { className: "error", hidden: true });
    this.error.setAttribute("role", "alert");
    this.actions = make("div", { className: "actions" });
    const name = make("h3", { className: "unseen" }, message.role === "user" ? "You" : "Model");
    const around = [this.error, this.note, this.actions];
    const parts = message.role === "user" ? [this.body] : [this.details, this.body, ...around];
    this.element = make("article", { className: `turn ${message.role}` }, name, ...parts);
    this.draw();
  }

  /** Draw at the next frame, however often it is asked for until then. */
  drawSoon() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      keepAtEnd(() => this.draw());
    });
  }

  draw() {
    const { role, content, reasoning_content: reasoning, note, error, isRunning } = this.message;
    if (role === "user") {
      this.body.textContent = content;
      return;
    }
    this.details.hidden = !reasoning;
    if (reasoning) renderMarkdown(this.thought, reasoning);
    this.thinking.textContent = isRunning && !content ? "Thinking…" : "Thought";
    renderMarkdown(this.body, content);
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.note.textContent = isRunning ? (content || reasoning ? "" : "Waiting for the first token…") : note ?? "";
    this.element.classList.toggle("running", Boolean(isRunning));
    this.drawActions();
  }

  drawActions() {
    const { content, isRunning } = this.message;
    this.actions.replaceChildren();
    if (isRunning) return;
    if (content) {
      const copy = button("Copy", () => copyText(copy, content), { className: "small" });
      this.actions.append(copy);
    }
    if (this.message === current.messages.at(-1)) {
      this.actions.append(button("Try again", tryAgain, { className: "small" }));
    }
  }
}

/** Start the view: the latest conversation, if one is kept. */
export function startChat() {
  open(conversations.list()[0] ?? conversations.create());
  conversations.onChange((id) => {
    refreshSidebar();
    if (id === current.id && !running.has(id)) open(conversations.load(id) ?? conversations.create());
  });
  // A reload keeps what had been written so far, and not the error that breaking off the connection ends in.
  addEventListener("pagehide", () => {
    running.forEach(({ conversation }) => keep(conversation));
    isLeaving = true;
  });
  addEventListener("pageshow", () => (isLeaving = false));
}

function open(conversation) {
  current = running.get(conversation.id)?.conversation ?? conversation;
  for (const message of current.messages) {
    if (message.isRunning && !running.has(current.id)) {
      message.isRunning = false;
      message.note = "interrupted";
    }
  }
  turns = current.messages.map((message) => new Turn(message));
  byId("turns").replaceChildren(...turns.map((turn) => turn.element));
  refresh();
  scroller.scrollTop = scroller.scrollHeight;
}

/** Everything around the turns. */
function refresh() {
  const isBusy = running.has(current.id);
  byId("empty").hidden = current.messages.length > 0;
  byId("title").textContent = current.title || "New chat";
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  refreshSidebar();
}

function refreshSidebar() {
  drawSidebar(conversations.list(), {
    currentId: current.id,
    isRunning: (id) => running.has(id),
    onOpen: (conversation) => {
      open(conversation);
      closeSidebar();
      text.focus();
    },
    onRename: (conversation, title) => change(conversation, (kept) => (kept.title = title)),
    onDelete: (conversation) => {
      running.get(conversation.id)?.controller.abort();
      deleted.add(conversation.id);
      conversations.remove(conversation.id);
      if (conversation.id === current.id) open(conversations.list()[0] ?? conversations.create());
      else refreshSidebar();
    },
  });
}

/** Change a conversation where it lives: the shown one and those being written are objects of this page. */
function change(conversation, edit) {
  const kept = conversation.id === current.id ? current : running.get(conversation.id)?.conversation ?? conversation;
  edit(kept);
  conversations.save(kept);
  refresh();
}

function send(words) {
  const conversation = current;
  conversation.title ||= conversations.titleFrom(words);
  add({ role: "user", content: words });
  answer(conversation);
}

/** Drop what followed the last question and answer it anew. */
function tryAgain() {
  if (running.has(current.id)) return;
  while (current.messages.length && current.messages.at(-1).role !== "user") current.messages.pop();
  open(current);
  answer(current);
}

/** A new message at the end of the shown conversation. */
function add(message) {
  current.messages.push(message);
  const before = turns.at(-1);
  const turn = new Turn(message);
  turns.push(turn);
  byId("turns").append(turn.element);
  if (before?.message.role === "assistant") before.drawActions(); // only the last answer can be tried again
  scroller.scrollTop = scroller.scrollHeight;
}

/** Write the answer to the last question of the shown conversation. */
async function answer(conversation) {
  const request = requestFor(conversation);
  const message = { role: "assistant", content: "", reasoning_content: "", isRunning: true };
  const controller = new AbortController();
  running.set(conversation.id, { conversation, controller });
  add(message);
  keep(conversation, message);
  refresh();
  const started = performance.now();
  let saved = started;
  let first = null;
  let usage = null;
  let finish = null;
  try {
    for await (const chunk of streamChat(request, controller.signal)) {
      usage = chunk.usage ?? usage;
      for (const { delta, finish_reason: reason } of chunk.choices) {
        if (first === null && (delta.content || delta.reasoning_content)) first = performance.now();
        message.content += delta.content ?? "";
        message.reasoning_content += delta.reasoning_content ?? "";
        finish = reason ?? finish;
      }
      turnOf(message)?.drawSoon();
      if (performance.now() - saved > SAVE_EVERY_MS) {
        saved = performance.now();
        keep(conversation, message);
      }
    }
    message.note = summary({ message, usage, finish, started, first });
  } catch (error) {
    if (error.name === "AbortError") message.note = "stopped";
    else fail(message, error);
  }
  message.isRunning = false;
  running.delete(conversation.id);
  keep(conversation, message);
  keepAtEnd(() => turnOf(message)?.draw());
  byId("announce").textContent = message.error ? "The answer failed." : "The answer is complete.";
  refresh();
}

function requestFor(conversation) {
  const system = systemPrompt();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning_content: reasoning } of conversation.messages) {
    // An answer that failed before its first word is no answer.
    if (role === "assistant" && !content && !reasoning) continue;
    messages.push(reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  }
  return { model: "default", messages, prompt_cache_key: conversation.id, ...requestFields() };
}

function summary({ message, usage, finish, started, first }) {
  if (!usage) return "";
  const words = [`${usage.completion_tokens} tokens`];
  const seconds = (performance.now() - first) / 1000;
  if (first !== null && usage.completion_tokens > 1 && seconds > 0) {
    words.push(`${(usage.completion_tokens / seconds).toFixed(0)} per second`);
    words.push(`first after ${((first - started) / 1000).toFixed(2)} s`);
  }
  const details = usage.completion_tokens_details ?? {};
  const drafted = (details.accepted_prediction_tokens ?? 0) + (details.rejected_prediction_tokens ?? 0);
  if (drafted) words.push(`${Math.round((100 * details.accepted_prediction_tokens) / drafted)} % of drafts kept`);
  if (message.reasoning_content && !message.content) words.push("ended inside the thought");
  if (finish === "length") words.push("cut at the length limit");
  return words.join(" · ");
}

function fail(message, error) {
  message.error = error instanceof ApiError ? error.message : "no connection to the server";
  if (error.status === 401) openSettings("key");
}

/** Save; where that fails, `message` says so. */
function keep(conversation, message = {}) {
  if (deleted.has(conversation.id) || isLeaving) return;
  conversation.updated = Date.now();
  if (!conversations.save(conversation)) {
    message.error = "this browser has no room left to keep the conversation; delete some to make room";
  }
}

const turnOf = (message) => turns.find((turn) => turn.message === message);

/** Do something that may lengthen the page; a reader at its end stays there. */
function keepAtEnd(act) {
  const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
  act();
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}

function stop() {
  running.get(current.id)?.controller.abort();
}

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const words = text.value.trim();
  if (!words || running.has(current.id)) return;
  text.value = "";
  grow();
  send(words);
});
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => {
  stop();
  text.focus();
});
byId("stage").addEventListener("keydown", (event) => event.key === "Escape" && stop());
byId("new").addEventListener("click", () => {
  open(conversations.create());
  closeSidebar();
  text.focus();
});
