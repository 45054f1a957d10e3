// What the settings dialog holds. Everything but the API key stays in localStorage; the key in sessionStorage, which
// the browser forgets with the tab.

import { byId } from "./dom.js";

const STORED = "stratagate.settings";
const STORED_KEY = "stratagate.key";
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "spec", "thinking_budget",
];

const dialog = byId("settings");
const inputs = [...dialog.querySelectorAll("[name]")];
const input = (name) => inputs.find((one) => one.name === name);

/** Fields of a request body that were set. What the server refuses in them it says in its answer. */
export function requestFields() {
  const fields = {};
  for (const name of NUMBERS) {
    if (input(name).value !== "") fields[name] = Number(input(name).value);
  }
  const thinking = input("enable_thinking").value;
  if (thinking) fields.enable_thinking = thinking === "true";
  return fields;
}

export const systemPrompt = () => input("system").value.trim();

export function authorization() {
  const key = input("key").value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
}

export function openSettings(name) {
  dialog.showModal();
  dialog.scrollTop = 0; // where it was left, the heading may be out of sight
  if (name) input(name).focus();
}

function save() {
  const values = {};
  for (const one of inputs) {
    if (one.name !== "key" && one.value !== "") values[one.name] = one.value;
  }
  try {
    localStorage.setItem(STORED, JSON.stringify(values));
    sessionStorage.setItem(STORED_KEY, input("key").value);
  } catch {
    // A browser that keeps nothing: the settings hold until the page is left.
  }
  showCount(Object.keys(values).length);
}

function load() {
  let values = {};
  try {
    values = JSON.parse(localStorage.getItem(STORED)) || {};
    values.key = sessionStorage.getItem(STORED_KEY) || "";
  } catch {
    // Nothing kept, or something that is not ours.
  }
  for (const one of inputs) {
    if (typeof values[one.name] === "string") one.value = values[one.name];
  }
  showCount(inputs.filter((one) => one.name !== "key" && one.value !== "").length);
}

function showCount(count) {
  byId("show-settings").textContent = count ? `Settings (${count})` : "Settings";
}

load();
dialog.addEventListener("input", save);
byId("show-settings").addEventListener("click", () => openSettings());
byId("close-settings").addEventListener("click", () => dialog.close());
byId("reset-settings").addEventListener("click", () => {
  for (const one of inputs) {
    if (one.name !== "key") one.value = "";
  }
  save();
});
// A click on the backdrop hits the dialog itself.
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
