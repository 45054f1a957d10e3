// The monitor view: asks for /v1/status once a second while it is seen, and shows the numbers.

import { status } from "./api.js";
import { byId, make } from "./dom.js";

const POLL_MS = 1000;
const HISTORY = 120; // polls
const SVG = "http://www.w3.org/2000/svg";
const MIB = 2 ** 20;

let isShown = false;
let timer = null;
let last = null; // the status before this one and when it came, to see what changed
const rates = []; // output tokens/s, one for each poll

export function showMonitor(shown) {
  isShown = shown;
  schedule(0);
}

function schedule(delay) {
  clearTimeout(timer);
  timer = isShown && !document.hidden ? setTimeout(poll, delay) : null;
  if (timer === null) last = null;
}

async function poll() {
  const trouble = byId("trouble");
  try {
    const now = { at: performance.now(), ...(await status()) };
    trouble.hidden = true;
    byId("monitor").classList.remove("stale");
    show(now, last);
    last = now;
  } catch (error) {
    const words = error.status ? error.message : "no connection to the server; trying again";
    trouble.textContent = error.status === 401 ? `${words} (Chat, Settings, API key)` : words;
    trouble.hidden = false;
    byId("monitor").classList.add("stale");
    last = null;
  }
  schedule(POLL_MS);
}

function show(now, before) {
  showOutput(now, before);
  showTiles(now);
  showSlots(now.slots);
  showDrafts(now.drafts);
  showStore(now.store);
  showMemory(now.memory_plan);
  const { submitted, rejected, preemptions, outcomes } = now.requests;
  fillPairs("requests", {
    admitted: submitted,
    ...Object.fromEntries(Object.entries(outcomes).filter(([, n]) => n).map(([name, n]) => [endedBy(name), n])),
    "gave way to others": preemptions,
    "refused, queue full": rejected,
    "prompt tokens read": now.tokens.prompt,
    "output tokens": now.tokens.completion,
  });
  const { model } = now;
  fillPairs("facts", {
    model: model.id,
    device: `${model.device}, ${model.dtype}, K/V in ${model.kv_dtype}`,
    arithmetic: model.kernels,
    context: `${count(model.max_context)} tokens a slot`,
    "prompt chunks": `${count(model.chunk_tokens)} tokens`,
    loaded: `in ${model.load_s.toFixed(1)} s`,
    up: duration(now.uptime_s),
    version: now.version,
  });
}

function showOutput(now, before) {
  const { per_s: rate, window_s: span } = now.tokens;
  byId("rate").textContent = rate >= 100 ? rate.toFixed(0) : rate.toFixed(1);
  byId("rate-note").textContent = `mean of ${span} s; ${count(now.tokens.completion)} since the start`;
  const seconds = before ? (now.at - before.at) / 1000 : 0;
  const isSameServer = before && now.uptime_s > before.uptime_s;
  if (isSameServer && seconds > 0) {
    rates.push((now.tokens.completion - before.tokens.completion) / seconds);
    if (rates.length > HISTORY) rates.shift();
  }
  drawHistory();
  const read = isSameServer && seconds > 0 ? (now.tokens.prompt - before.tokens.prompt) / seconds : 0;
  byId("reading").textContent = read > 0 ? `reading ${count(Math.round(read))} prompt tokens/s` : "";
}

/** A curve that ends at the right edge; its top is the highest rate seen. */
function drawHistory() {
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, index) => `${HISTORY - rates.length + index + 1},${31 - (29 * rate) / top}`);
  if (!points.length) return;
  const start = HISTORY - rates.length + 1;
  const area = document.createElementNS(SVG, "polygon");
  area.setAttribute("points", [`${start},32`, ...points, `${HISTORY},32`].join(" "));
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  byId("history").replaceChildren(area, line);
}

