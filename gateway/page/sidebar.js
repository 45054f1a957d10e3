// The list of conversations. It draws what it is given and calls back; on a narrow screen it slides over the chat.

import { button, byId, make } from "./dom.js";

const toggle = byId("show-sidebar");
const sidebar = byId("sidebar");

/** conversations, and what to do: { currentId, isRunning(id), onOpen, onRename(conversation, title), onDelete }. */
export function drawSidebar(conversations, actions) {
  // Drawing now would take away the title that is being typed.
  if (sidebar.querySelector("input")) return;
  byId("conversations").replaceChildren(...conversations.map((one) => entry(one, actions)));
}

function entry(conversation, actions) {
  const title = conversation.title || "Untitled";
  const item = make("li", { className: "conversation" });
  const open = button(title, () => actions.onOpen(conversation), { className: "open" });
  open.title = title;
  if (conversation.id === actions.currentId) open.setAttribute("aria-current", "true");
  if (actions.isRunning(conversation.id)) open.classList.add("busy");
  const rename = button("✎", () => edit(item, conversation, actions), { className: "icon", label: `Rename ${title}` });
  const remove = button("✕", () => {
    if (confirm(`Delete “${title}”?`)) actions.onDelete(conversation);
  }, { className: "icon", label: `Delete ${title}` });
  item.append(open, rename, remove);
  return item;
}

/** A field in place of the entry: Enter and leaving keep the title, Escape does not. */
function edit(item, conversation, actions) {
  const field = make("input", { value: conversation.title, maxLength: 120 });
  field.setAttribute("aria-label", "Title");
  let isOver = false;
  const finish = (title) => {
    if (isOver) return;
    isOver = true;
    field.remove();
    actions.onRename(conversation, title.trim() || conversation.title);
  };
  field.addEventListener("blur", () => finish(field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(field.value);
    if (event.key === "Escape") {
      event.stopPropagation();
      finish(conversation.title);
    }
  });
  item.replaceChildren(field);
  field.select();
}

export function closeSidebar() {
  show(false);
}

const isShown = () => document.body.classList.contains("with-sidebar");

function show(wanted) {
  document.body.classList.toggle("with-sidebar", wanted);
  toggle.setAttribute("aria-expanded", String(wanted));
  if (wanted) byId("new").focus();
}

toggle.addEventListener("click", () => show(!isShown()));
sidebar.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !isShown()) return;
  closeSidebar();
  toggle.focus();
});
byId("stage").addEventListener("click", (event) => {
  if (!toggle.contains(event.target)) closeSidebar();
});