function showTiles(now) {
  const busy = now.slots.filter((slot) => slot.phase !== "free").length;
  byId("busy").textContent = `${busy} of ${now.slots.length}`;
  byId("queue").textContent = count(now.queue.length);
  byId("rejected").textContent = now.requests.rejected ? `${count(now.requests.rejected)} refused` : "";
  const engine = byId("engine");
  engine.textContent = now.draining ? "stopping" : now.engine.state;
  engine.className = now.ready ? "good" : "bad";
  byId("restarts").textContent = `restarted ${now.engine.restarts} times`;
  const sum = (name) => now.drafts.by_depth.reduce((total, depth) => total + depth[name], 0);
  const offered = sum("offered");
  byId("acceptance").textContent = offered ? percent(sum("accepted") / offered) : "–";
  byId("gain").textContent = now.drafts.max_depth ? `chains of up to ${now.drafts.max_depth}` : "drafts are off";
}

function showSlots(slots) {
  fill("slots", slots.map(({ index, phase, prompt_tokens: prompt, read_tokens: read, output_tokens: output }) => {
    const isFree = phase === "free";
    const progress = phase === "reading" ? `${count(read)} / ${count(prompt)}` : count(prompt);
    const mark = make("span", { className: `phase ${phase}` }, phase);
    return row(String(index), mark, number(isFree ? "" : progress), number(isFree ? "" : count(output)));
  }));
}

function showDrafts({ by_depth: depths }) {
  fill("drafts", depths.map(({ depth, offered, accepted }) => {
    const share = offered ? accepted / offered : 0;
    const bar = meter(share, `depth ${depth}: ${percent(share)} accepted`);
    const label = make("span", { className: "share" }, offered ? percent(share) : "–");
    return row(String(depth), make("div", { className: "measure" }, bar, label), number(`${count(accepted)} / ${count(offered)}`));
  }));
}

function showStore(store) {
  if (!store) {
    fill("store", [make("tr", {}, make("td", { className: "hint" }, "This server parks nothing."))]);
    return;
  }
  const share = store.capacity_bytes ? store.bytes / store.capacity_bytes : 0;
  const used = meter(share, `${percent(share)} of the store used`);
  fillPairs("store", {
    conversations: store.conversations,
    memory: number(make("div", {}, `${mib(store.bytes)} of ${mib(store.capacity_bytes)} MiB`, used)),
    "prompts resumed": number(`${count(store.hits)} of ${count(store.lookups)}`),
    "tokens not read again": store.resumed_tokens,
    evicted: store.evictions,
    "no room for": store.refused,
  });
}

function showMemory(plan) {
  const line = (name, planned, actual) => row(name, number(mib(planned)), number(actual === null ? "–" : mib(actual)));
  const total = (name) => plan.reduce((sum, item) => sum + (item[name] ?? 0), 0);
  const rows = plan.map((item) => line(item.name, item.planned_bytes, item.actual_bytes));
  if (!plan.length) rows.push(make("tr", {}, make("td", { className: "hint", colSpan: 3 }, "This engine plans no memory.")));
  else {
    const sum = line("total", total("planned_bytes"), total("actual_bytes"));
    sum.className = "total";
    rows.push(sum);
  }
  fill("memory", rows);
}

function meter(share, label) {
  const bar = make("progress", { value: share, max: 1 });
  bar.setAttribute("aria-label", label);
  return bar;
}

const number = (content) => make("td", { className: "number" }, content);

/** A table row: its head, then cells or what goes into one. */
function row(head, ...cells) {
  const all = cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : make("td", {}, cell)));
  return make("tr", {}, make("th", { scope: "row" }, head), ...all);
}

function fill(id, rows) {
  byId(id).querySelector("tbody").replaceChildren(...rows);
}

/** A row for each name and its value; numbers stand at the right. */
function fillPairs(id, pairs) {
  fill(id, Object.entries(pairs).map(([name, value]) => row(name, typeof value === "number" ? number(count(value)) : value)));
}

const count = (value) => value.toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)} %`;
const endedBy = (outcome) => `ended: ${outcome.replaceAll("_", " ")}`;

function mib(bytes) {
  const value = bytes / MIB;
  const digits = value < 10 ? 2 : value < 1000 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

document.addEventListener("visibilitychange", () => schedule(0));
